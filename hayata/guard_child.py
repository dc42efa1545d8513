"""The guard as a child of the process that embeds the runtime: its birth, its word, its end.

The child is started with `subprocess` (an exec, so threads do no harm) in a session of its own, so that
Ctrl-C reaches only us. It watches us by pidfd, and hears us on a socket that it also ends by: both survive
whatever user code does to signals. It is reaped here.
"""

from __future__ import annotations

import math
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from contextlib import ExitStack

import msgspec

from hayata import messages as m
from hayata.error_info import error_from
from hayata.errors import HayataError, error_for
from hayata.memfd import sealed_memfd

STOP_GRACE_S = 45.0
"""Beyond the drain, until a guard that does not end is killed: longer than its own patience."""

_PACKET_BYTES = 1 << 20
_ENDING_S = 1.0  # a guard that is about to end closes its socket first
_from_guard = m.decoder(m.FromGuard)
_children: weakref.WeakSet[GuardChild] = weakref.WeakSet()


class GuardChild:
    """A running guard.

    Args:
        launch: What it shall run; its descriptors and ``parent_pid`` are filled in here.
        value: Pickled agents, in place of ``launch.apps``.

    Attributes:
        pid: Its process id.
        socket: Where its daemon listens.
    """

    def __init__(self, launch: m.Launch, value: bytes | None = None) -> None:
        self.socket = launch.socket
        self._lock = threading.RLock()
        self._fatal: HayataError | None = None
        self._end: str | None = None
        with ExitStack() as opened:
            self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            opened.callback(theirs.close)
            fds = [theirs.fileno()]
            if value is not None:
                fds.append(_memfd(opened, "hayata-agents", value))
            launch = msgspec.structs.replace(
                launch,
                value_fd=None if value is None else fds[-1],
                control_fd=theirs.fileno(),
                parent_pid=os.getpid(),
            )
            launch_fd = _memfd(opened, "hayata-launch", m.encode(launch))
            try:
                self._process = _spawn(launch_fd, [*fds, launch_fd])
            except BaseException:
                self._control.close()
                raise
        self.pid = self._process.pid
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except BaseException:
            self._process.kill()
            self._process.wait()
            self._control.close()
            raise
        _children.add(self)

    def wait_serving(self, timeout_s: float) -> None:
        """Wait until the runtime serves.

        Raises:
            HayataError: Why it can't, as the guard says; ``daemon_unavailable`` when it says nothing.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            ready = self._wait(deadline - time.monotonic(), self._control.fileno(), self._pidfd)
            if self._control.fileno() in ready:
                message = self._hear()
                if isinstance(message, m.Serving):
                    return
                if self._fatal is not None:
                    raise self._fatal
            if self._pidfd in ready:
                raise self.why_gone() or error_for("daemon_unavailable", "the runtime did not start")
            if not ready:
                raise error_for(
                    "daemon_unavailable",
                    f"the runtime was not ready in {timeout_s:.0f} s",
                    hint="log_level='info' says more; start_timeout_s is the limit for importing the app",
                )

    def why_gone(self) -> HayataError | None:
        """Why calls fail now: the guard has ended by itself, or was stopped. None while it lives."""
        with self._lock:
            if self._end is None and not self._collect(_ENDING_S):
                return None
            if self._fatal is not None:
                return error_for(
                    "daemon_unavailable",
                    f"the runtime has ended: {self._fatal.code}: {self._fatal.message}",
                    details={"reason": self._fatal.code, **self._fatal.details},
                    hint=self._fatal.hint,
                )
            return error_for(
                "daemon_unavailable",
                f"the runtime has ended: its guard (process {self.pid}) {self._end}",
                hint="what it was told is in its data directory: start it again to go on",
            )

    def stop(self, drain_s: float) -> None:
        """Stop the runtime and reap the guard; when it has ended, or is another process's, do nothing.

        Returns at the latest `STOP_GRACE_S` after the drain and the time that the nodes' ``shutdown`` takes. A
        `KeyboardInterrupt` ends both.
        """
        with self._lock:
            if self._end is not None:
                return
            try:  # an interrupt may come as soon as the message is sent: the guard is faster than we are
                self._tell(m.StopRuntime(drain_s))
                ended = self._await_end(time.monotonic() + drain_s + STOP_GRACE_S)
            except BaseException:
                self._tell(m.StopRuntime(0.0))
                if not self._collect(STOP_GRACE_S):
                    self._kill()
                raise
            if not ended:
                self._kill()

    def _await_end(self, due: float) -> bool:
        """Wait until the guard has ended and reap it; not beyond ``due``, which it may put off for its workers."""
        watched = [self._pidfd, self._control.fileno()]
        while True:
            ready = self._wait(due - time.monotonic(), *watched)
            if self._pidfd in ready or not ready:
                return self._collect(0.0)
            message = self._hear()
            if message is None:
                watched.pop()
            elif isinstance(message, m.Stopping):
                due = max(due, time.monotonic() + message.grace_s + STOP_GRACE_S)

    def _kill(self) -> None:
        """The guard hangs. Its supervisor sees it die, kills everything and ends."""
        try:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._collect(STOP_GRACE_S)

    def _collect(self, timeout_s: float) -> bool:
        """Wait for the guard's end and reap it; whether it has ended."""
        if not self._wait(timeout_s, self._pidfd):
            return False
        while self._wait(0.0, self._control.fileno()):
            if self._hear() is None:
                break
        code = self._process.wait()
        self._end = f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        os.close(self._pidfd)
        self._control.close()
        return True

    def _tell(self, message: m.StopRuntime) -> None:
        try:
            self._control.send(m.encode(message), socket.MSG_NOSIGNAL)
        except OSError:
            pass  # it has ended, or is about to: its death is what we wait for

    def _hear(self) -> m.FromGuard | None:
        """Take one message; None at the end of the connection."""
        try:
            packet = self._control.recv(_PACKET_BYTES)
        except ConnectionError:
            return None
        if not packet:
            return None
        message: m.FromGuard = _from_guard.decode(packet)
        if isinstance(message, m.Fatal):
            self._fatal = error_from(message.error)
        return message

    def _wait(self, timeout_s: float, *fds: int) -> list[int]:
        """Wait until one of the descriptors can be read; return those that can."""
        poll = select.poll()
        for fd in fds:
            poll.register(fd, select.POLLIN)
        return [fd for fd, _ in poll.poll(None if timeout_s == math.inf else max(0.0, timeout_s) * 1000)]

    def disown(self) -> None:
        """In a forked child: what we hold names another process's child."""
        self._lock = threading.RLock()  # a thread that isn't here may have held it
        self._process.returncode = 0  # or its destructor would warn that the guard still runs
        if self._end is None:
            self._end = "is another process's child"
            self._control.close()
            os.close(self._pidfd)


def _memfd(opened: ExitStack, name: str, data: bytes) -> int:
    fd = sealed_memfd(name, data)
    opened.callback(os.close, fd)
    return fd


def _spawn(launch_fd: int, pass_fds: list[int]) -> subprocess.Popen[bytes]:
    if not sys.executable:
        raise error_for(
            "unsupported_platform",
            "this Python does not know its own program (sys.executable is empty), so it can't start another",
            hint="start hayata-supervisor and use hayata.Client(), or hayata.start(agent, inline=True)",
        )
    try:
        return subprocess.Popen(
            # -P: a file in the working directory must not stand in for a module of the standard library.
            [sys.executable, "-P", "-m", "hayata_supervisor.guard", "--launch-fd", str(launch_fd)],
            stdin=subprocess.DEVNULL,
            pass_fds=pass_fds,
            start_new_session=True,
        )
    except OSError as error:
        raise error_for("daemon_unavailable", f"the runtime can't be started: {error}") from error


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _disown_all() -> None:
    for child in list(_children):
        child.disown()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disown_all)
