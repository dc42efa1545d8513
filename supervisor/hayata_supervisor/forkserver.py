"""The forkserver: a clean Python that imports one app once and forks its workers from then on.

The supervisor has threads, and a fork beside a thread that holds a lock deadlocks the child; so it execs
this, which has none. A fork of what is imported and frozen here takes two milliseconds and two megabytes.

Workers are forked twice: the process in the middle exits, so that the supervisor, which is a subreaper,
adopts them and they survive this process.

Source: multiprocessing's forkserver; gc.freeze (Instagram).
"""

from __future__ import annotations

import argparse
import gc
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import msgspec

from hayata.error_info import error_info, exception_info
from hayata.errors import DefinitionError, HayataError, error_for
from hayata.framing import FrameTooLarge, frame
from hayata.loading import load_app, load_value
from hayata.manifest import agent_manifest
from hayata.memfd import read_memfd
from hayata.messages import (
    AgentManifest,
    ErrorInfo,
    Fork,
    Forked,
    ForkFailed,
    Launch,
    Manifest,
    Pong,
    ToForkserver,
    WorkerFailed,
    WorkerReady,
    decoder,
    encode,
)
from hayata_supervisor import agent_worker, failpoints, node_worker
from hayata_supervisor.edge_worker import EdgeJob
from hayata_supervisor.fresh_code import distrust_young_bytecode, fingerprint
from hayata_supervisor.process import prctl, prologue
from hayata_supervisor.process.channel import Channel
from hayata_supervisor.process.descriptors import close_own, own, receive_packet
from hayata_supervisor.process.prologue import fork, run_worker
from hayata_supervisor.process.reactor import Reactor
from hayata_supervisor.process.start_notes import NoteWriter

if TYPE_CHECKING:
    from hayata.agent import Agent

EXIT_IMPORT_FAILED = 2
_FORK_FDS = 4
_PID = struct.Struct("i")

_decode_fork = decoder(Fork).decode
_decode = decoder(ToForkserver).decode
_PONG = encode(Pong())


class App(NamedTuple):
    """What was imported: agents and their manifests, by agent id; and where their edges note what begins."""

    agents: dict[str, Agent]
    manifests: dict[str, AgentManifest]
    notes: NoteWriter


def main(arguments: list[str] | None = None) -> int:
    """Import the app, then fork until the supervisor is gone. Returns the exit code."""
    failpoints.enter("forkserver")
    options = _parse(arguments)
    sys.argv[1:] = []  # an app that looks at the command line must not find ours
    stream = socket.socket(fileno=options.stream_fd)
    packets = socket.socket(fileno=options.fds_fd)
    parent = _peer_pid(stream)
    prctl.die_with_parent()
    if os.getppid() != parent:
        return prologue.EXIT_ORPHANED
    prctl.set_name("h:forkserver")
    prologue.buffer_lines()
    for thing in (stream, packets, options.launch_fd):
        os.set_inheritable(own(thing), False)
    launch = msgspec.msgpack.decode(read_memfd(options.launch_fd), type=Launch)
    incarnation = options.incarnation or os.urandom(4).hex()
    distrust_young_bytecode()
    began_ns = time.time_ns()
    try:
        failpoints.hit("forkserver.before_import")
        app = _import(launch, options.app_index)
        failpoints.hit("forkserver.after_import")
    except BaseException as error:  # noqa: BLE001 - SystemExit, too, is an import that failed
        _say(stream, launch, WorkerFailed(incarnation, _import_error(error)))
        return EXIT_IMPORT_FAILED
    prologue.buffer_lines()  # again: the app may have put other streams in the place of those
    _freeze()
    _say(stream, launch, WorkerReady("forkserver", incarnation, os.getpid()))
    _say(stream, launch, Manifest(list(app.manifests.values()), fingerprint(began_ns)))
    ForkServer(app, launch, parent, stream, packets).run()
    return prologue.EXIT_OK


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="hayata_supervisor.forkserver")
    parser.add_argument("--stream-fd", type=int, required=True)
    parser.add_argument("--fds-fd", type=int, required=True)
    parser.add_argument("--launch-fd", type=int, required=True)
    parser.add_argument("--app-index", type=int, required=True)
    parser.add_argument("--incarnation", default="")
    return parser.parse_args(arguments)


def _peer_pid(stream: socket.socket) -> int:
    """Pid of the supervisor: a socketpair's credentials are those of the process that made it, for ever.

    ``getppid`` alone can't tell the supervisor from whoever adopted us when it died during our start.
    """
    credentials = stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 3 * _PID.size)
    return int(_PID.unpack_from(credentials)[0])


def _say(stream: socket.socket, launch: Launch, message: WorkerReady | WorkerFailed | Manifest) -> None:
    """Write before the loop runs. The supervisor always reads, so this may block."""
    try:
        body = encode(message)
        failpoints.message("before_send", body, stream)
        stream.sendall(frame(body, launch.frame_cap_bytes))
        failpoints.message("after_send", body, stream)
    except FrameTooLarge as error:
        if isinstance(message, WorkerFailed):
            raise
        _say(stream, launch, WorkerFailed("", error_info(error)))
        raise SystemExit(EXIT_IMPORT_FAILED) from None


def _import(launch: Launch, index: int) -> App:
    os.chdir(launch.cwd)
    sys.argv[:] = launch.argv or [""]
    sys.path[:] = launch.sys_path + [entry for entry in sys.path if entry not in launch.sys_path]
    if index >= 0:
        agents = load_app(launch.apps[index])
    else:
        if launch.value_fd is None:
            raise error_for("agent_start_failed", "there are no agents by value")
        os.set_inheritable(own(launch.value_fd), False)
        agents = load_value(read_memfd(launch.value_fd))
    _refuse_threads()
    manifests = {agent.id: agent_manifest(agent) for agent in agents}
    if any(node.is_async for manifest in manifests.values() for node in manifest.nodes):
        import hayata_supervisor.edge_async  # noqa: F401 - imported here, its pages are shared by all edges
    return App({agent.id: agent for agent in agents}, manifests, NoteWriter(Path(launch.data_dir)))


def _refuse_threads() -> None:
    """A thread that holds a lock when we fork would hold it in the child for ever.

    Raises:
        DefinitionError: Python code runs in another thread. Threads of native libraries, which have
            handlers of their own for fork, are only mentioned on stderr.
    """
    names = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    frames = len(sys._current_frames())
    if names or frames > 1:
        shown = ", ".join(names) or "one that the module threading does not know"
        raise DefinitionError(
            "agent_start_failed",
            f"the import of the app left a thread running: {shown}",
            details={"threads": names},
            hint="start threads in a lifespan, which runs in each edge worker, not while the app is imported",
        )
    native = len(os.listdir("/proc/self/task")) - frames
    if native > 0:
        print(f"hayata: {native} threads of native libraries run beside the forkserver", file=sys.stderr)


def _import_error(error: BaseException) -> ErrorInfo:
    if isinstance(error, HayataError):
        return error_info(error)
    return exception_info("agent_start_failed", error)


def _freeze() -> None:
    """Keep the collector off what is shared: a mark in an object's header would copy its page."""
    gc.collect()
    gc.freeze()
    gc.disable()


class ForkServer:
    """See the module."""

    def __init__(
        self, app: App, launch: Launch, supervisor: int, stream: socket.socket, packets: socket.socket
    ) -> None:
        self._app = app
        self._launch = launch
        self._supervisor = supervisor
        self._packets = packets
        self._reactor = Reactor(forks=True)
        for fd in self._reactor.descriptors:
            own(fd)
        self._channel = Channel(self._reactor, stream, self, cap_bytes=launch.frame_cap_bytes)
        packets.setblocking(False)
        self._reactor.watch_read(packets.fileno(), self._packets_readable)

    def run(self) -> None:
        """Fork what is asked for until the supervisor closes a socket."""
        self._reactor.run()

    def received(self, body: bytes) -> None:
        """The supervisor asks whether we live; that is all that is ever sent to us here."""
        _decode(body)
        self._channel.send(_PONG)

    def closed(self, reason: FrameTooLarge | OSError | None) -> None:
        """The supervisor is gone, or wants us gone."""
        self._reactor.stop()

    def _packets_readable(self) -> None:
        packet = receive_packet(self._packets, _FORK_FDS)
        if packet is None:
            self._reactor.stop()
            return
        request = _decode_fork(packet.body)
        for fd in packet.fds:
            own(fd)
        try:
            answer = self._fork(request, packet.fds)
        finally:
            for fd in packet.fds:
                close_own(fd)
        self._channel.send(encode(answer))
        failpoints.message("after_receive", packet.body, self._packets)

    def _fork(self, request: Fork, fds: list[int]) -> Forked | ForkFailed:
        try:
            work = self._work(request, fds)
            return Forked(request.request, self._double_fork(request, fds, work))
        except HayataError as error:
            return ForkFailed(request.request, error_info(error))
        except OSError as error:
            refused = error_for(
                "node_unavailable", f"the system refused a fork: {error}", details={"errno": error.errno}
            )
            return ForkFailed(request.request, error_info(refused))

    def _work(self, request: Fork, fds: list[int]) -> Callable[[], None]:
        """What the worker will do, checked before anything is forked."""
        if len(fds) != _FORK_FDS:
            raise error_for("protocol_error", f"a fork came with {len(fds)} descriptors")
        agent = self._app.agents.get(request.agent)
        if agent is None:
            raise error_for("unknown_agent", f"the app defines no agent {request.agent!r}")
        cap = self._launch.frame_cap_bytes
        if request.node is None:
            return lambda: agent_worker.run(agent, request.incarnation, _socket(fds[0]), cap)
        for node in self._app.manifests[request.agent].nodes:
            if node.name == request.node:
                job = EdgeJob(agent, node, cap, self._app.notes)
                limits = node_worker.Patience(self._launch.start_timeout_s, self._launch.stopped_timeout_s)
                return lambda: node_worker.run(job, request.incarnation, limits, _socket(fds[0]), _socket(fds[1]))
        raise error_for("unknown_node", f"agent {request.agent!r} has no node {request.node!r}")

    def _double_fork(self, request: Fork, fds: list[int], work: Callable[[], None]) -> int:
        read_end, write_end = os.pipe()
        own(read_end)
        own(write_end)
        try:
            middle = fork()
            if middle == 0:
                self._middle(write_end, request, fds, work)
        finally:
            close_own(write_end)
        try:
            report = os.read(read_end, _PID.size)
            failpoints.hit("forkserver.before_receive_pid")
        finally:
            close_own(read_end)
            os.waitpid(middle, 0)
        # The middle process is reaped, so the kernel has handed the worker to the supervisor.
        if len(report) != _PID.size:
            raise OSError("the process between the forks died")
        pid: int = _PID.unpack(report)[0]
        if pid < 0:
            raise OSError(-pid, os.strerror(-pid))
        return pid

    def _middle(self, write_end: int, request: Fork, fds: list[int], work: Callable[[], None]) -> NoReturn:
        """Fork the worker, say its pid and go."""
        failpoints.enter("middle")
        middle = os.getpid()
        try:
            pid = fork()
            if pid == 0:
                self._worker(middle, request, fds, work)
            failpoints.hit("middle.before_send_pid")
            os.write(write_end, _PID.pack(pid))
            failpoints.hit("middle.after_send_pid")
        except OSError as error:
            failpoints.hit("middle.before_send_errno")
            os.write(write_end, _PID.pack(-(error.errno or 1)))
            failpoints.hit("middle.after_send_errno")
        finally:
            os._exit(prologue.EXIT_OK)

    def _worker(self, middle: int, request: Fork, fds: list[int], work: Callable[[], None]) -> NoReturn:
        failpoints.enter("agent" if request.node is None else "node")
        stream, packets, stdout, stderr = fds
        # An agent worker has no use for the descriptor channel.
        keep = [stream] if request.node is None else [stream, packets]
        run_worker(
            lambda: prologue.begin(
                name=f"h:{request.node or request.agent}",
                parent=self._supervisor,
                stdout=stdout,
                stderr=stderr,
                keep=keep,
                middle=middle,
            ),
            work,
        )


def _socket(fd: int) -> socket.socket:
    """Wrap a received descriptor; from now on it is registered as the object."""
    sock = socket.socket(fileno=fd)
    own(sock)
    return sock


if __name__ == "__main__":
    sys.exit(main())
