"""What others did twice: a long node, a failure that was handled, the effect before an approval.

Real processes and deaths; the ledger says what has really run.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hayata import HayataError, RecoveryNeeded
from hayata.client import Invocation
from hayata.client.records import Task
from tests.support.crash_site import Daemon, Seen, Site
from tests.support.eventually import eventually

APP = str(Path(__file__).parents[1] / "support" / "apps" / "again.py") + ":agents"
WAIT_S = 30.0
STOPPED_S = 1.5
"""Longer than a beat, a start note and any timer of ours; shorter than the guard's patience with a silent one."""


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    site = Site()
    try:
        yield site.daemon(APP, limits={"deaths": 100, "backoff": 0.01, "max_backoff": 0.01}).start()
    finally:
        site.close()


def uncertain(invocation: Invocation) -> Task:
    with pytest.raises(RecoveryNeeded) as needed:
        invocation.result(timeout=WAIT_S)
    assert needed.value.code == "task_execution_uncertain"
    return invocation.tasks()[-1]


def refused(code: str, call: Callable[[], object]) -> None:
    with pytest.raises(HayataError) as refusal:
        call()
    assert refusal.value.code == code


def victim(daemon: Daemon, role: str, name: str, before: int = 0) -> Seen:
    """That process of the tree; waits for one that is not ``before``."""

    def look() -> list[Seen]:
        return [seen for seen in daemon.tree() if (seen.role, seen.name) == (role, name) and seen.pid != before]

    return eventually(look, f"{role} {name}")[0]


def test_long_node_is_never_dispatched_a_second_time_while_it_runs_d3(daemon: Daemon):
    """D3, langgraph 7417: whatever is asked, dies beside it or stands still, the body runs once; after its own death
    the next attempt begins when nothing of the last lives.
    """
    ledger, client = daemon.site.ledger, daemon.client
    invocation = client.run("long", key="long")
    first = ledger.wait("start", invocation=invocation.id)
    (task,) = invocation.tasks()

    assert client.run("long", key="long").id == client.run("long", invocation_id=invocation.id).id == invocation.id
    assert client.recover("long") == []
    refused("not_uncertain", lambda: client.reconcile(invocation.id, task.id, retry=True))
    for role, name in (("agent", "long"), ("forkserver", APP)):
        before = victim(daemon, role, name)
        before.kill()
        victim(daemon, role, name, before.pid)
    still = [victim(daemon, "node", "long/long"), daemon.supervisor()]
    for seen in still:
        os.kill(seen.pid, signal.SIGSTOP)
        time.sleep(STOPPED_S)  # nothing to wait for: the point is that nothing happens
        os.kill(seen.pid, signal.SIGCONT)
    client.agents()
    assert [line["pid"] for line in ledger.lines("start", invocation=invocation.id)] == [first["pid"]]

    for attempt, role in enumerate(("edge", "node", "supervisor", "stopped edge"), 2):
        pid = ledger.lines("start", invocation=invocation.id)[-1]["pid"]
        edge = daemon.site.see(pid, "edge")
        match role:
            case "edge":
                edge.kill()
            case "node":
                victim(daemon, "node", "long/long").kill()
            case "supervisor":
                daemon.kill_supervisor()
            case _:
                edge.kill(signal.SIGSTOP)
                daemon.kill_supervisor()
        ledger.wait("start", invocation=invocation.id, attempt=attempt)
        assert edge.dead(), f"attempt {attempt} began while the one before lived"
    daemon.site.open_gate("long")
    assert invocation.result(timeout=WAIT_S) == {"attempt": 5}
    assert ledger.attempts(invocation.id, "long") == [1, 2, 3, 4, 5]
    assert not ledger.lines("overlap")


def test_failure_that_a_policy_handled_is_handled_once_over_restarts_d5(daemon: Daemon):
    """D5, langgraph 8277: a branch fails beside its sibling, the policy has it mended, and the supervisor is lost."""
    ledger = daemon.site.ledger
    invocation = daemon.client.run("mending")
    ledger.wait("start", invocation=invocation.id, node="mend", attempt=1)
    daemon.kill_supervisor()
    result = invocation.result(timeout=WAIT_S)
    assert "no left" in result["mended"]
    assert len(ledger.lines("handled", invocation=invocation.id)) == 1
    assert ledger.attempts(invocation.id, "left") == [1]
    assert ledger.attempts(invocation.id, "mend") == [1, 2]
    events = [(event.type, event.data.get("node_id")) for event in invocation.events()]
    assert events.count(("node_failed", "left")) == 1
    assert events[-1][0] == "invocation_completed"


def test_effect_before_three_approvals_happens_once_d6(daemon: Daemon):
    """D6, langgraph 7780: the effect is a sub-step, the body waits behind it; cut off and settled three times."""
    ledger = daemon.site.ledger
    invocation = daemon.client.run("approval")
    for attempt in (1, 2, 3):
        ledger.wait("asked", invocation=invocation.id, attempt=attempt)
        daemon.kill_supervisor()
        task = uncertain(invocation)
        assert task.attempt == attempt
        daemon.client.reconcile(invocation.id, task.id, retry=True, by=f"approver {attempt}")
    ledger.wait("asked", invocation=invocation.id, attempt=4)
    daemon.site.open_gate("approved-4")
    assert invocation.result(timeout=WAIT_S) == {"charged_by": 1, "approved": 4}
    assert [line["attempt"] for line in ledger.lines("charged", invocation=invocation.id)] == [1]
    assert ledger.attempts(invocation.id, "approve") == [1, 2, 3, 4]
    assert [task.reconciled.by for task in invocation.tasks() if task.reconciled] == [
        "approver 1",
        "approver 2",
        "approver 3",
    ]
