"""``python -m hayata.cli``: the same as ``hayata``, where that is not on the path."""

from hayata.cli.root import main

main()
