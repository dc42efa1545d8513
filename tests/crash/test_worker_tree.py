"""The supervisor's side of its workers, under real SIGKILLs."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time

import pytest
from msgspec import Raw

from hayata.framing import frame
from hayata.messages import DecidedFinish, WorkerReady, encode
from hayata_supervisor.process.pidfd import is_dead, open_pidfd, wait_dead
from hayata_supervisor.process.watcher import EdgeWatcher
from tests.support.eventually import eventually
from tests.support.tree_rig import APP, BROKEN_APP, TreeRig, kill

QUICK = {
    "node_link.UNANSWERED_S": 1.0,
    "node_link.ASKED_AFTER_S": 0.2,
    "forkserver_link.FORK_TIMEOUT_S": 1.0,
}


def framed(message):
    return frame(encode(message))


@pytest.fixture
def rig():
    with TreeRig() as rig:
        rig.pids = rig.all_serving()
        yield rig


# Agent worker


def test_agent_killed_idle_is_replaced_and_answers(rig):
    kill(rig.pids["tree", None])
    assert rig.serving("tree") != rig.pids["tree", None]
    rig.evaluate(1, result=1)
    assert rig.answer(1)["result"] == 1
    agent = rig.process("agent", "tree")
    assert (agent["restarts"], agent["last_exit"]) == (1, "signal SIGKILL")


def test_agent_killed_by_one_evaluation_asks_it_thrice_and_the_others_once_more(rig):
    rig.order(
        "many",
        orders=[
            {"do": "evaluate", "agent": "tree", "number": 1, "input": {"result": 1}},
            {"do": "evaluate", "agent": "tree", "number": 2, "input": {"policy": "die"}},
            {"do": "evaluate", "agent": "tree", "number": 3, "input": {"result": 3}},
        ],
    )
    failed = rig.answer(2)
    assert (failed["type"], failed["error"]["code"]) == ("PolicyFailed", "agent_crashed")
    assert failed["error"]["details"]["signal"] == "SIGKILL"
    assert rig.answer(1)["result"] == 1
    assert rig.answer(3)["result"] == 3
    assert [rig.told("policy")["event"] for _ in range(5)] == ["policy"] * 5  # 1, three times 2, 3
    rig.told_nothing_more()
    assert not rig.heard("answered")


def test_agent_killed_twice_by_an_evaluation_still_answers_it(rig):
    rig.evaluate(1, policy="die_until", marks=str(rig.home / "marks"), times=2, result="third time")
    assert rig.answer(1)["result"] == "third time"


def test_agent_whose_evaluations_crash_it_again_and_again_is_not_given_up(rig):
    for number in range(3):
        rig.evaluate(number, agent="fragile", policy="die")  # intensity 2
        assert rig.answer(number)["error"]["code"] == "agent_crashed"
    rig.evaluate(9, agent="fragile", result=9)
    assert rig.answer(9)["result"] == 9


def test_policy_that_never_returns_times_out_and_the_others_are_answered():
    with TreeRig(policy_timeout_s=0.4) as rig:
        rig.all_serving()
        rig.evaluate(1, policy="hang")
        rig.evaluate(2, result=2)
        begun = time.monotonic()
        timed_out = rig.answer(1)
        assert 0.3 < time.monotonic() - begun < 3.0
        assert (timed_out["type"], timed_out["error"]["code"]) == ("PolicyFailed", "policy_timeout")
        assert rig.answer(2)["result"] == 2


def test_policy_time_limit_begins_when_its_turn_comes():
    with TreeRig(policy_timeout_s=1.0) as rig:
        rig.all_serving()
        gates = [rig.home / f"gate{number}" for number in range(3)]
        for number, gate in enumerate(gates):
            rig.evaluate(number, policy="wait", gate=str(gate), result=number)
        for number, gate in enumerate(gates):  # 0.6 s each: less than the limit, together more
            rig.told("policy")
            rig.hears_nothing("answered", for_s=0.6)
            gate.touch()
            assert rig.answer(number)["result"] == number


def test_agent_that_dies_too_often_is_given_up_and_comes_back():
    with TreeRig(node_retry_s=0.5) as rig:
        pid = rig.all_serving()["fragile", None]
        for _ in range(2):
            kill(pid)
            pid = rig.serving("fragile")
        kill(pid)
        error = rig.hear("agent_given_up", agent="fragile")["error"]
        assert error["code"] == "agent_crashed"
        rig.evaluate(1, agent="fragile")
        assert rig.answer(1)["error"]["code"] == "agent_crashed"
        rig.hear("agent_back", agent="fragile")
        rig.evaluate(2, agent="fragile", result=2)
        assert rig.answer(2)["result"] == 2


@pytest.mark.parametrize(
    ("garbage", "reason"),
    [
        ((1).to_bytes(4, "big") + b"\xff", "can't be read"),
        ((2**32 - 1).to_bytes(4, "big"), "over the cap"),
        (framed(WorkerReady("agent", "another", 1)), "does not fit"),
    ],
)
def test_agent_that_does_not_speak_our_protocol_is_killed(rig, garbage, reason):
    rig.evaluate(1, policy="write", bytes=garbage.hex())
    assert reason in rig.hear("log", text="protocol error", agent="tree")["reason"]
    assert rig.answer(1)["error"]["code"] == "agent_crashed"
    rig.evaluate(2, result=2)
    assert rig.answer(2)["result"] == 2


def test_agent_that_answers_what_nobody_asked_is_not_believed(rig):
    forged = framed(DecidedFinish(77, Raw(b"\xc0")))
    rig.evaluate(1, policy="write", bytes=forged.hex(), result="mine")
    assert rig.answer(1)["result"] == "mine"
    assert not rig.heard("answered")


# Node worker


def test_node_killed_interrupts_its_tasks_and_serves_again(rig):
    rig.dispatch("e1", do="block")
    rig.dispatch("e2", do="block")
    bodies = [rig.told("body")["pid"] for _ in range(2)]
    begun = time.monotonic()
    kill(rig.pids["tree", "act"])
    for execution in ("e1", "e2"):
        report = rig.report(execution)
        assert (report["type"], report["started"]) == ("TaskInterrupted", True)
        assert report["error"]["code"] == "node_crashed"
        assert report["error"]["details"]["interrupted"] is True
        assert report["error"]["details"]["signal"] == "SIGKILL"
    rig.wait_gone(*bodies, timeout_s=0.0)  # dead and reaped before it was reported
    rig.serving("tree", "act")
    assert time.monotonic() - begun < 2.0
    rig.dispatch("e3", value=3)
    assert rig.report("e3")["update"] == {"value": 3}
    assert not rig.heard("reported")


def test_node_killed_takes_what_its_tasks_started_with_it(rig):
    """Case P1, ray 42861, one level up: children and double-forked daemons of an edge."""
    rig.dispatch("e1", do="spawn", ignoring=True)
    rig.told("body")
    left = rig.told("spawned")
    kill(rig.pids["tree", "act"])
    assert rig.report("e1")["error"]["code"] == "node_crashed"
    rig.wait_gone(left["child"], left["daemon"], timeout_s=0.0)


def test_node_killed_after_a_result_was_written_reports_the_result(rig):
    rig.dispatch("warm", value=0)
    rig.report("warm")
    rig.told("body")
    node = rig.pids["tree", "act"]
    rig.dispatch("e1", do="block_until", gate=str(rig.home / "gate"), value=1)
    rig.told("body")
    # The loop is held up: the node dies before a byte of the result is read.
    kill(rig.driver, signal.SIGSTOP)
    try:
        turns = rig.wait_asleep(node)
        (rig.home / "gate").touch()
        rig.told("returning")
        rig.wait_turn(node, turns)
        kill(node)
    finally:
        kill(rig.driver, signal.SIGCONT)
    report = rig.report("e1")
    assert (report["type"], report.get("update")) == ("TaskCompleted", {"value": 1})
    rig.serving("tree", "act")


def test_node_killed_before_a_task_was_written_runs_it_in_the_next_one(rig):
    pid = rig.pids["tree", "act"]
    kill(pid, signal.SIGSTOP)
    # The first fills the socket, so of the second not a byte is written.
    rig.dispatch("e1", filler=8_000_000)
    rig.dispatch("e2", value=2)
    rig.dispatch("e3", value=3)
    rig.order("kill", agent="tree", node="act", execution="e3", reason="wanted")
    rig.descriptors()  # answered after the dispatches …
    rig.descriptors()  # … and this one after the turn that wrote what could be written
    kill(pid)
    cut_off = rig.report("e1")
    assert (cut_off["type"], cut_off["error"]["code"]) == ("TaskInterrupted", "node_crashed")
    unwanted = rig.report("e3")
    assert (unwanted["started"], unwanted["error"]["code"]) == (False, "cancelled")
    assert rig.report("e2")["update"] == {"value": 2}
    assert rig.told("body")["execution"] == "e2"
    rig.told_nothing_more()
    assert not rig.heard("reported")


def test_node_killed_dispatch_while_it_is_down_waits_for_the_next_one(rig):
    forkserver = rig.node_down(rig.pids["tree", "act"])
    for number in range(3):
        rig.dispatch(f"e{number}", value=number)
    assert rig.process("node", "tree/act")["status"] in ("restarting", "starting")
    kill(forkserver, signal.SIGCONT)
    for number in range(3):
        assert rig.report(f"e{number}")["update"] == {"value": number}
    node = rig.process("node", "tree/act")
    assert (node["restarts"], node["last_exit"]) == (1, "signal SIGKILL")


def test_worker_that_does_not_get_ready_is_killed_and_given_up_and_comes_back():
    with TreeRig(broken="stuck worker", start_timeout_s=3.0, node_retry_s=0.5) as rig:
        error = rig.hear("agent_given_up", agent="fragile")["error"]
        assert "not ready within 3 s" in error["message"]
        rig.hear("node_given_up", agent="fragile")
        rig.broken.unlink()
        rig.hear("agent_back", agent="fragile")
        rig.hear("node_back", agent="fragile")
        rig.serving("tree", "act")  # one that is stuck has not yet bound its life to the driver's
        rig.serving("tree", "act_async")
        rig.serving("tree")
        rig.dispatch("e1", agent="fragile", value=1)
        assert rig.report("e1")["update"] == {"value": 1}


def test_forkserver_that_hangs_in_a_fork_is_replaced():
    with TreeRig(broken="stuck between", limits=QUICK) as rig:
        rig.hear("log", text="forkserver died")
        rig.broken.unlink()
        rig.all_serving()
        assert len(rig.children()) == 6


def test_app_that_cannot_be_imported_is_started_so_often_then_rests_and_comes_back():
    """P14, supervisor 1285, gunicorn 2504: a crash at the import is no storm, and no endless log either."""
    quick = {"restarter._MAX_BACKOFF_S": 0.02, "forkserver_link.MOST_FAILED_IMPORTS": 4}
    with TreeRig(BROKEN_APP, broken="yes", limits=quick, node_retry_s=3.0) as rig:
        assert rig.hear("log", text="app rests")["rest_s"] == 3.0
        assert len(rig.heard("app_failed")) == 5
        assert rig.process("forkserver", BROKEN_APP)["status"] == "failed"
        assert len(rig.heard("log")) <= 2 * 5
        assert rig.hear("log", text="app rests")["rest_s"] == 6.0
        assert len(rig.heard("app_failed")) == 6
        rig.broken.unlink()
        rig.hear("app_loaded")
        rig.serving("mended", "act")


def test_node_that_dies_too_often_is_given_up_and_comes_back():
    with TreeRig(node_retry_s=0.5) as rig:
        pid = rig.all_serving()["fragile", "act"]
        for _ in range(2):
            kill(pid)
            pid = rig.serving("fragile", "act")
        rig.dispatch("e0", agent="fragile", do="block")
        rig.told("body")
        kill(pid)
        assert rig.report("e0")["error"]["code"] == "node_crashed"
        error = rig.hear("node_given_up", agent="fragile", node="act")["error"]
        assert error["code"] == "node_unavailable"
        assert rig.process("node", "fragile/act")["status"] == "failed"
        rig.dispatch("e1", agent="fragile")
        report = rig.report("e1")
        assert (report["started"], report["error"]["code"]) == (False, "node_unavailable")
        rig.hear("node_back", agent="fragile", node="act")
        rig.dispatch("e2", agent="fragile", value=2)
        assert rig.report("e2")["update"] == {"value": 2}


def test_node_whose_edges_cannot_start_is_given_up_and_comes_back():
    with TreeRig(node_retry_s=0.5, broken="yes") as rig:
        rig.all_serving()
        rig.dispatch("e1", agent="fragile")
        error = rig.hear("node_given_up", agent="fragile", node="act")["error"]
        assert error["code"] == "node_unavailable"
        assert "no database" in error["message"]
        report = rig.report("e1")
        assert (report["type"], report["started"]) == ("TaskInterrupted", False)
        assert report["error"]["code"] == "node_unavailable"
        rig.broken.unlink()
        rig.hear("node_back", agent="fragile", node="act")
        rig.dispatch("e2", agent="fragile", value=2)
        assert rig.report("e2")["update"] == {"value": 2}
        rig.evaluate(1, agent="fragile", result=1)
        assert rig.answer(1)["result"] == 1


def test_node_that_is_stopped_at_a_deadline_or_a_kill_is_killed():
    with TreeRig(limits=QUICK) as rig:
        pids = rig.all_serving()
        rig.dispatch("e1", do="block", timeout_s=0.3)
        rig.dispatch("e2", node="act_async", do="block")
        rig.told("body")
        rig.told("body")
        kill(pids["tree", "act"], signal.SIGSTOP)
        kill(pids["tree", "act_async"], signal.SIGSTOP)
        rig.order("kill", agent="tree", node="act_async", execution="e2", reason="wanted")
        for execution in ("e1", "e2"):
            report = rig.report(execution, timeout_s=8.0)
            assert (report["type"], report["error"]["code"]) == ("TaskInterrupted", "node_crashed")
        rig.dispatch("e3", value=3)
        assert rig.report("e3")["update"] == {"value": 3}


def test_node_whose_edge_takes_long_to_start_is_not_taken_for_hung():
    with TreeRig(limits=QUICK, broken="slow") as rig:
        rig.all_serving()
        rig.dispatch("e1", agent="fragile", value=1, timeout_s=0.2)
        # Three times as long as a hung node would be given.
        rig.hears_nothing("reported", for_s=3.6)
        rig.broken.unlink()
        assert rig.report("e1")["update"] == {"value": 1}
        assert rig.process("node", "fragile/act")["restarts"] == 0


# Edge worker


def test_edge_killed_interrupts_its_task_and_the_book_of_edges_stays_right(rig):
    rig.dispatch("e1", do="block")
    rig.dispatch("e2", do="block")
    first, second = rig.told("body"), rig.told("body")
    kill(first["pid"])
    report = rig.report(first["execution"])
    assert (report["type"], report["error"]["code"]) == ("TaskInterrupted", "edge_crashed")
    rig.wait_gone(first["pid"])
    edges = [edge["pid"] for edge in rig.process("node", "tree/act")["children"]]
    assert second["pid"] in edges
    assert first["pid"] not in edges
    kill(rig.pids["tree", "act"])
    assert rig.report(second["execution"])["error"]["code"] == "node_crashed"
    rig.wait_gone(second["pid"], timeout_s=0.0)


# Forkserver


def test_forkserver_killed_leaves_the_workers_alone_and_forks_again(rig):
    forkserver = rig.process("forkserver", APP)["pid"]
    rig.dispatch("e1", do="block")
    rig.told("body")
    kill(forkserver)
    assert rig.hear("app_loaded")["agents"] == ["tree", "fragile"]
    rig.wait_gone(forkserver)
    assert {rig.process("agent", "tree")["pid"], rig.process("node", "tree/act")["pid"]} == {
        rig.pids["tree", None],
        rig.pids["tree", "act"],
    }
    assert not rig.heard("reported")
    kill(rig.pids["tree", "act"])
    assert rig.report("e1")["error"]["code"] == "node_crashed"
    rig.serving("tree", "act")
    assert not rig.heard("app_failed")


@pytest.mark.parametrize("hang", [False, True])
def test_forkserver_lost_with_forks_open_is_replaced_and_asked_again(hang):
    with TreeRig(limits=QUICK) as rig:
        pids = rig.all_serving()
        forkserver = rig.process("forkserver", APP)["pid"]
        kill(forkserver, signal.SIGSTOP)
        kill(pids["tree", "act"])
        kill(pids["tree", None])
        rig.hear("log", text="worker died", agent="tree", node="act")
        if not hang:
            with contextlib.suppress(
                ProcessLookupError
            ):  # on a slow machine the tree has lost its patience with it first
                kill(forkserver)
        rig.serving("tree")
        rig.serving("tree", "act")
        rig.dispatch("e1", value=1)
        assert rig.report("e1")["update"] == {"value": 1}
        rig.evaluate(1, result=1)
        assert rig.answer(1)["result"] == 1
        assert len(rig.children()) == 6


def test_forkserver_whose_app_no_longer_imports_is_reported_and_its_workers_stay():
    with TreeRig(BROKEN_APP) as rig:
        rig.hear("app_loaded")
        agent, node = rig.serving("mended"), rig.serving("mended", "act")
        rig.broken.write_text("yes")
        kill(rig.process("forkserver", BROKEN_APP)["pid"])
        assert "no module for today" in rig.hear("app_failed")["error"]["message"]
        rig.evaluate(1, agent="mended")
        assert rig.answer(1)["type"] == "DecidedNext"
        kill(node)
        rig.hear("log", text="worker died", pid=node)
        rig.dispatch("e1", agent="mended")
        rig.hear("app_failed")
        rig.broken.unlink()
        rig.hear("app_loaded")
        assert rig.report("e1")["type"] == "TaskCompleted"
        assert rig.process("agent", "mended")["pid"] == agent


# All of them


def test_everything_killed_at_once_comes_back(rig):
    rig.dispatch("e1", do="block")
    rig.dispatch("e2", node="act_async", do="block")
    rig.told("body")
    rig.told("body")
    for pid in rig.marked():
        kill(pid)
    assert {rig.report("e1")["error"]["code"], rig.report("e2")["error"]["code"]} <= {
        "node_crashed",
        "edge_crashed",
    }
    rig.dispatch("e3", value=3)
    rig.evaluate(1, result=1)
    assert rig.report("e3")["update"] == {"value": 3}
    assert rig.answer(1)["result"] == 1


def test_driver_killed_takes_every_worker_with_it(rig):
    rig.dispatch("e1", do="block")
    rig.told("body")
    assert len(rig.marked()) == 7
    kill(rig.driver)
    rig.wait_unmarked(timeout_s=1.0)


def test_sixty_crash_restarts_leave_the_number_of_descriptors_unchanged(rig):
    """P8, circus 315. And P4, rq 1193: no zombie."""
    rig.dispatch("warm", value=1)
    rig.report("warm")
    rig.told("body")
    before = rig.descriptors()
    agent, node = rig.pids["tree", None], rig.pids["tree", "act"]
    for number in range(20):
        rig.dispatch(f"e{number}", do="block")
        rig.told("body")
        kill(node)
        kill(agent)
        node, agent = rig.serving("tree", "act"), rig.serving("tree")
        assert rig.report(f"e{number}")["error"]["code"] == "node_crashed"
        rig.dispatch(f"f{number}", do="block")
        kill(rig.told("body")["pid"])
        assert rig.report(f"f{number}")["error"]["code"] == "edge_crashed"
    rig.dispatch("last", value=1)
    rig.report("last")
    eventually(lambda: rig.descriptors() == before, "as many descriptors as before")  # an edge may be on its way
    assert len(rig.children()) == 6


@pytest.mark.parametrize("seed", [1, 2])
def test_random_kills_every_task_ends_once_and_runs_at_most_once_and_every_question_is_answered_once(rig, seed):
    dice = random.Random(seed)
    ledger = rig.home / "ledger"
    ledger.touch()
    ends = {}
    killed = []
    for number in range(60):
        rig.dispatch(f"e{number}", ledger=str(ledger), value=number)
        rig.evaluate(number, quiet=True, result=number)
        victims = rig.marked() if dice.random() < 0.5 else rig.children()
        if victims and dice.random() < 0.5:
            killed.append(dice.choice(victims))
            with contextlib.suppress(ProcessLookupError):
                kill(killed[-1])
        if dice.random() < 0.3:  # else the dead are all that is left to be killed
            ends[number] = rig.report(f"e{number}")
    ends.update({number: rig.report(f"e{number}") for number in range(60) if number not in ends})
    answers = {number: rig.answer(number) for number in range(60)}
    bodies = ledger.read_text().split()
    assert len(bodies) == len(set(bodies))
    for number, end in ends.items():
        if end["type"] == "TaskCompleted":
            assert end["update"] == {"value": number}
            assert f"e{number}" in bodies
        else:
            assert end["error"]["code"] in ("node_crashed", "edge_crashed")
    assert {answer["type"] for answer in answers.values()} <= {"DecidedFinish", "PolicyFailed"}
    eventually(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in killed), "all are reaped, so known to be dead")
    # Whatever is late would come before the answer to this.
    rig.dispatch("last", ledger=str(ledger))
    assert rig.report("last")["type"] == "TaskCompleted"
    assert not rig.heard("reported")
    assert not rig.heard("answered")


# The edge watcher by itself


@pytest.fixture
def watched():
    """A watcher whose loop never turns; what it would call there."""
    calls = []
    watcher = EdgeWatcher(calls.append)
    watcher.start()
    sleepers = []

    def sleeper():
        process = subprocess.Popen(["sleep", "1000"])
        sleepers.append(process)
        return open_pidfd(process.pid)

    yield watcher, sleeper, calls
    watcher.stop()
    for process in sleepers:
        process.kill()
        process.wait()


def test_edge_watcher_node_dies_while_the_loop_is_busy_kills_its_edges_alone(watched):
    watcher, sleeper, calls = watched
    before = len(os.listdir("/proc/self/fd"))
    node, other_node, other_edge = sleeper(), sleeper(), sleeper()
    edges = [sleeper() for _ in range(20)]
    watcher.watch_node(1, node)
    watcher.watch_node(2, other_node)
    for number, edge in enumerate(edges):
        watcher.watch_edge(1, f"edge{number}", os.dup(edge))
    watcher.watch_edge(2, "other", os.dup(other_edge))
    signal.pidfd_send_signal(node, signal.SIGKILL)
    for edge in edges:
        assert wait_dead([edge], 1.0) == [edge]
    assert not is_dead(other_edge)
    late = sleeper()
    watcher.watch_edge(1, "late", os.dup(late))
    assert wait_dead([late], 1.0) == [late]
    for key in (1, 2):
        released = []
        watcher.release_node(key, released.append)
        wait_for_call(calls)()
        for pidfd in released[0].values():
            os.close(pidfd)
        assert len(released[0]) == {1: 21, 2: 1}[key]
    assert wait_dead([other_edge], 1.0) == [other_edge]
    for pidfd in (node, other_node, other_edge, late, *edges):
        os.close(pidfd)
    assert len(os.listdir("/proc/self/fd")) == before


def test_edge_watcher_forgotten_edge_is_not_killed(watched):
    watcher, sleeper, calls = watched
    node, edge = sleeper(), sleeper()
    watcher.watch_node(1, node)
    watcher.watch_edge(1, "edge", os.dup(edge))
    watcher.forget_edge(1, "edge")
    signal.pidfd_send_signal(node, signal.SIGKILL)
    assert wait_dead([node], 1.0) == [node]
    released = []
    watcher.release_node(1, released.append)
    wait_for_call(calls)()
    assert released == [{}]
    assert not is_dead(edge)
    os.close(node)
    os.close(edge)


def wait_for_call(calls, timeout_s=5.0):
    deadline = time.monotonic() + timeout_s
    while not calls:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return calls.pop(0)
