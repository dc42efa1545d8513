"""Lifecycle events: what each fact tells those who follow an invocation."""

from __future__ import annotations

from typing import Any

import msgspec

from hayata.ids import execution_id
from hayata.messages import NIL, ErrorInfo, EventInfo, Value
from hayata_supervisor.core import facts as f

_EVENT_TYPES: dict[type[Any], str] = {
    f.Started: "invocation_started",
    f.Marked: "node_started",
    f.Completed: "node_completed",
    f.Failed: "node_failed",
    f.Cancelled: "node_cancelled",
    f.Uncertain: "node_uncertain",
    f.Reconciled: "node_reconciled",
    f.Recovered: "invocation_recovered",
    f.Finished: "invocation_completed",
    f.Aborted: "invocation_failed",
    f.Dropped: "invocation_cancelled",
}

TERMINAL_EVENTS = frozenset({"invocation_completed", "invocation_failed", "invocation_cancelled"})

_encode = msgspec.msgpack.Encoder().encode


def event_type(fact: f.Fact) -> str | None:
    """The type of the fact's event; None when it has none."""
    return _EVENT_TYPES.get(type(fact))


def events_of(invocation: bytes, record: f.Record, input: Value | None) -> list[EventInfo]:
    """The lifecycle events of one record.

    Args:
        invocation: Internal id, for the execution ids.
        record: The record.
        input: The invocation's input, wanted only by the event number 1.
    """
    events = []
    sequence = record.sequence
    for fact in record.facts:
        kind = event_type(fact)
        if kind is not None:
            data = _event_data(invocation, fact, input)
            events.append(EventInfo(sequence, kind, record.at, msgspec.Raw(_encode(data))))
            sequence += 1
    return events


def _event_data(invocation: bytes, fact: f.Fact, input: Value | None) -> dict[str, Any]:
    match fact:
        case f.Started():
            return {"input": NIL if input is None else input}
        case f.Marked() | f.Completed() | f.Cancelled():
            return _node_data(invocation, fact)
        case f.Uncertain():
            error = {} if fact.error is None else {"error": error_data(fact.error)}
            return {**_node_data(invocation, fact), **error}
        case f.Failed():
            return {
                **_node_data(invocation, fact),
                "error": error_data(fact.error),
                "will_retry": fact.retry_at is not None,
            }
        case f.Reconciled():
            return {**_node_data(invocation, fact), "by": fact.by, "how": how(fact)}
        case f.Finished():
            return {"result": fact.result}
        case f.Aborted():
            return {"reason": error_data(fact.error)}
        case f.Dropped():
            return {"reason": fact.reason}
    return {}


def _node_data(
    invocation: bytes, fact: f.Marked | f.Completed | f.Cancelled | f.Uncertain | f.Failed | f.Reconciled
) -> dict[str, Any]:
    data = {
        "node_id": fact.node,
        "execution_id": execution_id(invocation, fact.step, fact.attempt, fact.edge),
        "attempt": fact.attempt,
    }
    return data if fact.edge < 0 else {**data, "edge": fact.edge}


def error_data(error: ErrorInfo) -> dict[str, Any]:
    """An error as event data: ``code``, ``message``, ``details``, ``hint``."""
    return {"code": error.code, "message": error.message, "details": error.details, "hint": error.hint}


def how(fact: f.Reconciled) -> str:
    """How a person settled a task: ``result``, ``error`` or ``retry``."""
    if fact.update is not None:
        return "result"
    return "retry" if fact.error is None else "error"
