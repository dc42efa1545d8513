"""A parent looks after its children: sees that one is stopped, and finds out whether one hangs.

The kernel tells of a stop by SIGCHLD, and `waitid` with WSTOPPED, asked for one child by its pidfd, says
whether it was that one; it reaps nothing. So children that are well cost nothing, but for those that are
asked whether they live: one small message each way every second or two.

Source: wait(2), WSTOPPED and WCONTINUED; `hayata_supervisor.core.liveness` judges.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Protocol

from hayata_supervisor.core.liveness import Pulse, Why
from hayata_supervisor.process import clock
from hayata_supervisor.process.reactor import Reactor, Timer

_MOST_BETWEEN_LOOKS_S = 2.0
_LOOKS_IN_PATIENCE = 4
_SIGCHLD_PAUSE_S = 0.02
"""A thousand orphans that die at once are a thousand SIGCHLDs; all that come within this are one look."""


class Ward(Protocol):
    """A child that is looked after."""

    pulse: Pulse

    def stop_seen(self, stopped: bool) -> None:
        """It was stopped; or it was, and goes on."""

    def lose_patience(self, why: Why) -> None:
        """It has been stopped, or has been silent, for too long: kill it. Called once."""


class Vigil:
    """See the module.

    Args:
        reactor: The loop. Its process calls `children_changed` at each SIGCHLD.
        hang_s: How long a child that is asked may be silent.
        stopped_s: How long a child may be stopped.
    """

    def __init__(self, reactor: Reactor, *, hang_s: float, stopped_s: float) -> None:
        self._reactor = reactor
        self._hang_s = hang_s
        self._stopped_s = stopped_s
        self._look_s = min(_MOST_BETWEEN_LOOKS_S, min(hang_s, stopped_s) / _LOOKS_IN_PATIENCE)
        self._wards: dict[int, Ward] = {}  # by pidfd, as those:
        self._pings: dict[int, Callable[[], None]] = {}
        self._timer: Timer | None = None
        self._notice_timer: Timer | None = None

    def watch(self, pidfd: int, ward: Ward) -> None:
        """Look after a child from now on; it may be stopped already."""
        self._wards[pidfd] = ward
        self._notice(pidfd, ward)

    def expect_answers(self, pidfd: int, ping: Callable[[], None]) -> None:
        """Ask this one from now on whether it lives, with ``ping``: it runs no user code, and listens.

        Its answer is `Pulse.answered`.
        """
        self._pings[pidfd] = ping
        self._wards[pidfd].pulse.asks = True
        self._arm()

    def forget(self, pidfd: int) -> None:
        """It is dead. Harmless the second time."""
        self._wards.pop(pidfd, None)
        self._pings.pop(pidfd, None)

    # Stops

    def children_changed(self) -> None:
        """SIGCHLD has come: some child has died, was stopped or goes on."""
        if self._notice_timer is None:
            self._notice_timer = self._reactor.call_later(_SIGCHLD_PAUSE_S, self._notice_all)

    def _notice_all(self) -> None:
        self._notice_timer = None
        for pidfd, ward in list(self._wards.items()):
            self._notice(pidfd, ward)

    def _notice(self, pidfd: int, ward: Ward) -> None:
        try:
            change = os.waitid(os.P_PIDFD, pidfd, os.WSTOPPED | os.WCONTINUED | os.WNOHANG)
        except ChildProcessError:
            return  # it is dead, and whoever waits for that reaps it
        if change is None:
            return
        if change.si_code == os.CLD_STOPPED:
            ward.pulse.stopped(clock.monotonic())
            self._arm()
            ward.stop_seen(True)
        elif change.si_code == os.CLD_CONTINUED and ward.pulse.is_stopped:
            ward.pulse.went_on(clock.monotonic())
            ward.stop_seen(False)

    # Clocks

    def _arm(self) -> None:
        if self._timer is None:
            due_s = clock.monotonic() + self._look_s
            self._timer = self._reactor.call_at(due_s, lambda: self._look(due_s))

    def _look(self, due_s: float) -> None:
        self._timer = None
        now_s = clock.monotonic()
        late = now_s - due_s > self._look_s  # stopped, frozen or starved: so were we, and they may be well
        for pidfd, ward in list(self._wards.items()):
            if late:
                ward.pulse.forgive(now_s)
            verdict = ward.pulse.judge(now_s, hang_s=self._hang_s, stopped_s=self._stopped_s)
            if verdict == "ask":
                ward.pulse.asked(now_s)
                self._pings[pidfd]()
            elif verdict != "well":
                self.forget(pidfd)
                ward.lose_patience(verdict)
        if any(ward.pulse.asks or ward.pulse.is_stopped for ward in self._wards.values()):
            self._arm()
