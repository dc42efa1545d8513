"""Everything in one process and one thread: for debuggers, coverage, tests, and systems other than Linux.

The same coordinators, store and server; only the processes are missing. User code runs when somebody waits for an
answer, in his thread, one piece at a time, so a breakpoint stops where one expects it. What isolation gave is gone: a
body that crashes takes the program along (the next start finds its task uncertain, as always), and a body can't be
killed, so a deadline is noticed when it returns.
"""

from __future__ import annotations

import asyncio
import math
import os
import select
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from pathlib import Path
from typing import Any

import hayata
from hayata import calls, reductions, updates
from hayata.agent import Agent
from hayata.client.transport import SocketTransport
from hayata.error_info import error_from, exception_info
from hayata.errors import error_for
from hayata.framing import FrameTooLarge
from hayata.manifest import agent_manifest
from hayata.messages import (
    CheckUpdate,
    ErrorInfo,
    Evaluate,
    Output,
    Partial,
    PartialAck,
    PolicyFailed,
    ProcessInfo,
    ReduceTask,
    ReloadReport,
    Substep,
    SubstepDone,
    TaskFailed,
    TaskInterrupted,
    TaskOrder,
    UpdateChecked,
    Value,
    encode,
)
from hayata_supervisor.admin import Admin
from hayata_supervisor.caps import over_cap
from hayata_supervisor.engine import Engine
from hayata_supervisor.maintenance_runs import MaintenanceRuns
from hayata_supervisor.process import clock
from hayata_supervisor.process.background import Foreground
from hayata_supervisor.process.reactor import Reactor
from hayata_supervisor.process.start_notes import NoteWriter, StartNotes
from hayata_supervisor.requests import Requests
from hayata_supervisor.server import Server
from hayata_supervisor.statistics import Statistics
from hayata_supervisor.store.directory import DATA, STORE
from hayata_supervisor.store.lmdb_store import open_store
from hayata_supervisor.tree.port import failure

EDGE = "inline"


class InlineServer:
    """See the module and `hayata.embedded.InlineServer`."""

    def __init__(
        self, agents: Sequence[Agent], data_dir: str, *, frame_cap_bytes: int, retention_s: float | None
    ) -> None:
        self._cap = frame_cap_bytes
        self._reactor = Reactor()
        background = Foreground(self._reactor)
        log = _WarningsOnly()
        store = open_store(Path(data_dir))
        self._engine = Engine(
            self._reactor,
            store,
            log,
            writer=background,
            reader=background,
            notes=StartNotes(Path(data_dir)),
            app_events=lambda index, reference, error: None,
            broken=_raise,
        )
        self._engine.load(store.load_open())
        self._workers = InlineWorkers(
            {agent.id: agent for agent in agents},
            self._engine,
            self._reactor,
            NoteWriter(Path(data_dir)),
            frame_cap_bytes,
        )
        self._engine.workers = self._workers
        self._admin = Admin(self._engine, MaintenanceRuns(self._reactor, data_dir, os.environ), retention_s)
        self._admin.start()
        requests = Requests(
            self._engine,
            tree=lambda described: described(_describe()),
            stats=Statistics(self._engine, store_file=Path(data_dir, STORE, DATA)).values,
            stop=lambda drain_s: None,
            reload=_reload,
            admin=self._admin,
            page_bytes=frame_cap_bytes // 2,
        )
        self._server = Server(
            self._reactor,
            None,
            requests,
            log,
            version=hayata.__version__,
            gone=lambda connection: self._engine.hub.gone(lambda sink: getattr(sink, "connection", None) is connection),
            cap_bytes=frame_cap_bytes,
        )
        self._engine.app_loaded(0, EDGE, [agent_manifest(agent) for agent in agents])
        requests.apps_ready()
        self._closed = False

    def connect(self) -> SocketTransport:
        """Open a connection: a socket pair, so that everything but the processes is what a daemon's clients use."""
        ours, theirs = socket.socketpair()
        self._server.adopt(ours)
        return _Pumping(theirs, self._cap, self.pump)

    def pump(self, timeout_s: float) -> None:
        """Run one piece of user code if there is one; else wait for something to do."""
        if not self._workers.run_one():
            self._reactor.turn(None if timeout_s == math.inf else max(0.0, timeout_s))
        else:
            self._reactor.turn(0.0)

    def close(self, drain_s: float, /) -> None:
        """Let what was handed out run, and close the store."""
        if self._closed:
            return
        self._closed = True
        self._engine.drain()
        deadline = clock.monotonic() + drain_s
        while not self._engine.idle and clock.monotonic() < deadline:
            self.pump(deadline - clock.monotonic())
        self._workers.close()
        self._server.close()
        self._admin.close()
        self._engine.close()
        self._reactor.close()


class _Pumping(SocketTransport):
    """A connection whose waiting makes the runtime work."""

    def __init__(self, sock: socket.socket, cap_bytes: int, pump: Callable[[float], None]) -> None:
        super().__init__(sock, cap_bytes)
        self._pump = pump

    def _wait(self, event: int, timeout_s: float) -> bool:
        deadline = clock.monotonic() + timeout_s
        poll = select.poll()
        poll.register(self._sock, event)
        while not poll.poll(0):
            left = deadline - clock.monotonic()
            if left <= 0:
                return False
            self._pump(left)
        return True


class InlineWorkers:
    """The engine's `Workers`, called in place. What would be too large for a message to a process is so here, too."""

    def __init__(
        self, agents: dict[str, Agent], engine: Engine, reactor: Reactor, notes: NoteWriter, cap_bytes: int
    ) -> None:
        self._cap = cap_bytes
        self._notes = notes
        self._agents = agents
        self._engine = engine
        self._reactor = reactor
        self._work: deque[Callable[[], None]] = deque()
        self._tasks: dict[str, tuple[str, str]] = {}
        self._acks: dict[tuple[str, int], PartialAck] = {}
        self._deps: dict[tuple[str, str], tuple[Any, Any]] = {}

    def run_one(self) -> bool:
        """Run what came first; False when there is nothing."""
        if not self._work:
            return False
        self._work.popleft()()
        return True

    def evaluate(self, agent_id: str, request: Evaluate) -> None:
        """Ask the policy."""
        self.check_fits(request)
        self._later(lambda: self._evaluate(agent_id, request))

    def _evaluate(self, agent_id: str, request: Evaluate) -> None:
        answer = calls.evaluate(self._agents[agent_id], request)
        error = over_cap(encode(answer), self._cap)
        self._engine.agent_answered(agent_id, answer if error is None else PolicyFailed(request.evaluation, error))

    def check_update(self, agent_id: str, request: CheckUpdate) -> None:
        """Ask whether an update fits."""
        self._later(lambda: self._check_update(agent_id, request))

    def _check_update(self, agent_id: str, request: CheckUpdate) -> None:
        answer = updates.check_update(self._agents[agent_id], request)
        error = over_cap(encode(answer), self._cap)
        self._engine.agent_answered(agent_id, answer if error is None else UpdateChecked(request.check, None, error))

    def dispatch(self, agent_id: str, node: str, task: TaskOrder) -> None:
        """Run a task."""
        self.check_fits(task)
        self._tasks[task.execution_id] = (agent_id, node)
        self._later(lambda: self._run(agent_id, node, task))

    def check_fits(self, message: Evaluate | TaskOrder | Partial | SubstepDone) -> None:
        """Refuse what would be over the cap.

        Raises:
            FrameTooLarge: It is.
        """
        size = len(encode(message))
        if size > self._cap:
            raise FrameTooLarge(size, self._cap)

    def _later(self, work: Callable[[], None]) -> None:
        self._work.append(work)
        self._reactor.call_soon(lambda: None)  # whoever waits in the loop looks at the work again

    def kill(self, agent_id: str, node: str, execution_id: str, reason: str) -> None:
        """End a task: it waits, for none runs while anything else does."""
        if self._tasks.pop(execution_id, None) is not None:
            error = failure("cancelled", f"it was not wanted any more: {reason}")
            report = TaskInterrupted(execution_id, EDGE, error, started=False)
            self._later(lambda: self._engine.task_reported(agent_id, node, report))

    def ack_partial(self, agent_id: str, node: str, ack: PartialAck) -> None:
        """Answer a chunk."""
        self._acks[ack.execution_id, ack.number] = ack

    def load_app(self, reference: str) -> int:
        """Refused: what runs inline was given at the start."""
        raise error_for("invalid_options", "an inline runtime runs the agents that it was started with")

    def stop_agent(self, agent_id: str, stopped: Callable[[], None]) -> None:
        """Nothing to end."""
        stopped()

    def tree(self) -> list[ProcessInfo]:
        """No processes."""
        return []

    def _run(self, agent_id: str, node: str, task: TaskOrder) -> None:
        if self._tasks.pop(task.execution_id, None) is None:
            return
        agent = self._agents[agent_id]
        deadline = None if task.timeout_s is None else clock.monotonic() + task.timeout_s
        if isinstance(task, ReduceTask):
            self._notes.begins(task.cell, task.execution_id)
            reduced = reductions.reduce(agent, node, task, EDGE, deadline)
            self._report(agent_id, node, task, deadline, reduced)
            return
        try:
            deps = self._enter(agent, node)
        except BaseException as error:  # noqa: BLE001 - a lifespan is user code; a worker process would fail to start
            info = exception_info("node_unavailable", error)
            self._engine.task_reported(agent_id, node, TaskInterrupted(task.execution_id, EDGE, info, started=False))
            return
        deadline = None if task.timeout_s is None else clock.monotonic() + task.timeout_s
        partials = _Partials(self, agent_id, node, task.execution_id)
        is_async = agent.nodes[node].is_async
        send = partials.send_async if is_async else partials.send
        store = partials.store_async if is_async else partials.store
        call = calls.TaskCall(agent, node, task, EDGE, deps, send, deadline, store)
        self._notes.begins(task.cell, task.execution_id)
        self._report(agent_id, node, task, deadline, _await(call.run_async()) if is_async else call.run())

    def _report(self, agent_id: str, node: str, task: TaskOrder, deadline: float | None, report: calls.Outcome) -> None:
        too_large = over_cap(encode(report), self._cap)
        if too_large is not None:
            report = TaskFailed(task.execution_id, EDGE, too_large, False)
        if deadline is not None and clock.monotonic() > deadline:
            late = failure(
                "execution_timeout",
                f"it took longer than {task.timeout_s} s",
                interrupted=True,
                reason="execution_timeout",
                timeout_s=task.timeout_s,
            )
            self._engine.task_reported(agent_id, node, TaskInterrupted(task.execution_id, EDGE, late))
        else:
            self._engine.task_reported(agent_id, node, report)

    def acknowledged(self, execution_id: str, number: int) -> PartialAck:
        """Wait for the answer to a chunk or sub-step; nothing else of users runs meanwhile."""
        while (ack := self._acks.pop((execution_id, number), None)) is None:
            self._reactor.turn(None)
        return ack

    def report_partial(self, agent_id: str, node: str, partial: Partial | SubstepDone) -> None:
        """Hand a chunk or sub-step over."""
        self._engine.task_reported(agent_id, node, partial)

    def _enter(self, agent: Agent, node: str) -> Any:
        key = (agent.id, node)
        if key not in self._deps:
            lifespan = calls.node_lifespan(agent, node)
            if lifespan is None:
                self._deps[key] = (None, None)
            elif isinstance(lifespan, AbstractContextManager):
                self._deps[key] = (lifespan, lifespan.__enter__())
            else:
                self._deps[key] = (lifespan, _await(lifespan.__aenter__()))
        return self._deps[key][1]

    def close(self) -> None:
        """Leave the lifespans."""
        for lifespan, _ in self._deps.values():
            if isinstance(lifespan, AbstractContextManager):
                lifespan.__exit__(None, None, None)
            elif isinstance(lifespan, AbstractAsyncContextManager):
                _await(lifespan.__aexit__(None, None, None))
        self._deps.clear()


class _Partials:
    """The chunks and sub-steps of one task."""

    def __init__(self, workers: InlineWorkers, agent_id: str, node: str, execution_id: str) -> None:
        self._workers = workers
        self._agent_id = agent_id
        self._node = node
        self._execution_id = execution_id
        self._number = 0

    def send(self, chunk: Value) -> None:
        """Send one and wait for its number."""
        self._ask(Partial(self._execution_id, EDGE, self._next(), chunk))

    def store(self, substep: Substep) -> None:
        """Send a sub-step's result and wait until it is durable."""
        self._ask(SubstepDone(self._execution_id, EDGE, self._next(), substep))

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _ask(self, message: Partial | SubstepDone) -> None:
        self._workers.check_fits(message)
        self._workers.report_partial(self._agent_id, self._node, message)
        ack = self._workers.acknowledged(self._execution_id, self._number)
        if ack.error is not None:
            raise error_from(ack.error)

    async def send_async(self, chunk: Value) -> None:
        """Send one and wait for its number."""
        self.send(chunk)

    async def store_async(self, substep: Substep) -> None:
        """Send a sub-step's result and wait until it is durable."""
        self.store(substep)


class _WarningsOnly:
    """A log for a program's own terminal: only what it should know."""

    def output(self, output: Output, *, agent: str, node: str) -> None:
        """Nothing: user code writes to the terminal itself."""

    def info(self, event: str, **fields: Any) -> None:
        """Nothing."""

    def warning(self, event: str, **fields: Any) -> None:
        """Show it."""
        print(f"hayata: {event} {fields}", file=sys.stderr)

    error = warning


def _await(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine to its end; beside a running loop (a notebook's) it needs a thread of its own."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    outcome: list[Any] = []
    thread = threading.Thread(target=lambda: outcome.append(asyncio.run(coroutine)))
    thread.start()
    thread.join()
    return outcome[0]


def _reload(answered: Callable[[ReloadReport | ErrorInfo], None]) -> None:
    """The agents are the program's own objects: there is nothing to load."""
    hint = "start the program again, or run it without inline=True"
    answered(failure("agent_start_failed", "inline agents can't be loaded anew", hint=hint))


def _describe() -> ProcessInfo:
    return ProcessInfo(role="supervisor", name="inline", pid=os.getpid(), status="serving")


def _raise(error: BaseException) -> None:
    raise error
