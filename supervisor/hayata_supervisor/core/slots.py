"""A node's slots: how many of its tasks may run at once, and who waits, first come first served."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from hayata.messages import ErrorInfo, NodeManifest


class Claim(NamedTuple):
    """A task that wants a slot."""

    invocation: bytes
    step: int
    attempt: int


class Slots:
    """See the module. ``busy`` counts executions whose end has not been confirmed, wanted or not: a slot is free only
    when its process has nothing to do any more."""

    def __init__(self, manifest: NodeManifest) -> None:
        self.manifest = manifest
        self.busy = 0
        self.waiting: deque[Claim] = deque()
        self.unavailable: ErrorInfo | None = None

    @property
    def free(self) -> bool:
        """Whether a task could run now."""
        return self.unavailable is None and self.busy < self.manifest.concurrency

    def reserve(self) -> bool:
        """Take a slot if one is free and nobody waits for it."""
        if not self.free or self.waiting:
            return False
        self.busy += 1
        return True

    def next_claim(self) -> Claim | None:
        """Take a slot for the first who waits; None when there is nobody or no slot."""
        if not self.waiting or not self.free:
            return None
        self.busy += 1
        return self.waiting.popleft()

    def release(self) -> None:
        """Give a slot back."""
        self.busy -= 1
