"""The node worker: owns a node's executions and its edge workers. Runs none of the user's code itself.

It hands each task to an edge, forwards frames as they are, enforces deadlines, and is the one that knows how
an edge died. It holds no more than the supervisor has given it: a task waits here only while an edge gets
ready.
"""

from __future__ import annotations

import gc
import math
import os
import signal
import socket
import sys
from collections import deque
from typing import NamedTuple, TypeAlias

import msgspec

from hayata.error_info import error_info
from hayata.errors import error_for
from hayata.framing import FrameTooLarge
from hayata.messages import (
    DescribeEdges,
    EdgeEnded,
    EdgesDescribed,
    EdgeStarted,
    EdgeStartFailed,
    EdgeStopped,
    ErrorInfo,
    KillTask,
    NodeManifest,
    Output,
    Ping,
    Pong,
    StopWorker,
    TaskInterrupted,
    WorkerReady,
    encode,
)
from hayata_supervisor import worker_logging
from hayata_supervisor.core.limits import container_default
from hayata_supervisor.edge_worker import EdgeJob
from hayata_supervisor.node_edge import Edge, EdgeSetting, PartialHead, StoppedHead, SubstepHead, TaskHead
from hayata_supervisor.node_fleet import Fleet
from hayata_supervisor.node_limits import Limits, MemoryLimit
from hayata_supervisor.node_tasks import Deadlines, Death, Task, edge_lost, never_ran, timed_out, told_to_end
from hayata_supervisor.process import cgroup, clock
from hayata_supervisor.process.channel import Channel
from hayata_supervisor.process.descriptors import PacketSender, own
from hayata_supervisor.process.output import StreamName
from hayata_supervisor.process.reactor import Reactor
from hayata_supervisor.process.signals import SignalInbox
from hayata_supervisor.process.vigil import Vigil

CANCEL_GRACE_S = 1.0
"""How long a cancelled coroutine may take to end before its edge is killed."""

_CONGESTED_BYTES = 4 * 1024 * 1024
_LAST_RITES_S = 1.0


class _Head(msgspec.Struct, array_like=True):
    """The first fields of a frame: all that a node looks at before it forwards the frame as it is."""


class RunHead(_Head, tag="run"):
    """Of `hayata.messages.RunTask`."""

    execution_id: str
    timeout_s: float | None


class ReduceHead(_Head, tag="reduce"):
    """Of `hayata.messages.ReduceTask`."""

    execution_id: str
    timeout_s: float | None


class AckHead(_Head, tag="partial_ack"):
    """Of `hayata.messages.PartialAck`."""

    execution_id: str


class Patience(NamedTuple):
    """How long an edge may take to get ready, and may be stopped, in seconds."""

    start_timeout_s: float
    stopped_timeout_s: float


Head: TypeAlias = RunHead | ReduceHead | AckHead | KillTask | Ping | StopWorker | DescribeEdges

_PONG = encode(Pong())
_decode_head = msgspec.msgpack.Decoder(Head).decode


def run(job: EdgeJob, incarnation: str, patience: Patience, stream: socket.socket, packets: socket.socket) -> None:
    """Work until told to stop, or until the supervisor is gone."""
    worker_logging.install(job.agent.id, job.node.name)  # for the edges, which inherit it and share its pages
    reactor = Reactor(forks=True)
    inbox = SignalInbox([signal.SIGCHLD])
    for fd in (*reactor.descriptors, *inbox.descriptors):
        own(fd)
    worker = NodeWorker(reactor, job, incarnation, patience, stream, packets)
    reactor.watch_read(inbox.fd, lambda: worker.children_changed(inbox))
    gc.collect()
    gc.freeze()
    worker.run()


class NodeWorker:
    """See the module."""

    def __init__(
        self,
        reactor: Reactor,
        job: EdgeJob,
        incarnation: str,
        patience: Patience,
        stream: socket.socket,
        packets: socket.socket,
    ) -> None:
        self._reactor = reactor
        self._node = job.node
        self._incarnation = incarnation
        self._channel = Channel(reactor, stream, self, cap_bytes=job.cap_bytes)
        self._packets = PacketSender(reactor, packets)
        # Edges run user code, so they are not asked whether they live.
        self._vigil = Vigil(reactor, hang_s=math.inf, stopped_s=patience.stopped_timeout_s)
        setting = EdgeSetting(reactor, self, job, patience.start_timeout_s, self._vigil)
        self._fleet = Fleet(setting, incarnation, self._edge_started, self._fork_refused, self._grow)
        self._tasks: dict[str, Task] = {}
        self._queue: deque[Task] = deque()
        self._reductions: deque[Task] = deque()
        self._deadlines = Deadlines(reactor, self._tasks, self._overdue)
        self._limits = Limits(reactor, job.node, memory_limit(job.node), lambda: self._fleet.edges, self)
        self._stopping = ""
        self._oom_kills = cgroup.oom_kills()
        self._gone = False
        self.strays = 0

    def run(self) -> None:
        """Turn until, after a stop, the edges are gone and all is said."""
        self._channel.send(encode(WorkerReady("node", self._incarnation, os.getpid())))
        while not self._finished():
            self._reactor.turn(None)

    def _finished(self) -> bool:
        if self._gone:
            return True
        unsaid = self._channel.open and self._channel.queued_bytes > 0
        return self._fleet.stopping and not self._fleet.edges and not unsaid

    # from the supervisor

    def received(self, body: bytes) -> None:
        """One frame from the supervisor."""
        head = _decode_head(body)
        if isinstance(head, RunHead):
            self._accept(Task(head.execution_id, head.timeout_s, body))
        elif isinstance(head, ReduceHead):
            self._accept(Task(head.execution_id, head.timeout_s, body, reduces=True))
        elif isinstance(head, AckHead):
            task = self._tasks.get(head.execution_id)
            if task is not None and task.edge is not None:
                task.edge.channel.send(body)
        elif isinstance(head, KillTask):
            task = self._tasks.get(head.execution_id)
            if task is not None:
                self._cut_off(task, told_to_end(head.reason), head.reason)
        elif isinstance(head, Ping):
            self._channel.send(_PONG)
        elif isinstance(head, DescribeEdges):
            self._channel.send(encode(EdgesDescribed({edge.id: list(edge.tasks) for edge in self._fleet.edges})))
        else:
            self._stop(head.reason)

    def closed(self, reason: FrameTooLarge | OSError | None) -> None:
        """The supervisor is gone: so are we, with all that is below us."""
        self._fleet.kill_all("the supervisor is gone")
        self._reactor.call_later(_LAST_RITES_S, self._give_up)

    def _give_up(self) -> None:
        self._gone = True

    def _stop(self, reason: str) -> None:
        self._stopping = reason
        self._fleet.stop()
        for queue in (self._queue, self._reductions):
            while queue:
                self._interrupted(queue.popleft(), never_ran("shutdown"), started=False)

    # tasks

    def _accept(self, task: Task) -> None:
        self._tasks[task.execution_id] = task
        if self._fleet.stopping:
            self._interrupted(task, never_ran("shutdown"), started=False)
            return
        self._waits_in(task).append(task)
        self._hand_over()

    def _waits_in(self, task: Task) -> deque[Task]:
        return self._reductions if task.reduces else self._queue

    def _hand_over(self) -> None:
        """Give waiting tasks to free edges; let edges start for the others, and a reducer for each reduction."""
        while self._reductions:
            reducer = self._fleet.reducer()
            if reducer is None:
                break
            self._give(self._reductions.popleft(), reducer)
        while self._queue:
            edge = self._fleet.take()
            if edge is None:
                self._fleet.grow(len(self._queue))
                return
            self._give(self._queue.popleft(), edge)

    def _give(self, task: Task, edge: Edge) -> None:
        body = task.body
        assert body is not None
        task.edge = edge
        task.body = None
        edge.tasks[task.execution_id] = task
        if self._limits.active:
            self._limits.began(task, edge)
        edge.channel.send(body, task)
        if task.timeout_s is not None:
            self._deadlines.start(task, clock.monotonic())

    def _grow(self) -> None:
        self._hand_over()
        self._fleet.keep_one()

    def _overdue(self, task: Task) -> None:
        assert task.timeout_s is not None
        self._cut_off(task, timed_out(task.timeout_s), "execution_timeout")

    def _cut_off(self, task: Task, verdict: ErrorInfo, why: str) -> None:
        """Let a task end now; it is reported when it has."""
        if task.verdict is not None:
            return
        task.verdict = verdict
        task.due = None
        edge = task.edge
        if edge is None:
            self._waits_in(task).remove(task)
            self._interrupted(task, verdict, started=False)
        elif task.reduces or not self._node.is_async:
            edge.kill(why)
        else:
            edge.channel.send(encode(KillTask(task.execution_id, why)))
            self._reactor.call_later(CANCEL_GRACE_S, lambda: self._did_not_end(task, edge))

    def _did_not_end(self, task: Task, edge: Edge) -> None:
        if self._tasks.get(task.execution_id) is task:
            edge.kill("a cancelled coroutine did not end")

    def _interrupted(self, task: Task, error: ErrorInfo, *, started: bool = True) -> None:
        edge = "" if task.edge is None else task.edge.id
        del self._tasks[task.execution_id]
        self._channel.send(encode(TaskInterrupted(task.execution_id, edge, error, started)))

    # edges

    def children_changed(self, inbox: SignalInbox) -> None:
        """SIGCHLD has come: an edge has died, was stopped or goes on."""
        inbox.take()
        self._vigil.children_changed()

    def edge_stopped(self, edge: Edge, stopped: bool) -> None:
        """Somebody has stopped it, or it goes on. Meanwhile it gets no task, which would only wait in it."""
        self._channel.send(encode(EdgeStopped(edge.id, stopped)))
        if stopped:
            self._fleet.withdraw(edge)
        else:
            self._fleet.put_back(edge)
            self._hand_over()

    def is_known(self, pid: int) -> bool:
        """Whether ``pid`` is an edge that isn't reaped."""
        return self._fleet.is_known(pid)

    def _edge_started(self, edge: Edge) -> None:
        self._packets.send(encode(EdgeStarted(edge.id, edge.pid, edge.role)), [edge.pidfd])

    def _fork_refused(self, name: str, error: OSError) -> None:
        message = f"the system refused a fork: {error}"
        refused = error_for("node_unavailable", message, details={"errno": error.errno})
        self._channel.send(encode(EdgeStartFailed(name, error_info(refused))))

    def edge_ready(self, edge: Edge) -> None:
        """It can take tasks."""
        self._fleet.became_ready(edge)
        self._hand_over()

    def edge_retires(self, edge: Edge) -> None:
        """It takes no more tasks."""
        self._fleet.withdraw(edge)
        if not edge.tasks:
            edge.retire(edge.retiring)
        # Not at once: the result that follows would have to wait for the fork.
        self._reactor.call_later(0, self._grow)

    def edge_said(self, edge: Edge, head: TaskHead, body: bytes) -> None:
        """It sent a frame that is about a task: forward it, if the task is really this edge's."""
        task = edge.tasks.get(head.execution_id)
        if task is None or head.edge != edge.id:
            self._stray(edge, head)
            return
        if isinstance(head, PartialHead | SubstepHead):
            self._channel.send(body)
            return
        edge.output.boundary()
        if type(head) is StoppedHead:
            if task.verdict is None:
                self._stray(edge, head)
                return
            self._interrupted(task, task.verdict)
        else:
            del self._tasks[task.execution_id]
            self._channel.send(body)
        del edge.tasks[task.execution_id]
        self._fleet.give_back(edge)
        if self._queue:
            self._hand_over()

    def _stray(self, edge: Edge, head: TaskHead) -> None:
        self.strays += 1
        if self.strays == 1:
            told = f"hayata: dropped a frame of edge {edge.id} about {head.execution_id}, which it does not run"
            print(told, file=sys.stderr)

    def edge_over(self, edge: Edge, why: str, verdict: ErrorInfo) -> None:
        """It uses more than it may. Nobody can tell which of several coroutines does: all of them are cut off."""
        self._fleet.withdraw(edge)
        if not edge.tasks:
            edge.retire(why)
            self._reactor.call_later(0, self._grow)
            return
        for task in edge.tasks.values():
            task.due = None
            task.verdict = task.verdict or verdict
        edge.kill(why)

    def edge_printed(self, edge: Edge, stream: StreamName, lines: list[str], dropped: int, slowed_s: float) -> bool:
        """User code wrote lines; False while the supervisor does not read fast enough."""
        if self._channel.queued_bytes > _CONGESTED_BYTES:
            return False
        task = next(iter(edge.tasks), None) if self._fleet.slots == 1 or edge.role == "reducer" else None
        self._channel.send(encode(Output(edge.id, task, stream, lines, dropped, slowed_s)))
        return True

    def edge_reaped(self, edge: Edge) -> None:
        """It is dead and its pid may be another's from now on."""
        self._fleet.reaped(edge)

    def edge_ended(self, edge: Edge) -> None:
        """It is dead, reaped, buried and drained: now its tasks can be told of."""
        assert edge.exit is not None
        neighbour = any(task.verdict is not None for task in edge.tasks.values())
        out_of_memory = edge.exit.signal == signal.SIGKILL and not edge.killed and self._kernel_has_killed()
        reducer = edge.role == "reducer"
        error = edge_lost(Death(edge.exit, edge.killed, neighbour, self._stopping, out_of_memory, reducer))
        unsent = set(edge.channel.unsent())
        idle = edge.ready and not edge.tasks
        for task in list(edge.tasks.values()):
            self._interrupted(task, task.verdict or error, started=task not in unsent)
        edge.tasks.clear()
        self._channel.send(encode(EdgeEnded(edge.id, edge.pid, _reason(edge))))
        expected = edge.retiring or self._fleet.stopping
        if not expected and (not edge.ready or (idle and not edge.killed)):
            self._fleet.start_failed()
            self._channel.send(encode(EdgeStartFailed(edge.id, edge.start_error or error)))
        self._fleet.remove(edge)
        self._hand_over()

    def _kernel_has_killed(self) -> bool:
        """Whether the kernel has killed for memory since we last asked."""
        before, self._oom_kills = self._oom_kills, cgroup.oom_kills()
        return self._oom_kills > before


def memory_limit(node: NodeManifest) -> MemoryLimit | None:
    """The node's own limit, or what its container implies."""
    if node.memory_limit_bytes is not None:
        return MemoryLimit(node.memory_limit_bytes, of_container=False)
    group = cgroup.memory_group()
    if group is None:
        return None
    machine_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = container_default(group.limit_bytes, machine_bytes, group.used_bytes)
    return None if limit is None else MemoryLimit(limit, of_container=True)


def _reason(edge: Edge) -> str:
    """Why an edge ended, for people."""
    return edge.killed or edge.retiring or str(edge.exit)
