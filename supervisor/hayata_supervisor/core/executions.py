"""Executions: marked tasks whose end has not been confirmed, their slots, and their start notes' cells.

An execution that was handed out keeps its slot until its end is confirmed by a report, wanted or not: a node never
runs more than its concurrency, and a new attempt never overlaps the old one. One that is marked and was not handed out
yet has provably not begun, and is dropped without a trace when it isn't wanted any more.

The probe of a task that was cut off is an execution, too, under the id of the attempt it asks about. It keeps that
attempt's cell: while nothing is known of the body, its note must not be overwritten, or the next recovery would take
the task for one that never began.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from hayata.ids import execution_id
from hayata.messages import ErrorInfo, NodeManifest, ReduceTask, RunTask, TaskOrder
from hayata_supervisor.core.cells import Cells
from hayata_supervisor.core.invocation import Invocation, Task
from hayata_supervisor.core.slots import Claim, Slots


class Execution(msgspec.Struct):
    """One of them.

    ``task``: what to hand out, until that has happened at ``handed_at`` (monotonic seconds). ``cause``: of a probe: why
    the body that it asks about was cut off.
    """

    invocation: bytes
    step: int
    attempt: int
    node: str
    cell: int
    task: TaskOrder | None
    handed_at: float = 0.0
    cause: ErrorInfo | None = None
    edge: int = -1


class Executions:
    """See the module."""

    def __init__(self, nodes: Iterable[NodeManifest], cells: Cells) -> None:
        self.slots = {node.name: Slots(node) for node in nodes}
        self._cells = cells
        self._marked: dict[str, Execution] = {}

    @property
    def busy(self) -> bool:
        """Whether executions were handed out whose end is not confirmed."""
        return any(slots.active for slots in self.slots.values())

    def take_nodes(self, nodes: Iterable[NodeManifest], gone: ErrorInfo) -> list[Slots]:
        """Go on with other definitions; what is in use stays counted. Returns the slots of nodes that are gone, which
        are forgotten unless something is in use.
        """
        known = {node.name: node for node in nodes}
        before, self.slots = self.slots, {}
        for name, node in known.items():
            slots = self.slots[name] = before.pop(name) if name in before else Slots(node)
            slots.manifest, slots.unavailable, slots.stopped = node, None, False
        for name, slots in before.items():
            slots.unavailable = gone
            if slots.marked or slots.waiting:
                self.slots[name] = slots
        return [slots for name, slots in self.slots.items() if name not in known]

    def new_cell(self) -> int:
        """A cell for a task that is being marked."""
        return self._cells.take()

    def free_cell(self, cell: int) -> None:
        """Nobody will ask what this cell's note says."""
        self._cells.release(cell)

    def add(self, invocation: Invocation, task: Task) -> str:
        """Remember a task that was just marked; returns its execution id."""
        name = execution_id(invocation.id, task.step, task.attempt, task.edge)
        timeout_s = self.slots[task.node].manifest.execution_timeout_s
        if task.edges < 0:
            order: TaskOrder = _run_task(invocation, task, name, timeout_s)
        else:
            order = _reduce_task(invocation, task, name, timeout_s)
        self._marked[name] = Execution(
            invocation.id, task.step, task.attempt, task.node, task.cell, order, 0.0, None, task.edge
        )
        return name

    def probe(self, invocation: Invocation, task: Task, cause: ErrorInfo) -> Slots:
        """Line up the probe of a task that was cut off for ``cause``; returns its node's slots."""
        name = self.add(invocation, task)
        execution = self._marked[name]
        assert isinstance(execution.task, RunTask), "a reduction is pure: nobody asks about it"
        execution.task = msgspec.structs.replace(
            execution.task, state={}, stream=False, cell=-1, probe=True, substeps=[]
        )
        execution.cause = cause
        self._cells.hold(task.cell)
        slots = self.slots[task.node]
        slots.probe(name)
        return slots

    def get(self, name: str) -> Execution | None:
        """The execution, if its end has not been confirmed."""
        return self._marked.get(name)

    def is_ready(self, name: str) -> Slots | None:
        """Its mark is durable; returns its node's slots, None when it was dropped meanwhile."""
        execution = self._marked.get(name)
        if execution is None:
            return None
        slots = self.slots[execution.node]
        slots.ready.append(name)
        return slots

    def hand_out(self, slots: Slots, mono_s: float) -> Iterator[TaskOrder]:
        """Take what is ready and has a slot."""
        while slots.ready:
            execution = self._marked.get(slots.ready[0])
            if execution is not None:
                if not slots.hand_out():
                    return
                task, execution.task, execution.handed_at = execution.task, None, mono_s
                assert task is not None
                yield task
            slots.ready.popleft()

    def end(self, name: str, mono_s: float) -> Execution | None:
        """The end of an execution that was handed out is confirmed."""
        execution = self._marked.get(name)
        if execution is None or execution.task is not None:
            return None
        del self._marked[name]
        self.slots[execution.node].took(mono_s - execution.handed_at if execution.cause is None else None)
        self._cells.release(execution.cell)
        return execution

    def running(self, invocation: Invocation, tasks: Iterable[Task] | None = None) -> list[str]:
        """Ids of the invocation's executions, or of these tasks', that were handed out; those that were not are
        dropped.
        """
        found = []
        for task in invocation.tasks if tasks is None else tasks:
            if task.status == "running":
                name = invocation.execution(task)
                execution = self._marked.get(name)
                if execution is not None and execution.task is not None:
                    self.drop(name)
                elif execution is not None:
                    found.append(name)
        return found

    def any_of(self, invocation: Invocation) -> bool:
        """Whether an execution of the invocation's is marked here; one that ran under another supervisor is not."""
        return any(task.status == "running" and invocation.execution(task) in self._marked for task in invocation.tasks)

    def handed(self, mono_s: float) -> dict[str, float]:
        """Execution id → seconds since it was handed out, of all whose end is not confirmed."""
        return {name: mono_s - each.handed_at for name, each in self._marked.items() if each.task is None}

    def lost(self, invocation: Invocation) -> list[Task]:
        """The invocation's tasks that are marked, and that nobody runs or will: a supervisor before this one did."""
        return [
            task
            for task in invocation.tasks
            if task.status == "running" and invocation.execution(task) not in self._marked
        ]

    def waits(self, name: str) -> bool:
        """Whether it is durably marked and was not handed out."""
        execution = self._marked.get(name)
        return execution is not None and execution.task is not None and name in self.slots[execution.node].ready

    def take_back(self, name: str) -> Execution:
        """Forget one that `waits`: it never began, and may be marked again."""
        execution = self._marked[name]
        self.slots[execution.node].ready.remove(name)
        self.drop(name)
        return execution

    def drop(self, name: str) -> None:
        """Forget an execution that was not handed out: it never began."""
        execution = self._marked.pop(name)
        self._cells.release(execution.cell)
        self.slots[execution.node].unmark()

    def give_up(self, slots: Slots, error: ErrorInfo) -> tuple[list[Execution], list[Claim]]:
        """The node is unavailable: take back what it was not handed, and what waits for it."""
        slots.unavailable = error
        names, slots.ready = list(slots.ready), type(slots.ready)()
        dropped = [self._marked[name] for name in names if name in self._marked]
        for name in names:
            if name in self._marked:
                self.drop(name)
        waiting, slots.waiting = list(slots.waiting), type(slots.waiting)()
        return dropped, waiting


def _run_task(invocation: Invocation, task: Task, name: str, timeout_s: float | None) -> RunTask:
    return RunTask(
        execution_id=name,
        timeout_s=timeout_s,
        invocation_id=invocation.name,
        attempt=task.attempt,
        idempotency_key=name.rpartition(".")[0],  # all but the attempt
        session=None if invocation.own_session else invocation.session,
        stream=invocation.stream,
        state=invocation.state,
        input=invocation.node_input if task.edge < 0 else task.input,
        cell=task.cell,
        parallel=invocation.parallel,
        substeps=task.substeps,
        edge=task.edge,
    )


def _reduce_task(invocation: Invocation, task: Task, name: str, timeout_s: float | None) -> ReduceTask:
    edges = invocation.edges(task.step)
    return ReduceTask(
        execution_id=name,
        timeout_s=timeout_s,
        invocation_id=invocation.name,
        attempt=task.attempt,
        session=None if invocation.own_session else invocation.session,
        input=invocation.node_input,
        results=[edge.update for edge in edges],
        errors={edge.edge: edge.error for edge in edges if edge.error is not None},
        cell=task.cell,
        parallel=invocation.parallel,
    )
