"""The supervisor's link to a node worker: hands it tasks, hears how they end, and knows its edges.

Every task that `dispatch` was given is reported exactly once. When the worker dies, what it had reported
counts; a task of which not a byte had been written to it is handed to the next incarnation, same attempt; any
other was cut off.
"""

from __future__ import annotations

import msgspec

from hayata.framing import FrameTooLarge
from hayata.messages import (
    AgentManifest,
    DescribeEdges,
    EdgeEnded,
    EdgesDescribed,
    EdgeStartFailed,
    EdgeStopped,
    ErrorInfo,
    FromNode,
    KillTask,
    NodeManifest,
    Output,
    Partial,
    PartialAck,
    Pong,
    ProcessInfo,
    ReduceTask,
    RestartType,
    RunTask,
    SubstepDone,
    TaskCompleted,
    TaskEnd,
    TaskFailed,
    TaskInterrupted,
    TaskOrder,
    TaskProbed,
    decoder,
    encode,
)
from hayata_supervisor.process import clock
from hayata_supervisor.process.reactor import Callback, Timer
from hayata_supervisor.tree import reasons
from hayata_supervisor.tree.edge_book import EdgeBook
from hayata_supervisor.tree.incarnation import Incarnation
from hayata_supervisor.tree.port import TaskReport, failure
from hayata_supervisor.tree.worker_link import CONGESTED_BYTES, Forks, Ground, Superior, WorkerLink

UNANSWERED_S = 5.0
"""A node that is this late with an end that was due, and does not answer, hangs, and is killed."""

ASKED_AFTER_S = 1.0
"""How late an end may be before the node is asked whether it lives. It may be late for a reason: the clock of a task
starts when an edge takes it, and an edge may take long to start.
"""

GRACE_S = 1.0
"""What a node worker that is told to end may take beyond its edges' ``shutdown``."""

_LOOK_S = 0.5

_DECODER = decoder(FromNode)


class _Sent:
    """A task that the worker has.

    ``overdue``: monotonic seconds at which we should have heard of its end. ``killed``: it was told to end
    it.
    """

    __slots__ = ("killed", "overdue", "task")

    def __init__(self, task: TaskOrder, overdue: float | None) -> None:
        self.task = task
        self.overdue = overdue
        self.killed = False


class NodeLink(WorkerLink):
    """See the module."""

    role = "node"
    listens = True

    def __init__(
        self, ground: Ground, forks: Forks, superior: Superior, manifest: AgentManifest, node: NodeManifest
    ) -> None:
        super().__init__(ground, forks, superior, manifest.id, node.name, _DECODER)
        self.manifest = node
        self._name = node.name
        self._waiting: dict[str, TaskOrder] = {}
        self._sent: dict[str, _Sent] = {}
        self._overdue_timer: Timer | None = None
        self._asked = False
        self._edge_failures = 0
        self._edges: EdgeBook | None = None
        self._lookers: list[Callback] = []
        self._successor: NodeLink | None = None

    # What the engine asks for

    def dispatch(self, task: TaskOrder) -> None:
        """Run a task; the listener hears how it ended, exactly once."""
        if self.retired:
            self._hand_over(task)
            return
        if self._unavailable is not None:
            self._report_soon(_not_started(task.execution_id, self._unavailable))
            return
        self._waiting[task.execution_id] = task
        self._pump()

    def kill(self, execution_id: str, reason: str) -> None:
        """End a task. Its report follows; it may be a result that was already on its way."""
        if self._waiting.pop(execution_id, None) is not None:
            self._report_soon(_not_started(execution_id, _cancelled(reason)))
            return
        sent = self._sent.get(execution_id)
        if sent is None or sent.killed:
            return
        sent.killed = True
        sent.overdue = clock.monotonic() + ASKED_AFTER_S
        self._send(KillTask(execution_id, reason))
        self._watch_overdue()

    def ack_partial(self, ack: PartialAck) -> None:
        """Answer a chunk."""
        self._send(ack)

    def holds(self, execution_id: str) -> bool:
        """Whether the worker has this task."""
        return execution_id in self._sent

    def look(self, looked: Callback) -> bool:
        """Ask the worker what its edges have; call ``looked`` when it has said so, if it does. False: there is none."""
        if self._edges is None or self.status not in ("serving", "draining", "stopping"):
            return False
        self._edges.tasks = {}
        self._lookers.append(looked)
        self._send(DescribeEdges())
        return True

    def _send(self, message: KillTask | PartialAck | DescribeEdges) -> None:
        if self.incarnation is not None:
            self.incarnation.stream.send(encode(message))

    def _pump(self) -> None:
        incarnation = self.incarnation
        if self.status != "serving" or self._giving_up or incarnation is None or not incarnation.alive:
            return
        stream = incarnation.stream
        waiting = self._waiting
        while waiting:
            if stream.queued_bytes > CONGESTED_BYTES:
                self._look_again()
                return
            execution_id = next(iter(waiting))
            task = waiting.pop(execution_id)
            try:
                stream.send(encode(task), task)
            except FrameTooLarge as error:
                info = failure(error.code, error.message, hint=error.hint, **error.details)
                self._report_soon(TaskFailed(execution_id, "", info, False))
                continue
            if task.timeout_s is None:
                self._sent[execution_id] = _Sent(task, None)
            else:
                self._sent[execution_id] = _Sent(task, clock.monotonic() + task.timeout_s + ASKED_AFTER_S)
                self._watch_overdue()

    # What the worker says

    def _message(self, message: FromNode) -> None:
        kind = type(message)
        if kind is TaskCompleted or kind is TaskFailed or kind is TaskProbed or kind is TaskInterrupted:
            self._ended(message)  # type: ignore[arg-type]
        elif kind is Partial or kind is SubstepDone:
            self._partial(message)  # type: ignore[arg-type]
        elif kind is Output:
            self._ground.log.output(message, agent=self.agent, node=self._name)  # type: ignore[arg-type]
        elif isinstance(message, EdgeEnded):
            self._edge_ended(message)
        elif isinstance(message, EdgeStartFailed):
            self._edge_failed(message)
        elif isinstance(message, EdgeStopped):
            self._edge_stopped(message)
        elif isinstance(message, Pong) and self.incarnation is not None:
            self.incarnation.pulse.answered()
        elif isinstance(message, EdgesDescribed) and self._edges is not None:
            self._edges.tasks = message.tasks
            lookers, self._lookers = self._lookers, []
            for looked in lookers:
                looked()

    def _ended(self, report: TaskEnd) -> None:
        sent = self._sent.pop(report.execution_id, None)
        if sent is None:
            return  # late: its end was reported before
        self._edge_failures = 0
        if self.status == "stopping" and isinstance(report, TaskInterrupted):
            return  # a stop writes nothing: the next start classifies the task
        if isinstance(report, TaskInterrupted) and not report.started and not sent.killed:
            if self.retired:
                self._hand_over(sent.task)
                self._look_whether_drained()
                return
            if self._ending:  # no edge had it: it is the next incarnation's
                self._waiting[report.execution_id] = sent.task
                return
            if self._giving_up:
                report = _not_started(report.execution_id, reasons.given_up(self))  # not that it was told to stop
        self._listener.task_reported(self.agent, self._name, report)
        self._look_whether_drained()

    def _partial(self, partial: Partial | SubstepDone) -> None:
        if partial.execution_id in self._sent:
            self._listener.task_reported(self.agent, self._name, partial)
            return
        error = failure("execution_not_active", "this execution is not active any more")
        self._send(PartialAck(partial.execution_id, partial.number, error))

    def _edge_failed(self, message: EdgeStartFailed) -> None:
        self._ground.log.warning(
            "edge failed to start", **self._names(), edge=message.edge, error=message.error.message
        )
        if self.status not in ("serving", "draining") or self._giving_up:
            return
        # Edges that take a minute each to fail never exceed the intensity, yet nothing gets done.
        self._edge_failures += 1
        if self._superior.edge_failed(self) or self._edge_failures > self._superior.intensity:
            self._giving_up = True
            self.last_error = message.error
            self._end(self.grace_s)

    def _edge_stopped(self, message: EdgeStopped) -> None:
        if self._edges is not None:
            self._edges.stopped(message)
        if message.stopped:
            self._ground.log.warning("edge stopped", **self._names(), edge=message.edge)
        else:
            self._ground.log.info("edge goes on", **self._names(), edge=message.edge)

    def _edge_ended(self, message: EdgeEnded) -> None:
        if self._edges is not None:
            self._edges.ended(message)
        if message.reason == "stopped":
            self._ground.log.error("edge killed", **self._names(), edge=message.edge, reason=message.reason)

    # A worker that hangs

    def _watch_overdue(self) -> None:
        if self._overdue_timer is None:
            self._overdue_timer = self._reactor.call_later(_LOOK_S, self._look_for_overdue)

    def _look_for_overdue(self) -> None:
        self._overdue_timer = None
        now = clock.monotonic()
        watched = [sent for sent in self._sent.values() if sent.overdue is not None]
        if not watched or self.status not in ("serving", "draining"):
            self._asked = False
            return
        late = [sent for sent in watched if sent.overdue is not None and sent.overdue <= now]
        if self._owes_answer(late, now):
            self._hangs()
        else:
            self._watch_overdue()

    def _owes_answer(self, late: list[_Sent], now: float) -> bool:
        """Find out whether a worker that is late still answers; one that does is given more time."""
        incarnation = self.incarnation
        if not late or incarnation is None:
            self._asked = False
        elif not self._asked:
            self._asked = True
            incarnation.ask()
        elif not incarnation.pulse.owes_answer:
            self._asked = False
            for sent in late:
                sent.overdue = now + UNANSWERED_S
        else:
            return incarnation.silent_s >= UNANSWERED_S - ASKED_AFTER_S
        return False

    def _hangs(self) -> None:
        assert self.incarnation is not None
        self.last_error = failure("node_crashed", f"{self} did not end a task that was due; it hangs")
        self.incarnation.lose_patience("stopped" if self.incarnation.stopped else "hung")

    # Another generation

    def retire(self, successor: NodeLink | None, stopped: Callback) -> None:
        """Take nothing any more, end with what the worker holds, and call ``stopped``.

        Args:
            successor: Runs what was not written to the worker yet; None: nobody may.
            stopped: Called when nothing of it lives.
        """
        self.retired, self._successor = True, successor
        self._hand_all_over()
        if not self._sent:
            self.stop(stopped, self.grace_s)
            return
        self._stopped.append(stopped)
        if self.status == "serving":  # else it dies or is dead, and will be judged
            self.status = "draining"

    def _hand_all_over(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for task in waiting.values():
            self._hand_over(task)

    def _hand_over(self, task: TaskOrder) -> None:
        if self._successor is not None:
            self._successor.dispatch(task)
        else:
            self._report_soon(_not_started(task.execution_id, failure("unknown_node", f"{self} is gone")))

    def _look_whether_drained(self) -> None:
        if self.status == "draining" and not self._sent:
            self._drained()

    def _drained(self) -> None:
        self.status = "stopping"
        self._end(self.grace_s)

    # Birth and death

    def open_incarnation(self) -> Incarnation:
        """Make the next incarnation, and a book for its edges."""
        incarnation = super().open_incarnation()
        self._edge_failures = 0
        self._asked = False
        self._lookers.clear()
        self._edges = EdgeBook(self._reactor, self._ground.watcher, incarnation)
        return incarnation

    def _bury(self, buried: Callback) -> None:
        assert self._edges is not None
        self._edges.bury(lambda: self._ground.graveyard.sweep(buried))

    def _judge(self, incarnation: Incarnation) -> bool:
        """Settle what the dead worker had: what it provably never saw is handed out again, the rest was cut
        off.
        """
        unseen: dict[str, TaskOrder] = {
            task.execution_id: task for task in incarnation.stream.unsent() if isinstance(task, RunTask | ReduceTask)
        }
        sent, self._sent = self._sent, {}
        again: dict[str, TaskOrder] = {}
        reports: list[TaskReport] = []
        for execution_id, state in sent.items():
            if execution_id not in unseen:
                error = self._crash("node_crashed", incarnation, "it ran a task")
                reports.append(TaskInterrupted(execution_id, "", error))
            elif state.killed:
                reports.append(_not_started(execution_id, _cancelled("killed")))
            else:
                again[execution_id] = unseen[execution_id]
        self._waiting = {**again, **self._waiting}
        if self.retired:
            self._hand_all_over()
        for report in reports:
            self._listener.task_reported(self.agent, self._name, report)
        return True

    def _tell_unavailable(self, error: ErrorInfo, *, stopped: bool) -> None:
        if stopped:
            self._listener.node_stopped(self.agent, self._name, error)
        else:
            self._listener.node_given_up(self.agent, self._name, error)

    def _tell_back(self) -> None:
        self._listener.node_back(self.agent, self._name)

    def _refuse_waiting(self, error: ErrorInfo) -> None:
        waiting, self._waiting = self._waiting, {}
        for execution_id in waiting:
            self._listener.task_reported(self.agent, self._name, _not_started(execution_id, error))

    def _report_soon(self, report: TaskReport) -> None:
        """Report what is known at once, but not from within the request."""
        self._reactor.call_soon(lambda: self._listener.task_reported(self.agent, self._name, report))

    # Spec and description

    @property
    def restart_type(self) -> RestartType:
        """As the node has it."""
        return self.manifest.restart

    @property
    def grace_s(self) -> float:
        """The node's ``shutdown``, and what its worker needs beyond it."""
        return self.manifest.shutdown_s + GRACE_S if self.manifest.shutdown_s > 0 else 0.0

    def info(self) -> ProcessInfo:
        """Describe the worker and its edges; what no edge is known to have is the node's own."""
        edges = self._edges.infos() if self._edges is not None else []
        placed = {name for edge in edges for name in edge.tasks}
        waiting = dict.fromkeys((name for name in self._sent if name not in placed), 0.0)
        return msgspec.structs.replace(super().info(), children=edges, tasks=waiting)


def _not_started(execution_id: str, error: ErrorInfo) -> TaskInterrupted:
    return TaskInterrupted(execution_id, "", error, started=False)


def _cancelled(reason: str) -> ErrorInfo:
    return failure("cancelled", f"it was not wanted any more: {reason}", reason=reason)
