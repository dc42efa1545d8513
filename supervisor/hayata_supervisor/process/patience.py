"""Time limits for others, which count only while we listen.

A process that was stopped, frozen with its container, or starved finds its timers late when it goes on; those
that it waits for were in the same plight, or have spoken long ago and were not heard. So a limit that is found
late begins anew. (`hayata_supervisor.process.vigil` has the same rule for whoever is asked if it lives.)
"""

from __future__ import annotations

from hayata_supervisor.process import clock
from hayata_supervisor.process.reactor import Callback, Reactor, Timer

LATE_S = 1.0
"""A timer that is so late says that we were not there."""


class PatientTimer:
    """Calls once, ``delay_s`` seconds from now, or later if we were not there; `cancel` makes it never happen."""

    def __init__(self, reactor: Reactor, delay_s: float, callback: Callback) -> None:
        self._reactor = reactor
        self._delay_s = delay_s
        self._callback = callback
        self._timer: Timer
        self._begin()

    def _begin(self) -> None:
        self._timer = self._reactor.call_later(self._delay_s, self._fire)

    def _fire(self) -> None:
        if clock.monotonic() - self._timer.due > LATE_S:
            self._begin()
        else:
            self._callback()

    def cancel(self) -> None:
        """Forget the call. Harmless when it has happened."""
        self._timer.cancel()
