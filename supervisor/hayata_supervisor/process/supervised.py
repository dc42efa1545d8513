"""One incarnation of the supervisor as its parent, the guard, sees it; and how often they may die."""

from __future__ import annotations

import os
import signal
import socket
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from hayata.messages import FromSupervisor
from hayata_supervisor.process import clock
from hayata_supervisor.process.packets import Packets
from hayata_supervisor.process.pidfd import open_child, send_signal
from hayata_supervisor.process.reactor import Reactor
from hayata_supervisor.process.spawn import spawn_module


class Limits(NamedTuple):
    """The guard's patience, in seconds where nothing else is said."""

    silence: float = 10.0  # of a supervisor that has spoken; before that, the launch's start_timeout_s
    check: float = 1.0  # between two looks at how long it has been silent
    backoff: float = 0.1
    max_backoff: float = 5.0
    stable: float = 60.0  # a supervisor that lived this long had a good start
    deaths: int = 5  # that many in one `period` are too many
    period: float = 60.0
    orphan: float = 2.0  # for an orphaned supervisor to end by itself
    stop_grace: float = 5.0  # after the drain, until everything is killed
    kill: float = 30.0  # for the kernel to let a killed process die


class DeathTally:
    """How often the supervisor died of late, and so how long to wait before the next start."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._recent: deque[float] = deque(maxlen=limits.deaths)
        self._in_a_row = 0

    def count(self, now_s: float, lived_s: float) -> float | None:
        """Count one death at ``now_s`` (monotonic seconds); return seconds to wait, or None to give up.

        Args:
            now_s: Not earlier than at the last call.
            lived_s: Seconds that this incarnation lived.
        """
        limits = self._limits
        self._in_a_row = 1 if lived_s >= limits.stable else self._in_a_row + 1
        self._recent.append(now_s)
        if len(self._recent) == limits.deaths and now_s - self._recent[0] <= limits.period:
            return None
        return float(min(limits.max_backoff, limits.backoff * 2 ** min(self._in_a_row - 1, 30)))


class Supervised:
    """One running supervisor.

    Args:
        reactor: Where its socket is watched.
        module: What to run.
        arguments: What stands before ``--guard-fd N`` on its command line.
        pass_fds: Descriptors that it inherits under their numbers.
        environ: Its environment.
        first_word_s: Seconds that it may be silent before its first message.
        silence_s: Seconds that it may be silent after that.
        received: Called with each of its messages.

    Raises:
        OSError: The system refused to start it.

    Attributes:
        pid: Its pid, ours to reap.
        killed: Why we killed it; empty when we did not.
        started_s: When it was started, monotonic seconds.
    """

    def __init__(
        self,
        reactor: Reactor,
        module: str,
        arguments: list[str],
        *,
        pass_fds: list[int],
        environ: Mapping[str, str],
        first_word_s: float,
        silence_s: float,
        received: Callable[[Any], None],
    ) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                self.pid = spawn_module(
                    module,
                    [*arguments, "--guard-fd", str(theirs.fileno())],
                    pass_fds=[*pass_fds, theirs.fileno()],
                    environ=environ,
                )
                self._pidfd = open_child(self.pid)
            except BaseException:
                ours.close()
                raise
        self._received = received
        self._packets = Packets(reactor, ours, FromSupervisor, self._hear, lambda: None)
        self._heard_s = self.started_s = clock.monotonic()
        self._patience_s = first_word_s
        self._silence_s = silence_s
        self.killed = ""

    def _hear(self, message: msgspec.Struct) -> None:
        self._heard_s = clock.monotonic()
        self._patience_s = self._silence_s
        self._received(message)

    def forgive(self) -> None:
        """Begin to count its silence anew: it was we who did not listen."""
        self._heard_s = clock.monotonic()

    def is_silent(self) -> bool:
        """Whether it has said nothing for too long."""
        return clock.monotonic() - self._heard_s > self._patience_s

    def send(self, message: msgspec.Struct) -> None:
        """Send it a message; if it is dead or hangs, that shows elsewhere."""
        self._packets.send(message)

    def drain(self) -> None:
        """Hand out what it said before it died."""
        self._packets.drain()

    def kill(self, reason: str) -> None:
        """SIGKILL it."""
        self.killed = self.killed or reason
        send_signal(self._pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Forget it, dead and reaped."""
        self._packets.close()
        os.close(self._pidfd)
