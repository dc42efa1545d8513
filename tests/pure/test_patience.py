"""A time limit that counts only while its process listens."""

from __future__ import annotations

import pytest

from hayata_supervisor.process import clock
from hayata_supervisor.process.patience import PatientTimer
from hayata_supervisor.process.reactor import Reactor


@pytest.fixture
def now_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(clock, "monotonic", lambda: now[0])
    return now


def test_limit_that_is_found_late_begins_anew(now_s: list[float]):
    reactor = Reactor()
    fired: list[float] = []
    PatientTimer(reactor, 5.0, lambda: fired.append(now_s[0]))
    for at_s in (104.9, 160.0, 164.9):
        now_s[0] = at_s
        reactor.turn(0)
        assert not fired
    now_s[0] = 165.0
    reactor.turn(0)
    assert fired == [165.0]
    reactor.close()


@pytest.mark.parametrize("late", [False, True])
def test_limit_that_is_cancelled_never_calls(now_s: list[float], late: bool):
    reactor = Reactor()
    fired: list[float] = []
    timer = PatientTimer(reactor, 5.0, lambda: fired.append(now_s[0]))
    if late:
        now_s[0] += 60.0
        reactor.turn(0)
    timer.cancel()
    for _ in range(20):
        now_s[0] += 0.9
        reactor.turn(0)
    assert not fired
    reactor.close()
