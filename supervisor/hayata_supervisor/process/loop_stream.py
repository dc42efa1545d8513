"""A framed stream socket on an asyncio loop, for the edge worker of a coroutine node.

Not asyncio's own transport: that allocates 256 KiB for each read, and makes each edge half a megabyte larger.
"""

from __future__ import annotations

import asyncio
import os
import socket
import traceback
from collections.abc import Callable
from typing import ParamSpec

from hayata.framing import FrameReader, frame
from hayata_supervisor import failpoints
from hayata_supervisor.process.blocking import Belonging
from hayata_supervisor.process.prologue import EXIT_BROKEN

P = ParamSpec("P")

_READ_BYTES = 64 * 1024


def or_end(callback: Callable[P, None]) -> Callable[P, None]:
    """Make of a callback one that ends the process when it raises.

    The loop would only log it and go on without the message, and whoever waits for the answer would wait for ever.
    """

    def call(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            callback(*args, **kwargs)
        except Exception:  # noqa: BLE001 - whatever it is, it is a bug of ours
            traceback.print_exc()
            os._exit(EXIT_BROKEN)

    return call


class LoopStream:
    """See the module. For the loop's thread.

    Args:
        sock: A connected stream socket.
        cap_bytes: Largest frame.
        received: Called with each frame's body.
        closed: Called once, when the peer is gone or the socket can't be used.
    """

    def __init__(
        self,
        sock: socket.socket,
        cap_bytes: int,
        received: Callable[[bytes], None],
        closed: Callable[[], None],
    ) -> None:
        sock.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._fd = sock.fileno()
        self._cap = cap_bytes
        self._received = received
        self._closed = closed
        self._reader = FrameReader(cap_bytes)
        self._waiting = bytearray()
        self._drained: asyncio.Future[None] | None = None
        self.belonging = Belonging(self._fd)
        self._loop.add_reader(self._fd, or_end(self._readable))

    def _readable(self) -> None:
        try:
            data = self._sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._end()
            return
        for body in self._reader.feed(data):
            failpoints.message("before_receive", body, self._sock)
            self._received(body)
            failpoints.message("after_receive", body, self._sock)

    def send(self, body: bytes) -> None:
        """Write a frame, as far as the kernel takes it now; the loop writes the rest.

        Raises:
            FrameTooLarge: It is over the cap; nothing was written.
        """
        data = frame(body, self._cap)
        self.belonging.exit_unless_ours()
        failpoints.message("before_send", body, self._sock)
        if self._waiting:
            self._waiting += data
            return
        sent = self._write(data)
        failpoints.message("after_send", body, self._sock)
        if sent < len(data):
            self._waiting += memoryview(data)[sent:]
            self._loop.add_writer(self._fd, or_end(self._writable))

    def _write(self, data: bytes | bytearray) -> int:
        try:
            return self._sock.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            self._loop.call_soon(self._end)
            return len(data)

    def _writable(self) -> None:
        self.belonging.exit_unless_ours()
        del self._waiting[: self._write(self._waiting)]
        if not self._waiting:
            self._loop.remove_writer(self._fd)
            if self._drained is not None and not self._drained.done():
                self._drained.set_result(None)

    async def drain(self) -> None:
        """Wait until all is written."""
        if self._waiting:
            self._drained = self._loop.create_future()
            await self._drained

    def _end(self) -> None:
        self._loop.remove_reader(self._fd)
        self._loop.remove_writer(self._fd)
        self._closed()
