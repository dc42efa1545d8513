"""One invocation: its durable state, and the fold that makes it from facts.

The coordinator decides which facts become true; this module says what each one means. Recovery folds the same facts
from the journal, so a recovered invocation *is* the committed one. The struct is also its own snapshot.

Task states (a task is one attempt of one step)::

    scheduled ──Marked──▶ running ──Completed──▶ completed
        │  ◀─────Unmarked────┤
        │                    ├─────Failed──────▶ failed ──(retry_at)──▶ the next attempt, scheduled
        │                    └─────Uncertain───▶ uncertain ──Reconciled──▶ completed, failed or the next attempt
        └──Cancelled (also from running)───────▶ cancelled

Invocation states::

    queued ──Started──▶ running ──Finished──▶ completed
                          │ ▲ ├────Aborted──▶ failed
              Uncertain   ▼ │ └────Dropped──▶ cancelled        (Dropped from every open state)
                      uncertain ──Recovered──▶ running
"""

from __future__ import annotations

from typing import Any, assert_never

import msgspec

from hayata.ids import execution_id
from hayata.messages import NIL, ErrorInfo, EventInfo, InvocationInfo, Substep, Update, Value
from hayata_supervisor.core import facts as f
from hayata_supervisor.core.definitions import EMPTY
from hayata_supervisor.core.merge import merge


class Task(msgspec.Struct, array_like=True):
    """The latest attempt of one step of the current transition."""

    step: int
    node: str
    attempt: int = 1
    status: str = "scheduled"
    update: Update | None = None
    retry_at: float = 0.0
    cell: int = -1
    substeps: list[Substep] = []


class Invocation(msgspec.Struct, array_like=True):
    """See the module. Times are wall seconds.

    Attributes:
        step: Executions scheduled so far.
        tasks: The current transition, in the order of the request; empty before the first.
        input: The invocation's input. ``node_input`` is the current transition's.
        sequence: Number of the last event, partial results included.
        reserved: Highest number that an event may have had; recovery counts on from here.
        number: Commits so far.
        definition: What its agent was when it started, or when a person had it go on with another version; then it
            is ``reversioned``.
        paused_s: For how long the invocation's timeout has stood still; ``paused_at``: since when it does.
    """

    id: bytes
    name: str
    agent: str
    version: str
    session: str
    own_session: bool
    stream: bool
    key: str | None
    digest: bytes
    created_at: float
    restarted_from: str | None = None
    status: str = "queued"
    input: Value = NIL
    state: Update = {}
    step: int = 0
    tasks: list[Task] = []
    parallel: bool = False
    node_input: Value = NIL
    parallel_results: list[Update] | None = None
    last: str | list[str] | None = None
    failure: ErrorInfo | None = None
    result: Value | None = None
    error: ErrorInfo | None = None
    started_at: float | None = None
    ended_at: float | None = None
    paused_s: float = 0.0
    paused_at: float | None = None
    sequence: int = 0
    reserved: int = 0
    number: int = 0
    definition: msgspec.Raw = EMPTY
    reversioned: bool = False
    started_lasting: float = 0.0

    @property
    def terminal(self) -> bool:
        """Whether it has ended."""
        return self.status in f.TERMINAL

    def task(self, step: int) -> Task | None:
        """The current transition's task of ``step``."""
        for task in self.tasks:
            if task.step == step:
                return task
        return None

    def execution(self, task: Task) -> str:
        """The execution id of the task's current attempt."""
        return execution_id(self.id, task.step, task.attempt)


def replay(invocation: Invocation, number: int, record: f.Record) -> None:
    """Fold one record of the journal into ``invocation``."""
    for fact in record.facts:
        apply(invocation, fact, record.at)
    events = sum(1 for fact in record.facts if event_type(fact))
    if events:
        invocation.sequence = record.sequence + events - 1
    invocation.reserved = record.reserved
    invocation.number = number


def apply(invocation: Invocation, fact: f.Fact, at: float) -> None:
    """Fold one fact into ``invocation``. It was checked when it was made; the fold never refuses."""
    match fact:
        case f.Accepted():
            invocation.input = fact.input
        case f.Started():
            invocation.status = "running"
            invocation.state = fact.state
            invocation.definition = fact.definition
            invocation.started_at = at
            invocation.started_lasting = fact.lasting
        case f.Decided():
            invocation.step = fact.step + len(fact.nodes)
            invocation.tasks = [Task(fact.step + offset, node) for offset, node in enumerate(fact.nodes)]
            invocation.parallel = fact.parallel
            invocation.node_input = fact.input
            invocation.parallel_results = None
            invocation.failure = None
        case f.Marked():
            task = _task(invocation, fact.step)
            task.status, task.cell = "running", fact.cell
        case f.Unmarked():
            _task(invocation, fact.step).status = "scheduled"
        case f.Completed():
            _complete(invocation, _task(invocation, fact.step), fact.update, fact.merge)
        case f.SubstepDone():
            _task(invocation, fact.step).substeps.append(fact.substep)
        case f.Failed():
            task = _task(invocation, fact.step)
            if fact.retry_at is None:
                task.status, task.substeps = "failed", []
                invocation.failure = fact.error
                _transition_ended(invocation)
            else:
                _next_attempt(task, fact.retry_at)
        case f.Cancelled():
            _task(invocation, fact.step).status = "cancelled"
        case f.Uncertain():
            _task(invocation, fact.step).status = "uncertain"
            invocation.status = "uncertain"
            if invocation.paused_at is None:
                invocation.paused_at = at
        case f.Reconciled():
            _reconcile(invocation, _task(invocation, fact.step), fact)
        case f.Recovered():
            invocation.status = "running"
            invocation.paused_s += fact.paused_s
            invocation.paused_at = None
        case f.Reversioned():
            invocation.version, invocation.reversioned = fact.version, True
            invocation.definition = fact.definition
        case f.Finished():
            _end(invocation, "completed", at)
            invocation.result = fact.result
        case f.Aborted():
            _end(invocation, "failed", at)
            invocation.error = fact.error
        case f.Dropped():
            _end(invocation, "cancelled", at)
            invocation.error = ErrorInfo("cancelled", fact.reason)
        case _:
            assert_never(fact)


def _task(invocation: Invocation, step: int) -> Task:
    task = invocation.task(step)
    if task is None:
        raise LookupError(f"invocation {invocation.name} has no task of step {step}: its journal is out of order")
    return task


def _complete(invocation: Invocation, task: Task, update: Update, operations: dict[str, str]) -> None:
    task.status, task.substeps = "completed", []
    if invocation.parallel:
        task.update = update
    else:
        invocation.state = merge(invocation.state, update, operations)
    if all(each.status == "completed" for each in invocation.tasks):
        _transition_ended(invocation)
        if invocation.parallel:
            invocation.parallel_results = [each.update or {} for each in invocation.tasks]
            for each in invocation.tasks:
                each.update = None


def _transition_ended(invocation: Invocation) -> None:
    names = [each.node for each in invocation.tasks]
    invocation.last = names if invocation.parallel else names[0]


def _next_attempt(task: Task, retry_at: float) -> None:
    task.attempt += 1
    task.status = "scheduled"
    task.retry_at = retry_at


def _reconcile(invocation: Invocation, task: Task, fact: f.Reconciled) -> None:
    if fact.update is not None:
        _complete(invocation, task, fact.update, fact.merge)
    elif fact.error is not None:
        task.status, task.substeps = "failed", []
        invocation.failure = fact.error
        _transition_ended(invocation)
    else:
        _next_attempt(task, 0.0)


def _end(invocation: Invocation, status: str, at: float) -> None:
    invocation.status = status
    invocation.ended_at = at
    invocation.state = {}
    invocation.parallel_results = None


def cancellations(invocation: Invocation) -> list[f.Cancelled]:
    """Facts that cancel what is scheduled or running."""
    return [
        f.Cancelled(task.step, task.attempt, task.node)
        for task in invocation.tasks
        if task.status in ("scheduled", "running")
    ]


def info(invocation: Invocation) -> InvocationInfo:
    """What clients see of the invocation."""
    return InvocationInfo(
        id=invocation.name,
        agent=invocation.agent,
        status=invocation.status,
        version=invocation.version,
        created_at=invocation.created_at,
        session=None if invocation.own_session else invocation.session,
        key=invocation.key,
        stream=invocation.stream,
        step=invocation.step,
        started_at=invocation.started_at,
        ended_at=invocation.ended_at,
        result=msgspec.UNSET if invocation.result is None else invocation.result,
        error=invocation.error,
        restarted_from=invocation.restarted_from,
    )


# --------------------------------------------------------------------------------------------------------------------
# Events
# --------------------------------------------------------------------------------------------------------------------

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
    return {
        "node_id": fact.node,
        "execution_id": execution_id(invocation, fact.step, fact.attempt),
        "attempt": fact.attempt,
    }


def error_data(error: ErrorInfo) -> dict[str, Any]:
    """An error as event data: ``code``, ``message``, ``details``, ``hint``."""
    return {"code": error.code, "message": error.message, "details": error.details, "hint": error.hint}


def how(fact: f.Reconciled) -> str:
    """How a person settled a task: ``result``, ``error`` or ``retry``."""
    if fact.update is not None:
        return "result"
    return "retry" if fact.error is None else "error"
