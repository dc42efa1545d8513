"""A framed stream socket for a process that does one thing at a time: agent workers and sync edge workers.

Beside it in the same process runs user code, which may fork and fall through, or close descriptors that
aren't its own. So before each write the stream makes sure that it is still in its process and still on its
socket: a result must not be delivered twice, nor frames be written into a file of the user's that got our
number.
"""

from __future__ import annotations

import os
import socket
from collections import deque

from hayata.framing import FrameReader, frame
from hayata_supervisor import failpoints
from hayata_supervisor.process.prologue import EXIT_BROKEN, EXIT_OK

_READ_BYTES = 64 * 1024


class Belonging:
    """Whether this is still the process and the socket that it was."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._pid = os.getpid()
        self._inode = os.fstat(fd).st_ino

    @property
    def in_process(self) -> bool:
        """False in a forked child."""
        return os.getpid() == self._pid

    def exit_unless_ours(self) -> None:
        """End the process if it may not write to the socket."""
        if os.getpid() != self._pid:
            os._exit(EXIT_OK)
        try:
            ours = os.fstat(self._fd).st_ino == self._inode
        except OSError:
            ours = False
        if not ours:
            os._exit(EXIT_BROKEN)


class BlockingStream:
    """See the module. Not thread-safe.

    Args:
        sock: A connected stream socket.
        cap_bytes: Largest frame.
    """

    def __init__(self, sock: socket.socket, cap_bytes: int) -> None:
        sock.setblocking(True)
        self._sock = sock
        self.cap_bytes = cap_bytes
        self._reader = FrameReader(cap_bytes)
        self._bodies: deque[bytes] = deque()
        self.belonging = Belonging(sock.fileno())

    def receive(self) -> bytes | None:
        """Wait for the next frame's body; None when the peer has closed or died.

        Raises:
            FrameTooLarge: The peer announced a frame over the cap.
        """
        while not self._bodies:
            try:
                data = self._sock.recv(_READ_BYTES)
            except OSError:
                return None
            if not data:
                return None
            self._bodies.extend(self._reader.feed(data))
        failpoints.message("before_receive", self._bodies[0], self._sock)
        return self._bodies.popleft()

    def send(self, body: bytes, before: bytes | None = None) -> None:
        """Write a frame, with another one before it in the same call if given.

        Raises:
            FrameTooLarge: It is over the cap; nothing was written.
            OSError: The peer is gone.
        """
        data = frame(body, self.cap_bytes)
        if before is not None:
            data = frame(before, self.cap_bytes) + data
        self.belonging.exit_unless_ours()
        failpoints.message("before_send", before, self._sock)
        failpoints.message("before_send", body, self._sock)
        self._sock.sendall(data)
        failpoints.message("after_send", body, self._sock)
