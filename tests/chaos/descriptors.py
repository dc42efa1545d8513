"""Descriptors of guard, supervisor and nodes: as many at the end as at the beginning."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator
from contextlib import suppress

from tests.chaos.faults import Faults
from tests.chaos.processes import Process, Snapshot, list_descriptors

_SLACK = 2
_DEADLINE_S = 20.0
_LOOK_S = 0.2

_Counts = dict[tuple[str, str], tuple[int, int]]
"""(role, name) → how many there are, and the pid of the process that has most."""


class Descriptors:
    """Counts them while nothing is going on."""

    def __init__(self, faults: Faults, agents: Collection[str]) -> None:
        self._faults = faults
        self._agents = agents
        self._before: _Counts = {}

    def before(self) -> None:
        """Count, before the load."""
        self._before = self._quiet()

    def after(self) -> Iterator[str]:
        """Count again when the load is over; tell what has grown."""
        due = time.monotonic() + _DEADLINE_S
        while (grown := self._grown(self._quiet())) and time.monotonic() < due:
            continue
        yield from grown

    def _quiet(self) -> _Counts:
        """Count when it is the same in two looks."""
        due = time.monotonic() + _DEADLINE_S
        counts: _Counts = {}
        while time.monotonic() < due:
            before, counts = counts, self._count(self._faults.look())
            if counts and counts == before:
                break
            time.sleep(_LOOK_S)
        return counts

    def _count(self, snapshot: Snapshot) -> _Counts:
        counts: _Counts = {}
        for role in ("guard", "supervisor", "node"):
            for process in snapshot.of_role(role, self._agents):
                used = len(list_descriptors(process.pid))
                if used:
                    # Several nodes may have one name: the greatest counts.
                    key = (role, process.name)
                    count = used - _for_edges(snapshot, role, process)
                    counts[key] = max(counts.get(key, (0, 0)), (count, process.pid))
        return counts

    def _grown(self, counts: _Counts) -> list[str]:
        return [
            f"{role} {name} ({pid}) had {self._before[role, name][0]} descriptors beside its edges', "
            f"and has {count}: {what_is_open(pid)}"
            for (role, name), (count, pid) in counts.items()
            if count > self._before.get((role, name), (count, 0))[0] + _SLACK
        ]


def what_is_open(pid: int) -> dict[int, str]:
    """The descriptors of a process: number → what it is."""
    found = {}
    for name in list_descriptors(pid):
        with suppress(OSError):
            found[int(name)] = os.readlink(f"/proc/{pid}/fd/{name}")
    return dict(sorted(found.items()))


def _for_edges(snapshot: Snapshot, role: str, process: Process) -> int:
    """What is open because of edges."""
    if role == "node":
        return 4 * len(snapshot.children(process.pid))  # of each its pidfd, stream, stdout and stderr
    if role == "supervisor":
        # Their pidfds, and another one of each node that has some, for the watcher.
        edges = [len(snapshot.children(worker.pid)) for worker in snapshot.children(process.pid)]
        return sum(count + 1 for count in edges if count)
    return 0
