"""The supervisor's side of its workers, with real processes: start, work, stop."""

from __future__ import annotations

import os
import signal

import cloudpickle
import pytest

from hayata import Agent
from hayata_supervisor.process.pidfd import children_of
from tests.support.tree_rig import APP, BROKEN_APP, TreeRig, kill


@pytest.fixture
def rig():
    with TreeRig() as rig:
        rig.loaded = rig.hear("app_loaded")
        yield rig


# Start


def test_start_app_of_two_agents_runs_a_worker_for_each_agent_and_node(rig):
    loaded = rig.loaded
    assert (loaded["index"], loaded["reference"], loaded["agents"]) == (0, APP, ["tree", "fragile"])
    names = [("tree", None), ("tree", "act"), ("tree", "act_async"), ("fragile", None), ("fragile", "act")]
    pids = {rig.serving(agent, node) for agent, node in names}
    rig.order("describe")
    processes = rig.hear("tree")["processes"]
    assert [(each["role"], each["name"], each["status"]) for each in processes] == [
        ("forkserver", APP, "serving"),
        ("agent", "tree", "serving"),
        ("node", "tree/act", "serving"),
        ("node", "tree/act_async", "serving"),
        ("agent", "fragile", "serving"),
        ("node", "fragile/act", "serving"),
    ]
    assert {each["pid"] for each in processes[1:]} == pids
    assert set(rig.children()) == {each["pid"] for each in processes}
    assert len({each["incarnation"] for each in processes}) == 6
    assert all(each["restarts"] == 0 and each["last_exit"] == "" for each in processes)


def test_start_app_that_cannot_be_imported_is_reported_and_tried_again():
    with TreeRig(BROKEN_APP, broken="yes") as rig:
        failed = rig.hear("app_failed")
        assert (failed["index"], failed["reference"]) == (0, BROKEN_APP)
        assert failed["error"]["code"] == "agent_start_failed"
        assert "no module for today" in failed["error"]["message"]
        assert "ImportError" in str(failed["error"]["details"])
        rig.hear("app_failed")
        rig.broken.unlink()
        assert rig.hear("app_loaded")["agents"] == ["mended"]
        rig.serving("mended")


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [("die", "agent_start_failed", "SIGKILL"), ("slow", "agent_start_failed", "longer than 1 s")],
)
def test_start_app_whose_import_never_ends_well_is_reported_with_the_reason(how, code, said):
    with TreeRig(BROKEN_APP, broken=how, start_timeout_s=1.0 if how == "slow" else 30.0) as rig:
        error = rig.hear("app_failed")["error"]
        assert error["code"] == code
        assert said in error["message"]


# Agents


def test_evaluate_each_decision_is_answered(rig):
    rig.evaluate(1, result={"n": 1})
    rig.evaluate(2, policy="next", value=7)
    rig.evaluate(3, policy="fail")
    rig.evaluate(4, policy="raise")
    answers = [rig.answer(number) for number in (1, 2, 3, 4)]
    assert [answer["type"] for answer in answers] == [
        "DecidedFinish",
        "DecidedNext",
        "DecidedFail",
        "PolicyFailed",
    ]
    assert answers[0]["result"] == {"n": 1}
    assert answers[1]["nodes"] == ["act"]
    assert answers[3]["error"]["code"] == "policy_exception"


def test_evaluate_many_at_once_are_answered_in_order(rig):
    orders = [{"do": "evaluate", "agent": "tree", "number": number, "input": {"quiet": True}} for number in range(300)]
    rig.order("many", orders=orders)
    rig.answer(299)
    answered = [each["answer"]["evaluation"] for each in rig.heard("answered")]
    assert answered == list(range(299))


def test_check_update_is_answered_with_the_mapping_or_the_reason(rig):
    rig.order("check", agent="tree", number=1, node="act", update={"a": 1})
    rig.order("check", agent="tree", number=2, node="act", update=[1])
    good = rig.hear("answered", answer={"check": 1})["answer"]
    bad = rig.hear("answered", answer={"check": 2})["answer"]
    assert (good["update"], good["error"]) == ({"a": 1}, None)
    assert (bad["update"], bad["error"]["code"]) == (None, "invalid_node_result")


def test_evaluate_over_the_frame_cap_fails_that_one_alone():
    with TreeRig(frame_cap_bytes=200_000) as rig:
        rig.hear("app_loaded")
        rig.evaluate(1, result="x" * 300_000)
        rig.evaluate(2, result="small")
        assert rig.answer(1)["error"]["code"] == "frame_too_large"
        assert rig.answer(2)["result"] == "small"


# Nodes


@pytest.mark.parametrize("node", ["act", "act_async"])
def test_dispatch_result_is_reported_and_the_edge_is_in_the_tree(rig, node):
    rig.dispatch("e1", node=node, value=5)
    report = rig.report("e1")
    assert (report["type"], report["update"]) == ("TaskCompleted", {"value": 5})
    (edge,) = rig.process("node", f"tree/{node}")["children"]
    assert (edge["role"], edge["name"]) == ("edge", report["edge"])
    assert edge["pid"] == rig.told("body")["pid"]


def test_dispatch_before_the_node_is_up_is_run_when_it_is(rig):
    rig.order("many", orders=[order(f"e{n}") for n in range(3)])
    assert {rig.report(f"e{n}")["type"] for n in range(3)} == {"TaskCompleted"}


def order(execution, **input):
    return {"do": "dispatch", "agent": "tree", "node": "act", "execution": execution, "input": input}


def test_dispatch_failure_and_chunk_are_reported(rig):
    rig.dispatch("e1", do="raise")
    rig.dispatch("e2", do="stream", value=2)
    assert rig.report("e1")["error"]["code"] == "node_exception"
    first, second = rig.report("e2"), rig.report("e2")
    assert (first["type"], first["chunk"]) == ("Partial", {"chunk": 1})
    assert (second["type"], second["update"]) == ("TaskCompleted", {"value": 2})


def test_dispatch_over_the_frame_cap_fails_that_task_alone():
    with TreeRig(frame_cap_bytes=200_000) as rig:
        rig.hear("app_loaded")
        rig.dispatch("e1", filler=300_000)
        rig.dispatch("e2", value=1)
        report = rig.report("e1")
        assert (report["type"], report["retryable"]) == ("TaskFailed", False)
        assert report["error"]["code"] == "frame_too_large"
        assert rig.report("e2")["type"] == "TaskCompleted"


def test_dispatch_what_a_body_prints_is_logged_with_its_names(rig):
    rig.dispatch("e1", do="print")
    said = rig.hear("output", node="act", stream="stdout")
    assert (said["agent"], said["node"], said["execution"]) == ("tree", "act", "e1")
    assert said["lines"] == ["said by a body"]
    assert rig.hear("output", node="act", stream="stderr")["lines"] == ["said to stderr"]


def test_output_of_forkserver_and_agent_is_logged_with_their_names(rig):
    assert rig.hear("output", agent="", node="")["lines"] == ["said while the app was imported"]
    rig.evaluate(1, policy="print")
    assert rig.hear("output", agent="tree", node="", stream="stdout")["lines"] == ["said by a policy"]


def test_dispatch_five_megabytes_both_ways_at_once_do_not_deadlock(rig):
    """P10, zeek 3396."""
    size = 5_000_000
    for number in range(4):
        rig.dispatch(f"e{number}", filler=size, do="echo")
    assert [len(rig.report(f"e{number}")["update"]["value"]) for number in range(4)] == [size] * 4


@pytest.mark.parametrize("node", ["act", "act_async"])
def test_kill_running_task_ends_it_and_the_node_goes_on(rig, node):
    rig.dispatch("e1", node=node, do="block")
    rig.told("body")
    rig.order("kill", agent="tree", node=node, execution="e1", reason="wanted")
    report = rig.report("e1")
    assert (report["type"], report["started"]) == ("TaskInterrupted", True)
    assert report["error"]["code"] == "cancelled"
    rig.dispatch("e2", node=node, value=1)
    assert rig.report("e2")["type"] == "TaskCompleted"


def test_kill_task_that_waits_for_its_node_reports_that_it_never_ran(rig):
    forkserver = rig.node_down(rig.all_serving()["tree", "act"])
    rig.dispatch("e1")
    rig.dispatch("e2", value=2)
    rig.order("kill", agent="tree", node="act", execution="e1", reason="sibling_failed")
    report = rig.report("e1")
    assert (report["started"], report["error"]["code"]) == (False, "cancelled")
    assert "sibling_failed" in report["error"]["message"]
    kill(forkserver, signal.SIGCONT)
    assert rig.report("e2")["update"] == {"value": 2}
    assert not rig.heard("reported", report={"execution_id": "e1"})


def test_kill_task_that_has_ended_does_nothing(rig):
    rig.dispatch("e1", value=1)
    assert rig.report("e1")["type"] == "TaskCompleted"
    rig.order("kill", agent="tree", node="act", execution="e1", reason="late")
    rig.dispatch("e2", value=2)
    assert rig.report("e2")["type"] == "TaskCompleted"
    assert not rig.heard("reported")


# Stop


@pytest.mark.parametrize("drain", [True, False])
def test_stop_leaves_no_process_and_no_descriptor(rig, drain):
    before = rig.descriptors()
    rig.all_serving()
    rig.dispatch("e1", value=1)
    rig.report("e1")
    rig.order("stop", drain=drain)
    stopped = rig.hear("stopped")
    # What is left: the standard streams, the launch, the loop's two.
    assert stopped["descriptors"] < before["count"]
    assert rig.marked() == []
    assert not rig.heard("log", text="worker died")


def test_stop_body_in_hand_is_cut_off_within_its_grace_and_not_reported(rig):
    rig.all_serving()
    rig.dispatch("e1", do="block")
    rig.told("body")
    rig.order("stop", drain=True)
    rig.hear("stopped", timeout_s=6.0)
    assert not rig.heard("reported")
    assert rig.marked() == []


def test_stop_workers_that_do_not_react_are_killed_when_their_grace_is_over(rig):
    for pid in rig.all_serving().values():
        kill(pid, signal.SIGSTOP)
    rig.order("stop", drain=True)
    rig.hear("stopped", timeout_s=6.0)
    assert rig.marked() == []


@pytest.mark.parametrize("drain", [True, False])
def test_stop_child_of_a_task_that_ignores_sigterm_is_killed(rig, drain):
    """Case P3, circus 1044."""
    rig.all_serving()
    rig.dispatch("e1", do="spawn", ignoring=True)
    rig.told("body")
    left = rig.told("spawned")
    rig.order("stop", drain=drain)
    rig.hear("stopped", timeout_s=6.0)
    rig.wait_gone(left["child"], left["daemon"], timeout_s=0.0)


def test_stop_while_everything_starts_leaves_nothing():
    with TreeRig() as rig:
        rig.order("stop", drain=True)
        rig.hear("stopped")
        assert rig.marked() == []


# Apps and agents at run time


def test_load_app_runs_its_agents_beside_the_others(rig):
    rig.all_serving()
    rig.order("load", reference=BROKEN_APP)
    assert rig.hear("loading")["index"] == 1
    loaded = rig.hear("app_loaded", index=1)
    assert loaded["agents"] == ["mended"]
    rig.serving("mended")
    rig.evaluate(1, agent="mended")
    assert rig.answer(1)["type"] == "DecidedNext"


def test_load_app_that_cannot_be_imported_leaves_nothing(rig):
    rig.all_serving()
    before = rig.descriptors()["count"]
    rig.broken.write_text("yes")
    rig.order("load", reference=BROKEN_APP)
    failed = rig.hear("app_failed", index=1)
    assert "no module for today" in failed["error"]["message"]
    assert len(rig.children()) == 6
    assert rig.descriptors()["count"] == before


def test_load_app_with_an_agent_that_runs_already_is_refused(rig):
    rig.all_serving()
    rig.order("load", reference=APP)
    error = rig.hear("app_failed", index=1)["error"]
    assert error["code"] == "invalid_definition"
    assert "'tree'" in error["message"]
    rig.evaluate(1, result=1)
    assert rig.answer(1)["result"] == 1


def test_stop_agent_ends_its_workers_alone_and_the_last_one_takes_the_forkserver(rig):
    pids = rig.all_serving()
    forkserver = rig.process("forkserver", APP)["pid"]
    rig.order("stop_agent", agent="fragile")
    rig.hear("agent_stopped")
    rig.wait_gone(pids["fragile", None], pids["fragile", "act"])
    rig.dispatch("e1", agent="fragile")
    rig.hear("log", text="task for a node that does not run")
    rig.dispatch("e2", value=2)
    assert rig.report("e2")["type"] == "TaskCompleted"
    assert forkserver in children_of(rig.driver)
    rig.order("stop_agent", agent="tree")
    rig.hear("agent_stopped")
    assert rig.marked() == []


def test_stop_agent_stays_stopped_when_its_forkserver_is_replaced(rig):
    rig.all_serving()
    rig.order("stop_agent", agent="fragile")
    rig.hear("agent_stopped")
    kill(rig.process("forkserver", APP)["pid"])
    assert rig.hear("app_loaded")["agents"] == ["tree"]
    rig.order("describe")
    assert not [each for each in rig.hear("tree")["processes"] if each["name"].startswith("fragile")]
    # From another forkserver it may come back.
    rig.order("stop_agent", agent="tree")
    rig.hear("agent_stopped")
    rig.order("load", reference=APP)
    assert rig.hear("app_loaded")["agents"] == ["tree", "fragile"]
    rig.serving("fragile")


def test_app_by_value_runs_without_a_module():
    secret = "of a closure"

    def act(state, ctx):
        return {"value": secret}

    by_value = cloudpickle.dumps([Agent(id="value", nodes=[act])])
    with TreeRig(value=by_value) as rig:
        loaded = rig.hear("app_loaded")
        assert (loaded["index"], loaded["agents"]) == (-1, ["value"])
        kill(rig.process("forkserver", "<value>")["pid"])
        rig.hear("app_loaded")
        rig.dispatch("e1", agent="value")
        assert rig.report("e1")["update"] == {"value": secret}


def test_workers_get_the_launch_s_directory_and_the_environment_unchanged(rig):
    pids = rig.all_serving()
    worker = pids["tree", "act"]
    assert os.readlink(f"/proc/{worker}/cwd") == "/"
    assert os.readlink(f"/proc/{worker}/fd/0") == "/dev/null"
