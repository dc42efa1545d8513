"""What a restart does with every kind of unfinished work, and what clients see of it.

Real daemons, real SIGKILL.
"""

from __future__ import annotations

import os
import random
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from hayata import Client, HayataError, InvocationCancelled, InvocationFailed, RecoveryNeeded
from hayata.client import Invocation
from hayata.client.records import TERMINAL, Event, Task
from tests.support.crash_site import Daemon, Site, check_gone
from tests.support.eventually import eventually
from tests.support.ledger import audit, check_events

WAIT_S = 20.0


def at_gate(daemon: Daemon, agent: str, node: str = "act", **options) -> Invocation:
    """Start an invocation, and return when its ``node`` waits at the gate of that name."""
    invocation = daemon.client.run(agent, {f"{node}_gate": node}, **options)
    daemon.site.ledger.wait("start", invocation=invocation.id, node=node)
    return invocation


def statuses(invocation: Invocation) -> list[tuple[str, int, str]]:
    return [(task.node, task.attempt, task.status) for task in invocation.tasks()]


def uncertain(invocation: Invocation) -> Task:
    """The task that is uncertain; waits until recovery says so."""
    with pytest.raises(RecoveryNeeded) as needed:
        invocation.result(timeout=WAIT_S)
    assert needed.value.code == "task_execution_uncertain"
    (task,) = [task for task in invocation.tasks() if task.status == "uncertain"]
    return task


def refused(code: str, call: Callable[[], object]) -> HayataError:
    with pytest.raises(HayataError) as refusal:
        call()
    assert refusal.value.code == code
    return refusal.value


def both_killed(daemon: Daemon) -> None:
    """Kill guard and supervisor, and start the daemon again."""
    tree = daemon.tree()
    for seen in tree[:2]:
        seen.kill()
    began = time.monotonic()
    check_gone(tree, began)
    daemon.wait_lost()
    daemon.start()


# ---- the four scenarios ----------------------------------------------------------------------------------


def test_completed_results_survive_and_are_not_computed_again(daemon: Daemon):
    done = daemon.client.run("line")
    result = done.result(timeout=WAIT_S)
    half = at_gate(daemon, "line", "report")
    before = half.tasks()[:2]
    both_killed(daemon)
    assert done.result(timeout=WAIT_S) == result
    assert daemon.client.get_result(done.id) == result
    unsure = uncertain(half)
    assert half.tasks()[:2] == before  # results and times included
    daemon.client.reconcile(half.id, unsure.id, result={"report": "by hand", "log": "by hand"})
    tokens = [task.update["log"] for task in before]
    assert half.result(timeout=WAIT_S)["log"] == [*tokens, "by hand"]
    for node in ("prepare", "act", "report"):
        assert daemon.site.ledger.attempts(half.id, node) == [1]
    audit(daemon.client, daemon.site.ledger, [done.id, half.id], reruns={})


def test_task_that_was_running_without_a_result_is_uncertain_and_not_run_again(daemon: Daemon):
    invocation = at_gate(daemon, "line")
    daemon.kill_supervisor()
    unsure = uncertain(invocation)
    assert (unsure.node, unsure.attempt) == ("act", 1)
    daemon.site.open_gate("act")
    assert daemon.client.call("line", timeout=WAIT_S)  # the agent serves others meanwhile
    assert invocation.status() == "uncertain"
    assert daemon.site.ledger.attempts(invocation.id, "act") == [1]
    daemon.kill_supervisor()  # and it is as uncertain after another one
    assert uncertain(invocation).id == unsure.id
    assert invocation.cancel() == "cancelled"
    with pytest.raises(InvocationCancelled):
        invocation.result(timeout=WAIT_S)
    assert [event.type for event in invocation.events()].count("node_uncertain") == 1


def test_running_checkpoint_is_restored_and_goes_on_where_it_was(daemon: Daemon):
    invocation = at_gate(daemon, "again")
    prepared = invocation.tasks()[0]
    daemon.kill_supervisor()
    daemon.site.ledger.wait("start", invocation=invocation.id, node="act", attempt=2)
    assert (invocation.refresh().status, invocation.record.step) == ("running", 2)
    daemon.site.open_gate("act")
    result = invocation.result(timeout=WAIT_S)
    assert result["prepare"] == prepared.update["prepare"]
    assert daemon.site.ledger.attempts(invocation.id, "prepare") == [1]
    assert statuses(invocation) == [
        ("prepare", 1, "completed"),
        ("act", 1, "failed"),
        ("act", 2, "completed"),
        ("report", 1, "completed"),
    ]
    assert invocation.tasks()[1].error.code == "supervisor_lost"
    audit(daemon.client, daemon.site.ledger, [invocation.id], reruns={"act": 3})


def test_checkpoint_of_an_agent_that_resumes_by_hand_waits_for_recover(daemon: Daemon):
    invocation = at_gate(daemon, "manual", session="s")
    daemon.kill_supervisor()
    with pytest.raises(RecoveryNeeded) as needed:
        invocation.result(timeout=WAIT_S)
    assert needed.value.code == "recovery_required"
    assert invocation.status() == "recovery_required"
    assert statuses(invocation) == [("prepare", 1, "completed"), ("act", 1, "running")]
    refused("recovery_required", lambda: daemon.client.run("manual", session="s"))
    task = invocation.tasks()[1]
    refused("not_uncertain", lambda: daemon.client.reconcile(invocation.id, task.id, retry=True))
    assert [each.id for each in daemon.client.invocations(status="recovery_required")] == [invocation.id]
    daemon.site.open_gate("act")
    assert [each.id for each in daemon.client.recover("manual")] == [invocation.id]
    unsure = uncertain(invocation)
    daemon.client.reconcile(invocation.id, unsure.id, retry=True)  # the last one resumes, under manual, too
    assert invocation.result(timeout=WAIT_S)["act"]
    assert daemon.site.ledger.attempts(invocation.id, "act") == [1, 2]


def test_parallel_invocation_reuses_one_branch_and_runs_the_other(daemon: Daemon):
    """The other branch was waiting for a slot, so it was never marked as running: it is run."""
    blocker = at_gate(daemon, "pair", "right")
    invocation = daemon.client.run("pair")
    done = eventually(
        lambda: [task for task in invocation.tasks() if task.status == "completed"],
        "the left branch is stored",
    )
    assert statuses(invocation) == [("left", 1, "completed"), ("right", 1, "scheduled")]
    daemon.kill_supervisor()
    result = invocation.result(timeout=WAIT_S)
    assert daemon.site.ledger.attempts(invocation.id, "left") == [1]
    assert daemon.site.ledger.attempts(invocation.id, "right") == [1]
    right = invocation.tasks()[1]
    assert result["results"] == [done[0].update, right.update]
    assert uncertain(blocker).node == "right"
    audit(daemon.client, daemon.site.ledger, [invocation.id, blocker.id], reruns={})


def test_branch_that_was_cut_off_runs_again_when_its_node_says_so(daemon: Daemon):
    invocation = at_gate(daemon, "pair_again", "right")
    eventually(lambda: invocation.tasks()[0].status == "completed", "the left branch is stored")
    daemon.kill_supervisor()
    daemon.site.open_gate("right")
    result = invocation.result(timeout=WAIT_S)
    left, _, right, _ = invocation.tasks()
    assert result["results"] == [left.update, right.update]
    assert daemon.site.ledger.attempts(invocation.id, "left") == [1]
    assert daemon.site.ledger.attempts(invocation.id, "right") == [1, 2]


def test_two_branches_that_were_cut_off_wait_until_both_are_settled(daemon: Daemon):
    invocation = daemon.client.run("pair", {"left_gate": "both", "right_gate": "both"})
    for node in ("left", "right"):
        daemon.site.ledger.wait("start", invocation=invocation.id, node=node)
    daemon.kill_supervisor()
    with pytest.raises(RecoveryNeeded):
        invocation.result(timeout=WAIT_S)
    left, right = invocation.tasks()
    assert (left.status, right.status) == ("uncertain", "uncertain")
    daemon.site.open_gate("both")
    daemon.client.reconcile(invocation.id, right.id, result={"right": "by hand"})
    assert invocation.status() == "uncertain"
    daemon.client.reconcile(invocation.id, left.id, retry=True)
    results = invocation.result(timeout=WAIT_S)["results"]
    assert list(results[0]) == ["left", "log"]
    assert results[1] == {"right": "by hand"}


# ---- reconcile, other definitions ------------------------------------------------------------------------


def test_reconcile_settles_each_uncertain_task_once(daemon: Daemon):
    """D11: a second verdict does nothing twice. Who settled what, and how, is recorded."""
    client = daemon.client
    first, second, third = (at_gate(daemon, "line") for _ in range(3))
    daemon.kill_supervisor()
    tasks = {invocation.id: uncertain(invocation) for invocation in (first, second, third)}
    daemon.site.open_gate("act")

    refused("invalid_node_result", lambda: client.reconcile(first.id, tasks[first.id].id, result={"act": 1}))
    assert first.status() == "uncertain"
    settled = client.reconcile(first.id, tasks[first.id].id, result={"act": "yes", "log": "yes"}, by="ann")
    assert (settled.status, settled.reconciled.by, settled.reconciled.how) == ("completed", "ann", "result")
    assert first.result(timeout=WAIT_S)["act"] == "yes"
    again = refused("already_reconciled", lambda: client.reconcile(first.id, tasks[first.id].id, retry=True))
    assert again.details["by"] == "ann"

    client.reconcile(second.id, tasks[second.id].id, error="the order was never placed")
    with pytest.raises(InvocationFailed, match="the order was never placed"):
        second.result(timeout=WAIT_S)

    client.reconcile(third.id, tasks[third.id].id, retry=True)
    assert third.result(timeout=WAIT_S)["act"]
    assert statuses(third)[1:3] == [("act", 1, "failed"), ("act", 2, "completed")]

    running = at_gate(daemon, "pair", "right")
    for invocation, code in ((running, "not_uncertain"), (third, "invocation_terminal")):
        task = invocation.tasks()[0]
        refused(code, lambda id=invocation.id, task=task: client.reconcile(id, task.id, retry=True))
    daemon.kill_supervisor()  # what was settled stays settled
    assert [event.type for event in first.events()].count("node_reconciled") == 1
    audit(client, daemon.site.ledger, [first.id, second.id, third.id], reruns={})
    assert [daemon.site.ledger.attempts(each.id, "act") for each in (first, second, third)] == [
        [1],
        [1],
        [1, 2],
    ]


@pytest.mark.parametrize("changed", ["continue", "restart", "drop"])
def test_definition_of_another_version_is_not_resumed_silently(site: Site, changed: str):
    daemon = site.daemon(agents="again").start(CRASH_VERSION="1")
    invocation = at_gate(daemon, "again")
    daemon.stop()
    daemon.start(CRASH_VERSION="2")
    site.open_gate("act")
    with pytest.raises(RecoveryNeeded) as needed:
        invocation.result(timeout=WAIT_S)
    assert needed.value.code == "definition_changed"
    daemon.client.recover("again")  # without a word about it: nothing
    assert invocation.status() == "recovery_required"
    assert site.ledger.attempts(invocation.id, "act") == [1]
    daemon.client.recover("again", changed)
    if changed == "continue":
        assert invocation.result(timeout=WAIT_S)["act"]
        assert invocation.refresh().version == "2"
        assert site.ledger.attempts(invocation.id, "act") == [1, 2]
        return
    with pytest.raises(InvocationCancelled):
        invocation.result(timeout=WAIT_S)
    others = [each for each in daemon.client.invocations(agent="again") if each.id != invocation.id]
    assert len(others) == (1 if changed == "restart" else 0)
    for fresh in others:
        assert fresh.result(timeout=WAIT_S)["act"]
        assert (fresh.record.restarted_from, fresh.record.version) == (invocation.id, "2")
        assert site.ledger.attempts(fresh.id, "prepare") == [1]


# ---- clients over a restart ------------------------------------------------------------------------------


@pytest.fixture
def threads():
    with ThreadPoolExecutor(4) as pool:
        yield pool


def test_client_that_waits_for_a_result_gets_it_from_the_next_supervisor(daemon: Daemon, threads: ThreadPoolExecutor):
    again, plain = at_gate(daemon, "again"), at_gate(daemon, "line")
    result = threads.submit(again.result, WAIT_S)
    error = threads.submit(plain.result, WAIT_S)
    eventually(lambda: connections(daemon) >= 2, "both wait")
    daemon.kill_supervisor()
    assert isinstance(error.exception(WAIT_S), RecoveryNeeded)
    assert not result.done()
    daemon.site.open_gate("act")
    assert result.result(WAIT_S)["act"]


def connections(daemon: Daemon) -> int:
    """How many clients are connected to the daemon's socket, besides this test's own pooled connection."""
    with open("/proc/net/unix") as table:
        lines = [line.split() for line in table]
    return sum(line[-1] == daemon.socket and line[5] == "03" for line in lines)


def test_run_that_was_acknowledged_exists_whatever_dies_next_d2(daemon: Daemon):
    """D2, langgraph 8764: a run that was accepted outlives a crash right after its acknowledgement."""
    acknowledged = []
    for kill in ("supervisor", "all", "supervisor"):
        tree = daemon.tree()
        victims = tree if kill == "all" else [seen for seen in tree if seen.role == kill]
        invocation = daemon.client.run("again", {"text": kill}, key=kill)
        for seen in victims:
            seen.kill()
        acknowledged.append(invocation)
        if kill == "all":
            check_gone(tree, time.monotonic())
            daemon.wait_lost()
            daemon.start()
        assert invocation.id in [each.id for each in daemon.client.invocations()]
        assert daemon.client.run("again", {"text": kill}, key=kill).id == invocation.id
    for invocation in acknowledged:
        try:
            assert invocation.result(timeout=WAIT_S)["act"]
        except RecoveryNeeded:  # `prepare`, which may not be run again, was running
            daemon.client.reconcile(invocation.id, uncertain(invocation).id, retry=True)
            assert invocation.result(timeout=WAIT_S)["act"]
    audit(daemon.client, daemon.site.ledger, [each.id for each in acknowledged], reruns={"act": 3})


def test_session_queue_survives_in_its_order(daemon: Daemon):
    def say(text: str, gate: str | None = None) -> Invocation:
        words = {"text": text, "speak_gate": gate}
        return daemon.client.run("chat", words, session="s", on_busy="queue")

    first = say("first", "talk")
    daemon.site.ledger.wait("start", invocation=first.id)
    refused("session_busy", lambda: daemon.client.run("chat", {"text": "pushy"}, session="s"))
    second, third = say("second"), say("third")
    daemon.kill_supervisor()
    unsure = uncertain(first)
    refused("recovery_required", lambda: daemon.client.run("chat", {"text": "pushy"}, session="s"))
    fourth = say("fourth")
    assert [each.status() for each in (second, third, fourth)] == ["queued"] * 3
    other = daemon.client.run("chat", {"text": "elsewhere"}, session="t")
    assert [message["content"] for message in other.result(timeout=WAIT_S)["messages"]] == ["elsewhere"]
    told = {"messages": [{"role": "user", "content": "first"}]}
    daemon.client.reconcile(first.id, unsure.id, result=told)
    spoken = fourth.result(timeout=WAIT_S)["messages"]
    assert [message["content"] for message in spoken] == ["first", "second", "third", "fourth"]
    order = [line["invocation"] for line in daemon.site.ledger.lines("start")]
    assert [id for id in order if id != other.id] == [each.id for each in (first, second, third, fourth)]
    both_killed(daemon)
    assert len(say("fifth").result(timeout=WAIT_S)["messages"]) == 5


def test_reader_of_events_sees_each_number_once_over_a_restart(daemon: Daemon, threads: ThreadPoolExecutor):
    invocation = daemon.client.run("streamer", {"pour_gate": "pour"}, stream=True)
    read: list[Event] = []

    def follow() -> None:
        for event in invocation.events(until="terminal"):
            read.append(event)  # one by one: we look at it meanwhile

    following = threads.submit(follow)
    eventually(lambda: len([e for e in read if e.type == "node_partial_result"]) == 5, "five chunks")
    seen = read[-1].sequence
    daemon.kill_supervisor()
    daemon.site.ledger.wait("start", invocation=invocation.id, attempt=2)
    daemon.site.open_gate("pour")
    following.result(WAIT_S)
    check_events(read, "completed")
    chunks = [e.data["result"] for e in read if e.type == "node_partial_result"]
    assert chunks[:5] == [{"attempt": 1, "chunk": number} for number in range(5)]
    assert chunks[5:] == [{"attempt": 2, "chunk": number} for number in range(10)]
    late = list(invocation.events(after=seen))  # a reader that comes later, behind what was read before the kill
    check_events(late, "completed", first=seen + 1)
    assert [e.sequence for e in late if e.type != "gap"] == [
        e.sequence for e in read if e.sequence > seen and e.type != "gap"
    ]
    check_events(list(invocation.events()), "completed")
    both_killed(daemon)
    check_events(list(invocation.events()), "completed")
    lifecycle = [(e.sequence, e.type, e.data) for e in read if e.type not in ("gap", "node_partial_result")]
    assert [(e.sequence, e.type, e.data) for e in invocation.events() if e.type != "gap"] == lifecycle


# ---- other daemons ---------------------------------------------------------------------------------------


def test_second_daemon_gets_a_clear_error_and_the_first_still_serves_p16(site: Site):
    """P16, supervisor 613."""
    first = site.daemon(agents="line").start()
    invocation = at_gate(first, "line")
    tree = first.tree()
    for second, code in (
        (site.daemon(agents="line", sock="s2"), "data_dir_in_use"),
        (site.daemon(agents="line", data_dir="d2"), "socket_in_use"),
        (site.daemon(agents="line"), "data_dir_in_use"),
    ):
        before = site.log.stat().st_size
        assert second.launch().wait(WAIT_S) == 5
        said = site.log.read_text()[before:]
        assert f"{code}: " in said
        assert "hint: " in said
        assert "Traceback" not in said
    assert not [seen for seen in tree if seen.dead()]
    eventually(lambda: {seen.pid for seen in site.marked()} == {seen.pid for seen in first.tree()}, "only the first")
    assert os.path.exists(first.socket)
    assert not os.path.exists(f"{site.home}/s2.lock")
    site.open_gate("act")
    assert invocation.result(timeout=WAIT_S)["act"]
    first.stop()
    site.daemon(agents="line", sock="s2").start()  # the directory is free again


def test_copy_of_the_store_serves_and_the_original_is_untouched(site: Site):
    original = site.daemon(agents="line").start()
    done = original.client.run("line")
    result = done.result(timeout=WAIT_S)
    running = at_gate(original, "line")
    tree = original.tree()
    shutil.copytree(original.data_dir, f"{site.home}/copy")
    copy = site.daemon(agents="line", data_dir="copy", sock="c").start()
    assert copy.client.get_result(done.id) == result
    there = copy.client.invocation(running.id)
    unsure = uncertain(there)
    copy.client.reconcile(there.id, unsure.id, result={"act": "in the copy", "log": "in the copy"})
    assert there.result(timeout=WAIT_S)["act"] == "in the copy"
    for seen in copy.tree()[:2]:
        seen.kill()  # the sweep of the next start there must not see the original's processes
    copy.wait_lost()
    copy.start()
    assert not [seen for seen in tree if seen.dead()]
    assert running.status() == "running"
    site.open_gate("act")
    assert running.result(timeout=WAIT_S)["act"].startswith("act-")
    assert site.ledger.attempts(running.id, "act") == [1]


# ---- random moments --------------------------------------------------------------------------------------


class Customer:
    """Runs short invocations one after the other, and settles what is uncertain: so none is left open."""

    def __init__(self, socket: str, name: str, stop: threading.Event) -> None:
        self.acknowledged: list[str] = []
        self.seen: dict[str, tuple[str, object]] = {}
        self.retried: set[str] = set()
        self._client = Client(socket)
        self._name = name
        self._stop = stop

    def work(self) -> None:
        with self._client:
            while not self._stop.is_set():
                name = f"{self._name}-{len(self.acknowledged)}"
                invocation = self._client.run("short", {"left_seconds": 0.01}, invocation_id=name)
                self.acknowledged.append(name)
                self._see_through(invocation)

    def _see_through(self, invocation: Invocation) -> None:
        while True:
            try:
                result: object = invocation.result(timeout=30)
            except RecoveryNeeded:
                for task in invocation.tasks():
                    if task.status == "uncertain":
                        self._client.reconcile(invocation.id, task.id, retry=True)
                        self.retried.add(task.id)
            else:
                self.seen[invocation.id] = ("completed", result)
                return


def test_supervisor_killed_at_random_moments_repeats_nothing_d1(site: Site, threads: ThreadPoolExecutor):
    """D1, langgraph 8039: fifteen kills under load; then the ledger is compared with what the product says."""
    dice = random.Random(7)
    daemon = site.daemon(agents="short", limits={"deaths": 100, "backoff": 0.01, "max_backoff": 0.01}).start()
    stop = threading.Event()
    customers = [Customer(daemon.socket, f"c{number}", stop) for number in range(3)]
    working = [threads.submit(customer.work) for customer in customers]
    try:
        for _ in range(15):
            victim = daemon.supervisor()
            tree = daemon.tree()
            grown = site.ledger.size() + dice.randrange(1, 20_000)
            eventually(lambda grown=grown: site.ledger.size() >= grown or failed(working), "work goes on")
            time.sleep(dice.random() * 0.01)  # not to wait for anything: the moment is to be any
            victim.kill()
            check_gone([seen for seen in tree if seen.role != "guard"], time.monotonic())
    finally:
        stop.set()
    for done in working:
        done.result(60)
    acknowledged = [name for customer in customers for name in customer.acknowledged]
    seen = {name: outcome for customer in customers for name, outcome in customer.seen.items()}
    assert sorted(seen) == sorted(acknowledged)  # nothing is left open
    assert {status for status, _ in seen.values()} <= TERMINAL
    both_killed(daemon)
    tasks = audit(daemon.client, site.ledger, acknowledged, reruns={"again": 3}, seen=seen)
    again = [task for each in tasks.values() for task in each if task.attempt > 1]
    retried = {name for customer in customers for name in customer.retried}
    print(f"{len(acknowledged)} invocations, {len(retried)} tasks uncertain, {len(again)} attempts repeated")
    assert len(acknowledged) > 15
    assert retried  # or the kills have hit nothing


def failed(working: list[Future[None]]) -> bool:
    return any(done.done() for done in working)
