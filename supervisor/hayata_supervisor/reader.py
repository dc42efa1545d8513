"""Reads of the store, on a thread of their own: a page that isn't in memory must not hold up the loop."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeVar

from hayata_supervisor.process.reactor import Reactor

T = TypeVar("T")


class Reader:
    """Runs queries one after the other and hands the answers to the loop."""

    def __init__(self, reactor: Reactor) -> None:
        self._reactor = reactor
        self._queries: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="store-reader", daemon=True)
        self._thread.start()

    def ask(self, query: Callable[[], T], answered: Callable[[T], None], failed: Callable[[Exception], None]) -> None:
        """Run ``query`` on the thread; then call one of the others on the loop."""

        def work() -> None:
            try:
                found = query()
            except Exception as error:  # noqa: BLE001 - it is the asker's, who is on the other thread
                caught = error
                self._reactor.call_from_thread(lambda: failed(caught))
            else:
                self._reactor.call_from_thread(lambda: answered(found))

        self._queries.put(work)

    def _run(self) -> None:
        while True:
            work = self._queries.get()
            if work is None:
                return
            work()

    def close(self) -> None:
        """End the thread after the queries that were asked."""
        self._queries.put(None)
        self._thread.join()
