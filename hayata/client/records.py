"""What a client is given: plain frozen records, made from the daemon's answers.

Field names are the keys of ``--json`` on the command line too. Times are seconds since the epoch. An
``error`` is the `HayataError` that would be raised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from hayata import messages as m
from hayata.error_info import error_from
from hayata.errors import HayataError
from hayata.values import decode, decode_mapping

TERMINAL = frozenset({"completed", "failed", "cancelled"})
RESTING = frozenset({"uncertain", "recovery_required"})


@dataclass(frozen=True, slots=True)
class InvocationRecord:
    """An invocation as it was when the daemon was asked.

    Attributes:
        id: Its id.
        agent: Id of its agent.
        status: ``queued running waiting recovery_required uncertain completed failed cancelled``.
        version: Version of the agent's definition that it runs by.
        session: Its session, or None when it has one of its own.
        key: Its idempotency key.
        stream: Whether partial results are published.
        step: Executions scheduled so far.
        created_at: When it was accepted.
        started_at: When it began to run; None while it is queued.
        ended_at: When it became terminal.
        result: Its result, once it is ``completed``.
        error: Reason of ``failed``, or of a rest.
        restarted_from: Id of the invocation that it replaces.
    """

    id: str
    agent: str
    status: str
    version: str
    session: str | None
    key: str | None
    stream: bool
    step: int
    created_at: float
    started_at: float | None
    ended_at: float | None
    result: Any
    error: HayataError | None
    restarted_from: str | None


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """Who settled an uncertain task, when and how (``result``, ``error`` or ``retry``)."""

    by: str
    at: float
    how: str


@dataclass(frozen=True, slots=True)
class Task:
    """One attempt of one step, or of one of its edges.

    Attributes:
        id: The execution id.
        node: Name of its node.
        step: Number of the step, from 0.
        attempt: Number of the attempt, from 1.
        status: ``scheduled running completed failed cancelled uncertain``; ``collecting`` of a node with edges
            that waits for them.
        scheduled_at: When it was decided.
        started_at: When it was marked running.
        ended_at: When its end was recorded.
        error: Why it failed.
        update: What the node returned.
        reconciled: Who settled it, if somebody did.
        substeps: Keys or names of the sub-steps that it has stored (``ctx.step``).
        edge: Number of the edge, from 0; None for the execution itself, which is its reduction if it has edges.
    """

    id: str
    node: str
    step: int
    attempt: int
    status: str
    scheduled_at: float | None
    started_at: float | None
    ended_at: float | None
    error: HayataError | None
    update: dict[str, Any] | None
    reconciled: Reconciliation | None
    substeps: tuple[str, ...] = ()
    edge: int | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """One event of an invocation.

    Attributes:
        sequence: Its number, from 1, without a hole: type ``gap`` stands for the numbers ``from`` to ``to``
            of its data.
        type: ``invocation_started``, ``node_completed`` and so on.
        time: When it happened.
        invocation_id: Whose it is.
        data: What belongs to the type; node events have ``node_id`` and ``execution_id``, and ``edge`` if
            they are about an edge of a node.
    """

    sequence: int
    type: str
    time: float
    invocation_id: str
    data: dict[str, Any]


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """A node of an agent: ``concurrency`` tasks at most, ``busy`` now."""

    name: str
    status: str
    is_async: bool
    concurrency: int
    busy: int


@dataclass(frozen=True, slots=True)
class AgentRecord:
    """An agent.

    Its ``status`` is ``serving``, ``failed`` (then ``error`` says why), ``stopped``, or ``gone``: its app does not
    define it any more, and what is open rests.
    """

    id: str
    version: str
    app: str
    status: str
    nodes: tuple[NodeRecord, ...]
    running: int
    queued: int
    error: HayataError | None


@dataclass(frozen=True, slots=True)
class Process:
    """One process of the supervision tree.

    Attributes:
        role: ``guard supervisor forkserver agent node edge reducer``.
        name: Of the agent, node or edge.
        pid: Its process id.
        status: What it does.
        incarnation: Changes with each restart.
        started_at: When this incarnation was started.
        restarts: How often it was restarted.
        memory_bytes: Resident memory, pages that it shares with others included.
        cpu_s: CPU seconds that it has used.
        last_exit: How the one before ended.
        restart: Its restart type: ``permanent transient temporary``; of agents and nodes.
        strategy: With whom it is restarted: ``one_for_one one_for_all rest_for_one``; of agents and nodes.
        tasks: What it runs: execution id → seconds since it was handed out; a node's own wait for an edge.
        children: The processes below.
        generation: Of its code: one more with each reload; 0 for a process that has none.
    """

    role: str
    name: str
    pid: int
    status: str
    incarnation: str
    started_at: float | None
    restarts: int
    memory_bytes: int | None
    cpu_s: float | None
    last_exit: str
    restart: str
    strategy: str
    tasks: Mapping[str, float]
    children: tuple[Process, ...]
    generation: int = 0


@dataclass(frozen=True, slots=True)
class ReloadedAgent:
    """What a reload has made of one agent.

    Attributes:
        id: Its id.
        app: Where it comes from.
        outcome: ``kept``, ``new`` or ``gone``.
        version: Of its definition.
        was: Its version before, if that was another: its invocations rest.
        changes: What has changed in its definition, in words.
    """

    id: str
    app: str
    outcome: str
    version: str
    was: str | None
    changes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReloadReport:
    """All agents after a reload; ``generation`` counts from 1 since the supervisor's start."""

    generation: int
    agents: tuple[ReloadedAgent, ...]


@dataclass(frozen=True, slots=True)
class StoreProblem:
    """What is wrong with one record of the store."""

    record: str
    problem: str


@dataclass(frozen=True, slots=True)
class StoreReport:
    """What a verification, or that of a backup, has found.

    Attributes:
        counts: How many invocations, records and so on were looked at.
        problems: The first thousand; none means that all of it is whole.
        found: How many problems there are.
        directory: Where the backup is; empty for a verification.
    """

    counts: dict[str, int]
    problems: tuple[StoreProblem, ...]
    found: int
    directory: str


@dataclass(frozen=True, slots=True)
class Pruned:
    """How much was removed.

    Attributes:
        invocations: How many invocations.
        records: How many records of their journals.
        bytes_before: Size of the store's file before it was compacted; None when it was not.
        bytes_after: And after.
    """

    invocations: int
    records: int
    bytes_before: int | None = None
    bytes_after: int | None = None


def error_of(info: m.ErrorInfo | None) -> HayataError | None:
    """The error that the data describe."""
    return None if info is None else error_from(info)


def invocation_record(info: m.InvocationInfo) -> InvocationRecord:
    """Make the record of an answer."""
    return InvocationRecord(
        id=info.id,
        agent=info.agent,
        status=info.status,
        version=info.version,
        session=info.session,
        key=info.key,
        stream=info.stream,
        step=info.step,
        created_at=info.created_at,
        started_at=info.started_at,
        ended_at=info.ended_at,
        result=decode(info.result) if isinstance(info.result, m.Value) else None,
        error=error_of(info.error),
        restarted_from=info.restarted_from,
    )


def task(info: m.TaskInfo) -> Task:
    """Make the record of an answer."""
    settled = info.reconciled
    return Task(
        id=info.id,
        node=info.node,
        step=info.step,
        attempt=info.attempt,
        status=info.status,
        scheduled_at=info.scheduled_at,
        started_at=info.started_at,
        ended_at=info.ended_at,
        error=error_of(info.error),
        update=None if info.update is None else decode_mapping(info.update),
        reconciled=None if settled is None else Reconciliation(settled.by, settled.at, settled.how),
        substeps=tuple(info.substeps),
        edge=info.edge if info.edge >= 0 else None,
    )


def event(invocation_id: str, info: m.EventInfo) -> Event:
    """Make the record of an answer."""
    return Event(info.sequence, info.type, info.time, invocation_id, decode(info.data))


def journal_record(info: m.RecordInfo) -> dict[str, Any]:
    """A record of a journal as a mapping, its facts decoded."""
    return {
        "number": info.number,
        "at": info.at,
        "sequence": info.sequence,
        "reserved": info.reserved,
        "facts": [decode(fact) for fact in info.facts],
    }


def as_mapping(record: Any) -> dict[str, Any]:
    """The fields of one of the records of this module by name; what they hold stays as it is."""
    return {field.name: getattr(record, field.name) for field in fields(record)}


def store_report(info: m.StoreReport) -> StoreReport:
    """Make the record of an answer."""
    problems = tuple(StoreProblem(each.record, each.problem) for each in info.problems)
    return StoreReport(dict(info.counts), problems, info.found, info.directory)


def pruned(info: m.Pruned) -> Pruned:
    """Make the record of an answer."""
    return Pruned(info.invocations, info.records, info.bytes_before, info.bytes_after)


def agents(infos: Sequence[m.AgentInfo]) -> list[AgentRecord]:
    """Make the records of an answer."""
    return [
        AgentRecord(
            id=info.id,
            version=info.version,
            app=info.app,
            status=info.status,
            nodes=tuple(NodeRecord(n.name, n.status, n.is_async, n.concurrency, n.busy) for n in info.nodes),
            running=info.running,
            queued=info.queued,
            error=error_of(info.error),
        )
        for info in infos
    ]


def process(info: m.ProcessInfo) -> Process:
    """Make the record of an answer, with those below it."""
    return Process(
        role=info.role,
        name=info.name,
        pid=info.pid,
        status=info.status,
        incarnation=info.incarnation,
        started_at=info.started_at,
        restarts=info.restarts,
        memory_bytes=info.memory_bytes,
        cpu_s=info.cpu_s,
        last_exit=info.last_exit,
        restart=info.restart,
        strategy=info.strategy,
        tasks=info.tasks,
        children=tuple(process(child) for child in info.children),
        generation=info.generation,
    )


def reload_report(info: m.ReloadReport) -> ReloadReport:
    """Make the record of an answer."""
    agents = [ReloadedAgent(a.id, a.app, a.outcome, a.version, a.was or None, tuple(a.changes)) for a in info.agents]
    return ReloadReport(info.generation, tuple(agents))
