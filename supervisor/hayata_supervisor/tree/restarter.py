"""When a worker is started again: the shell of `core.restart`, with a clock, dice and a timer."""

from __future__ import annotations

from collections.abc import Callable

from hayata.messages import SupervisionManifest
from hayata_supervisor.core.restart import RestartWindow, add_restart, rest_s, restart_delay_s
from hayata_supervisor.process import clock
from hayata_supervisor.process.reactor import Callback, Reactor, Timer

_LONGEST_REST = 10
"""Longest rest of a given-up worker, in first rests."""


class Restarter:
    """Decides when one worker is started again, and does it.

    Args:
        reactor: The loop.
        supervision: Intensity, period and backoff. May be exchanged.
        first_rest_s: How long the worker rests after it was first given up.
        jitter: Gives random numbers in [0, 1).
        start: Starts the worker.

    Attributes:
        restarts: How often it was started again.
        given_up: Whether it rests, or is being tried again and is not up yet.
    """

    def __init__(
        self,
        reactor: Reactor,
        supervision: SupervisionManifest,
        first_rest_s: float,
        jitter: Callable[[], float],
        start: Callback,
    ) -> None:
        self.supervision = supervision
        self.restarts = 0
        self.given_up = False
        self._reactor = reactor
        self._first_rest_s = first_rest_s
        self._jitter = jitter
        self._start = start
        self._window = RestartWindow()
        self._rest_s: float | None = None
        self._back_at = 0.0
        self._timer: Timer | None = None

    def count(self) -> bool:
        """Count a failure; say whether the caller must `give_up`.

        That is when the intensity is exceeded, or when the failure ends the one try that a given-up worker
        gets.
        """
        self._window, exceeded = add_restart(
            self._window,
            clock.monotonic(),
            period_s=self.supervision.period_s,
            intensity=self.supervision.intensity,
        )
        return exceeded or self.given_up

    def restart(self) -> None:
        """Start the worker again, with the pause that the counted failures call for."""
        delay_s = restart_delay_s(
            len(self._window.restarts),
            backoff_s=self.supervision.backoff_s,
            max_backoff_s=self.supervision.max_backoff_s,
            jitter=self._jitter(),
        )
        self._restart_in(delay_s)

    def restart_now(self) -> None:
        """Start the worker again at once: its death was not its own fault."""
        self._restart_in(0.0)

    def give_up(self) -> None:
        """Let the worker rest, and try it again afterwards with a clean slate."""
        now = clock.monotonic()
        self._rest_s = rest_s(
            self._rest_s,
            0.0 if self.given_up else now - self._back_at,
            first_s=self._first_rest_s,
            longest_s=_LONGEST_REST * self._first_rest_s,
            period_s=self.supervision.period_s,
        )
        self.given_up = True
        self._window = RestartWindow()
        self._restart_in(self._rest_s)

    def came_up(self) -> bool:
        """The worker is up; say whether it had been given up."""
        back, self.given_up = self.given_up, False
        if back:
            self._back_at = clock.monotonic()
        return back

    def cancel(self) -> None:
        """Forget a start that is due."""
        if self._timer is not None:
            self._timer.cancel()

    def _restart_in(self, delay_s: float) -> None:
        self.restarts += 1
        self._timer = self._reactor.call_later(delay_s, self._start)
