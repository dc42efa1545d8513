"""Classification after a loss of the supervisor: what each task of an unfinished invocation is now.

===========================  =======================================================
in the store                 becomes
===========================  =======================================================
completed, failed, …         as it is: the result is reused
scheduled, not marked        as it is: it is run
marked, provably not begun   scheduled again, the same attempt
marked, ``Rerun`` left       failed ``supervisor_lost``, and the next attempt is scheduled
marked reduction             the same, since it is pure; after the second time it has failed for good
marked, ``Probe``            marked still, until its probe has been asked
marked                       uncertain: never run again silently
===========================  =======================================================

An evaluation of the policy that was interrupted before its decision was recorded is repeated: policies are pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from hayata.messages import AgentManifest, ErrorInfo
from hayata_supervisor.core import facts as f
from hayata_supervisor.core.invocation import Invocation, Task
from hayata_supervisor.core.retries import reduced_again

LOST = ErrorInfo(
    "supervisor_lost",
    "the supervisor was lost while this ran",
    details=f.interrupted_details("supervisor_lost"),
)


class Found(NamedTuple):
    """What is to be done about tasks that were lost: ``facts`` to record, ``probes`` to ask, and reductions that have
    no attempt left.
    """

    facts: list[f.Fact]
    probes: list[Task]
    spent: list[Task]


def classify(
    invocation: Invocation,
    lost: Iterable[Task],
    manifest: AgentManifest,
    began: Callable[[int, str], bool],
) -> Found:
    """Say what the lost tasks of an invocation become.

    Args:
        invocation: As the store has it.
        lost: Its tasks that are marked and that nobody runs.
        manifest: Its agent.
        began: Whether the execution with this cell and id may have begun; True when that can't be known.
    """
    nodes = {node.name: node for node in manifest.nodes}
    found = Found([], [], [])
    for task in lost:
        node = nodes.get(task.node)
        if not began(task.cell, invocation.execution(task)):
            found.facts.append(f.Unmarked(task.step, task.attempt, task.node, task.edge))
        elif task.edges >= 0 and not reduced_again(task.attempt):
            found.spent.append(task)
        elif task.edges >= 0:
            found.facts.append(f.Failed(task.step, task.attempt, task.node, LOST, 0.0))
        elif node is not None and node.probe_attempts:
            found.probes.append(task)
        elif node is not None and task.attempt < node.rerun_attempts:
            found.facts.append(f.Failed(task.step, task.attempt, task.node, LOST, 0.0, task.edge))
        else:
            found.facts.append(f.Uncertain(task.step, task.attempt, task.node, None, task.edge))
    return found
