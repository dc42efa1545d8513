"""A parent looks after its children: sees that one is stopped, and finds out whether one hangs.

The kernel tells of a stop by SIGCHLD, and `waitid` with WSTOPPED, asked for one child by its pidfd, says
whether it was that one; it reaps nothing. So children that are well cost nothing, but for those that are
asked whether they live: one small message each way every second or two.

Source: wait(2), WSTOPPED and WCONTINUED; `hayata_supervisor.core.liveness` judges.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple, Protocol

from hayata_supervisor.core.liveness import Pulse, Why
from hayata_supervisor.process import clock
from hayata_supervisor.process.reactor import Reactor, Timer
from hayata_supervisor.process.usage import waited_for_cpu_s

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


class _Asked(NamedTuple):
    """How one is asked."""

    pid: int
    ping: Callable[[], None]


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
        self._asked: dict[int, _Asked] = {}
        self._timer: Timer | None = None
        self._due_s = 0.0
        self._notice_timer: Timer | None = None

    def watch(self, pidfd: int, ward: Ward) -> None:
        """Look after a child from now on; it may be stopped already."""
        self._wards[pidfd] = ward
        self._notice(pidfd, ward)

    def expect_answers(self, pidfd: int, pid: int, ping: Callable[[], None]) -> None:
        """Ask this one from now on whether it lives, with ``ping``: it runs no user code, and listens.

        Its answer is `Pulse.answered`.
        """
        self._asked[pidfd] = _Asked(pid, ping)
        self._wards[pidfd].pulse.asks = True
        self._arm()

    def ask(self, pidfd: int) -> None:
        """Ask one of those now. Harmless for one that was given up."""
        if pidfd in self._asked:
            self._wards[pidfd].pulse.asked(clock.monotonic(), self._waited_s(pidfd))
            self._asked[pidfd].ping()

    def silent_s(self, pidfd: int) -> float:
        """How long one of those owes an answer, in seconds of its own time; 0.0 when it need not have been heard."""
        now_s = clock.monotonic()
        if pidfd not in self._asked or self._is_late(now_s):
            return 0.0
        return self._wards[pidfd].pulse.silent_s(now_s, self._waited_s(pidfd))

    def _waited_s(self, pidfd: int) -> float:
        asked = self._asked.get(pidfd)
        return 0.0 if asked is None else waited_for_cpu_s(asked.pid)

    def forget(self, pidfd: int) -> None:
        """It is dead. Harmless the second time."""
        self._wards.pop(pidfd, None)
        self._asked.pop(pidfd, None)

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
            ward.pulse.went_on(clock.monotonic(), self._waited_s(pidfd))
            ward.stop_seen(False)

    # Clocks

    def _arm(self) -> None:
        if self._timer is None:
            self._due_s = clock.monotonic() + self._look_s
            self._timer = self._reactor.call_at(self._due_s, self._look)

    def _is_late(self, now_s: float) -> bool:
        """Whether we were stopped, frozen or starved: then they may be well."""
        return self._timer is not None and now_s - self._due_s > self._look_s

    def _look(self) -> None:
        now_s = clock.monotonic()
        late = self._is_late(now_s)
        self._timer = None
        for pidfd, ward in list(self._wards.items()):
            waited_s = self._waited_s(pidfd) if ward.pulse.owes_answer else 0.0
            if late:
                ward.pulse.forgive(now_s, waited_s)
            verdict = ward.pulse.judge(now_s, waited_s, hang_s=self._hang_s, stopped_s=self._stopped_s)
            if verdict == "ask":
                self.ask(pidfd)
            elif verdict != "well":
                self.forget(pidfd)
                ward.lose_patience(verdict)
        if any(ward.pulse.asks or ward.pulse.is_stopped for ward in self._wards.values()):
            self._arm()
