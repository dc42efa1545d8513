"""The edge worker of a coroutine node: many tasks at once on one asyncio loop.

Source: `hayata_supervisor.edge_worker` says what an edge is.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import selectors
import socket
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Generator
from functools import partial
from typing import Any

from hayata import calls
from hayata.error_info import error_from, exception_info
from hayata.messages import (
    EdgeRetires,
    KillTask,
    Partial,
    PartialAck,
    RunTask,
    StopWorker,
    Substep,
    SubstepDone,
    TaskFailed,
    TaskStopped,
    Value,
    WorkerFailed,
    WorkerReady,
    encode,
)
from hayata_supervisor import failpoints, worker_logging
from hayata_supervisor.edge_surroundings import Surroundings
from hayata_supervisor.edge_worker import (
    EdgeJob,
    Result,
    deadline_of,
    decode,
    encode_result,
    ids_of,
    not_active,
    spent,
    task_limit,
)
from hayata_supervisor.process import prologue
from hayata_supervisor.process.loop_stream import LoopStream, or_end


class OwnSelector(selectors.DefaultSelector):
    """Ends a forked child that comes back to the loop, where it would run all other tasks again."""

    def __init__(self) -> None:
        super().__init__()
        self._pid = os.getpid()

    def select(self, timeout: float | None = None) -> Any:
        """Wait, in the process that made this."""
        if os.getpid() != self._pid:
            os._exit(prologue.EXIT_OK)
        return super().select(timeout)


class OwnSteps(Coroutine[Any, Any, Result]):
    """A task's coroutine that ends a forked child before its next step.

    What the loop had ready when another task forked, it would run in both processes before it selects again.
    """

    __slots__ = ("_body", "_pid")

    def __init__(self, body: Coroutine[Any, Any, Result]) -> None:
        self._body = body
        self._pid = os.getpid()

    def send(self, value: Any) -> Any:
        """Go on, in the process that made this."""
        if os.getpid() != self._pid:
            os._exit(prologue.EXIT_OK)
        return self._body.send(value)

    def throw(self, *error: Any) -> Any:
        """The same, with an exception."""
        if os.getpid() != self._pid:
            os._exit(prologue.EXIT_OK)
        return self._body.throw(*error)

    def close(self) -> None:
        """Give up."""
        self._body.close()

    def __await__(self) -> Generator[Any, Any, Result]:
        return self._body.__await__()


def run(job: EdgeJob, edge: str, sock: socket.socket) -> None:
    """Run tasks until told to stop or the node is gone."""
    loop = asyncio.SelectorEventLoop(OwnSelector())
    asyncio.set_event_loop(loop)
    loop.run_until_complete(_run(job, edge, sock))


async def _run(job: EdgeJob, edge: str, sock: socket.socket) -> None:
    await AsyncEdge(job, edge, sock).run()


class AsyncEdge:
    """See the module."""

    def __init__(self, job: EdgeJob, edge: str, sock: socket.socket) -> None:
        self._job = job
        self._agent = job.agent
        self._node = job.node
        self._edge = edge
        self._stream = LoopStream(sock, job.cap_bytes, self._received, self._closed)
        self._limit = task_limit(job.node)
        self._taken = 0
        self._tasks: dict[str, asyncio.Task[Result]] = {}
        self._killed: set[str] = set()
        self._acks: dict[tuple[str, int], asyncio.Future[PartialAck]] = {}
        self._deps: Any = None
        self._surroundings: Surroundings | None = None
        self._retiring = False
        self._stop = asyncio.Event()

    async def run(self) -> None:
        """Enter the lifespan, run tasks, leave it."""
        try:
            leave = await self._enter()
        except BaseException as error:  # noqa: BLE001 - whatever the app's code raises is why we can't start
            traceback.print_exc()
            self._stream.send(encode(WorkerFailed(self._edge, exception_info("node_unavailable", error))))
            await self._stream.drain()
            return
        self._surroundings = Surroundings(threads_matter=False)
        prologue.flush_standard_streams()
        self._stream.send(encode(WorkerReady("edge", self._edge, os.getpid())))
        await self._stop.wait()
        while self._tasks:
            await asyncio.wait(self._tasks.values())
        await leave()
        await self._stream.drain()

    async def _enter(self) -> Callable[[], Awaitable[Any]]:
        """Enter the lifespan; return what leaves it."""
        lifespan: Any = calls.node_lifespan(self._agent, self._node.name)
        if lifespan is None:
            return _nothing
        self._deps = await lifespan.__aenter__()
        return partial(lifespan.__aexit__, None, None, None)

    # the stream

    def _closed(self) -> None:
        """The node is gone, and the kernel kills us for that; or somebody in here has closed the socket."""
        if not self._stop.is_set():
            os._exit(prologue.EXIT_ORPHANED)

    def _received(self, body: bytes) -> None:
        message = decode(body)
        kind = type(message)
        if kind is RunTask:
            self._begin(message)
        elif kind is PartialAck:
            waiting = self._acks.pop((message.execution_id, message.number), None)
            if waiting is not None and not waiting.done():
                waiting.set_result(message)
        elif kind is KillTask:
            task = self._tasks.get(message.execution_id)
            if task is not None:
                self._killed.add(message.execution_id)
                task.cancel(message.reason)
        elif kind is StopWorker:
            self._stop.set()

    # tasks

    def _begin(self, task: RunTask) -> None:
        self._taken += 1
        if self._taken >= self._limit:
            self._retire(spent(self._node, self._taken))
        partials = Partials(self, self._edge, task.execution_id)
        call = calls.TaskCall(
            self._agent,
            self._node.name,
            task,
            self._edge,
            self._deps,
            partials.send,
            deadline_of(task),
            partials.store,
        )
        context = contextvars.copy_context()
        context.run(worker_logging.current_task.set, ids_of(task))
        running = asyncio.get_running_loop().create_task(
            OwnSteps(self._body(task, call, partials)), name=task.execution_id, context=context
        )
        self._tasks[task.execution_id] = running
        running.add_done_callback(or_end(lambda running: self._ended(task, running)))

    async def _body(self, task: RunTask, call: calls.TaskCall, partials: Partials) -> Result:
        failpoints.hit("edge.before_note")
        self._job.notes.begins(task.cell, task.execution_id)
        failpoints.hit("edge.after_note")
        try:
            return await call.run_async()
        finally:
            await partials.close()

    def _ended(self, task: RunTask, running: asyncio.Task[Result]) -> None:
        failpoints.hit("edge.after_body")
        del self._tasks[task.execution_id]
        prologue.flush_standard_streams()
        if task.execution_id in self._killed:
            self._killed.discard(task.execution_id)
            if not running.cancelled():
                running.exception()  # looked at, so that asyncio does not complain that nobody has
            body = encode(TaskStopped(task.execution_id, self._edge))
        else:
            body = encode_result(self._result(task, running), self._edge, self._job.cap_bytes)
        idle = not self._tasks
        if idle:
            self._look_behind()
        self._stream.send(body)
        if idle and self._surroundings is not None:
            self._surroundings.restore()

    def _result(self, task: RunTask, running: asyncio.Task[Result]) -> Result:
        try:
            return running.result()
        except asyncio.CancelledError as error:  # of the body's own making: nobody told us to kill it
            info = exception_info("node_exception", error)
            return TaskFailed(task.execution_id, self._edge, info, retryable=False)

    def _look_behind(self) -> None:
        """With no task in hand, a child process can be told to be left over."""
        why = "" if self._surroundings is None else self._surroundings.left_behind()
        if why:
            self._retire(why)

    def _retire(self, why: str) -> None:
        if not self._retiring:
            self._retiring = True
            self._stream.send(encode(EdgeRetires(self._edge, why)))

    def ask(self, message: Partial | SubstepDone) -> asyncio.Future[PartialAck]:
        """Send one chunk or sub-step; the future is its acknowledgement.

        Raises:
            HayataError: ``execution_not_active``, ``frame_too_large``.
        """
        execution_id = message.execution_id
        if execution_id not in self._tasks or not self._stream.belonging.in_process:
            raise not_active(execution_id)
        self._stream.send(encode(message))
        waiting: asyncio.Future[PartialAck] = asyncio.get_running_loop().create_future()
        self._acks[execution_id, message.number] = waiting
        return waiting


async def _nothing() -> None:
    """Leave no lifespan."""


class Partials:
    """The chunks and sub-steps of one task."""

    def __init__(self, edge: AsyncEdge, name: str, execution_id: str) -> None:
        self._edge = edge
        self._name = name
        self._execution_id = execution_id
        self._number = 0
        self._open = True
        self._pending: set[asyncio.Future[PartialAck]] = set()

    async def send(self, chunk: Value) -> None:
        """Send one chunk and wait until the supervisor has numbered it.

        Raises:
            HayataError: ``execution_not_active`` when the task is over; what the supervisor says;
                ``frame_too_large``.
        """
        await self._ask(lambda number: Partial(self._execution_id, self._name, number, chunk))

    async def store(self, substep: Substep) -> None:
        """Send a sub-step's result and wait until it is durable. Errors as those of `send`."""
        await self._ask(lambda number: SubstepDone(self._execution_id, self._name, number, substep))

    async def _ask(self, message: Callable[[int], Partial | SubstepDone]) -> None:
        if not self._open:
            raise not_active(self._execution_id)
        self._number += 1
        waiting = self._edge.ask(message(self._number))
        self._pending.add(waiting)
        waiting.add_done_callback(self._pending.discard)
        answer = await waiting
        if answer.error is not None:
            raise error_from(answer.error)

    async def close(self) -> None:
        """The task is over. Chunks that are on their way are waited for: nobody answers them after the result."""
        self._open = False
        if self._pending:
            await asyncio.wait(self._pending)
