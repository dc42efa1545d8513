"""Executions with edges: what is left of them after any death, with real processes and real SIGKILL.

One daemon serves all these tests; its supervisor is killed in many of them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from hayata import InvocationCancelled, InvocationFailed, RecoveryNeeded
from hayata.client import Invocation
from hayata.client.records import Task
from tests.support.crash_site import Daemon, Seen, Site, flat
from tests.support.eventually import eventually
from tests.support.ledger import check_bodies, check_events

APP = str(Path(__file__).parents[1] / "support" / "apps" / "edges.py") + ":agents"
WAIT_S = 30.0


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    site = Site()
    try:
        yield site.daemon(APP, limits={"deaths": 100, "backoff": 0.01, "max_backoff": 0.01}).start()
    finally:
        site.close()


def run(daemon: Daemon, agent: str, *edges: dict, **words: object) -> Invocation:
    return daemon.client.run(agent, {"edges": list(edges), **words})


def wait_started(daemon: Daemon, invocation: Invocation, count: int) -> list[dict]:
    """Wait until so many bodies of edges have begun."""
    ledger = daemon.site.ledger
    return eventually(
        lambda: (found := ledger.lines("start", invocation=invocation.id)) and len(found) >= count and found,
        f"{count} bodies",
    )


def wait_completed(invocation: Invocation, count: int) -> None:
    """Wait until so many edges are durably completed."""
    eventually(lambda: sum(task.status == "completed" for task in invocation.tasks()) >= count, f"{count} results")


def statuses(invocation: Invocation) -> dict[str, str]:
    """Step or edge, and attempt → status."""
    return {task.id.partition(".")[2]: task.status for task in invocation.tasks()}


def reducing(daemon: Daemon, invocation: Invocation, attempt: int = 1) -> int:
    """The pid of the reducer, when it is at its work."""
    return daemon.site.ledger.wait("reduce", invocation=invocation.id, attempt=attempt)["pid"]


def node(daemon: Daemon, agent: str) -> Seen:
    """The worker of an agent's node with edges."""
    return next(seen for seen in daemon.tree() if (seen.role, seen.name) == ("node", f"{agent}/many"))


def kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def check(daemon: Daemon, invocation: Invocation, reruns: int = 1) -> list[Task]:
    """The invariants of an invocation that has ended or rests: nothing ran twice, marks first, events without hole."""
    ledger, tasks = daemon.site.ledger, invocation.tasks()
    assert not ledger.lines("overlap")
    edges = [task for task in tasks if task.edge is not None]
    check_bodies(
        edges, ledger.lines("start", invocation=invocation.id), ledger.lines("end", invocation=invocation.id),
        {"many": reruns},
    )  # fmt: skip
    reductions = [line["execution"] for line in ledger.lines("reduce", invocation=invocation.id)]
    assert len(reductions) == len(set(reductions)) <= 2
    check_events(list(invocation.events(until="now")), invocation.refresh().status)
    return tasks


def tokens(daemon: Daemon, invocation: Invocation) -> list[str]:
    """What the bodies of the edges have returned, in the order of the edges."""
    ends = daemon.site.ledger.lines("end", invocation=invocation.id)
    return [end["result"]["token"] for end in sorted(ends, key=lambda end: int(end["execution"].split(".")[1][2:]))]


# ---- without a fault ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("agent", ["edges", "async"])
def test_results_come_in_the_order_of_the_edges(daemon: Daemon, agent: str):
    invocation = run(daemon, agent, *[{}] * 9)
    result = invocation.result(timeout=WAIT_S)["state"]
    assert result["tokens"] == tokens(daemon, invocation)
    assert result["counts"] == [9, 9, 0, 0]
    tasks = check(daemon, invocation)
    assert [(task.edge, task.status) for task in tasks] == [(each, "completed") for each in [*range(9), None]]


def test_reducer_is_a_process_of_its_own_and_is_seen_in_the_tree(daemon: Daemon):
    invocation = run(daemon, "edges", {}, {}, reduce_gate="seen")
    pid = reducing(daemon, invocation)
    assert pid not in {line["pid"] for line in daemon.site.ledger.lines("start", invocation=invocation.id)}
    roles = {each.pid: each.role for each in flat(daemon.client.tree())}
    assert roles[pid] == "reducer"
    daemon.site.open_gate("seen")
    invocation.result(timeout=WAIT_S)
    eventually(lambda: pid not in {each.pid for each in flat(daemon.client.tree())}, "the reducer to end")


def test_execution_with_edges_is_one_branch(daemon: Daemon):
    invocation = run(daemon, "edges", {}, {}, nodes=["many", "plain"])
    many, plain = invocation.result(timeout=WAIT_S)["parallel"]
    assert (len(many["tokens"]), plain) == (2, {"plain": True})
    invocation.refresh()
    assert invocation.record.step == 2


def test_show_lists_edges_and_their_reduction(daemon: Daemon):
    invocation = run(daemon, "partial", {}, {"fail": True})
    invocation.result(timeout=WAIT_S)
    command = [sys.executable, "-m", "hayata.cli", "show", invocation.id, "--socket", daemon.socket]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=WAIT_S).stdout
    rows = [line.split()[:4] for line in said.splitlines() if " many " in line and invocation.id not in line[:40]]
    assert [row for row in rows if row[2] == "1"] == [
        ["0-0", "many", "1", "completed"], ["0-1", "many", "1", "failed"], ["0", "many", "1", "completed"],
    ]  # fmt: skip
    assert "0-1.1 many: node_exception: ValueError: edge 1 fails" in said


def test_cancel_ends_edges_and_reducer(daemon: Daemon):
    edges, reduction = run(daemon, "edges", {}, {"gate": "never"}), run(daemon, "edges", {}, reduce_gate="never")
    wait_completed(edges, 1)
    pids = [reducing(daemon, reduction), wait_started(daemon, edges, 2)[-1]["pid"]]
    victims = [daemon.site.see(pid) for pid in pids]
    for invocation in (edges, reduction):
        invocation.cancel()
        with pytest.raises(InvocationCancelled):
            invocation.result(timeout=WAIT_S)
        check(daemon, invocation)
    assert victims[0].dead()
    assert statuses(edges) == {"0-0.1": "completed", "0-1.1": "cancelled", "0.1": "cancelled"}


# ---- edges -------------------------------------------------------------------------------------------------


def test_edge_killed_fails_the_execution_and_ends_its_siblings(daemon: Daemon):
    invocation = run(daemon, "edges", {}, {"gate": "never"}, {"gate": "never"})
    wait_completed(invocation, 1)
    started = wait_started(daemon, invocation, 3)
    pids = {line["execution"].split(".")[1]: line["pid"] for line in started}
    sibling = daemon.site.see(pids["0-2"])
    kill(pids["0-1"])
    with pytest.raises(InvocationFailed) as failed:
        invocation.result(timeout=WAIT_S)
    assert failed.value.code == "edge_crashed"
    assert failed.value.message.startswith("edge 1 of many: ")
    assert sibling.dead(WAIT_S)
    assert statuses(invocation) == {
        "0-0.1": "completed", "0-1.1": "failed", "0-2.1": "cancelled", "0.1": "failed",
    }  # fmt: skip
    check(daemon, invocation)


def test_edge_killed_runs_again_alone_where_it_may(daemon: Daemon):
    invocation = run(daemon, "again", {}, {"gate": "second"}, {})
    wait_completed(invocation, 2)
    kill(next(line["pid"] for line in wait_started(daemon, invocation, 3) if ".0-1." in line["execution"]))
    daemon.site.open_gate("second")
    assert invocation.result(timeout=WAIT_S)["state"]["counts"] == [3, 3, 0, 0]
    tasks = check(daemon, invocation, reruns=3)
    assert [task.attempt for task in tasks] == [1, 1, 2, 1, 1]


def test_partial_reduction_does_without_a_killed_edge(daemon: Daemon):
    invocation = run(daemon, "partial", {}, {"gate": "never"}, {"fail": True}, {})
    wait_completed(invocation, 2)
    kill(next(line["pid"] for line in wait_started(daemon, invocation, 4) if ".0-1." in line["execution"]))
    state = invocation.result(timeout=WAIT_S)["state"]
    assert [bool(token) for token in state["tokens"]] == [True, False, False, True]
    assert state["counts"] == [4, 2, 2, 0]
    assert state["errors"] == {"1": "edge_crashed", "2": "node_exception"}
    check(daemon, invocation)


def test_node_killed_with_edges_on_their_way(daemon: Daemon):
    plain, again = (run(daemon, agent, {}, {"gate": "node"}, {}) for agent in ("edges", "again"))
    for invocation in (plain, again):
        wait_completed(invocation, 2)
        wait_started(daemon, invocation, 3)
    for agent in ("edges", "again"):
        node(daemon, agent).kill()
    daemon.site.open_gate("node")
    with pytest.raises(InvocationFailed) as failed:
        plain.result(timeout=WAIT_S)
    assert failed.value.code == "node_crashed"
    assert again.result(timeout=WAIT_S)["state"]["counts"] == [3, 3, 0, 0]
    check(daemon, plain)
    check(daemon, again, reruns=3)


# ---- the reducer -------------------------------------------------------------------------------------------


def test_reducer_killed_once_is_started_again_with_the_results(daemon: Daemon):
    invocation = run(daemon, "edges", {}, {}, reduce_gate="once")
    kill(reducing(daemon, invocation))
    second = reducing(daemon, invocation, 2)
    daemon.site.open_gate("once")
    assert invocation.result(timeout=WAIT_S)["state"]["tokens"] == tokens(daemon, invocation)
    lines = daemon.site.ledger.lines("reduce", invocation=invocation.id)
    assert [line["attempt"] for line in lines] == [1, 2]
    assert lines[0]["results"] == lines[1]["results"]
    assert second == lines[1]["pid"] != lines[0]["pid"]
    tasks = check(daemon, invocation)
    assert [(task.attempt, task.status) for task in tasks if task.edge is None] == [(1, "failed"), (2, "completed")]
    assert tasks[-2].error.details["signal"] == "SIGKILL"


def test_reducer_killed_twice_has_failed(daemon: Daemon):
    invocation = run(daemon, "partial", {}, {"fail": True}, {}, reduce_gate="twice")
    for attempt in (1, 2):
        kill(reducing(daemon, invocation, attempt))
    with pytest.raises(InvocationFailed) as failed:
        invocation.result(timeout=WAIT_S)
    assert failed.value.code == "reducer_failed"
    counts = ("signal", "expected_edges", "result_count", "error_count", "pending_edges")
    assert [failed.value.details[each] for each in counts] == ["SIGKILL", 3, 2, 1, 0]
    check(daemon, invocation)


def test_reduction_that_raises_is_not_repeated(daemon: Daemon):
    invocation = run(daemon, "edges", {}, reduce_fails=True)
    with pytest.raises(InvocationFailed) as failed:
        invocation.result(timeout=WAIT_S)
    assert (failed.value.code, failed.value.details["type"]) == ("reducer_failed", "ValueError")
    assert "put_together" in failed.value.details["traceback"]
    assert len(daemon.site.ledger.lines("reduce", invocation=invocation.id)) == 1


def test_reduction_that_takes_too_long_is_ended(daemon: Daemon):
    invocation = run(daemon, "short", {}, reduce_seconds=600)
    with pytest.raises(InvocationFailed) as failed:
        invocation.result(timeout=WAIT_S)
    assert failed.value.code == "execution_timeout"
    assert len(daemon.site.ledger.lines("reduce", invocation=invocation.id)) == 1


def test_node_killed_during_the_reduction(daemon: Daemon):
    invocation = run(daemon, "edges", {}, {}, reduce_gate="node_reduce")
    pid = daemon.site.see(reducing(daemon, invocation))
    node(daemon, "edges").kill()
    assert pid.dead(WAIT_S)
    reducing(daemon, invocation, 2)
    daemon.site.open_gate("node_reduce")
    assert invocation.result(timeout=WAIT_S)["state"]["counts"] == [2, 2, 0, 0]
    check(daemon, invocation)


# ---- the supervisor ----------------------------------------------------------------------------------------


def test_supervisor_killed_between_results(daemon: Daemon):
    """Completed edges are reused, those that ran are run again where they may, those that never began are run."""
    invocation = run(daemon, "again", {}, {}, *[{"gate": "between"}] * 5)
    wait_completed(invocation, 2)
    wait_started(daemon, invocation, 6)  # four at once: the last one waits for a slot
    before = invocation.tasks()[:2]
    daemon.kill_supervisor()
    daemon.site.open_gate("between")
    assert invocation.result(timeout=WAIT_S)["state"]["counts"] == [7, 7, 0, 0]
    tasks = check(daemon, invocation, reruns=3)
    assert [task for task in tasks if task.edge in (0, 1)] == before
    assert {task.attempt for task in tasks if task.edge == 6} == {1}
    edges = [line["count"] for line in daemon.site.ledger.lines("edges") if line["count"] == 7]
    assert len(edges) == 1, "edges are worked out once"


def test_supervisor_killed_during_the_reduction(daemon: Daemon):
    invocation = run(daemon, "edges", {}, {}, reduce_gate="again")
    pid = daemon.site.see(reducing(daemon, invocation))
    daemon.kill_supervisor()
    assert pid.dead(WAIT_S)
    reducing(daemon, invocation, 2)
    daemon.site.open_gate("again")
    assert invocation.result(timeout=WAIT_S)["state"]["tokens"] == tokens(daemon, invocation)
    tasks = check(daemon, invocation)
    assert tasks[-2].error.code == "supervisor_lost"


def test_uncertain_edge_is_reconciled_and_the_others_are_reused(daemon: Daemon):
    invocation = run(daemon, "edges", {}, {"gate": "never"}, {})
    wait_completed(invocation, 2)
    wait_started(daemon, invocation, 3)
    daemon.kill_supervisor()
    with pytest.raises(RecoveryNeeded) as needed:
        invocation.result(timeout=WAIT_S)
    assert needed.value.code == "task_execution_uncertain"
    (unsure,) = [task for task in invocation.tasks() if task.status == "uncertain"]
    assert unsure.edge == 1
    assert statuses(invocation)["0.1"] == "collecting"
    settled = daemon.client.reconcile(invocation.id, unsure.id, result={"token": "by hand"})
    assert (settled.edge, settled.status) == (1, "completed")
    result = invocation.result(timeout=WAIT_S)["state"]["tokens"]
    first, last = tokens(daemon, invocation)
    assert result == [first, "by hand", last]
    check(daemon, invocation)


# ---- time --------------------------------------------------------------------------------------------------


def test_timeout_reduces_what_is_there(daemon: Daemon):
    invocation = run(daemon, "timed", {}, {"gate": "never"}, {})
    wait_completed(invocation, 2)
    late = next(line["pid"] for line in wait_started(daemon, invocation, 3) if ".0-1." in line["execution"])
    edge = daemon.site.see(late)
    state = invocation.result(timeout=WAIT_S)["state"]
    assert state["counts"] == [3, 2, 0, 1]
    assert [bool(token) for token in state["tokens"]] == [True, False, True]
    assert edge.dead(WAIT_S)
    assert statuses(invocation)["0-1.1"] == "cancelled"
    check(daemon, invocation)


def test_timeout_without_partial_fails_the_node(daemon: Daemon):
    invocation = run(daemon, "strict", {"gate": "never"})
    assert invocation.result(timeout=WAIT_S)["failure"] == "reducer_failed"
    assert statuses(invocation) == {"0-0.1": "cancelled", "0.1": "failed"}
    check(daemon, invocation)


def test_timeout_counts_on_over_a_restart(daemon: Daemon):
    began = time.monotonic()
    invocation = run(daemon, "strict", {"gate": "never"})
    wait_started(daemon, invocation, 1)
    task = invocation.tasks()[0]
    daemon.kill_supervisor()
    with pytest.raises(RecoveryNeeded):  # the time stands still while a person is waited for
        invocation.result(timeout=WAIT_S)
    time.sleep(max(0.0, began + 2.5 - time.monotonic()))
    assert invocation.status() == "uncertain"
    daemon.client.reconcile(invocation.id, task.id, retry=True)
    assert invocation.result(timeout=WAIT_S)["failure"] == "reducer_failed"
    check(daemon, invocation)
