"""What is due when: a heap of (monotonic time, what)."""

from __future__ import annotations

import heapq
import itertools
from typing import NamedTuple

from hayata_supervisor.core.slots import Claim


class Due(NamedTuple):
    """One entry. ``what``: the retry that is due; the step whose edges have had their time; None: the invocation's
    timeout.
    """

    mono_s: float
    order: int
    invocation: bytes
    what: Claim | int | None


class Timers:
    """Entries are never cancelled: who takes one looks whether it still means something."""

    def __init__(self) -> None:
        self._heap: list[Due] = []
        self._order = itertools.count()

    def arm(self, mono_s: float, invocation: bytes, what: Claim | int | None = None) -> None:
        """Have something due at ``mono_s``."""
        heapq.heappush(self._heap, Due(mono_s, next(self._order), invocation, what))

    def next_due(self) -> float | None:
        """When the next is due; None: never."""
        return self._heap[0].mono_s if self._heap else None

    def take(self, mono_s: float) -> Due | None:
        """Take one that is due at ``mono_s``."""
        return heapq.heappop(self._heap) if self._heap and self._heap[0].mono_s <= mono_s else None
