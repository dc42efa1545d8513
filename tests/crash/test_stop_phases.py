"""A signal to stop in every phase of a daemon's life: it ends with 0, soon, and nothing of it is left.

Phases are held by failpoints, or by the app; a pipe says when one is reached, nobody looks at a clock.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hayata.errors import HayataError
from hayata_supervisor.process import locks
from tests.support.crash_site import Daemon, Site
from tests.support.eventually import DEADLINE_S, eventually

APP = str(Path(__file__).parents[1] / "support" / "apps" / "stopping.py") + ":agents"
TERM, INT, QUIT = signal.SIGTERM, signal.SIGINT, signal.SIGQUIT
SIGNALS = [(TERM,), (INT,), (QUIT,), (TERM, TERM, TERM), (TERM, QUIT)]
HELD_S = 1.0


class Stage:
    """A daemon that is led to a phase."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.daemon = site.daemon(APP)
        self.home = Path(site.home)
        for name in ("reached", "importing", "working"):
            os.mkfifo(self.home / name)

    def launch(self, **environ: str) -> subprocess.Popen:
        return self.daemon.launch(STOP_HOME=str(self.home), HAYATA_DRAIN_TIMEOUT="0.4", **environ)

    def start(self, **environ: str) -> Daemon:
        return self.daemon.start(STOP_HOME=str(self.home), HAYATA_DRAIN_TIMEOUT="0.4", **environ)

    def hold(self, point: str) -> dict[str, str]:
        """Arm a failpoint, once: say that it is reached, then wait there."""
        once = self.home / "once"
        trace = f"{point}=trace({self.home}/reached)@once:{once}-1"
        return {"HAYATA_FAILPOINTS": f"{trace};{point}=delay({HELD_S})@once:{once}-2"}

    def wait(self, name: str) -> None:
        """Wait until somebody has written to the pipe."""
        with open(self.home / name) as pipe:
            assert pipe.read()

    def run(self) -> None:
        """Have a task run that does not end."""
        self.daemon.client.run("stopping", invocation_id="held")
        self.wait("working")


def claiming(stage: Stage) -> None:
    stage.launch(**stage.hold("guard.before_claim"))
    stage.wait("reached")


def claimed(stage: Stage) -> None:
    stage.launch(**stage.hold("guard.after_claim"))
    stage.wait("reached")


def opening_the_store(stage: Stage) -> None:
    stage.launch(**stage.hold("supervisor.before_open"))
    stage.wait("reached")


def importing(stage: Stage) -> None:
    stage.launch(STOP_IMPORT="1")
    stage.wait("importing")


def recovering(stage: Stage) -> None:
    _leave_a_marked_task(stage)
    stage.launch(**stage.hold("engine.before_begin"))
    stage.wait("reached")


def _leave_a_marked_task(stage: Stage) -> None:
    stage.start()
    stage.run()
    stage.daemon.guard.kill()
    stage.daemon.wait_lost()
    eventually(lambda: not stage.site.marked(), "the end of the killed")


def serving(stage: Stage) -> None:
    stage.start()


def working(stage: Stage) -> None:
    stage.start()
    stage.run()


def burying(stage: Stage) -> None:
    """The supervisor is dead, and the guard has not buried what it left."""
    stage.start(**stage.hold("guard.before_bury"))
    stage.run()
    stage.daemon.kill_supervisor()
    stage.wait("reached")


def starting_again(stage: Stage) -> None:
    stage.start()
    stage.run()
    stage.daemon.guard.kill()
    stage.daemon.wait_lost()
    os.unlink(stage.daemon.socket)
    stage.start(**stage.hold("guard.after_bury"))
    stage.daemon.kill_supervisor()
    stage.wait("reached")


PHASES = [
    claiming,
    claimed,
    opening_the_store,
    importing,
    recovering,
    serving,
    working,
    burying,
    starting_again,
]


@pytest.fixture
def stage() -> Iterator[Stage]:
    site = Site()
    yield Stage(site)
    site.close()


@pytest.mark.parametrize("signals", SIGNALS, ids=lambda signals: "+".join(each.name for each in signals))
@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.__name__)
def test_stop_in_any_phase_ends_with_0_and_leaves_nothing(
    stage: Stage, phase: Callable[[Stage], None], signals: tuple[signal.Signals, ...]
):
    phase(stage)
    for number in signals:
        stage.daemon.guard.send_signal(number)
    assert stage.daemon.guard.wait(DEADLINE_S) == 0, stage.site.log.read_text()
    nothing_left(stage)


def nothing_left(stage: Stage) -> None:
    data_dir, sock = Path(stage.daemon.data_dir), stage.daemon.socket
    assert stage.site.marked() == []
    assert not os.path.lexists(sock)
    assert not os.path.lexists(sock + ".lock")
    assert [name for name in ("guard.lock", "store.lock") if locks.holder(str(data_dir / name)) is not None] == []


def test_task_that_ends_within_the_drain_is_completed_and_no_other_begins(stage: Stage):
    daemon = stage.site.daemon(agents="line").start(HAYATA_DRAIN_TIMEOUT="600")
    invocation = daemon.client.run("line", {"act_gate": "act"}, invocation_id="drained")
    stage.site.ledger.wait("start", invocation=invocation.id, node="act")
    daemon.guard.send_signal(TERM)
    eventually(lambda: daemon.client.tree().children[0].status == "draining", "the drain")
    with pytest.raises(HayataError, match="stopping"):
        daemon.client.run("line", {})
    stage.site.open_gate("act")
    assert daemon.guard.wait(DEADLINE_S) == 0
    daemon.start()
    tasks = daemon.client.invocation("drained").tasks()
    assert [(task.node, task.status, task.attempt) for task in tasks[:2]] == [
        ("prepare", "completed", 1),
        ("act", "completed", 1),
    ]
    assert set(invocation.result(timeout=DEADLINE_S)) >= {"prepare", "act", "report"}
    for node in ("prepare", "act", "report"):
        assert len(stage.site.ledger.lines("start", invocation=invocation.id, node=node)) == 1


def test_what_a_stop_cut_off_is_classified_by_the_next_start(stage: Stage):
    working(stage)
    stage.daemon.guard.send_signal(TERM)
    assert stage.daemon.guard.wait(DEADLINE_S) == 0
    stage.start()
    held = stage.daemon.client.invocation("held")
    eventually(lambda: held.status() == "uncertain", "its verdict")


@pytest.mark.parametrize("shutdown", ["60", "infinity"])
def test_worker_gets_the_time_of_its_own_spec_beyond_the_guards_patience(stage: Stage, shutdown: str):
    """The lifespan's exit takes longer than drain_timeout and the guard's stop grace together; its node has more."""
    stage.start(STOP_CLOSES_S="7.0", STOP_SHUTDOWN=shutdown)
    _have_an_idle_edge(stage)
    stage.daemon.guard.send_signal(TERM)
    assert stage.daemon.guard.wait(60) == 0
    assert (stage.home / "closed").exists()
    nothing_left(stage)


def test_brutal_kill_waits_for_nothing(stage: Stage):
    stage.start(STOP_CLOSES_S="600", STOP_SHUTDOWN="brutal_kill")
    _have_an_idle_edge(stage)
    stage.daemon.guard.send_signal(TERM)
    assert stage.daemon.guard.wait(DEADLINE_S) == 0
    assert "killed" not in stage.site.log.read_text(), "by the supervisor, not by the guard"
    nothing_left(stage)


def test_second_signal_takes_that_time_away(stage: Stage):
    stage.start(STOP_CLOSES_S="600", STOP_SHUTDOWN="infinity")
    _have_an_idle_edge(stage)
    stage.daemon.guard.send_signal(TERM)
    eventually(lambda: "stopping" in stage.site.log.read_text(), "the stop")
    stage.daemon.guard.send_signal(TERM)
    assert stage.daemon.guard.wait(DEADLINE_S) == 0
    assert "killed" not in stage.site.log.read_text(), "by the supervisor, not by the guard"
    nothing_left(stage)


def _have_an_idle_edge(stage: Stage) -> None:
    (stage.home / "done").touch()
    stage.daemon.client.call("slow", timeout=DEADLINE_S)
