"""Classification after a loss of the supervisor: what each task of an unfinished invocation is now.

===========================  =======================================================
in the store                 becomes
===========================  =======================================================
completed, failed, …         as it is: the result is reused
scheduled, not marked        as it is: it is run
marked, ``Rerun`` left       failed ``supervisor_lost``, and the next attempt is scheduled
marked                       uncertain: never run again silently
===========================  =======================================================

An evaluation of the policy that was interrupted before its decision was recorded is repeated: policies are pure.
"""

from __future__ import annotations

from hayata.messages import AgentManifest, ErrorInfo
from hayata_supervisor.core import facts as f
from hayata_supervisor.core.invocation import Invocation

LOST = ErrorInfo(
    "supervisor_lost",
    "the supervisor was lost while this ran",
    details=f.interrupted_details("supervisor_lost"),
)


def classify(invocation: Invocation, manifest: AgentManifest) -> list[f.Fact]:
    """Say which facts recovery adds before the invocation may go on; none when all its tasks are clear."""
    attempts = {node.name: node.rerun_attempts for node in manifest.nodes}
    found: list[f.Fact] = []
    for task in invocation.tasks:
        if task.status == "running":
            if task.attempt < attempts.get(task.node, 0):
                found.append(f.Failed(task.step, task.attempt, task.node, LOST, 0.0))
            else:
                found.append(f.Uncertain(task.step, task.attempt, task.node))
    return found
