"""File descriptors: which ones are the runtime's own, and how they travel between processes.

A forked child inherits every descriptor, and must close those that are the runtime's: a write end that is
held twice hides its reader's end of file. It must not close what the app opened at import: closing it lets
one of our sockets take its number, and the app would write into the protocol. Hence a registry instead of
``closerange``.

Source: dramatiq 707 (a parent that kept the write end); unix(7), SCM_RIGHTS.
"""

from __future__ import annotations

import os
import socket
from array import array
from collections import deque
from collections.abc import Collection, Sequence
from typing import NamedTuple

from hayata_supervisor import failpoints
from hayata_supervisor.process.reactor import Reactor

_PACKET_BYTES = 64 * 1024

_owned: dict[int, socket.socket | None] = {}


def own(thing: socket.socket | int) -> int:
    """Register a descriptor that a forked child must not keep; return its number.

    A socket is registered as the object: closing only its number would leave an object whose end closes that
    number again, when it belongs to somebody else.
    """
    if isinstance(thing, socket.socket):
        fd = thing.fileno()
        _owned[fd] = thing
        return fd
    _owned[thing] = None
    return thing


def disown(thing: socket.socket | int) -> None:
    """Forget a descriptor, before it is closed or its number reused. Harmless when it isn't registered."""
    _owned.pop(thing if isinstance(thing, int) else thing.fileno(), None)


def close_own(thing: socket.socket | int) -> None:
    """Forget a descriptor and close it."""
    disown(thing)
    if isinstance(thing, int):
        os.close(thing)
    else:
        thing.close()


def close_owned(keep: Collection[int]) -> None:
    """Close every registered descriptor but those in ``keep``, which stay registered."""
    for fd, sock in list(_owned.items()):
        if fd in keep:
            continue
        del _owned[fd]
        if sock is None:
            os.close(fd)
        else:
            sock.close()


def owned() -> frozenset[int]:
    """The registered numbers."""
    return frozenset(_owned)


class Packet(NamedTuple):
    """One packet of a descriptor channel: a message's body, and descriptors, the receiver's to close."""

    body: bytes
    fds: list[int]


def receive_packet(sock: socket.socket, max_fds: int) -> Packet | None:
    """Receive one packet; None when the peer has closed. The descriptors are close-on-exec.

    A receiver that has no room for them gets the packet with fewer descriptors, and no second chance.

    Raises:
        BlockingIOError: Nothing is there.
        OSError: A packet was too large or carried more descriptors than ``max_fds``; those received are
            closed.
    """
    # Not `socket.recv_fds`: up to Python 3.13 it forgets its flags, and what it receives is inherited by programs.
    numbers = array("i")
    room = socket.CMSG_LEN(max_fds * numbers.itemsize)
    body, messages, flags, _ = sock.recvmsg(_PACKET_BYTES, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, data in messages:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
    fds = list(numbers)
    if flags & socket.MSG_TRUNC or (flags & socket.MSG_CTRUNC and len(fds) >= max_fds):
        for fd in fds:
            os.close(fd)
        raise OSError("a packet of the descriptor channel was cut off")
    if not body:
        return None
    failpoints.message("before_receive", body, sock)
    return Packet(body, fds)


class PacketSender:
    """Sends packets with descriptors and never blocks: what the kernel does not take now waits its turn."""

    def __init__(self, reactor: Reactor, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._reactor = reactor
        self._sock = sock
        self._waiting: deque[tuple[bytes, list[int]]] = deque()

    def send(self, body: bytes, fds: Sequence[int]) -> None:
        """Send one packet. The descriptors are duplicated where it has to wait, so they stay the caller's.

        A peer that is gone is not an error here: whoever watches its process will say so.
        """
        if not self._waiting and self._try(body, fds):
            return
        if not self._waiting:
            self._reactor.watch_write(self._sock.fileno(), self._writable)
        self._waiting.append((body, [own(os.dup(fd)) for fd in fds]))

    def _try(self, body: bytes, fds: Sequence[int]) -> bool:
        failpoints.message("before_send", body, self._sock)
        try:
            socket.send_fds(self._sock, [body], fds)
        except BlockingIOError:
            return False
        except OSError:
            return True
        failpoints.message("after_send", body, self._sock)
        return True

    def _writable(self) -> None:
        while self._waiting:
            body, fds = self._waiting[0]
            if not self._try(body, fds):
                return
            self._waiting.popleft()
            for fd in fds:
                close_own(fd)
        self._reactor.unwatch_write(self._sock.fileno())
