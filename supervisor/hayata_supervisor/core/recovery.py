"""Classification after a loss of the supervisor: what each task of an unfinished invocation is now.

===========================  =======================================================
in the store                 becomes
===========================  =======================================================
completed, failed, …         as it is: the result is reused
scheduled, not marked        as it is: it is run
marked, provably not begun   scheduled again, the same attempt
marked, ``Rerun`` left       failed ``supervisor_lost``, and the next attempt is scheduled
marked                       uncertain: never run again silently
===========================  =======================================================

An evaluation of the policy that was interrupted before its decision was recorded is repeated: policies are pure.
"""

from __future__ import annotations

from collections.abc import Callable

from hayata.messages import AgentManifest, ErrorInfo
from hayata_supervisor.core import facts as f
from hayata_supervisor.core.invocation import Invocation

LOST = ErrorInfo(
    "supervisor_lost",
    "the supervisor was lost while this ran",
    details=f.interrupted_details("supervisor_lost"),
)


def classify(
    invocation: Invocation, manifest: AgentManifest, began: Callable[[int, str], bool]
) -> list[f.Fact]:
    """Say which facts recovery adds before the invocation may go on; none when all its tasks are clear.

    Args:
        invocation: As the store has it.
        manifest: Its agent.
        began: Whether the execution with this cell and id may have begun; True when that can't be known.
    """
    attempts = {node.name: node.rerun_attempts for node in manifest.nodes}
    found: list[f.Fact] = []
    for task in invocation.tasks:
        if task.status == "running":
            if not began(task.cell, invocation.execution(task)):
                found.append(f.Unmarked(task.step, task.attempt, task.node))
            elif task.attempt < attempts.get(task.node, 0):
                found.append(f.Failed(task.step, task.attempt, task.node, LOST, 0.0))
            else:
                found.append(f.Uncertain(task.step, task.attempt, task.node))
    return found
