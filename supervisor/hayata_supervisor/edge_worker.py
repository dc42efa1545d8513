"""The edge worker: runs node functions, one at a time. Coroutine nodes have `hayata_supervisor.edge_async`.

It is the process that may die. Between two tasks it is made as it was; where that can't be done it asks its
node for a successor, before it sends the result, so that no further task is on its way to it.
"""

from __future__ import annotations

import contextvars
import os
import resource
import socket
import threading
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from hayata import calls
from hayata.agent import Agent
from hayata.error_info import error_from, exception_info
from hayata.errors import error_for
from hayata.messages import (
    EdgeRetires,
    NodeManifest,
    Partial,
    PartialAck,
    RunTask,
    StopWorker,
    Substep,
    SubstepDone,
    TaskCompleted,
    TaskFailed,
    TaskOrder,
    ToEdge,
    Value,
    WorkerFailed,
    WorkerReady,
    decoder,
    encode,
)
from hayata_supervisor import failpoints, worker_logging
from hayata_supervisor.caps import over_cap
from hayata_supervisor.core.limits import tasks_of_edge
from hayata_supervisor.edge_surroundings import Surroundings
from hayata_supervisor.process import clock, prologue
from hayata_supervisor.process.blocking import BlockingStream
from hayata_supervisor.process.start_notes import NoteWriter

Result: TypeAlias = calls.Outcome

decode = decoder(ToEdge).decode


class EdgeJob(NamedTuple):
    """What all edges of a node have in common; the node has it from the forkserver.

    Attributes:
        agent: The agent, with its functions.
        node: Which of its nodes.
        cap_bytes: Largest frame.
        notes: Where each body's beginning is noted.
    """

    agent: Agent
    node: NodeManifest
    cap_bytes: int
    notes: NoteWriter


def run(job: EdgeJob, edge: str, sock: socket.socket) -> None:
    """Run tasks until told to stop or the node is gone."""
    limit_resources(job)
    if job.node.is_async:
        from hayata_supervisor import edge_async  # loaded by the forkserver, if the app has coroutine nodes

        edge_async.run(job, edge, sock)
    else:
        SyncEdge(job, edge, BlockingStream(sock, job.cap_bytes)).run()


def limit_resources(job: EdgeJob) -> None:
    """Have the kernel refuse more than the node may have."""
    node = job.agent.nodes[job.node.name]
    _limit(resource.RLIMIT_AS, node.address_space_limit)
    _limit(resource.RLIMIT_NOFILE, node.open_files)


def _limit(kind: int, most: int | None) -> None:
    """Have the kernel refuse more: the body itself gets the error, and so do the programs that it starts."""
    if most is None:
        return
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)  # what is forbidden to us can't be allowed to them
    resource.setrlimit(kind, (most, most))


def task_limit(node: NodeManifest) -> int:
    """How many tasks one edge runs."""
    if node.fresh:
        return 1
    return tasks_of_edge(node.max_tasks, int.from_bytes(os.urandom(4), "big"))


def spent(node: NodeManifest, done: int) -> str:
    """Why an edge that has reached its limit ends."""
    return "a fresh process for each task" if node.fresh else f"has run {done} tasks"


def ids_of(task: TaskOrder) -> dict[str, Any]:
    """What a log record of the task's code is given."""
    return {"invocation_id": task.invocation_id, "execution_id": task.execution_id, "attempt": task.attempt}


def deadline_of(task: TaskOrder) -> float | None:
    """The deadline in monotonic seconds, as the task's code sees it."""
    return None if task.timeout_s is None else clock.monotonic() + task.timeout_s


def encode_result(result: Result, edge: str, cap_bytes: int) -> bytes:
    """Encode a result; one over the cap becomes the failure that says so."""
    body = encode(result)
    error = over_cap(body, cap_bytes)
    return body if error is None else encode(TaskFailed(result.execution_id, edge, error, False))


def not_active(execution_id: str) -> Exception:
    """The error for a chunk of a task that is over."""
    return error_for(
        "execution_not_active",
        f"execution {execution_id} has ended; its chunks are refused",
        hint="finish, join or cancel whatever streams before the node function returns",
    )


class SyncEdge:
    """See the module."""

    def __init__(self, job: EdgeJob, edge: str, stream: BlockingStream) -> None:
        self._job = job
        self._agent = job.agent
        self._node = job.node
        self._edge = edge
        self._stream = stream
        self._limit = task_limit(job.node)
        self._stopping = False

    def run(self) -> None:
        """Enter the lifespan, run tasks, leave it."""
        try:
            lifespan: Any = calls.node_lifespan(self._agent, self._node.name)
            deps = None if lifespan is None else lifespan.__enter__()
        except BaseException as error:  # noqa: BLE001 - whatever the app's code raises is why we can't start
            traceback.print_exc()
            self._stream.send(encode(WorkerFailed(self._edge, exception_info("node_unavailable", error))))
            return
        prologue.flush_standard_streams()
        self._stream.send(encode(WorkerReady("edge", self._edge, os.getpid())))
        self._serve(deps)
        if lifespan is not None:
            lifespan.__exit__(None, None, None)

    def _serve(self, deps: Any) -> None:
        surroundings = Surroundings(threads_matter=True)
        done = 0
        while not self._stopping:
            task = self._next()
            if task is None:
                return
            result = self._run(task, deps)
            done += 1
            why = spent(self._node, done) if done >= self._limit else surroundings.left_behind()
            prologue.flush_standard_streams()
            body = encode_result(result, self._edge, self._stream.cap_bytes)
            self._stream.send(body, before=encode(EdgeRetires(self._edge, why)) if why else None)
            if not why:
                surroundings.restore()

    def _next(self) -> RunTask | None:
        while (body := self._stream.receive()) is not None:
            message = decode(body)
            if type(message) is RunTask:
                return message
            if type(message) is StopWorker:
                return None
            # An acknowledgement that nobody waits for: its task was over. A sync edge is killed, not told to.
        return None

    def _run(self, task: RunTask, deps: Any) -> Result:
        """Run the body in a context of its own: what it sets in context variables ends with it."""
        partials = Partials(self, self._stream, self._edge, task.execution_id)
        call = calls.TaskCall(
            self._agent,
            self._node.name,
            task,
            self._edge,
            deps,
            partials.send,
            deadline_of(task),
            partials.store,
        )
        result = contextvars.copy_context().run(self._run_in_context, task, call)
        if not self._stream.belonging.in_process:
            # A child that the body has forked falls through to here. Its result is nobody's.
            prologue.flush_standard_streams()
            os._exit(prologue.EXIT_OK if isinstance(result, TaskCompleted) else prologue.EXIT_FAILED)
        partials.close()
        failpoints.hit("edge.after_body")
        return result

    def _run_in_context(self, task: RunTask, call: calls.TaskCall) -> Result:
        worker_logging.current_task.set(ids_of(task))
        failpoints.hit("edge.before_note")
        self._job.notes.begins(task.cell, task.execution_id)
        failpoints.hit("edge.after_note")
        return call.run()

    def acknowledgement(self, number: int) -> PartialAck:
        """Wait for one answer of the supervisor. Called while the body runs, so that nobody else reads."""
        while (body := self._stream.receive()) is not None:
            message = decode(body)
            if type(message) is PartialAck and message.number == number:
                return message
            if type(message) is StopWorker:
                self._stopping = True
        os._exit(prologue.EXIT_ORPHANED)


class Partials:
    """The chunks and sub-steps of one task, from any of its threads; each waits for its answer."""

    def __init__(self, edge: SyncEdge, stream: BlockingStream, name: str, execution_id: str) -> None:
        self._edge = edge
        self._stream = stream
        self._name = name
        self._execution_id = execution_id
        self._lock = threading.Lock()
        self._number = 0
        self._open = True

    def send(self, chunk: Value) -> None:
        """Send one chunk, and return when the supervisor has numbered it.

        Raises:
            HayataError: ``execution_not_active`` when the task is over or this is a forked child; what the
                supervisor says; ``frame_too_large``.
        """
        self._ask(lambda number: Partial(self._execution_id, self._name, number, chunk))

    def store(self, substep: Substep) -> None:
        """Send a sub-step's result, and return when it is durable. Errors as those of `send`."""
        self._ask(lambda number: SubstepDone(self._execution_id, self._name, number, substep))

    def _ask(self, message: Callable[[int], Partial | SubstepDone]) -> None:
        if not self._stream.belonging.in_process:
            raise not_active(self._execution_id)
        with self._lock:
            if not self._open:
                raise not_active(self._execution_id)
            self._number += 1
            self._stream.send(encode(message(self._number)))
            answer = self._edge.acknowledgement(self._number)
        if answer.error is not None:
            raise error_from(answer.error)

    def close(self) -> None:
        """The task is over. A chunk that is on its way is waited for: the result comes after it."""
        with self._lock:
            self._open = False
