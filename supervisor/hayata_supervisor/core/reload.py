"""When the apps' code is loaded anew, and who hears of it: one reload at a time, and one generation that drains.

    starting ──opened──▶ idle ──asked──▶ loading ──all imported──▶ draining ──drained──▶ idle
                           ▲                └──────refused───────────▲ (nothing drains: at once)
    any ──closed──▶ closed

Whoever asks in another state than idle is answered by one more reload, for all of them together, when it is idle
again: the files may have changed after the reload under way has read them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, Literal, NamedTuple, TypeAlias, TypeVar

from hayata.messages import ErrorInfo

A = TypeVar("A")

State: TypeAlias = Literal["starting", "idle", "loading", "draining", "closed"]


class Begin(NamedTuple):
    """Import each app once more, as this generation; then say `Reloads.begun`."""

    generation: int


class Switch(NamedTuple):
    """All are imported: have the new generation take over. `Reloads.switched` or `refused` follows."""


class Abandon(NamedTuple):
    """End what the new generation has so far."""


class Answer(NamedTuple):
    """Tell these, who may be none, what came of it; None: the new generation serves."""

    askers: list[object]
    error: ErrorInfo | None


class Rest(NamedTuple):
    """Nothing more was asked for."""


Step: TypeAlias = Begin | Switch | Abandon | Answer | Rest


class Reloads(Generic[A]):
    """See the module. Methods return what is to be done, in order.

    Attributes:
        generation: Of the code that serves, from 1 on.
    """

    def __init__(self) -> None:
        self.state: State = "starting"
        self.generation = 1
        self._left: set[int] = set()
        self._askers: list[A] = []
        self._next: list[A] = []

    def ask(self, asker: A) -> list[Step]:
        """Somebody wants the code as it is on the disk now. `closed` must not be asked."""
        self._next.append(asker)
        return self._begin()

    def opened(self) -> list[Step]:
        """The first generation is there."""
        if self.state != "starting":
            return []
        self.state = "idle"
        return self._begin()

    def begun(self, apps: Iterable[int]) -> list[Step]:
        """These are being imported."""
        self._left = set(apps)
        return self._all_imported()

    def imported(self, app: int) -> list[Step]:
        """One is, or is not wanted any more."""
        if self.state != "loading" or app not in self._left:
            return []
        self._left.discard(app)
        return self._all_imported()

    def switched(self) -> list[Step]:
        """The new generation has taken over; the old one drains until `drained`."""
        if self.state != "loading":
            return []
        self.generation += 1
        return self._over(None)

    def refused(self, error: ErrorInfo) -> list[Step]:
        """One can't be imported, or they don't fit together: all of them stay as they were."""
        if self.state != "loading":
            return []
        return [Abandon(), *self._over(error)]

    def replaced(self) -> int:
        """An app's forkserver came back with other code, so its workers are replaced; returns the generation."""
        self.generation += 1
        if self.state == "idle":
            self.state = "draining"
        return self.generation

    def drained(self) -> list[Step]:
        """Nothing of an older generation works any more."""
        if self.state != "draining":
            return []
        self.state = "idle"
        return self._begin()

    def close(self, error: ErrorInfo) -> list[Step]:
        """The runtime ends: nobody reloads any more."""
        loading, self.state = self.state == "loading", "closed"
        askers, self._askers, self._next = [*self._askers, *self._next], [], []
        return [*([Abandon()] if loading else []), Answer([*askers], error)]

    def _begin(self) -> list[Step]:
        if self.state != "idle" or not self._next:
            return []
        self.state = "loading"
        self._askers, self._next = self._next, []
        return [Begin(self.generation + 1)]

    def _all_imported(self) -> list[Step]:
        return [] if self._left else [Switch()]

    def _over(self, error: ErrorInfo | None) -> list[Step]:
        self.state = "draining"
        askers, self._askers = self._askers, []
        return [Answer([*askers], error), *([] if self._next else [Rest()])]
