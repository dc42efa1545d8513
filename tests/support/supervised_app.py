"""Agents under each strategy, for tests of the supervision tree. Bodies and policies are those of `tree_app`."""

import os
from pathlib import Path

from hayata import Agent, Node, Supervision
from tests.support.tree_app import act, policy


def start_badly():
    """Workers of this app die at their start, for as long as the test wants them to. Each start is noted."""
    broken = Path(os.environ["TREE_RIG_BROKEN"])
    if broken.exists() and os.getppid() != FORKSERVER:  # not the process between the forks
        with broken.with_name("born").open("a") as born:
            born.write("x")
        os._exit(3)


FORKSERVER = os.getpid()
os.register_at_fork(after_in_child=start_badly)


def agent(id, strategy, *, restart="permanent", shutdown=1.0, intensity=1000, backoff=0.0):
    """Three nodes; the options are the middle one's."""
    names = ("first", "second", "third")
    own = {"second": {"restart": restart, "shutdown": shutdown}}
    return Agent(
        id=id,
        nodes=[Node(act, name=name, **{"concurrency": 2, "shutdown": 1.0, **own.get(name, {})}) for name in names],
        decision_policy=policy,
        supervision=Supervision(strategy, intensity=intensity, period=60.0, backoff=backoff),
    )


every = [agent("all", "one_for_all")]
rest = [agent("rest", "rest_for_one")]
transient = [agent("alone", "one_for_one", restart="transient")]
temporary = [agent("alone", "one_for_one", restart="temporary")]
every_temporary = [agent("all", "one_for_all", restart="temporary")]
brutal = [agent("all", "one_for_all", shutdown="brutal_kill")]
patient = [agent("all", "one_for_all", shutdown="infinity")]
fragile = [agent("all", "one_for_all", intensity=1), agent("other", "one_for_one")]
fragile_alone = [agent("alone", "one_for_one", intensity=1), agent("other", "one_for_one")]
storm = [agent("storm", "one_for_one", intensity=3, backoff=0.05)]
storm_of_all = [agent("storm", "one_for_all", intensity=3, backoff=0.05)]
