"""A framed, non-blocking stream socket on a reactor: how our processes and clients talk.

Frames are queued and leave together at the end of the turn. A channel knows which frames it has not begun to write:
if its peer dies, those provably never arrived.
"""

from __future__ import annotations

import itertools
import socket
from collections import deque
from collections.abc import Callable
from typing import Protocol

from hayata.framing import DEFAULT_CAP_BYTES, HEADER, FrameReader, FrameTooLarge, frame
from hayata_supervisor import failpoints
from hayata_supervisor.process.reactor import Reactor

_READ_BYTES = 64 * 1024  # recv allocates as much; from 128 KiB on malloc maps and unmaps pages, 14 µs a call
_BUFFERS_PER_WRITE = 64


class Peer(Protocol):
    """Who hears what a channel receives."""

    def received(self, body: bytes) -> None:
        """One frame's body."""

    def closed(self, reason: FrameTooLarge | OSError | None) -> None:
        """The stream has ended: by the peer (None), by a frame over the cap, or by an error. Called once."""


class Channel:
    """See the module. ``tag`` of a frame is whatever its sender wants to find again in `unsent`.

    Args:
        drained: Called whenever the peer has taken all that was queued.

    Attributes:
        open: Whether it can be used.
        farewell: A body to send before closing on a peer whose frame is over the cap; None for none.
    """

    def __init__(
        self,
        reactor: Reactor,
        sock: socket.socket,
        peer: Peer,
        *,
        cap_bytes: int = DEFAULT_CAP_BYTES,
        drained: Callable[[], None] | None = None,
    ) -> None:
        sock.setblocking(False)
        self._drained = drained
        self._reactor = reactor
        self._sock = sock
        self._fd = sock.fileno()
        self._peer = peer
        self._cap = cap_bytes
        self._reader = FrameReader(cap_bytes)
        self._queue: deque[tuple[bytes, object]] = deque()
        self._begun = 0  # bytes of the queue's head that have been written
        self._queued_bytes = 0
        self._flush_due = False
        self._write_watched = False
        self._paused = False
        self.open = True
        self.farewell: bytes | None = None
        reactor.watch_read(self._fd, self._readable)

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait to be written."""
        return self._queued_bytes

    def send(self, body: bytes, tag: object = None) -> None:
        """Queue one frame. Does nothing on a closed channel: its peer is gone, and somebody hears of that.

        Raises:
            FrameTooLarge: ``body`` is over the cap; nothing was queued.
        """
        data = frame(body, self._cap)
        if not self.open:
            return
        failpoints.message("before_send", body, self._sock)
        self._queue.append((data, tag))
        self._queued_bytes += len(data)
        if not self._flush_due and not self._write_watched:
            self._flush_due = True
            self._reactor.call_at_turn_end(self.flush)

    def flush(self) -> None:
        """Write what the kernel takes now."""
        self._flush_due = False
        if not self.open:
            return
        while self._queue:
            try:
                sent = self._send_head()
            except BlockingIOError:
                break
            except OSError as error:
                # What the peer wrote before it died is still to be read: the reading side reports the end.
                self.resume_reading()
                if self._write_watched:
                    self._reactor.unwatch_write(self._fd)
                    self._write_watched = False
                self._write_failed(error)
                return
            self._written(sent)
        if self._queue:
            if not self._write_watched:
                self._write_watched = True
                self._reactor.watch_write(self._fd, self.flush)
            return
        if self._write_watched:
            self._write_watched = False
            self._reactor.unwatch_write(self._fd)
        if self._drained is not None:
            self._drained()

    def _send_head(self) -> int:
        first: bytes | memoryview = self._queue[0][0]
        if self._begun:
            first = memoryview(first)[self._begun :]
        if len(self._queue) == 1:
            return self._sock.send(first)
        rest = (data for data, _ in itertools.islice(self._queue, 1, _BUFFERS_PER_WRITE))
        return self._sock.sendmsg([first, *rest])

    def _written(self, sent: int) -> None:
        self._queued_bytes -= sent
        sent += self._begun
        while self._queue and sent >= len(self._queue[0][0]):
            data, _ = self._queue.popleft()
            sent -= len(data)
            failpoints.message("after_send", data, self._sock, HEADER)
        self._begun = sent

    def _write_failed(self, error: OSError) -> None:
        if not isinstance(error, BrokenPipeError | ConnectionResetError):
            self.close(error)

    def unsent(self) -> list[object]:
        """Tags of the frames of which no byte has been written, in order."""
        tags = [tag for _, tag in self._queue]
        return tags[1:] if self._begun else tags

    def _readable(self) -> None:
        self.read_once()

    def read_once(self) -> bool:
        """Read once and hand out the frames; say whether there may be more to read."""
        if not self.open:
            return False
        try:
            data = self._sock.recv(_READ_BYTES)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            # The peer has ended before it had read all that we had sent. What it said itself has been read by now.
            self.close(None)
            return False
        except OSError as error:
            self.close(error)
            return False
        if not data:
            self.close(None)
            return False
        try:
            for body in self._reader.feed(data):
                failpoints.message("before_receive", body, self._sock)
                self._peer.received(body)
                failpoints.message("after_receive", body, self._sock)
                if not self.open:
                    return False
        except FrameTooLarge as error:
            if self.farewell is not None:
                self._queue.append((frame(self.farewell), None))
                self.flush()
            self.close(error)
            return False
        return True

    def drain(self) -> None:
        """Read all that a dead peer has left; a frame that is not complete is dropped."""
        while self.read_once():
            pass

    def pause_reading(self) -> None:
        """Let the peer's bytes wait in the kernel. Its end is then only seen when something is written to it."""
        self._paused = True
        self._reactor.unwatch_read(self._fd)

    def resume_reading(self) -> None:
        """Read again, if that was paused."""
        if self.open and self._paused:
            self._paused = False
            self._reactor.watch_read(self._fd, self._readable)

    def close(self, reason: FrameTooLarge | OSError | None = None) -> None:
        """Close the socket and tell the peer object, once."""
        if not self.open:
            return
        self.open = False
        self._reactor.unwatch_read(self._fd)
        self._reactor.unwatch_write(self._fd)
        self._write_watched = False
        self._sock.close()
        self._peer.closed(reason)
