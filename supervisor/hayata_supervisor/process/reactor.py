"""A loop over file descriptors, timers and wake-ups from other threads: the heart of the guard, S, F and N.

It is small because its users need little and count microseconds: descriptors are level-triggered, callbacks run to
their end, and what was written during a turn is flushed once at the turn's end, so that many messages to one peer
leave in one system call. An exception that leaves a callback leaves `run`: the process dies loudly and is restarted.

`select.epoll` and `select.poll` are used as they are: `selectors` on top of them costs 4 µs a turn, and a step takes
seven turns.

Source: the reactor of "Reactor: an object behavioral pattern for demultiplexing" (Schmidt, 1995).
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import select
from collections import deque
from collections.abc import Callable

from hayata_supervisor.process import clock

Callback = Callable[[], None]

_READ, _WRITE = select.POLLIN, select.POLLOUT  # epoll's bits are the same
_MOST_EVENTS = 256
_MS = 1000.0


class Timer:
    """A call in the future; `cancel` makes it never happen."""

    __slots__ = ("callback", "due")

    def __init__(self, due: float, callback: Callback) -> None:
        self.due = due
        self.callback: Callback | None = callback

    def cancel(self) -> None:
        """Forget the call. Harmless when it has happened."""
        self.callback = None


class Reactor:
    """See the module.

    Args:
        forks: The process forks, so it gets no epoll object: that is shared by the fork, and a change that the child
            makes would reach the parent's.
    """

    def __init__(self, *, forks: bool = False) -> None:
        self._epoll = select.epoll() if not forks and hasattr(select, "epoll") else None
        self._poller = self._epoll or select.poll()
        self._masks: dict[int, int] = {}
        self._readers: dict[int, Callback] = {}
        self._writers: dict[int, Callback] = {}
        self._changed: set[int] = set()  # in this turn: what was seen of them is another's, or nobody's
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._soon: deque[Callback] = deque()
        self._turn_end: list[Callback] = []
        self._from_threads: deque[Callback] = deque()
        self._wake_fd, self._waker_fd = os.pipe()
        os.set_blocking(self._wake_fd, False)
        os.set_blocking(self._waker_fd, False)
        self._running = False
        self.watch_read(self._wake_fd, self._woken)

    # descriptors

    def watch_read(self, fd: int, callback: Callback) -> None:
        """Call ``callback`` whenever ``fd`` can be read. One reader for each descriptor."""
        self._ask_for(fd, self._masks.get(fd, 0) | _READ)
        self._readers[fd] = callback

    def watch_write(self, fd: int, callback: Callback) -> None:
        """Call ``callback`` whenever ``fd`` can be written, until `unwatch_write`."""
        self._ask_for(fd, self._masks.get(fd, 0) | _WRITE)
        self._writers[fd] = callback

    def unwatch_read(self, fd: int) -> None:
        """Stop reading ``fd``. Harmless when it isn't watched."""
        if self._readers.pop(fd, None) is not None:
            self._ask_for(fd, self._masks[fd] & ~_READ)

    def unwatch_write(self, fd: int) -> None:
        """Stop waiting to write ``fd``. Harmless when it isn't watched."""
        if self._writers.pop(fd, None) is not None:
            self._ask_for(fd, self._masks[fd] & ~_WRITE)

    def _ask_for(self, fd: int, mask: int) -> None:
        if mask and fd in self._masks:
            self._poller.modify(fd, mask)
        elif mask:
            self._poller.register(fd, mask)
        else:
            del self._masks[fd]
            with contextlib.suppress(OSError):  # closed already: the kernel has forgotten it
                self._poller.unregister(fd)
        if mask:
            self._masks[fd] = mask
        self._changed.add(fd)

    # calls

    def call_soon(self, callback: Callback) -> None:
        """Call in this turn, after what runs now."""
        self._soon.append(callback)

    def call_at(self, due: float, callback: Callback) -> Timer:
        """Call at ``due`` (monotonic seconds) or soon after."""
        timer = Timer(due, callback)
        heapq.heappush(self._timers, (due, next(self._order), timer))
        return timer

    def call_later(self, delay_s: float, callback: Callback) -> Timer:
        """Call in ``delay_s`` seconds."""
        return self.call_at(clock.monotonic() + delay_s, callback)

    def call_at_turn_end(self, callback: Callback) -> None:
        """Call once, when this turn's callbacks have run: the place to flush."""
        self._turn_end.append(callback)

    def call_from_thread(self, callback: Callback) -> None:
        """Call in the loop's thread. The one method that other threads may use."""
        self._from_threads.append(callback)
        try:
            os.write(self._waker_fd, b"!")
        except (BlockingIOError, OSError):
            # Full: it is readable anyway. Closed: the loop is gone, and nobody waits for this call.
            return

    def _woken(self) -> None:
        try:
            os.read(self._wake_fd, 4096)
        except BlockingIOError:
            return
        while self._from_threads:
            self._from_threads.popleft()()

    # the loop

    def run(self) -> None:
        """Turn until `stop`."""
        self._running = True
        while self._running:
            self.turn(None)

    def stop(self) -> None:
        """End `run` after this turn."""
        self._running = False

    def turn(self, timeout_s: float | None) -> None:
        """Wait for something to do, at most ``timeout_s`` seconds (None: as long as it takes), and do it."""
        self._changed.clear()
        for fd, seen in self._poll(self._wait(timeout_s)):  # an error or a hang-up is news for both
            if seen & ~_WRITE and fd not in self._changed and (callback := self._readers.get(fd)) is not None:
                callback()
            if seen & ~_READ and fd not in self._changed and (callback := self._writers.get(fd)) is not None:
                callback()
        self._run_due()
        while self._soon:
            self._soon.popleft()()
        while self._turn_end:
            callbacks, self._turn_end = self._turn_end, []
            for callback in callbacks:
                callback()

    def _poll(self, timeout_s: float | None) -> list[tuple[int, int]]:
        if self._epoll is not None:
            return self._epoll.poll(timeout_s, _MOST_EVENTS)
        return self._poller.poll(None if timeout_s is None else timeout_s * _MS)

    def _wait(self, timeout_s: float | None) -> float | None:
        if self._soon or self._turn_end or self._from_threads:
            return 0
        while self._timers and self._timers[0][2].callback is None:
            heapq.heappop(self._timers)
        if not self._timers:
            return timeout_s
        wait = max(0.0, self._timers[0][0] - clock.monotonic())
        return wait if timeout_s is None else min(wait, timeout_s)

    def _run_due(self) -> None:
        if not self._timers:
            return
        now = clock.monotonic()
        while self._timers and self._timers[0][0] <= now:
            timer = heapq.heappop(self._timers)[2]
            if timer.callback is not None:
                timer.callback()

    def close(self) -> None:
        """Give the loop's own descriptors back."""
        if self._epoll is not None:
            self._epoll.close()
        os.close(self._wake_fd)
        os.close(self._waker_fd)

    @property
    def descriptors(self) -> list[int]:
        """The loop's own descriptors, for a child that must close them after fork."""
        own = [self._wake_fd, self._waker_fd]
        return own if self._epoll is None else [*own, self._epoll.fileno()]
