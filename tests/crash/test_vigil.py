"""A parent that watches a real child, by a fake clock."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from hayata_supervisor.core.liveness import Pulse, Why
from hayata_supervisor.process import clock, vigil
from hayata_supervisor.process.pidfd import open_pidfd
from hayata_supervisor.process.reactor import Reactor
from hayata_supervisor.process.usage import waited_for_cpu_s
from hayata_supervisor.process.vigil import Vigil
from tests.support.eventually import eventually

HANG_S, STOPPED_S = 10.0, 30.0


class Child:
    """A child, and what its parent thinks of it."""

    def __init__(self, vigil: Vigil) -> None:
        self.pulse = Pulse()
        self.told: list[object] = []
        self.pid = os.fork()
        if self.pid == 0:
            signal.pause()
            os._exit(0)
        self.pidfd = open_pidfd(self.pid)
        vigil.watch(self.pidfd, self)

    def stop_seen(self, stopped: bool) -> None:
        self.told.append(stopped)

    def lose_patience(self, why: Why) -> None:
        self.told.append(why)

    def end(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.pidfd)


class Rig:
    """A vigil over one child; its time goes on when a test says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.reactor = Reactor()
        self.vigil = Vigil(self.reactor, hang_s=HANG_S, stopped_s=STOPPED_S)
        self.child = Child(self.vigil)

    def pass_time(self, seconds: float, step_s: float = 0.5) -> None:
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s = min(end_s, self.now_s + step_s)
            self.reactor.turn(0)

    def signal(self, number: signal.Signals, told: object) -> None:
        """Send it, and have the parent look until it has seen it."""
        os.kill(self.child.pid, number)

        def seen() -> bool:
            self.vigil.children_changed()
            self.pass_time(0.02, 0.02)
            return self.child.told[-1:] == [told]

        eventually(seen, f"that the parent sees {number.name}")


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch):
    made = Rig()
    monkeypatch.setattr(clock, "monotonic", lambda: made.now_s)
    yield made
    made.child.end()
    made.reactor.close()


def test_child_is_seen_to_stop_and_to_go_on(rig: Rig):
    rig.signal(signal.SIGSTOP, True)
    assert rig.child.pulse.is_stopped
    rig.pass_time(STOPPED_S - 2)
    rig.signal(signal.SIGCONT, False)
    rig.pass_time(3 * STOPPED_S)
    assert rig.child.told == [True, False]


def test_child_that_stays_stopped_is_given_up_once(rig: Rig):
    rig.signal(signal.SIGSTOP, True)
    rig.pass_time(STOPPED_S + 3)
    assert rig.child.told == [True, "stopped"]
    rig.pass_time(3 * STOPPED_S)
    assert rig.child.told == [True, "stopped"]


def test_child_that_was_stopped_before_it_is_watched_is_seen(rig: Rig):
    rig.vigil.forget(rig.child.pidfd)
    os.kill(rig.child.pid, signal.SIGSTOP)
    os.waitid(os.P_PIDFD, rig.child.pidfd, os.WSTOPPED | os.WNOWAIT)
    rig.vigil.watch(rig.child.pidfd, rig.child)
    assert rig.child.told == [True]


def test_child_that_answers_is_asked_and_left_alone(rig: Rig):
    asked: list[float] = []

    def ping() -> None:
        asked.append(rig.now_s)
        rig.child.pulse.answered()

    rig.vigil.expect_answers(rig.child.pidfd, rig.child.pid, ping)
    rig.pass_time(100.0)
    assert rig.child.told == []
    assert 40 <= len(asked) <= 51


@pytest.mark.parametrize("late_s", [0.0, 60.0])
def test_silence_is_not_counted_while_the_parent_itself_was_stopped(rig: Rig, late_s: float):
    rig.vigil.expect_answers(rig.child.pidfd, rig.child.pid, lambda: None)
    rig.pass_time(3.0)
    rig.now_s += late_s  # the parent's loop does not turn
    rig.pass_time(HANG_S - 2.0)
    assert rig.child.told == []
    rig.pass_time(5.0)
    assert rig.child.told == ["hung"]


def test_time_that_the_child_waited_for_a_processor_is_not_counted(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    waited = {rig.child.pid: 500.0}
    monkeypatch.setattr(vigil, "waited_for_cpu_s", waited.__getitem__)
    rig.vigil.expect_answers(rig.child.pidfd, rig.child.pid, lambda: None)
    rig.pass_time(3.0)  # it is asked
    for _ in range(100):
        rig.pass_time(1.0)
        waited[rig.child.pid] += 0.96
    assert rig.child.told == []
    rig.pass_time(HANG_S + 3.0)
    assert rig.child.told == ["hung"]


def test_stop_is_not_counted_while_the_parent_itself_was_stopped(rig: Rig):
    """Somebody stops a whole tree, and lets it go on from the top."""
    rig.signal(signal.SIGSTOP, True)
    rig.now_s += 1000.0
    rig.pass_time(STOPPED_S - 3.0)
    assert rig.child.told == [True]
    rig.signal(signal.SIGCONT, False)


def test_vigil_over_children_that_are_well_needs_no_timer(rig: Rig):
    callbacks: list[Callable[[], None]] = []
    rig.reactor.call_at = lambda due, callback: callbacks.append(callback)  # type: ignore[method-assign,return-value,assignment]
    rig.pass_time(100.0)
    assert not callbacks


def test_process_that_shares_a_processor_is_seen_to_wait_for_it():
    cpu = min(os.sched_getaffinity(0))
    pids = []
    for _ in range(2):
        pid = os.fork()
        if pid == 0:
            os.sched_setaffinity(0, {cpu})
            while True:
                pass
        pids.append(pid)
    try:
        for pid in pids:
            eventually(lambda pid=pid: waited_for_cpu_s(pid) > 0.05, "it waits")
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    assert waited_for_cpu_s(pids[0]) == 0.0
