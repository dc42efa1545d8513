"""One edge worker as its node sees it: a fork, its stream, its output, and the order of things when it dies.

The verdict on a dead edge has five steps, always in this order: kill, reap, bury its descendants, drain its
stream to the end, report. A complete result frame in the stream wins over the death. Only after the report is
the slot free.
"""

from __future__ import annotations

import math
import os
import signal
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, TypeAlias

import msgspec

from hayata.framing import FrameTooLarge
from hayata.messages import ErrorInfo, StopWorker, WorkerFailed, WorkerReady, encode
from hayata_supervisor import edge_worker, failpoints, reducer
from hayata_supervisor.core.liveness import Pulse, Why
from hayata_supervisor.process import prologue
from hayata_supervisor.process.burial import Burial
from hayata_supervisor.process.channel import Channel
from hayata_supervisor.process.descriptors import close_own, disown, own
from hayata_supervisor.process.output import StreamName, WorkerOutput
from hayata_supervisor.process.patience import PatientTimer
from hayata_supervisor.process.pidfd import Exit, open_child, reap, send_signal
from hayata_supervisor.process.reactor import Reactor, Timer
from hayata_supervisor.process.vigil import Vigil

if TYPE_CHECKING:
    from hayata_supervisor.node_tasks import Task


Role: TypeAlias = Literal["edge", "reducer"]

_MARKS = {"edge": "*", "reducer": "+"}
"""What ``ps`` shows behind the node's name."""

EOF_GRACE_S = 0.05
"""How long an edge may live after its stream has ended."""


class _Head(msgspec.Struct, array_like=True):
    """The first fields of a frame: all that a node looks at before it forwards the frame as it is."""


class CompletedHead(_Head, tag="completed"):
    """Of `hayata.messages.TaskCompleted`."""

    execution_id: str
    edge: str


class FailedHead(_Head, tag="task_failed"):
    """Of `hayata.messages.TaskFailed`."""

    execution_id: str
    edge: str


class ProbedHead(_Head, tag="probed"):
    """Of `hayata.messages.TaskProbed`."""

    execution_id: str
    edge: str


class PartialHead(_Head, tag="partial"):
    """Of `hayata.messages.Partial`."""

    execution_id: str
    edge: str


class SubstepHead(_Head, tag="substep"):
    """Of `hayata.messages.SubstepDone`."""

    execution_id: str
    edge: str


class StoppedHead(_Head, tag="stopped"):
    """Of `hayata.messages.TaskStopped`."""

    execution_id: str
    edge: str


class RetiresHead(_Head, tag="retires"):
    """Of `hayata.messages.EdgeRetires`."""

    edge: str
    reason: str


TaskHead: TypeAlias = CompletedHead | FailedHead | ProbedHead | PartialHead | SubstepHead | StoppedHead

_decode_head = msgspec.msgpack.Decoder(TaskHead | RetiresHead | WorkerReady | WorkerFailed).decode


class EdgeOwner(Protocol):
    """Who hears of an edge: the node worker."""

    def edge_ready(self, edge: Edge) -> None:
        """It can take tasks."""

    def edge_said(self, edge: Edge, head: TaskHead, body: bytes) -> None:
        """It sent a frame that is about a task."""

    def edge_stopped(self, edge: Edge, stopped: bool) -> None:
        """Somebody has stopped it; or it goes on."""

    def edge_printed(self, edge: Edge, stream: StreamName, lines: list[str], dropped: int, slowed_s: float) -> bool:
        """User code wrote lines; False if they can't be taken now."""

    def edge_retires(self, edge: Edge) -> None:
        """It takes no more tasks."""

    def edge_reaped(self, edge: Edge) -> None:
        """It is dead and its pid may be another's from now on."""

    def is_known(self, pid: int) -> bool:
        """Whether ``pid`` is an edge that isn't reaped."""

    def edge_ended(self, edge: Edge) -> None:
        """It is dead, reaped, buried and drained."""


class EdgeSetting(NamedTuple):
    """What all edges of a node are made of."""

    reactor: Reactor
    owner: EdgeOwner
    job: edge_worker.EdgeJob
    start_timeout_s: float
    vigil: Vigil


class Edge:
    """See the module. Made by `spawn`.

    Attributes:
        id: Its incarnation.
        pid: Only for people and for messages; signals go by `pidfd`.
        tasks: What was handed to it and has not ended, by execution id.
        ready: It has said so.
        retiring: Why it takes no more tasks, or an empty string.
        killed: Why we killed it, or an empty string.
        exit: How it ended, once it is reaped.
        start_error: What it said when it could not start.
        idle_since: Monotonic seconds at which its last task ended.
        pulse: Whether somebody has stopped it. It is never asked whether it lives, as it runs user code.
        role: ``edge``, or ``reducer``: then it has one task in its life.
    """

    def __init__(
        self,
        setting: EdgeSetting,
        edge: str,
        pid: int,
        pidfd: int,
        sock: socket.socket,
        out: int,
        err: int,
        role: Role = "edge",
    ) -> None:
        self.id = edge
        self.role = role
        self.pid = pid
        self.pidfd = own(pidfd)
        self.tasks: dict[str, Task] = {}
        self.ready = False
        self.retiring = ""
        self.killed = ""
        self.exit: Exit | None = None
        self.start_error: ErrorInfo | None = None
        self.idle_since = 0.0
        self.pulse = Pulse()
        self._setting = setting
        self._owner = setting.owner
        self._reactor = setting.reactor
        self._fd = sock.fileno()
        self.channel = Channel(setting.reactor, sock, self, cap_bytes=setting.job.cap_bytes)
        self.output = WorkerOutput(setting.reactor, out, err, self._printed)
        self._kill_timer: Timer | PatientTimer | None = PatientTimer(
            setting.reactor, setting.start_timeout_s, lambda: self.kill("start timeout")
        )
        setting.reactor.watch_read(self.pidfd, self._died)
        setting.vigil.watch(self.pidfd, self)

    # what it says

    def received(self, body: bytes) -> None:
        """One frame from the edge."""
        try:
            head = _decode_head(body)
        except msgspec.DecodeError:
            self.kill("broken protocol")
            return
        if isinstance(head, WorkerReady):
            self._became_ready()
        elif isinstance(head, WorkerFailed):
            self.start_error = head.error
        elif isinstance(head, RetiresHead):
            self.retiring = head.reason
            self._owner.edge_retires(self)
        else:
            self._owner.edge_said(self, head, body)

    def closed(self, reason: FrameTooLarge | OSError | None) -> None:
        """The stream has ended. That is no death: a task may have closed it, and runs on."""
        disown(self._fd)
        if reason is not None:
            self.kill("broken protocol")
        elif self.exit is None:
            # A process that exits closes its descriptors first, and is dead a moment later.
            self._cancel_timer()
            self._kill_timer = self._reactor.call_later(EOF_GRACE_S, lambda: self.kill("closed its stream"))

    def _became_ready(self) -> None:
        self._cancel_timer()
        self.ready = True
        self.output.boundary()
        self._owner.edge_ready(self)

    def _printed(self, stream: StreamName, lines: list[str], dropped: int, slowed_s: float) -> bool:
        return self._owner.edge_printed(self, stream, lines, dropped, slowed_s)

    # whether it is well

    def stop_seen(self, stopped: bool) -> None:
        """Somebody has stopped it; or it goes on."""
        self._owner.edge_stopped(self, stopped)

    def lose_patience(self, why: Why) -> None:
        """It has been stopped for too long."""
        self.kill(why)

    # how it ends

    def kill(self, why: str) -> None:
        """SIGKILL it; the verdict follows when it is dead."""
        if not self.killed:
            self.killed = why
        send_signal(self.pidfd)

    def retire(self, why: str) -> None:
        """Ask it to end; the node's ``shutdown_s`` later it is killed."""
        self.retiring = self.retiring or why
        self.channel.send(encode(StopWorker()))
        self._cancel_timer()
        shutdown_s = self._setting.job.node.shutdown_s
        if shutdown_s != math.inf:
            self._kill_timer = self._reactor.call_later(shutdown_s, lambda: self.kill("did not stop in time"))

    def _cancel_timer(self) -> None:
        if self._kill_timer is not None:
            self._kill_timer.cancel()

    def _died(self) -> None:
        failpoints.hit("node.before_bury")
        # Until it is reaped its number names nobody else, nor does the group that it leads. What has left the
        # group is found by the burial.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        ended = reap(self.pidfd)
        if ended is None:
            return
        self.exit = ended
        self._cancel_timer()
        self._setting.vigil.forget(self.pidfd)
        self._reactor.unwatch_read(self.pidfd)
        self._owner.edge_reaped(self)
        Burial(self._reactor, self._owner.is_known, self._buried).start()

    def _buried(self) -> None:
        failpoints.hit("node.before_judge")
        self.channel.drain()
        self.channel.close()
        self.output.end()
        close_own(self.pidfd)
        self._owner.edge_ended(self)
        failpoints.hit("node.after_judge")


def spawn(setting: EdgeSetting, edge: str, role: Role = "edge") -> Edge:
    """Fork an edge worker or a reducer.

    Raises:
        OSError: The system refused.
    """
    held: list[socket.socket | int] = []
    try:
        ours, theirs = socket.socketpair()
        held += [ours, theirs]
        out, out_end = os.pipe()
        held += [out, out_end]
        err, err_end = os.pipe()
        held += [err, err_end]
        for thing in held:
            own(thing)
        node_pid = os.getpid()
        pid = prologue.fork()
    except OSError:
        for thing in held:
            close_own(thing)
        raise
    if pid == 0:
        failpoints.enter(role)
        prologue.run_worker(
            lambda: prologue.begin(
                name=f"h:{setting.job.node.name}{_MARKS[role]}",
                parent=node_pid,
                stdout=out_end,
                stderr=err_end,
                keep=[theirs.fileno()],
                new_session=True,
                expendable=True,
            ),
            lambda: (edge_worker if role == "edge" else reducer).run(setting.job, edge, theirs),
        )
    for thing in (theirs, out_end, err_end):
        close_own(thing)
    try:
        return Edge(setting, edge, pid, open_child(pid), ours, out, err, role)
    except OSError:
        for thing in (ours, out, err):
            close_own(thing)
        raise
