"""How messages are carried: what the blocking face needs of a carrier, and the carrier over a Unix socket.

A carrier moves whole messages (bodies, without frames): a runtime that runs inline, in the caller's own
thread, can be one as well.
"""

from __future__ import annotations

import math
import os
import select
import socket
import time
from collections import deque
from typing import Protocol

from hayata import address
from hayata.client.core import ANSWER_S, Conversation, Frames, Lost
from hayata.errors import HayataError, error_for
from hayata.framing import DEFAULT_CAP_BYTES, frame

READ_BYTES = 256 * 1024
_QUEUE_FULL_S = 0.05


class Transport(Protocol):
    """One connection, for one conversation, used by one thread at a time.

    Both ways it carries `hayata.messages` in msgpack, the `Hello` of each side first.
    """

    def send(self, body: bytes, /) -> None:
        """Send one message (of `hayata.messages.ToServer`).

        A peer that is gone is no error here: what it had said before can still be received.

        Raises:
            FrameTooLarge: It is over the cap; nothing was sent.
            Lost: The peer takes no more bytes.
        """

    def receive(self, timeout_s: float | None, /) -> bytes:
        """Wait for one message (of `hayata.messages.ToClient`), at most ``timeout_s`` seconds; None: without
        bound.

        Raises:
            TimeoutError: None has come. The connection is as it was.
            Lost: The peer is gone and has said all.
            HayataError: ``protocol_error``.
        """
        ...

    def close(self) -> None:
        """Give everything back. What was asked on it goes on without a listener."""


def connect(path: str) -> socket.socket:
    """Connect to the daemon, without waiting.

    Returns:
        A socket that does not block.

    Raises:
        Lost: There is no daemon, or it can't be reached now.
        HayataError: ``invalid_options`` for a path that no socket can have.
    """
    try:
        return address.connect(path, timeout_s=0.0)
    except (BlockingIOError, InterruptedError):
        raise Lost("the queue of new connections is full") from None
    except PermissionError as error:
        raise Lost(str(error), refusal=_refused(path, error)) from None
    except OSError as error:
        raise Lost(str(error), refusal=_absent(path, error)) from None


def _refused(path: str, error: OSError) -> HayataError:
    return error_for(
        "permission_denied",
        f"the socket {path} can't be used: {error.strerror}",
        details={"path": path},
        hint="a daemon serves its own user only",
    )


def _absent(path: str, error: OSError) -> HayataError:
    return error_for(
        "daemon_unavailable",
        f"no daemon listens at {path} ({error.strerror or error})",
        details={"path": path},
        hint="start one with hayata-supervisor APP, or say where it is: --socket, HAYATA_SOCKET",
    )


def wait_gone(path: str, guard_pid: int) -> None:
    """Wait until the daemon at ``path`` has ended.

    By the pid of its guard, where that can be seen: nobody else ends last, and at a socket that a service manager
    holds, a connection would start the next one. Else by holding a connection until it ends.
    """
    if _is_guard(guard_pid):
        try:
            pidfd = os.pidfd_open(guard_pid)
        except OSError:
            return
        try:
            if _is_guard(guard_pid):
                _wait_for_end(pidfd)
        finally:
            os.close(pidfd)
        return
    while True:
        try:
            sock = connect(path)
        except Lost as loss:
            if loss.refusal is not None:
                return
            time.sleep(_QUEUE_FULL_S)
            continue
        with sock:
            _wait_for_end(sock, 0)  # its end is always told; what is said meanwhile is not for us


def _is_guard(pid: int) -> bool:
    """Whether the number names a guard here: the daemon may be in a container, and count its processes from one."""
    try:
        with open(f"/proc/{pid}/comm") as file:
            return file.read().strip() == address.GUARD_NAME
    except OSError:
        return False


def _wait_for_end(file: int | socket.socket, events: int = select.POLLIN) -> None:
    poll = select.poll()
    poll.register(file, events)
    poll.poll()


def daemon_package(path: str, timeout_s: float) -> str:
    """Which version of hayata the daemon at ``path`` is of.

    Raises:
        TimeoutError: It does not answer.
        Lost: There is none, or it can't be reached.
        HayataError: ``protocol_error``: it speaks another protocol, or is no daemon of ours.
    """
    transport = SocketTransport(connect(path))
    try:
        conversation = Conversation()
        transport.send(conversation.hello())
        while not conversation.greeted:
            conversation.receive(transport.receive(timeout_s))
        return conversation.package
    finally:
        transport.close()


class SocketTransport:
    """A `Transport` over a connected Unix socket."""

    def __init__(self, sock: socket.socket, cap_bytes: int = DEFAULT_CAP_BYTES) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._cap = cap_bytes
        self._frames = Frames(cap_bytes)
        self._bodies: deque[bytes] = deque()

    def send(self, body: bytes, /) -> None:
        """See `Transport.send`."""
        rest = memoryview(frame(body, self._cap))
        while rest:
            try:
                rest = rest[self._sock.send(rest) :]
            except BlockingIOError:
                if not self._wait(select.POLLOUT, ANSWER_S):
                    raise Lost("the daemon reads nothing") from None
            except OSError:
                return

    def receive(self, timeout_s: float | None, /) -> bytes:
        """See `Transport.receive`."""
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not self._bodies:
            try:
                data = self._sock.recv(READ_BYTES)
            except BlockingIOError:
                if not self._wait(select.POLLIN, deadline - time.monotonic()):
                    raise TimeoutError from None
                continue
            except OSError as error:
                raise Lost(f"the connection was lost ({error.strerror})") from None
            if not data:
                raise Lost("the daemon has closed the connection")
            self._bodies.extend(self._frames.feed(data))
        return self._bodies.popleft()

    def _wait(self, event: int, timeout_s: float) -> bool:
        poll = select.poll()
        poll.register(self._sock, event)
        return bool(poll.poll(None if timeout_s == math.inf else max(0, math.ceil(timeout_s * 1000))))

    def close(self) -> None:
        """See `Transport.close`."""
        self._sock.close()
