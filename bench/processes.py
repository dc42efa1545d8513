"""The tree of a running Hayata as a benchmark sees it: who is in it, and when its processes are dead."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Protocol, Self


class Process(Protocol):
    """What ``runtime.tree()`` returns, as far as it is used here."""

    @property
    def role(self) -> str:
        """Of guard, supervisor, forkserver, agent, node, edge."""

    @property
    def name(self) -> str:
        """Of the agent, node or edge."""

    @property
    def pid(self) -> int:
        """Its process id."""

    @property
    def children(self) -> Sequence[Process]:
        """The processes below."""


def walk(process: Process) -> Iterator[Process]:
    """Yield ``process`` and all below it, from the top down."""
    yield process
    for child in process.children:
        yield from walk(child)


def with_role(root: Process, role: str) -> list[Process]:
    """All processes of one role."""
    return [process for process in walk(root) if process.role == role]


class Deaths:
    """Watches processes from before they are killed, by pidfd, in a thread of its own.

    Use as a context manager around the kill; ``last_s`` is then the monotonic time of the last death.
    """

    def __init__(self, pids: Iterable[int], timeout_s: float = 30.0) -> None:
        self._timeout_s = timeout_s
        self._stack = ExitStack()
        self._poll = select.poll()
        self._pending: set[int] = set()
        for pid in pids:
            fd = os.pidfd_open(pid)
            self._stack.callback(os.close, fd)
            self._poll.register(fd, select.POLLIN)
            self._pending.add(fd)
        if not self._pending:
            raise SystemExit("bench: there is no process whose death could be watched")
        self._thread = threading.Thread(target=self._watch, name="deaths")
        self._times_s: list[float] = []

    def __enter__(self) -> Self:
        """Begin to watch."""
        self._thread.start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _tb: TracebackType | None
    ) -> None:
        """Wait until all are dead or the time is over."""
        self._thread.join()
        self._stack.close()

    @property
    def last_s(self) -> float:
        """When the last one died.

        Raises:
            SystemExit: One of them lives.
        """
        if self._pending:
            raise SystemExit(f"bench: {len(self._pending)} processes are alive {self._timeout_s:.0f} s after the kill")
        return max(self._times_s)

    @property
    def all_s(self) -> list[float]:
        """When each one died, in the order of the deaths."""
        return self._times_s

    def _watch(self) -> None:
        deadline_s = time.monotonic() + self._timeout_s
        while self._pending and (left_s := deadline_s - time.monotonic()) > 0:
            for fd, _events in self._poll.poll(left_s * 1e3):
                self._poll.unregister(fd)
                self._pending.discard(fd)
                self._times_s.append(time.monotonic())


def wait_for_tree(tree: Callable[[], Process], wanted: Callable[[Process], bool], timeout_s: float) -> Process:
    """Ask for the tree until it is as ``wanted``.

    Raises:
        SystemExit: It is not within ``timeout_s``.
    """
    deadline_s = time.monotonic() + timeout_s
    while not wanted(root := tree()):
        if time.monotonic() > deadline_s:
            raise SystemExit(f"bench: the tree was not as expected after {timeout_s:.0f} s: {root}")
        time.sleep(0.001)
    return root
