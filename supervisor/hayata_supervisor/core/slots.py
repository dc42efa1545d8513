"""A node's slots: how many of its tasks run at once, how many more are marked ahead, and who waits, in order.

A task is handed to a worker only when its mark is durable. Where tasks are shorter than a commit, a worker would wait
for disk between any two of them; so for such a node a few more tasks than it can run are marked, and one of them is
handed out the moment a worker is free. If the supervisor is lost, the start notes (`core.cells`) prove that those
never began. For a node whose tasks take longer nothing is marked ahead: what is shown as running runs.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from hayata.messages import ErrorInfo, NodeManifest

_QUICK_S = 0.01
_MOST_AHEAD = 32
_WEIGHT = 0.1


class Claim(NamedTuple):
    """A task that wants to be marked."""

    invocation: bytes
    step: int
    attempt: int
    edge: int = -1


class Slots:
    """See the module.

    Attributes:
        marked: Executions that are marked and whose end has not been confirmed, wanted or not.
        active: Those of them that were handed to the node.
        ready: Execution ids that are durably marked and wait to be handed out.
        unavailable: Why nothing can be handed out.
        stopped: It is not even tried again by itself.
    """

    def __init__(self, manifest: NodeManifest) -> None:
        self.manifest = manifest
        self.marked = 0
        self.active = 0
        self.waiting: deque[Claim] = deque()
        self.ready: deque[str] = deque()
        self.unavailable: ErrorInfo | None = None
        self.stopped = False
        self._mean_s = 1.0

    def mark(self) -> bool:
        """Allow one more mark, unless somebody else waits for it."""
        if self.waiting or not self._may_mark():
            return False
        self.marked += 1
        return True

    def next_claim(self) -> Claim | None:
        """Allow the first who waits to be marked; None when there is nobody, or no room."""
        if not self.waiting or not self._may_mark():
            return None
        self.marked += 1
        return self.waiting.popleft()

    def _may_mark(self) -> bool:
        concurrency = self.manifest.concurrency
        ahead = min(2 * concurrency, _MOST_AHEAD) if self._mean_s < _QUICK_S else 0
        return self.unavailable is None and self.marked < concurrency + ahead

    def unmark(self) -> None:
        """A marked execution that was never handed out is over."""
        self.marked -= 1

    def hand_out(self) -> bool:
        """Take a slot, if one is free."""
        if self.active >= self.manifest.concurrency:
            return False
        self.active += 1
        return True

    def probe(self, name: str) -> None:
        """Line up the probe of an execution that is durably marked already. It waits for a slot, not for a mark: what
        was cut off comes before what is new.
        """
        self.marked += 1
        self.ready.append(name)

    def took(self, seconds: float | None) -> None:
        """An execution that was handed out is over; ``seconds``: from there to its report, None for a probe."""
        self.marked -= 1
        self.active -= 1
        if seconds is not None:
            self._mean_s += _WEIGHT * (seconds - self._mean_s)
