"""What happens when a node runs again, or must not: probes, sub-steps, retries, with real processes and deaths.

One daemon serves all these tests; its supervisor is killed in many of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hayata import InvocationFailed, RecoveryNeeded
from hayata.client import Invocation
from hayata.client.records import Task
from tests.support.crash_site import Daemon, Site
from tests.support.eventually import eventually

APP = str(Path(__file__).parents[1] / "support" / "apps" / "again.py") + ":agents"
WAIT_S = 20.0
PAUSE_S = 6.0
"""Of the agent ``failing``."""


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    site = Site()
    try:
        yield site.daemon(APP, limits={"deaths": 100, "backoff": 0.01, "max_backoff": 0.01}).start()
    finally:
        site.close()


def begun(daemon: Daemon, agent: str = "pay", **words: str) -> Invocation:
    """An invocation whose body waits at its gate, before or after it has paid."""
    invocation = daemon.client.run(agent, {f"pay_{name}": word for name, word in words.items()})
    start = daemon.site.ledger.wait("start", invocation=invocation.id)
    if "gate" not in words:
        daemon.site.ledger.wait("paid", key=start["key"])
    return invocation


def uncertain(invocation: Invocation) -> Task:
    with pytest.raises(RecoveryNeeded) as needed:
        invocation.result(timeout=WAIT_S)
    assert needed.value.code == "task_execution_uncertain"
    return invocation.tasks()[-1]


def attempts(invocation: Invocation) -> list[tuple[int, str]]:
    return [(task.attempt, task.status) for task in invocation.tasks()]


def events(invocation: Invocation) -> list[str]:
    return [event.type for event in invocation.events(until="now") if event.type.startswith("node_")]


def test_probe_after_a_lost_supervisor_says_what_became_of_the_body(daemon: Daemon):
    ledger = daemon.site.ledger
    done, not_done = begun(daemon, late_gate="never"), begun(daemon, gate="never")
    unknown = begun(daemon, late_gate="never", probe="unknown")
    closed = begun(daemon, late_gate="never", probe="raise")
    daemon.kill_supervisor()

    execution = ledger.lines("start", invocation=done.id)[0]["execution"]
    assert done.result(timeout=WAIT_S) == {"paid": execution}
    assert (attempts(done), ledger.attempts(done.id, "pay")) == ([(1, "completed")], [1])
    assert events(done) == ["node_started", "node_completed"]
    (asked,) = ledger.lines("probe", invocation=done.id)
    assert asked["execution"] == execution

    assert not_done.result(timeout=WAIT_S)["paid"].endswith(".0.2")
    assert attempts(not_done) == [(1, "failed"), (2, "completed")]
    assert not_done.tasks()[0].error.code == "supervisor_lost"
    failed = next(event for event in not_done.events() if event.type == "node_failed")
    assert failed.data["will_retry"] is True

    assert uncertain(unknown).error.code == "supervisor_lost"
    error = uncertain(closed).error
    assert (error.code, "the bank is closed" in error.message) == ("node_exception", True)
    assert events(closed) == ["node_started", "node_uncertain"]
    daemon.client.reconcile(closed.id, closed.tasks()[0].id, result={"paid": "by hand"})
    assert closed.result(timeout=WAIT_S) == {"paid": "by hand"}
    assert closed.tasks()[0].error is None


def test_probe_that_is_cut_off_is_asked_again_by_the_next_supervisor(daemon: Daemon):
    ledger = daemon.site.ledger
    invocation = begun(daemon, late_gate="never", probe="bank")
    for asked in (1, 2):
        daemon.kill_supervisor()
        eventually(lambda asked=asked: len(ledger.lines("probe", invocation=invocation.id)) == asked, "the question")
    assert (invocation.status(), attempts(invocation)) == ("running", [(1, "running")])
    daemon.site.open_gate("bank")
    assert invocation.result(timeout=WAIT_S)["paid"].endswith(".0.1")
    assert ledger.attempts(invocation.id, "pay") == [1]


@pytest.mark.parametrize("victim", ["edge", "node"])
def test_probe_under_a_living_supervisor_asks_about_what_a_crash_cut_off(daemon: Daemon, victim: str):
    invocation = begun(daemon, late_gate="never")
    pid = daemon.site.ledger.lines("start", invocation=invocation.id)[0]["pid"]
    for seen in daemon.tree():
        if seen.pid == pid if victim == "edge" else (seen.role == "node" and seen.name in ("pay", "pay/pay")):
            seen.kill()
            assert seen.dead(WAIT_S)
    assert invocation.result(timeout=WAIT_S)["paid"].endswith(".0.1")
    (probe,) = daemon.site.ledger.lines("probe", invocation=invocation.id)
    assert probe["pid"] != pid
    assert daemon.site.ledger.attempts(invocation.id, "pay") == [1]


def test_probe_asks_after_a_deadline_and_answers_within_it(daemon: Daemon):
    late = begun(daemon, "pay_in_time", late_gate="never")
    assert late.result(timeout=WAIT_S)["paid"].endswith(".0.1")
    slow = begun(daemon, "pay_in_time", late_gate="never", probe="never")
    error = uncertain(slow).error
    assert (error.code, error.message.startswith("its probe gave no answer")) == ("execution_timeout", True)


def test_probe_that_dies_or_talks_nonsense_leaves_the_task_uncertain(daemon: Daemon):
    for words, code in (({"probe": "abort"}, "edge_crashed"), ({"probe": "nonsense"}, "invalid_node_result")):
        invocation = daemon.client.run(
            "pay", {f"pay_{name}": word for name, word in words.items()} | {"pay_abort": "after"}
        )
        assert uncertain(invocation).error.code == code
        assert attempts(invocation) == [(1, "uncertain")]


def test_attempts_that_were_not_done_are_bounded_p13(daemon: Daemon):
    """P13, celery 1628 and 3053."""
    invocation = daemon.client.run("pay", {"pay_abort": "before"})
    with pytest.raises(InvocationFailed) as failed:
        invocation.result(timeout=WAIT_S)
    assert (failed.value.code, failed.value.details["signal"]) == ("edge_crashed", "SIGABRT")
    assert daemon.site.ledger.attempts(invocation.id, "pay") == [1, 2]
    assert attempts(invocation) == [(1, "failed"), (2, "failed")]


def test_coroutine_node_has_a_coroutine_for_a_probe(daemon: Daemon):
    invocation, other = daemon.client.run("pay_later"), daemon.client.run("pay_later")
    pids = [daemon.site.ledger.wait("start", invocation=each.id)["pid"] for each in (invocation, other)]
    assert pids[0] == pids[1]
    next(seen for seen in daemon.tree() if seen.pid == pids[0]).kill()
    assert invocation.result(timeout=WAIT_S) == other.result(timeout=WAIT_S) == {"paid": "asked"}


# ---- sub-steps -------------------------------------------------------------------------------------------


def calls(daemon: Daemon, invocation: Invocation) -> list[tuple[str, int]]:
    """The sub-steps that were really called, and by which attempt."""
    lines = daemon.site.ledger.lines("substep", invocation=invocation.id)
    return [(line["name"], line["attempt"]) for line in lines]


def test_stored_steps_are_not_called_again_after_a_lost_supervisor(daemon: Daemon):
    between = daemon.client.run("steps", {"in_steps_gate": "never"})
    amid = daemon.client.run("steps", {"in_steps_second_gate": "never"})
    daemon.site.ledger.wait("substep", invocation=amid.id, name="second")
    eventually(lambda: between.tasks() and between.tasks()[0].substeps, "the first step is stored")
    daemon.kill_supervisor()

    assert between.result(timeout=WAIT_S) == {
        "first": ("first", 1),
        "second": ("second", 2),
        "third": ("third", 2),
    }
    assert calls(daemon, between) == [("first", 1), ("second", 2), ("third", 2)]
    assert [task.substeps for task in between.tasks()] == [("work",), ("second", "work")]

    assert amid.result(timeout=WAIT_S) == {
        "first": ("first", 1),
        "second": ("second", 2),
        "third": ("third", 2),
    }
    assert calls(daemon, amid) == [("first", 1), ("second", 1), ("second", 2), ("third", 2)]


def test_stored_steps_are_not_called_again_by_a_retry(daemon: Daemon):
    invocation = daemon.client.run("steps", {"in_steps_fail": True})
    assert invocation.result(timeout=WAIT_S) == {
        "first": ("first", 1),
        "second": ("second", 1),
        "third": ("third", 2),
    }
    assert calls(daemon, invocation) == [("first", 1), ("second", 1), ("third", 2)]


def test_coroutine_steps_are_stored_when_their_edge_dies(daemon: Daemon):
    invocation = daemon.client.run("steps_later")
    assert invocation.result(timeout=WAIT_S) == {
        "first": ("first", 1),
        "second": ("second", 1),
        "third": ("third", 2),
    }
    assert sorted(calls(daemon, invocation)) == [("first", 1), ("second", 1), ("third", 2)]


# ---- retries and reruns ------------------------------------------------------------------------------------


def test_failures_are_retried_as_often_as_the_policy_says_and_no_more(daemon: Daemon):
    invocation = daemon.client.run("failing_fast")
    with pytest.raises(InvocationFailed, match="try again"):
        invocation.result(timeout=WAIT_S)
    assert daemon.site.ledger.attempts(invocation.id, "fail") == [1, 2, 3]
    assert [event.data["will_retry"] for event in invocation.events() if event.type == "node_failed"] == [
        True,
        True,
        False,
    ]


def test_task_that_kills_itself_is_tried_as_often_as_its_policy_says_p13(daemon: Daemon):
    """P13, celery 1628 and 3053: the signal is named."""
    invocation = daemon.client.run("dying")
    with pytest.raises(InvocationFailed) as failed:
        invocation.result(timeout=WAIT_S)
    assert (failed.value.code, failed.value.details["signal"]) == ("edge_crashed", "SIGKILL")
    assert daemon.site.ledger.attempts(invocation.id, "die") == [1, 2, 3]


def test_reruns_and_a_pending_retry_over_lost_supervisors(daemon: Daemon):
    """Reruns end uncertain and don't go on for ever; a retry keeps what is left of its pause."""
    ledger = daemon.site.ledger
    failing = daemon.client.run("failing", {"good_attempt": 2})
    first = ledger.wait("failed", invocation=failing.id)["at"]
    eventually(lambda: len(failing.tasks()) == 2, "the next attempt is scheduled")
    dying = daemon.client.run("dying", {"die_gate": "never"})
    for attempt in (1, 2, 3):
        ledger.wait("start", invocation=dying.id, attempt=attempt)
        killed_at = time.time()
        daemon.kill_supervisor()

    assert uncertain(dying).attempt == 3
    assert ledger.attempts(dying.id, "die") == [1, 2, 3]
    assert [task.error.code for task in dying.tasks()[:2]] == ["supervisor_lost"] * 2

    assert failing.result(timeout=WAIT_S) == {"attempt": 2}
    second = ledger.wait("failed", invocation=failing.id, attempt=2)["at"]
    assert second - first >= PAUSE_S, "not at once"
    assert second - killed_at < PAUSE_S, "not all of it again"
    assert attempts(failing) == [(1, "failed"), (2, "completed")]
