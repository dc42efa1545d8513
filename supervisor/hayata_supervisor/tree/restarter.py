"""When a forkserver is started again: backoff and rest of `core.restart`, with a clock, dice and a timer.

It is never given up for good, and has no siblings; for workers there is `core.supervision`.
"""

from __future__ import annotations

from collections.abc import Callable

from hayata_supervisor.core.restart import RestartWindow, add_restart, rest_s, restart_delay_s
from hayata_supervisor.process import clock
from hayata_supervisor.process.reactor import Callback, Reactor, Timer

_PERIOD_S = 60.0
_BACKOFF_S = 0.2
_MAX_BACKOFF_S = 5.0
_COUNTED = 64
"""The pause has long been at its longest then."""

LONGEST_REST = 10
"""Longest rest of what was given up, in first rests."""


class Restarter:
    """Starts one thing again, with a pause that grows with the number of times in the last minute.

    Args:
        reactor: The loop.
        first_rest_s: The first rest.
        jitter: Gives random numbers in [0, 1).
        start: Starts it.

    Attributes:
        restarts: How often it was started again.
    """

    def __init__(self, reactor: Reactor, first_rest_s: float, jitter: Callable[[], float], start: Callback) -> None:
        self.restarts = 0
        self._reactor = reactor
        self._first_rest_s = first_rest_s
        self._rest_s: float | None = None
        self._jitter = jitter
        self._start = start
        self._window = RestartWindow()
        self._timer: Timer | None = None

    def count(self) -> None:
        """Count a failure."""
        now = clock.monotonic()
        self._window, _ = add_restart(self._window, now, period_s=_PERIOD_S, intensity=_COUNTED)

    def restart(self) -> None:
        """Start it again, with the pause that the counted failures call for."""
        delay_s = restart_delay_s(
            len(self._window.restarts), backoff_s=_BACKOFF_S, max_backoff_s=_MAX_BACKOFF_S, jitter=self._jitter()
        )
        self._restart_in(delay_s)

    def rest(self) -> float:
        """Start it again after a rest, which is twice as long as the last one; returns its length in seconds."""
        longest_s = LONGEST_REST * self._first_rest_s
        self._rest_s = rest_s(self._rest_s, 0.0, first_s=self._first_rest_s, longest_s=longest_s, period_s=_PERIOD_S)
        self._restart_in(self._rest_s)
        return self._rest_s

    def healed(self) -> None:
        """It is well: its next rest is as short as the first."""
        self._rest_s = None

    def _restart_in(self, delay_s: float) -> None:
        self.restarts += 1
        self._timer = self._reactor.call_later(delay_s, self._start)

    def cancel(self) -> None:
        """Forget a start that is due."""
        if self._timer is not None:
            self._timer.cancel()
