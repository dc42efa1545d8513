"""Plays the supervisor for the tests of the workers: a real subreaper with a real forkserver below it.

The test's own process adopts, kills, reaps and sweeps; `Supervisor.close` fails if any process is left.
"""

from __future__ import annotations

import ctypes
import os
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from hayata import values
from hayata.memfd import sealed_memfd
from hayata.messages import (
    EdgeEnded,
    EdgeStarted,
    ErrorInfo,
    Fork,
    Forked,
    FromAgent,
    FromForkserver,
    FromNode,
    KillTask,
    Launch,
    Manifest,
    Output,
    Partial,
    PartialAck,
    RunTask,
    TaskCompleted,
    TaskFailed,
    TaskInterrupted,
    WorkerFailed,
    WorkerReady,
    decoder,
    encode,
)
from hayata_supervisor.process.burial import Burial
from hayata_supervisor.process.channel import Channel
from hayata_supervisor.process.descriptors import receive_packet
from hayata_supervisor.process.output import WorkerOutput
from hayata_supervisor.process.pidfd import Exit, children_of, open_pidfd, reap, send_signal
from hayata_supervisor.process.reactor import Reactor
from hayata_supervisor.process.spawn import spawn_module
from hayata_supervisor.process.start_notes import StartNotes

ROOT = Path(__file__).resolve().parents[2]
APP = str(ROOT / "tests/support/worker_app.py")
PATIENCE_S = 20.0

_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37
_libc = ctypes.CDLL(None)
_decode_edge = decoder(EdgeStarted).decode

Found = TypeVar("Found")
Ended = TaskCompleted | TaskFailed | TaskInterrupted


def details(error: ErrorInfo) -> dict[str, Any]:
    """An error's details as plain values."""
    return values.decode(error.details)


def open_files(pid: int) -> list[str]:
    """What the descriptors of a process lead to."""
    found = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # when it is our own: the directory that was being listed
            found.append(os.readlink(f"/proc/{pid}/fd/{name}"))
    return found


class Subreaper:
    """Makes this process adopt orphans, for a while."""

    def __enter__(self) -> None:
        self._before = ctypes.c_int()
        _libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(self._before), 0, 0, 0)
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1), 0, 0, 0)

    def __exit__(self, *_: object) -> None:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(self._before.value), 0, 0, 0)


class Process:
    """A process that the harness knows: its stream, its output, its death."""

    def __init__(self, supervisor: Supervisor, kind: Any, stream: socket.socket, out: int, err: int) -> None:
        self.supervisor = supervisor
        self.pid = 0
        self.pidfd = -1
        self.exit: Exit | None = None
        self.messages: list[Any] = []
        self.lines: list[tuple[str, str]] = []
        self.times: dict[int, float] = {}
        self.eof_at: float | None = None
        self._decode = decoder(kind).decode
        self.channel = Channel(supervisor.reactor, stream, self, cap_bytes=supervisor.launch.frame_cap_bytes)
        self.output = WorkerOutput(supervisor.reactor, out, err, self._printed)

    def adopt(self, pid: int) -> None:
        self.pid = pid
        self.pidfd = open_pidfd(pid)
        self.supervisor.reactor.watch_read(self.pidfd, self._died)
        self.supervisor.processes[pid] = self

    def received(self, body: bytes) -> None:
        message = self._decode(body)
        self.times[len(self.messages)] = time.monotonic()
        self.messages.append(message)
        self.heard(message)

    def heard(self, message: Any) -> None:
        """For a node: acknowledge chunks."""

    def closed(self, reason: object) -> None:
        self.eof_at = time.monotonic()

    def _printed(self, stream: str, lines: list[str], dropped: int, slowed_s: float) -> bool:
        self.lines += [(stream, line) for line in lines]
        return True

    def _died(self) -> None:
        self.exit = reap(self.pidfd)
        self.supervisor.reactor.unwatch_read(self.pidfd)
        os.close(self.pidfd)
        del self.supervisor.processes[self.pid]

    def kill(self) -> None:
        send_signal(self.pidfd)

    def send(self, message: Any) -> None:
        self.channel.send(encode(message))

    def wait(self, found: Callable[[], Found | None], timeout_s: float = PATIENCE_S) -> Found:
        return self.supervisor.wait(found, timeout_s, lambda: f"{self.messages[-5:]} {self.lines[-20:]}")

    def wait_for(self, kind: type[Found], timeout_s: float = PATIENCE_S) -> Found:
        """The first message of a kind, which is taken away."""

        def find() -> Found | None:
            for message in self.messages:
                if type(message) is kind:
                    self.messages.remove(message)
                    return message
            return None

        return self.wait(find, timeout_s)

    def wait_dead(self, timeout_s: float = PATIENCE_S) -> Exit:
        return self.wait(lambda: self.exit, timeout_s)


class Node(Process):
    """A node worker, with the edges that it has told of."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.edges: dict[str, EdgeStarted] = {}
        self.edge_pidfds: dict[str, int] = {}
        self.ended_edges: dict[str, EdgeEnded] = {}
        self.ends: dict[str, Ended] = {}
        self.refuse_partials: ErrorInfo | None = None
        self.printed: list[Output] = []
        self.packets: socket.socket | None = None

    def listen(self, packets: socket.socket) -> None:
        packets.setblocking(False)
        self.packets = packets
        self.supervisor.reactor.watch_read(packets.fileno(), self._packet)

    def _packet(self) -> None:
        assert self.packets is not None
        packet = receive_packet(self.packets, 4)
        if packet is None:
            self.supervisor.reactor.unwatch_read(self.packets.fileno())
            return
        started = _decode_edge(packet.body)
        self.edges[started.edge] = started
        (self.edge_pidfds[started.edge],) = packet.fds

    def heard(self, message: Any) -> None:
        if isinstance(message, Partial):
            self.send(PartialAck(message.execution_id, message.number, self.refuse_partials))
        elif isinstance(message, Ended):
            assert message.execution_id not in self.ends, "a task ended twice"
            self.ends[message.execution_id] = message
        elif isinstance(message, Output):
            self.printed.append(message)
        elif isinstance(message, EdgeEnded):
            self.ended_edges[message.edge] = message

    def run(self, execution_id: str, value: Any = None, **fields: Any) -> str:
        """Send a task."""
        task: dict[str, Any] = {
            "execution_id": execution_id,
            "timeout_s": None,
            "invocation_id": f"of-{execution_id}",
            "attempt": 1,
            "idempotency_key": f"key-{execution_id}",
            "session": None,
            "stream": True,
            "state": {},
            "input": msgspec.Raw(values.encode(value)),
        }
        self.send(RunTask(**{**task, **fields}))
        return execution_id

    def end_of(self, execution_id: str, timeout_s: float = PATIENCE_S) -> Ended:
        return self.wait(lambda: self.ends.get(execution_id), timeout_s)

    def call(self, execution_id: str, value: Any = None, timeout_s: float = PATIENCE_S, **fields: Any) -> Any:
        """Run a task that completes; return its update as plain values."""
        ended = self.end_of(self.run(execution_id, value, **fields), timeout_s)
        assert isinstance(ended, TaskCompleted), ended
        return values.decode_mapping(ended.update)

    def kill_task(self, execution_id: str, reason: str = "unwanted") -> None:
        self.send(KillTask(execution_id, reason))

    def edge(self) -> EdgeStarted:
        """The one edge that lives, when it is known."""

        def one() -> EdgeStarted | None:
            living = [edge for name, edge in self.edges.items() if name not in self.ended_edges]
            return living[0] if len(living) == 1 else None

        return self.wait(one)

    def text(self, execution_id: str | None = None, stream: str = "stdout") -> list[str]:
        """The lines that edges printed."""
        return [
            line
            for output in self.printed
            if output.stream == stream and execution_id in (None, output.execution_id)
            for line in output.lines
        ]


class Supervisor:
    """See the module.

    Args:
        app: Reference of the app.
        launch: Fields of the `Launch` to set.
    """

    def __init__(self, app: str = APP, *, value: bytes | None = None, **launch: Any) -> None:
        self._subreaper = Subreaper()
        self._subreaper.__enter__()
        self.strangers = set(children_of(os.getpid()))
        self.reactor = Reactor()
        self.processes: dict[int, Process] = {}
        self.everyone: list[Process] = []
        self._requests = 0
        value_fd = None if value is None else sealed_memfd("value", value)
        self._data_dir = tempfile.TemporaryDirectory(prefix="hayata-workers-")
        StartNotes(Path(self._data_dir.name))
        self.launch = Launch(
            apps=[app],
            data_dir=self._data_dir.name,
            socket="/nonexistent",
            sys_path=[str(ROOT), str(ROOT / "supervisor")],
            cwd=str(ROOT),
            value_fd=value_fd,
            **launch,
        )
        self._launch_fd = sealed_memfd("launch", encode(self.launch))
        self.forkserver = self._spawn_forkserver(value_fd)

    def _spawn_forkserver(self, value_fd: int | None) -> Process:
        forkserver, theirs = self._process(Process, FromForkserver)
        stream, fds, out, err = theirs
        passed = [stream.fileno(), fds.fileno(), self._launch_fd]
        arguments = ["--stream-fd", stream.fileno(), "--fds-fd", fds.fileno(), "--launch-fd", self._launch_fd]
        arguments += ["--app-index", 0 if value_fd is None else -1, "--incarnation", "f1"]
        pid = spawn_module(
            "hayata_supervisor.forkserver",
            [str(argument) for argument in arguments],
            pass_fds=passed if value_fd is None else [*passed, value_fd],
            environ={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/supervisor", "PYTHONDONTWRITEBYTECODE": "1"},
            move_fds={1: out, 2: err},
        )
        forkserver.adopt(pid)
        self._close(theirs)
        if value_fd is not None:
            os.close(value_fd)
        return forkserver

    def _process(self, kind: type[Any], decodes: Any) -> tuple[Any, list[Any]]:
        stream, their_stream = socket.socketpair()
        fds, their_fds = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        (out, their_out), (err, their_err) = os.pipe(), os.pipe()
        process = kind(self, decodes, stream, out, err)
        process.fds_socket = fds
        self.everyone.append(process)
        return process, [their_stream, their_fds, their_out, their_err]

    @staticmethod
    def _close(theirs: list[Any]) -> None:
        for thing in theirs:
            os.close(thing) if isinstance(thing, int) else thing.close()

    def start(self) -> Manifest:
        """Wait until the app is imported."""

        def loaded() -> Manifest | None:
            failed = [message for message in self.forkserver.messages if isinstance(message, WorkerFailed)]
            assert not failed, failed[0].error
            found = [message for message in self.forkserver.messages if isinstance(message, Manifest)]
            return found[0] if found else None

        return self.forkserver.wait(loaded)

    def fork(self, agent: str, node: str | None) -> Any:
        """Have a worker forked; return it when it is ready."""
        self._requests += 1
        worker, theirs = self._process(Node if node else Process, FromNode if node else FromAgent)
        numbers = [thing if isinstance(thing, int) else thing.fileno() for thing in theirs]
        body = encode(Fork(self._requests, agent, node, f"w{self._requests}"))
        socket.send_fds(self.forkserver.fds_socket, [body], numbers)
        self._close(theirs)
        if node:
            worker.listen(worker.fds_socket)
        answer = self.forkserver.wait_for(Forked)
        assert answer.request == self._requests
        worker.adopt(answer.pid)
        ready = worker.wait_for(WorkerReady)
        assert ready.pid == answer.pid
        return worker

    def clear(self, cell: int) -> None:
        """Do what a supervisor does before it marks a task."""
        StartNotes(Path(self.launch.data_dir)).clear(cell)

    def began(self, cell: int, execution_id: str) -> bool:
        """Whether the start notes say that a body has begun."""
        return StartNotes(Path(self.launch.data_dir)).began(cell, execution_id)

    def node(self, name: str, agent: str = "workshop") -> Node:
        return self.fork(agent, name)

    def wait(
        self,
        found: Callable[[], Found | None],
        timeout_s: float = PATIENCE_S,
        seen: Callable[[], str] = lambda: "",
    ) -> Found:
        """Turn the loop until ``found`` finds something."""
        due = time.monotonic() + timeout_s
        while True:
            value = found()
            if value is not None and value is not False:
                return value
            left = due - time.monotonic()
            assert left > 0, f"waited {timeout_s} s; saw {seen()}"
            self.reactor.turn(min(left, 0.5))

    def sweep(self) -> int:
        """Bury orphans as a supervisor does; return how many there were."""
        over: list[bool] = []
        burial = Burial(
            self.reactor,
            lambda pid: pid in self.processes or pid in self.strangers,
            lambda: over.append(True),
        )
        burial.start()
        self.wait(lambda: over or None)
        return burial.buried

    def release(self) -> None:
        """End all workers but the forkserver, and make sure that nothing else is left."""
        workers = [process for process in self.everyone if process is not self.forkserver]
        for process in workers:
            if process.exit is None and process.pid:
                process.kill()
        self.wait(lambda: all(process.exit is not None or not process.pid for process in workers))
        self.sweep()
        for process in workers:
            self._forget(process)
        assert set(children_of(os.getpid())) <= self.strangers | {self.forkserver.pid}

    def _forget(self, process: Any) -> None:
        self.everyone.remove(process)
        process.channel.close()
        process.output.end()
        self.reactor.unwatch_read(process.fds_socket.fileno())
        process.fds_socket.close()
        for pidfd in getattr(process, "edge_pidfds", {}).values():
            os.close(pidfd)

    def close(self) -> None:
        """End everything, and make sure that nothing is left."""
        self.release()
        if self.forkserver.exit is None:
            self.forkserver.kill()
            self.forkserver.wait_dead()
        self.sweep()
        self._forget(self.forkserver)
        self.reactor.close()
        os.close(self._launch_fd)
        self._data_dir.cleanup()
        self._subreaper.__exit__()
        assert set(children_of(os.getpid())) <= self.strangers
