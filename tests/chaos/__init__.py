"""Chaos: an app under load, processes killed at random, and a check of what was promised.

    python -m tests.chaos --minutes 5 --seed 1 [--roles edge,node] [--app APP]

`plan` says what goes wrong and when, `app` are the agents under load, `load` the clients, in processes of
their own; `faults` carries the plan out, `watch` looks for processes that should be dead; `story` is all that
was written and told, `checks` compares it with what was promised. `run` puts it together.
"""
