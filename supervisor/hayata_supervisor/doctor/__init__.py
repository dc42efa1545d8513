"""``hayata doctor``: checks of the machine, the settings and the store. It changes nothing and needs no daemon.

A program of its own, started by the command: an installation that can't start it is a finding, too, and so is a
store that ends whoever reads it.
"""
