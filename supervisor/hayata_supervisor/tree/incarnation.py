"""One process of a worker: its descriptors, its pidfd, and its end.

It begins with its descriptors, before there is a process; `adopt` gives it one. Its death is what the pidfd
says, never an end of file: a forked child of user code can hold a pipe open, and a broken worker can close
one. After the death its owner buries what it left behind, then calls `drain`, and only then judges.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from uuid import uuid4

import msgspec

from hayata.framing import FrameTooLarge
from hayata.messages import Output, Ping, StopWorker, encode
from hayata_supervisor.core.liveness import Pulse, Why
from hayata_supervisor.process import clock
from hayata_supervisor.process.channel import Channel
from hayata_supervisor.process.output import Deliver, WorkerOutput
from hayata_supervisor.process.pidfd import Exit, open_pidfd, reap, send_signal
from hayata_supervisor.process.reactor import Timer
from hayata_supervisor.tree.port import Log

if TYPE_CHECKING:
    from hayata_supervisor.tree.worker_link import Ground

_EOF_GRACE_S = 1.0
_PING = encode(Ping())
_KILLED_FOR = {"stopped": "stopped for too long", "hung": "silent for too long"}


class ChildEnds(NamedTuple):
    """The worker's ends of its descriptors, in the order of the fork packet."""

    stream: socket.socket
    fds: socket.socket
    stdout: int
    stderr: int

    @property
    def numbers(self) -> list[int]:
        """Their numbers."""
        return [self.stream.fileno(), self.fds.fileno(), self.stdout, self.stderr]


class Owner(Protocol):
    """Who hears of an incarnation."""

    def received(self, message: Any) -> None:
        """The worker sent a message."""

    def broken(self, reason: str) -> None:
        """The worker sent what is not our protocol. It is being killed."""

    def died(self) -> None:
        """The process is dead and reaped. Its last messages are still to be read."""


class Incarnation:
    """See the module.

    Args:
        ground: What the tree stands on.
        owner: Who hears of it.
        names: Whose process it is, for the log.
        decoder: For what comes over the stream.

    Raises:
        OSError: No descriptors are left.

    Attributes:
        pulse: Whether it is well.
        killed_for: Why patience with it was lost; None for a process that ended otherwise.
    """

    def __init__(
        self,
        ground: Ground,
        owner: Owner,
        names: Mapping[str, str],
        decoder: msgspec.msgpack.Decoder[Any],
    ) -> None:
        self.id = uuid4().hex
        self.asked_at = clock.monotonic()
        self.started_at = clock.wall()
        self.pid: int | None = None
        self.exit: Exit | None = None
        self.pulse = Pulse()
        self.killed_for: Why | None = None
        self._reactor = ground.reactor
        self._graveyard = ground.graveyard
        self._vigil = ground.vigil
        self._log = ground.log
        self._owner = owner
        self._names = names
        self._decode = decoder.decode
        self._pidfd: int | None = None
        self._doomed = False
        self._kill_timer: Timer | None = None
        stdout, stderr, child_ends, stream, self.fds = _descriptors()
        self._child_ends: ChildEnds | None = child_ends
        self.stream = Channel(ground.reactor, stream, self, cap_bytes=ground.launch.frame_cap_bytes)
        deliver = lines_to(ground.log, names.get("agent", ""), names.get("node", ""))
        self._output = WorkerOutput(ground.reactor, stdout, stderr, deliver)

    # Birth

    @property
    def child_ends(self) -> ChildEnds:
        """What the process is to inherit; `adopt` or `close_child_ends` closes it here."""
        assert self._child_ends is not None
        return self._child_ends

    def close_child_ends(self) -> None:
        """Close our copies: an end held twice hides the other's end of file."""
        ends, self._child_ends = self._child_ends, None
        if ends is not None:
            ends.stream.close()
            ends.fds.close()
            os.close(ends.stdout)
            os.close(ends.stderr)

    def adopt(self, pid: int) -> bool:
        """Take the process, which must be an unreaped child of ours; False when there is none of that pid.

        Raises:
            OSError: No descriptors are left. A process that can't be watched must not live: whoever gives it up
                has it swept.
        """
        if self.pid is not None:
            return self.pid == pid
        try:
            pidfd = open_pidfd(pid)
        except (ProcessLookupError, OverflowError):
            return False
        if not _is_child(pidfd):
            os.close(pidfd)
            return False
        self.pid, self._pidfd = pid, pidfd
        self._graveyard.register(pid)
        self._graveyard.fork_settled(self.id)
        self._reactor.watch_read(pidfd, self._dead)
        self._vigil.watch(pidfd, self)
        if self._doomed:
            send_signal(pidfd)
        return True

    # Life

    @property
    def pidfd(self) -> int:
        """Its pidfd, from `adopt` until its death."""
        assert self._pidfd is not None
        return self._pidfd

    @property
    def alive(self) -> bool:
        """Whether the process can still be talked to."""
        return self._pidfd is not None and self.stream.open

    def received(self, body: bytes) -> None:
        """One frame of the stream."""
        try:
            message = self._decode(body)
        except msgspec.DecodeError as error:
            self.refuse(f"a message that can't be read: {error}")
            return
        self._owner.received(message)

    def closed(self, reason: FrameTooLarge | OSError | None) -> None:
        """The stream has ended. A worker that exits does this just before; one that lives on is no use to
        anybody.
        """
        if self._pidfd is None:
            return
        if reason is None:
            self.kill_later(_EOF_GRACE_S)
        else:
            self.refuse(str(reason))

    def refuse(self, reason: str) -> None:
        """Kill the worker because of what it sent, and believe nothing that it says after that."""
        self._owner.broken(reason)
        self.kill()
        self.stream.close()

    # Whether it is well

    @property
    def stopped(self) -> bool:
        """Whether somebody has stopped it with a signal."""
        return self.pulse.is_stopped

    def expect_answers(self) -> None:
        """Ask it from now on, every second or two, whether it lives."""
        if self._pidfd is not None:  # else this is one of its last words
            assert self.pid is not None
            self._vigil.expect_answers(self._pidfd, self.pid, lambda: self.stream.send(_PING))

    def ask(self) -> None:
        """Ask it now whether it lives; whoever takes its `Pong` calls `Pulse.answered`."""
        if self._pidfd is not None:
            self._vigil.ask(self._pidfd)

    @property
    def silent_s(self) -> float:
        """How long it owes an answer, in seconds of its own time."""
        return 0.0 if self._pidfd is None else self._vigil.silent_s(self._pidfd)

    def stop_seen(self, stopped: bool) -> None:
        """Somebody has stopped it; or it goes on."""
        if stopped:
            self._log.warning("worker stopped", **self._names, pid=self.pid)
        else:
            self._log.info("worker goes on", **self._names, pid=self.pid)

    def lose_patience(self, why: Why) -> None:
        """Kill it because it is stopped or hangs."""
        self.killed_for = self.killed_for or why
        self._log.error("worker killed", **self._names, pid=self.pid, reason=why)
        self.kill()

    @property
    def ending(self) -> str:
        """How it ended, for people."""
        return str(self.exit) if self.killed_for is None else f"{self.exit}, as it was {_KILLED_FOR[self.killed_for]}"

    # Death

    def stop(self, grace_s: float, reason: str = "stopped") -> None:
        """Ask it to end; kill it after ``grace_s`` seconds, which may be infinite."""
        if self._pidfd is not None:
            self.stream.send(encode(StopWorker(reason)))
            self.kill_later(grace_s)
        else:
            self.kill()

    def kill_later(self, grace_s: float) -> None:
        """Kill it if it still lives in ``grace_s`` seconds."""
        if self._kill_timer is None and grace_s != math.inf:
            self._kill_timer = self._reactor.call_later(grace_s, self.kill)

    def kill(self) -> None:
        """SIGKILL it, or the process that is yet to come."""
        self._doomed = True
        if self._pidfd is not None:
            send_signal(self._pidfd)

    def _dead(self) -> None:
        pidfd, self._pidfd = self.pidfd, None
        self._reactor.unwatch_read(pidfd)
        self._vigil.forget(pidfd)
        if self._kill_timer is not None:
            self._kill_timer.cancel()
        self.exit = reap(pidfd)
        os.close(pidfd)
        assert self.pid is not None
        self._graveyard.strike_out(self.pid)
        self._owner.died()

    def drain(self) -> None:
        """Read and deliver what the dead process left, and close everything. What was unsent stays known."""
        if self.stream.open:
            self.stream.drain()
        self.close()

    def close(self) -> None:
        """Close everything. For an incarnation without a living process."""
        self.close_child_ends()
        self.stream.close()
        self._output.end()
        if self.fds.fileno() >= 0:
            self._reactor.unwatch_read(self.fds.fileno())
            self.fds.close()


def lines_to(log: Log, agent: str, node: str) -> Deliver:
    """Deliver a worker's own stdout and stderr to the log."""

    def deliver(stream: Any, lines: list[str], dropped: int, slowed_s: float) -> bool:
        log.output(Output("", None, stream, lines, dropped, slowed_s), agent=agent, node=node)
        return True

    return deliver


def _is_child(pidfd: int) -> bool:
    """Whether the process is an unreaped child of ours: nothing else may be killed on a worker's word."""
    try:
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _descriptors() -> tuple[int, int, ChildEnds, socket.socket, socket.socket]:
    """Open all or none: our stdout and stderr, the child's ends, our stream and descriptor channel."""
    opened: list[int] = []
    try:
        for _ in range(2):
            opened += os.pipe2(os.O_CLOEXEC)
        stream, child_stream = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            fds, child_fds = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError:
            stream.close()
            child_stream.close()
            raise
    except OSError:
        for fd in opened:
            os.close(fd)
        raise
    fds.setblocking(False)
    stdout, child_stdout, stderr, child_stderr = opened
    return stdout, stderr, ChildEnds(child_stream, child_fds, child_stdout, child_stderr), stream, fds
