"""Work that may wait for the disk, done beside the loop: by a thread with a queue or, inline, at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol, TypeVar

from hayata_supervisor.process.reactor import Reactor

T = TypeVar("T")


class Background(Protocol):
    """Does one piece of work after the other."""

    def submit(self, work: Callable[[], T], done: Callable[[T], None], failed: Callable[[BaseException], None]) -> None:
        """Do ``work``; then call one of the others in the loop's thread, never from within this call."""

    def close(self) -> None:
        """End after what was submitted."""


class BackgroundThread:
    """A `Background` with a thread of its own."""

    def __init__(self, reactor: Reactor, name: str) -> None:
        self._reactor = reactor
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], T], done: Callable[[T], None], failed: Callable[[BaseException], None]) -> None:
        """See `Background`."""
        self._queue.put(lambda: _do(work, done, failed, self._reactor.call_from_thread))

    def _run(self) -> None:
        while True:
            work = self._queue.get()
            if work is None:
                return
            work()

    def close(self) -> None:
        """See `Background`."""
        self._queue.put(None)
        self._thread.join()


class Foreground:
    """A `Background` without a thread: it holds the loop up, which harms nobody when everything is one thread."""

    def __init__(self, reactor: Reactor) -> None:
        self._reactor = reactor

    def submit(self, work: Callable[[], T], done: Callable[[T], None], failed: Callable[[BaseException], None]) -> None:
        """See `Background`."""
        _do(work, done, failed, self._reactor.call_soon)

    def close(self) -> None:
        """See `Background`."""


def _do(
    work: Callable[[], T],
    done: Callable[[T], None],
    failed: Callable[[BaseException], None],
    call: Callable[[Callable[[], None]], None],
) -> None:
    try:
        found = work()
    except BaseException as error:  # noqa: BLE001 - whatever it is, the loop must hear of it and decide
        caught = error
        call(lambda: failed(caught))
    else:
        call(lambda: done(found))
