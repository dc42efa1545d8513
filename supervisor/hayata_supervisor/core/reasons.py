"""The errors that the coordinator itself gives: what is refused, and why."""

from __future__ import annotations

import msgspec

from hayata.messages import AgentManifest, DecidedNext, ErrorInfo, ReduceManifest
from hayata_supervisor.core.invocation import Invocation, Task

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(dict[str, msgspec.Raw]).decode


class Refusal(Exception):
    """A request that can't be granted; nothing has changed."""

    def __init__(self, error: ErrorInfo) -> None:
        super().__init__(error.message)
        self.error = error


def session_held(holder: Invocation, *, rests: bool) -> ErrorInfo:
    """Another invocation has the session."""
    details = msgspec.Raw(_encode({"session": holder.session, "invocation_id": holder.name}))
    if rests:
        return ErrorInfo(
            "recovery_required",
            f"session {holder.session!r} is held by {holder.name}, which waits for a person",
            "recover or reconcile it, or run with on_busy='queue'",
            details,
        )
    return ErrorInfo(
        "session_busy",
        f"session {holder.session!r} is held by {holder.name}",
        "wait for it, use another session, or run with on_busy='queue'",
        details,
    )


def restarted(manifest: AgentManifest) -> ErrorInfo:
    """The agent resumes by hand."""
    return ErrorInfo("recovery_required", "the supervisor was restarted", f"hayata recover {manifest.id}")


def by_hand(manifest: AgentManifest) -> ErrorInfo:
    """Nothing is in its way any more, but it waits for a person all the same."""
    return ErrorInfo("recovery_required", "it rests, and may go on", f"hayata recover {manifest.id}")


def node_gone(manifest: AgentManifest) -> ErrorInfo:
    """A node is gone from the definition."""
    return ErrorInfo("unknown_node", f"{manifest.id} has no such node any more")


def definition_changed(invocation: Invocation, manifest: AgentManifest) -> ErrorInfo:
    """The invocation belongs to another version."""
    return ErrorInfo(
        "definition_changed",
        f"it was started by version {invocation.version!r} of {manifest.id}, this is {manifest.version!r}",
        f"hayata recover {manifest.id} --changed continue|restart|drop",
    )


def unknown_node(manifest: AgentManifest, node: str) -> ErrorInfo:
    """A task's node is gone from the definition."""
    return ErrorInfo("unknown_node", f"{manifest.id} has no node {node!r} any more")


def unfit(why: ErrorInfo, changes: list[str], manifest: AgentManifest) -> ErrorInfo:
    """The state doesn't fit the definition of the day, which is another than the one it was made by."""
    told = f" ({'; '.join(changes)})" if changes else ""
    return msgspec.structs.replace(
        why,
        message=f"{why.message}: its state was made by another definition{told}",
        hint=f"start the daemon with a state_type that fits, or hayata recover {manifest.id} --changed restart|drop",
    )


def no_answer(why: ErrorInfo) -> ErrorInfo:
    """The probe of a task that was cut off gave none."""
    return msgspec.structs.replace(why, message=f"its probe gave no answer: {why.message}")


def timed_out(manifest: AgentManifest) -> ErrorInfo:
    """The invocation took too long."""
    return ErrorInfo("invocation_timeout", f"it took longer than {manifest.invocation_timeout_s} s")


def bad_decision(invocation: Invocation, decision: DecidedNext, manifest: AgentManifest) -> ErrorInfo | None:
    """What is wrong with a decision, if anything is; the agent worker has checked it, and is not trusted."""
    known = {node.name for node in manifest.nodes}
    for node in decision.nodes:
        if node not in known:
            return ErrorInfo("unknown_node", f"the policy chose {node!r}, which is no node of {manifest.id}")
    if not decision.nodes or len(set(decision.nodes)) != len(decision.nodes):
        return ErrorInfo("invalid_policy_decision", "Next needs one node or more, each once")
    if invocation.step + len(decision.nodes) > manifest.max_steps:
        return ErrorInfo(
            "max_steps_exceeded",
            f"{invocation.step} executions were scheduled, and {len(decision.nodes)} more are over "
            f"the {manifest.max_steps} that are allowed",
            "raise max_steps, or have the policy finish",
        )
    return None


def edge_failed(edge: Task, error: ErrorInfo) -> ErrorInfo:
    """An execution has failed with one of its edges."""
    return msgspec.structs.replace(error, message=f"edge {edge.edge} of {edge.node}: {error.message}")


def edges_late(invocation: Invocation, execution: Task, reduce: ReduceManifest) -> ErrorInfo:
    """Edges were still pending when their time was up."""
    counts = _counts(invocation, execution)
    return ErrorInfo(
        "reducer_failed",
        f"{counts['pending_edges']} of {execution.edges} edges of {execution.node} were not done "
        f"after {reduce.timeout_s:g} s",
        "raise the timeout of its Reduce, or let it reduce what is there: partial=True",
        msgspec.Raw(_encode({"reason": "timeout", "timeout_s": reduce.timeout_s, **counts})),
    )


def reducer_failed(invocation: Invocation, execution: Task, why: ErrorInfo) -> ErrorInfo:
    """The reducer was cut off as often as is tried."""
    details = msgspec.Raw(_encode({**_decode(why.details), **_counts(invocation, execution)}))
    return ErrorInfo(
        "reducer_failed",
        f"the reducer of {execution.node} was cut off in attempt {execution.attempt}, too: {why.message}",
        why.hint,
        details,
    )


def _counts(invocation: Invocation, execution: Task) -> dict[str, int]:
    edges = invocation.edges(execution.step)
    return {
        "expected_edges": len(edges),
        "result_count": sum(edge.status == "completed" for edge in edges),
        "error_count": sum(edge.status == "failed" for edge in edges),
        "pending_edges": sum(edge.status not in ("completed", "failed") for edge in edges),
    }
