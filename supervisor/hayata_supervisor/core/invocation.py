"""One invocation: its durable state, and the fold that makes it from facts.

The coordinator decides which facts become true; this module says what each one means. Recovery folds the same facts
from the journal, so a recovered invocation *is* the committed one. The struct is also its own snapshot.

Task states (a task is one attempt of one step)::

    scheduled ──Marked──▶ running ──Completed──▶ completed
        │  ◀─────Unmarked────┤
        │                    ├─────Failed──────▶ failed ──(retry_at)──▶ the next attempt, scheduled
        │                    └─────Uncertain───▶ uncertain ──Reconciled──▶ completed, failed or the next attempt
        └──Cancelled (also from running)───────▶ cancelled

    collecting ──the last edge is over──▶ scheduled        (the task of an execution with edges: its reduction)

Invocation states::

    queued ──Started──▶ running ──Finished──▶ completed
                          │ ▲ ├────Aborted──▶ failed
              Uncertain   ▼ │ └────Dropped──▶ cancelled        (Dropped from every open state)
                      uncertain ──Recovered──▶ running
"""

from __future__ import annotations

from typing import assert_never

import msgspec

from hayata.ids import execution_id
from hayata.messages import NIL, ErrorInfo, InvocationInfo, Substep, Update, Value
from hayata_supervisor.core import facts as f
from hayata_supervisor.core.definitions import EMPTY
from hayata_supervisor.core.events import event_type
from hayata_supervisor.core.merge import merge


class Task(msgspec.Struct, array_like=True):
    """The latest attempt of one step of the current transition, or of one of the step's edges.

    Attributes:
        edge: Which edge of the step it is; -1: it is the execution itself. ``input`` is the edge's value, ``error`` why
            it has failed; its ``update`` is kept until the execution is over.
        edges: How many edges the execution has, of whose results it is the reduction; -1: it has none. Such a one is
            ``collecting`` until they are over.
        since: From when the time of its edges counts.
    """

    step: int
    node: str
    attempt: int = 1
    status: str = "scheduled"
    update: Update | None = None
    retry_at: float = 0.0
    cell: int = -1
    substeps: list[Substep] = []
    edge: int = -1
    input: Value = NIL  # msgspec decodes `Raw | None` as None alone
    error: ErrorInfo | None = None
    edges: int = -1
    since: float = 0.0

    @property
    def over(self) -> bool:
        """Whether it has ended for good."""
        return self.status in ("completed", "failed", "cancelled")


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

    def task(self, step: int, edge: int = -1) -> Task | None:
        """The current transition's task of ``step``, or of one of its edges."""
        for task in self.tasks:
            if task.step == step and task.edge == edge:
                return task
        return None

    def edges(self, step: int) -> list[Task]:
        """The tasks of the step's edges, in their order."""
        return [task for task in self.tasks if task.step == step and task.edge >= 0]

    def execution(self, task: Task) -> str:
        """The execution id of the task's current attempt."""
        return execution_id(self.id, task.step, task.attempt, task.edge)


def decided_tasks(fact: f.Decided) -> list[Task]:
    """The tasks of a decision: of each step those of its edges, then its own."""
    if fact.edges is None:
        return [Task(step, node) for step, node in enumerate(fact.nodes, fact.step)]
    tasks: list[Task] = []
    for step, node in enumerate(fact.nodes, fact.step):
        values = fact.edges.get(node)
        if values is None:
            tasks.append(Task(step, node))
            continue
        tasks += [Task(step, node, edge=edge, input=value) for edge, value in enumerate(values)]
        status = "collecting" if values else "scheduled"
        tasks.append(Task(step, node, status=status, edges=len(values), since=fact.since or 0.0))
    return tasks


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
            invocation.tasks = decided_tasks(fact)
            invocation.parallel = fact.parallel
            invocation.node_input = fact.input
            invocation.parallel_results = None
            invocation.failure = None
        case f.Marked():
            task = _task(invocation, fact)
            task.status, task.cell = "running", fact.cell
        case f.Unmarked():
            _task(invocation, fact).status = "scheduled"
        case f.Completed():
            _complete(invocation, _task(invocation, fact), fact.update, fact.merge)
        case f.SubstepDone():
            _task(invocation, fact).substeps.append(fact.substep)
        case f.Failed():
            task = _task(invocation, fact)
            if fact.retry_at is None:
                _fail(invocation, task, fact.error)
            else:
                _next_attempt(task, fact.retry_at)
        case f.Cancelled():
            task = _task(invocation, fact)
            task.status = "cancelled"
            _edge_over(invocation, task)
        case f.Uncertain():
            _task(invocation, fact).status = "uncertain"
            invocation.status = "uncertain"
            if invocation.paused_at is None:
                invocation.paused_at = at
        case f.Reconciled():
            _reconcile(invocation, _task(invocation, fact), fact)
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


def _task(invocation: Invocation, fact: f.TaskFact) -> Task:
    task = invocation.task(fact.step, fact.edge)
    if task is None:
        raise LookupError(f"invocation {invocation.name} has no task of step {fact.step}: its journal is out of order")
    return task


def _complete(invocation: Invocation, task: Task, update: Update, operations: dict[str, str]) -> None:
    task.status, task.substeps = "completed", []
    if task.edge >= 0:
        task.update = update
        _edge_over(invocation, task)
        return
    if task.edges >= 0:
        for edge in invocation.edges(task.step):
            edge.update = None
    if not invocation.parallel:
        invocation.state = merge(invocation.state, update, operations)
        invocation.last = task.node
        return
    task.update = update
    executions = [each for each in invocation.tasks if each.edge < 0]
    if all(each.status == "completed" for each in executions):
        _transition_ended(invocation)
        invocation.parallel_results = [each.update or {} for each in executions]
        for each in executions:
            each.update = None


def _fail(invocation: Invocation, task: Task, error: ErrorInfo) -> None:
    task.status, task.substeps = "failed", []
    if task.edge >= 0:
        task.error = error
        _edge_over(invocation, task)
    else:
        invocation.failure = error
        _transition_ended(invocation)


def _edge_over(invocation: Invocation, task: Task) -> None:
    """When the last edge of an execution is over, its reduction is scheduled."""
    if task.edge < 0:
        return
    execution = invocation.task(task.step)
    if execution and execution.status == "collecting" and all(each.over for each in invocation.edges(task.step)):
        execution.status = "scheduled"


def _transition_ended(invocation: Invocation) -> None:
    names = [each.node for each in invocation.tasks if each.edge < 0]
    invocation.last = names if invocation.parallel else names[0]


def _next_attempt(task: Task, retry_at: float) -> None:
    task.attempt += 1
    task.status = "scheduled"
    task.retry_at = retry_at


def _reconcile(invocation: Invocation, task: Task, fact: f.Reconciled) -> None:
    if fact.update is not None:
        _complete(invocation, task, fact.update, fact.merge)
    elif fact.error is not None:
        _fail(invocation, task, fact.error)
    else:
        _next_attempt(task, 0.0)


def _end(invocation: Invocation, status: str, at: float) -> None:
    invocation.status = status
    invocation.ended_at = at
    invocation.state = {}
    invocation.parallel_results = None


def cancellations(invocation: Invocation) -> list[f.Cancelled]:
    """Facts that cancel what is not over."""
    return [
        f.Cancelled(task.step, task.attempt, task.node, task.edge)
        for task in invocation.tasks
        if task.status in ("scheduled", "running", "collecting")
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
