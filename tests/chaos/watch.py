"""Looks for processes that should be dead: one second after a kill nothing of a dead incarnation may live."""

from __future__ import annotations

from collections.abc import Collection

from tests.chaos.plan import ROLES
from tests.chaos.processes import SUPERVISOR, Process, Snapshot

GONE_S = 1.0
_MOST_COUNTED_S = 0.25
"""Of the time between two looks: on a machine so busy that we are not woken up, the runtime isn't, either."""

_Key = tuple[int, int]


class Watch:
    """Ages those that are misplaced, and counts restarts.

    Attributes:
        overdue: What was misplaced for longer than `GONE_S`.
        longest_s: The longest that anything was.
    """

    def __init__(self, agents: Collection[str]) -> None:
        self._agents = agents
        self._ages: dict[_Key, float] = {}
        self._seen: dict[str, set[_Key]] = {role: set() for role in ROLES}
        self._told: set[_Key] = set()
        self._at_first: dict[str, int] | None = None
        self.overdue: list[str] = []
        self.longest_s = 0.0

    @property
    def restarts(self) -> dict[str, int]:
        """Role → how many processes were started since the first look."""
        first = self._at_first or {}
        return {role: len(seen) - first.get(role, 0) for role, seen in self._seen.items()}

    def look(self, snapshot: Snapshot, passed_s: float, *, held: bool) -> None:
        """Take a look.

        Args:
            snapshot: Who is there.
            passed_s: Seconds since the last look.
            held: Whether somebody who has to bury is stopped: then nothing ages.
        """
        for role, seen in self._seen.items():
            seen.update(map(_key, snapshot.of_role(role, self._agents)))
        if self._at_first is None:
            self._at_first = {role: len(seen) for role, seen in self._seen.items()}
        counted_s = 0.0 if held else min(passed_s, _MOST_COUNTED_S)
        serves = any(child.name == SUPERVISOR for child in snapshot.children(snapshot.guard))
        ages: dict[_Key, float] = {}
        for process, what in snapshot.misplaced():
            key = _key(process)
            known = self._ages.get(key)
            # What a task has started is found by the next start, if guard and supervisor have died together.
            ages_now = serves or process.is_worker or process.name == SUPERVISOR
            ages[key] = 0.0 if known is None else known + (counted_s if ages_now else 0.0)
            self.longest_s = max(self.longest_s, ages[key])
            if ages[key] > GONE_S and key not in self._told:
                self._told.add(key)
                self.overdue.append(f"{process} for {ages[key]:.2f} s: {what}")
        self._ages = ages


def _key(process: Process) -> _Key:
    return process.pid, process.started
