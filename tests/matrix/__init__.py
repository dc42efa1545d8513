"""The failpoint matrix: every point × what can happen there, each in a daemon of its own.

    python -m tests.matrix [--only REGEX] [--actions kill,error,…] [--jobs N] [--keep]

First a run without a fault is traced: which points do its processes come by, and how often? Each of them is then armed
with each action, at its first hit and in the middle, once in the trial; the processes that live on are expected to mend
it. A trial begins in a data directory that a killed daemon has left, so that recovery is under test as well. What is
checked are the invariants of `tests.chaos.checks`, with its agents and its outside ledger; that nothing is left of dead
processes; and that, after all, everything comes to an end.
"""
