"""What user code prints: two pipes per worker, drained without ever holding up the loop.

A flooder is slowed and not dropped: past its rate its pipes are simply not read, so it blocks in its own
``write`` while its deadline runs on. How long that was is told, ever more seldom while it lasts. Lines are dropped,
and counted, only when whoever should take them can't keep up.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Iterator
from typing import Literal, TypeAlias

from hayata_supervisor.process import clock
from hayata_supervisor.process.descriptors import close_own, own
from hayata_supervisor.process.reactor import Reactor, Timer

StreamName: TypeAlias = Literal["stdout", "stderr"]
Deliver: TypeAlias = Callable[[StreamName, list[str], int, float], bool]
"""Takes a stream's name, some lines, how many were dropped before them, and for how many seconds nothing was read
because too much had come; False when it can't take them.
"""

RATE_BYTES_PER_S = 1024 * 1024
BURST_BYTES = 8 * 1024 * 1024
LINE_BYTES = 64 * 1024
BATCH_BYTES = 64 * 1024

_READ_BYTES = 64 * 1024
_TELL_S = 1.0  # slowed for so long, it is told; then for twice as long, and so on
_PIPE_BYTES = 64 * 1024  # what a pipe holds: more than this at a boundary was written after it
_MAX_PIPE_BYTES = 1024 * 1024  # what a pipe can be made to hold


class LineSplitter:
    """Bytes → lines, without their ends. A line over `LINE_BYTES` becomes several."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """Take bytes in; return the lines that are now complete."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        texts = [text for line in lines for text in _cut(line)]
        while len(self._rest) >= LINE_BYTES:
            texts.append(_text(self._rest[:LINE_BYTES]))
            self._rest = self._rest[LINE_BYTES:]
        return texts

    def flush(self) -> list[str]:
        """Return what has no end of line yet."""
        rest, self._rest = self._rest, b""
        return [_text(rest)] if rest else []


def _cut(line: bytes) -> Iterator[str]:
    for start in range(0, max(len(line), 1), LINE_BYTES):
        yield _text(line[start : start + LINE_BYTES])


def _text(line: bytes) -> str:
    return line.removesuffix(b"\r").decode("utf-8", "replace")


def batches(lines: list[str]) -> Iterator[list[str]]:
    """Group lines into lists of at most `BATCH_BYTES` characters; a longer line stands alone."""
    batch: list[str] = []
    size = 0
    for line in lines:
        if batch and size + len(line) > BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(line)
        size += len(line)
    if batch:
        yield batch


class Allowance:
    """A token bucket: bytes that may be read now. It may go into debt, which is paid before more is read."""

    def __init__(self, now: float) -> None:
        self._left = float(BURST_BYTES)
        self._at = now

    def spend(self, size: int, now: float) -> float:
        """Take ``size`` bytes; return the seconds to wait before the next read, 0 for none."""
        self._left = min(BURST_BYTES, self._left + (now - self._at) * RATE_BYTES_PER_S) - size
        self._at = now
        return 0.0 if self._left >= 0 else (_READ_BYTES - self._left) / RATE_BYTES_PER_S


class WorkerOutput:
    """Drains one worker's stdout and stderr and delivers lines.

    Args:
        reactor: The loop.
        stdout: Read end of the pipe, ours to close.
        stderr: The same.
        deliver: Takes lines.
    """

    def __init__(self, reactor: Reactor, stdout: int, stderr: int, deliver: Deliver) -> None:
        self._reactor = reactor
        self._deliver = deliver
        self._names: dict[int, StreamName] = {stdout: "stdout", stderr: "stderr"}
        self._splitters = {stdout: LineSplitter(), stderr: LineSplitter()}
        self._dropped: dict[StreamName, int] = {"stdout": 0, "stderr": 0}
        self._allowance = Allowance(clock.monotonic())
        self._resume: Timer | None = None
        self._slowed_s = 0.0
        self._tell_s = _TELL_S
        self._unfinished = False
        self._poll = select.poll()
        for fd in self._names:
            os.set_blocking(fd, False)
            own(fd)
            self._poll.register(fd, select.POLLIN)
            self._watch(fd)

    def _watch(self, fd: int) -> None:
        self._reactor.watch_read(fd, lambda: self._readable(fd))

    def _readable(self, fd: int) -> None:
        if self._read(fd) == 0:
            self._close(fd)

    def _read(self, fd: int) -> int | None:
        """Read once; return the size, 0 at the end, None when there is nothing now."""
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return None
        if data:
            self._unfinished = True
            self._hand_over(self._names[fd], self._splitters[fd].feed(data))
            wait_s = self._allowance.spend(len(data), clock.monotonic())
            if wait_s > 0:
                self._pause(wait_s)
        return len(data)

    def _drain(self, fd: int, limit_bytes: int) -> None:
        """Read until nothing is there, or as much as was there at first: somebody may be writing on."""
        read = 0
        while read < limit_bytes:
            size = self._read(fd)
            if not size:
                return
            read += size

    def _pause(self, wait_s: float) -> None:
        for fd in self._names:
            self._reactor.unwatch_read(fd)
        if self._resume is not None:
            self._resume.cancel()
        self._resume = self._reactor.call_later(wait_s, self._resume_reading)
        self._slowed_s += wait_s
        if self._slowed_s >= self._tell_s:
            self._tell_slowed()
            self._tell_s *= 2

    def _tell_slowed(self) -> None:
        if self._slowed_s and self._deliver("stdout", [], self._dropped["stdout"], self._slowed_s):
            self._slowed_s = 0.0
            self._dropped["stdout"] = 0

    def _resume_reading(self) -> None:
        self._resume = None
        for fd in self._names:
            self._watch(fd)

    def _hand_over(self, name: StreamName, lines: list[str]) -> None:
        for batch in batches(lines):
            if self._deliver(name, batch, self._dropped[name], 0.0):
                self._dropped[name] = 0
            else:
                self._dropped[name] += len(batch)

    def boundary(self) -> None:
        """Deliver what was written so far, partial last lines too: a task begins or ends here.

        Called for every task, so the common case, nothing written, is one system call.
        """
        for fd, _ in self._poll.poll(0):
            self._drain(fd, _PIPE_BYTES)
        if self._unfinished:
            self._unfinished = False
            self._tell_slowed()
            self._tell_s = _TELL_S
            for fd, name in self._names.items():
                self._hand_over(name, self._splitters[fd].flush())

    def end(self) -> None:
        """Deliver the rest of a dead worker's output, whose descendants are dead too, and close."""
        for fd in list(self._names):
            self._drain(fd, _MAX_PIPE_BYTES)
            self._close(fd)
        self._tell_slowed()
        if self._resume is not None:
            self._resume.cancel()

    def _close(self, fd: int) -> None:
        """Close one pipe; harmless when it is closed."""
        name = self._names.pop(fd, None)
        if name is None:
            return
        self._hand_over(name, self._splitters.pop(fd).flush())
        if self._dropped[name]:
            self._deliver(name, [], self._dropped[name], 0.0)
        self._poll.unregister(fd)
        self._reactor.unwatch_read(fd)
        close_own(fd)
