"""Which points there are, found by tracing runs without a fault; and what is tried at them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from tests.matrix.host import Host
from tests.matrix.trial import Trial, undisturbed

ACTIONS = ("kill", "error", "raise", "orphan", "delay")
_DELAY = "delay(0.3)"
_DELAYS_A_TRIAL = 10
_OFTEN = 4
"""A point that a process comes by so often is struck in the middle, too."""

_WORKERS = {
    "edge": "edge",
    "reducer": "edge",
    "node": "node",
    "agent": "agent",
    "forkserver": "forkserver",
    "middle": "forkserver",
}

NOT_REACHED = {
    "store.before_grow": "the map is full only after 64 GiB: tests/crash/test_store_growth.py",
    "store.after_grow": "the same",
    "store.before_lengthen": "LMDB left pages unwritten: tests/conformance/test_store.py",
    "store.after_lengthen": "the same",
    "store.before_remove": "nothing is old enough: tests/crash/test_store_prune.py",
    "store.after_remove": "the same",
    "maintenance.before_rename": "no backup is made: tests/crash/test_store_backup.py",
    "maintenance.after_rename": "the same",
    "maintenance.before_replace": "nothing is pruned: tests/crash/test_store_backup.py",
    "maintenance.after_replace": "the same",
    "middle.before_send_errno": "the second fork is refused: tests/crash/test_workers.py",
    "middle.after_send_errno": "the same",
    "supervisor.before_send_fatal": "the store can't be opened: tests/crash/test_guard_start.py",
    "supervisor.after_send_fatal": "the same",
}
"""Points that the source names and the scenario does not come by, and why."""


class Point(NamedTuple):
    """One failpoint.

    Attributes:
        name: Its name.
        hits: How often the process that came by most often did.
        fresh: Only a start in an empty directory comes by.
    """

    name: str
    hits: int
    fresh: bool

    @property
    def place(self) -> str:
        """What stands before the dot."""
        return self.name.partition(".")[0]


def find_points(template: Path) -> list[Point]:
    """Trace a run that begins with what a killed daemon has left, and one in an empty directory.

    Raises:
        AssertionError: Something is violated without any fault.
    """
    usual, fresh = _trace(template), _trace(None)
    points = [Point(name, hits, False) for name, hits in usual.items()]
    points += [Point(name, hits, True) for name, hits in fresh.items() if name not in usual]
    return sorted(points)


def _trace(template: Path | None) -> Mapping[str, int]:
    host = Host(template=template)
    path = host.home / "trace"
    host.armed = f"*=trace({path})"
    try:
        violations = undisturbed(host)
        assert not violations, violations
        hits: dict[str, Counter[str]] = defaultdict(Counter)
        for line in path.read_text().splitlines():
            pid, name = line.split()
            hits[name][pid] += 1
        return {name: max(counts.values()) for name, counts in hits.items()}
    finally:
        host.destroy(keep=False)


def cases(points: Iterable[Point], action: str) -> list[tuple[Point, str]]:
    """Each point with what arms it."""
    found = []
    for point in points:
        if not _applies(point, action):
            continue
        middle = point.hits // 2 if point.hits >= _OFTEN else 1
        numbers = {1, middle} if action in ("kill", "delay") else {middle}
        done = _DELAY if action == "delay" else action
        found += [(point, f"{point.name}={done}@{number}") for number in sorted(numbers)]
    return found


def _applies(point: Point, action: str) -> bool:
    if action == "orphan":
        return point.place != "guard"  # its parent are we
    if action == "error":
        return not point.name.endswith((".after_fork", ".after_spawn"))  # nothing can go wrong there any more
    # Elsewhere an error is an exception, too.
    return action != "raise" or "_send_" in point.name or "_receive_" in point.name


def trials(points: Iterable[Point], action: str) -> Iterator[Trial]:
    """Trials that hold all cases of the action, several in one where they are in each other's way the least.

    Of the workers each trial hurts one of each role. Of the supervisor's points two are in one trial, so that
    the second one strikes while, or after, it recovers from the first. The guard's are tried one by one.
    """
    armed = cases(points, action)
    yield from (Trial((each,), fresh=True) for point, each in armed if point.fresh)
    usual = [(point, each) for point, each in armed if not point.fresh]
    if action == "delay":
        texts = [each for _, each in usual]
        count = -(-len(texts) // _DELAYS_A_TRIAL)
        yield from (Trial(tuple(texts[number::count])) for number in range(count))
        return
    groups: dict[str, list[str]] = defaultdict(list)
    for point, each in usual:
        groups[_WORKERS.get(point.place, "guard" if point.place == "guard" else "supervisor")].append(each)
    yield from (Trial((each,)) for each in groups.pop("guard", ()))
    above = groups.pop("supervisor", [])
    half = -(-len(above) // 2)
    yield from (Trial(_those(pair)) for pair in zip_longest(above[:half], above[half:]))
    yield from (Trial(_those(row)) for row in zip_longest(*groups.values()))


def _those(row: Iterable[str | None]) -> tuple[str, ...]:
    return tuple(each for each in row if each is not None)
