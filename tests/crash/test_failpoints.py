"""A small part of the failpoint matrix; ``make crash`` runs all of it (`tests.matrix`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hayata import Client
from tests.matrix.host import ODD_APP, Host
from tests.matrix.trial import Trial, make_template, run

TRIALS = {
    "workers die": (
        "agent.before_receive_evaluate=kill@5",
        "edge.after_note=kill@2",
        "node.before_send_completed=kill@3",
        "forkserver.after_fork=kill@3",
        "agent.after_send_next=kill@1",
        "edge.after_send_completed=kill@1",
        "node.after_receive_run=kill@2",
        "middle.before_send_pid=kill@1",
    ),
    "supervisor dies before it knows": ("supervisor.before_receive_completed=kill@10", "store.before_commit=kill@20"),
    "supervisor dies before it tells": ("store.after_commit=kill@20", "committer.before_perform=kill@20"),
    "supervisor dies while it recovers": ("engine.before_begin=kill@3", "engine.after_begin=kill@5"),
    "guard dies": ("guard.before_receive_beat=kill@1",),
    "first start dies": ("store.before_rename=kill@1", "notes.before_own=kill@1"),
    "connections break": (
        "agent.before_send_next=error@3",
        "edge.before_send_completed=error@2",
        "node.before_receive_run=error@1",
        "supervisor.before_receive_forked=error@3",
        "supervisor.before_send_tell_invocation=error@7",
    ),
    "disk errs": ("store.before_commit=error@20", "store.before_read=error@30", "supervisor.before_spawn=error@1"),
    "disk is full": ("store.before_commit=error(ENOSPC)@10",),
    "bugs": ("edge.before_receive_partial_ack=raise@30", "supervisor.before_send_evaluate=raise@20"),
    "parents die": ("edge.after_note=orphan@1", "supervisor.before_receive_completed=orphan@8"),
    "everybody is late": (
        "edge.after_note=delay(0.2)@1",
        "node.before_receive_completed=delay(0.2)@2",
        "agent.before_send_next=delay(0.2)@1",
        "store.before_commit=delay(0.2)@10",
        "guard.after_receive_beat=delay(0.2)@1",
    ),
}


@pytest.fixture(scope="module")
def template() -> Iterator[Path]:
    """What a killed daemon has left."""
    host = make_template()
    yield host.home
    host.destroy(keep=False)


@pytest.mark.parametrize("name", TRIALS)
def test_promise_holds_when(name: str, template: Path):
    outcome = run(Trial(TRIALS[name], fresh=name == "first start dies"), template)
    assert not outcome.violations, f"{outcome.violations}\n{outcome.log}"
    assert outcome.struck == TRIALS[name]


def test_app_of_a_client_is_not_taken_for_one_of_the_start():
    """Found by a trial: it counted, and the daemon refused what its own agents were asked for."""
    host = Host()
    try:
        marker = host.home / "struck"
        host.armed = f"forkserver.before_import=delay(1.5)@1@once:{marker}"
        host.start()
        while not marker.exists():  # the app of the start is being imported
            assert not host.ended(), host.tail()
        with Client(host.socket) as client:
            assert [agent.id for agent in client.start_agent(ODD_APP)] == ["odd"]
            assert client.call("line", {"base": 1}, timeout=20)["sum"] == 5 + 7 * (1 + 2 + 3 + 4)
        host.end()
    finally:
        host.close_control()
        host.destroy(keep=False)
