"""Strategies, restart types and escalation, with real workers under real SIGKILLs."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support.tree_rig import TreeRig, kill

APP = Path(__file__).parents[1] / "support" / "supervised_app.py"
NODES = ("first", "second", "third")


class Rig(TreeRig):
    """A tree with the agents of one name in `supervised_app`."""

    def __init__(self, agents, **options):
        super().__init__(f"{APP}:{agents}", **options)

    def up(self, *agents):
        """Wait for the first start; return the pids by node, None for the agent's own worker."""
        return {(agent, node): self.serving(agent, node) for agent in agents for node in (None, *NODES)}

    def worker(self, agent, node=None):
        name = agent if node is None else f"{agent}/{node}"
        return self.process("agent" if node is None else "node", name)

    def wait_until(self, condition):
        """For what sends no event of its own."""
        self._wait_for(condition, "it")

    def run(self, execution, agent, node, **input):
        self.dispatch(execution, agent, node, **input)


@pytest.mark.parametrize(
    ("agents", "agent", "restarted"),
    [("every", "all", (None, "first", "second", "third")), ("rest", "rest", ("second", "third"))],
)
def test_node_killed_restarts_those_that_its_strategy_names_and_nobody_else(agents, agent, restarted):
    with Rig(agents) as rig:
        pids = rig.up(agent)
        kill(pids[agent, "second"])
        new = {node: rig.serving(agent, node) for node in restarted}
        for node in (None, *NODES):
            worker = rig.worker(agent, node)
            assert (worker["status"], worker["restarts"]) == ("serving", int(node in restarted))
            assert worker["pid"] == (new[node] if node in restarted else pids[agent, node])
        assert rig.worker(agent)["strategy"] == ("one_for_all" if agent == "all" else "rest_for_one")
        rig.evaluate(1, agent, result=1)
        assert rig.answer(1)["result"] == 1
        for node in NODES:
            rig.run(node, agent, node, value=node)
            assert rig.report(node)["update"] == {"value": node}


def test_task_of_a_terminated_sibling_may_end_within_its_shutdown_and_is_then_cut_off():
    with Rig("every") as rig:
        pids = rig.up("all")
        rig.run("e1", "all", "first", do="block")
        rig.run("e2", "all", "first", do="block_until", gate=str(rig.home / "gate"), value=2)
        bodies = [rig.told("body")["pid"] for _ in range(2)]
        kill(pids["all", "second"])
        rig.hear("log", text="worker died", node="third")
        (rig.home / "gate").touch()
        rig.run("e3", "all", "first", value=3)  # it is being terminated: this is for the next one
        assert rig.report("e2")["update"] == {"value": 2}
        cut_off = rig.report("e1")
        assert (cut_off["type"], cut_off["started"]) == ("TaskInterrupted", True)
        assert cut_off["error"]["code"] == "node_crashed"
        assert cut_off["error"]["details"]["reason"] == "sibling_restart"
        assert cut_off["error"]["details"]["interrupted"] is True
        rig.wait_gone(*bodies, timeout_s=0.0)
        assert rig.report("e3")["update"] == {"value": 3}
        assert not rig.heard("reported")


def test_task_that_no_edge_had_is_run_by_the_next_incarnation():
    with Rig("every") as rig:
        pids = rig.up("all")
        kill(pids["all", "first"], signal.SIGSTOP)
        rig.run("e1", "all", "first", value=1)  # written, and never read
        rig.descriptors()
        kill(pids["all", "second"])
        rig.hear("log", text="worker died", node="third")
        kill(pids["all", "first"], signal.SIGCONT)
        report = rig.report("e1")
        assert report["type"] == "TaskCompleted"
        assert rig.worker("all", "first")["restarts"] == 1
        rig.up("all")


def test_evaluation_in_hand_of_a_terminated_agent_worker_is_asked_again_and_not_blamed():
    with Rig("every", limits={"agent_link.GRACE_S": 0.3}) as rig:
        pids = rig.up("all")
        rig.evaluate(1, "all", policy="wait", gate=str(rig.home / "gate"), result=1)
        rig.told("policy")
        for _ in range(4):  # more than an evaluation may crash its worker
            kill(pids["all", "second"])
            rig.told("policy")
            pids["all", "second"] = rig.serving("all", "second")
        (rig.home / "gate").touch()
        assert rig.answer(1)["result"] == 1


def test_brutally_killed_sibling_is_given_no_time():
    with Rig("brutal") as rig:
        pids = rig.up("all")
        rig.run("e1", "all", "second", do="block_until", gate=str(rig.home / "gate"))
        rig.told("body")
        kill(pids["all", "first"])
        cut_off = rig.report("e1")
        assert (cut_off["error"]["code"], cut_off["error"]["details"]["reason"]) == ("node_crashed", "sibling_restart")
        assert cut_off["error"]["details"]["signal"] == "SIGKILL"
        assert "the worker of node 'second'" in cut_off["error"]["message"]  # not only its edge was killed


def test_sibling_of_infinite_shutdown_is_waited_for_and_a_further_death_begins_no_other_restart():
    with Rig("patient") as rig:
        pids = rig.up("all")
        rig.run("e1", "all", "second", do="block_until", gate=str(rig.home / "gate"), value=1)
        rig.told("body")
        kill(pids["all", "third"])
        kill(pids["all", None])
        rig.hear("log", text="worker died", pid=pids["all", None])
        rig.hears_nothing("reported", for_s=1.5)
        assert rig.worker("all", "second")["status"] == "terminating"
        (rig.home / "gate").touch()
        assert rig.report("e1")["update"] == {"value": 1}
        rig.up("all")
        assert [rig.worker("all", node)["restarts"] for node in (None, *NODES)] == [1, 1, 1, 1]


def test_stop_ends_a_sibling_that_is_waited_for():
    with Rig("patient") as rig:
        pids = rig.up("all")
        rig.run("e1", "all", "second", do="block")
        rig.told("body")
        kill(pids["all", "third"])
        rig.hear("log", text="worker died", pid=pids["all", "third"])
        rig.order("stop", drain=False)
        rig.hear("stopped")


def test_transient_node_is_restarted_after_a_crash_and_stopped_after_sigterm():
    with Rig("transient") as rig:
        pids = rig.up("alone")
        kill(pids["alone", "second"])
        pid = rig.serving("alone", "second")
        kill(pid, signal.SIGTERM)
        error = rig.hear("node_stopped", node="second")["error"]
        assert (error["code"], error["details"]["last_exit"]) == ("node_unavailable", "signal SIGTERM")
        worker = rig.worker("alone", "second")
        assert (worker["status"], worker["restarts"], worker["restart"]) == ("stopped", 1, "transient")
        rig.run("e1", "alone", "second")
        report = rig.report("e1")
        assert (report["started"], report["error"]["code"]) == (False, "node_unavailable")
        assert "not started again" in report["error"]["message"]
        rig.run("e2", "alone", "first", value=2)
        assert rig.report("e2")["update"] == {"value": 2}


def test_temporary_node_is_never_restarted_and_what_waits_for_it_fails():
    with Rig("temporary") as rig:
        pids = rig.up("alone")
        rig.run("e1", "alone", "second", do="block")
        rig.told("body")
        kill(pids["alone", "second"])
        assert rig.report("e1")["error"]["code"] == "node_crashed"
        rig.hear("node_stopped", node="second")
        rig.run("e2", "alone", "second")
        assert rig.report("e2")["error"]["code"] == "node_unavailable"
        assert rig.worker("alone", "second")["restarts"] == 0


def test_temporary_sibling_is_terminated_with_its_group_and_not_restarted():
    with Rig("every_temporary") as rig:
        pids = rig.up("all")
        kill(pids["all", "first"])
        rig.hear("node_stopped", node="second")
        for node in (None, "first", "third"):
            rig.serving("all", node)
        assert rig.worker("all", "second")["status"] == "stopped"
        rig.wait_gone(pids["all", "second"])


def test_group_over_its_intensity_fails_its_agent_alone_and_is_tried_again():
    with Rig("fragile", node_retry_s=2.0) as rig:
        pids = rig.up("all", "other")
        kill(pids["all", "second"])
        again = rig.up("all")
        rig.run("e1", "all", "first", do="block")
        rig.told("body")
        rig.run("e0", "other", "first", do="block_until", gate=str(rig.home / "gate"), value=0)
        rig.told("body")
        kill(again["all", "third"])
        error = rig.hear("agent_given_up", agent="all")["error"]
        assert error["code"] == "agent_crashed"
        assert "node 'third' of agent 'all' does not stay up" in error["message"]
        for node in NODES:
            assert rig.hear("node_given_up", agent="all", node=node)["error"]["code"] == "node_unavailable"
        rig.evaluate(1, "all", result=1)
        assert rig.answer(1)["error"]["code"] == "agent_crashed"
        rig.run("e2", "all", "second")
        assert rig.report("e2")["error"]["code"] == "node_unavailable"
        cut_off = rig.report("e1")["error"]
        assert (cut_off["code"], cut_off["details"]["reason"]) == ("node_crashed", "agent_failed")
        rig.wait_gone(*again.values())
        assert [rig.worker("all", node)["status"] for node in (None, *NODES)] == ["failed"] * 4
        (rig.home / "gate").touch()
        assert rig.report("e0")["update"] == {"value": 0}  # the other agent's tasks go on
        rig.hear("agent_back", agent="all")
        assert [each["node"] for each in rig.heard("node_back", agent="all")] == ["third", "second", "first"]
        rig.evaluate(2, "all", result=2)
        assert rig.answer(2)["result"] == 2
        rig.run("e3", "all", "second", value=3)
        assert rig.report("e3")["update"] == {"value": 3}
        assert [rig.worker("other", node)["restarts"] for node in (None, *NODES)] == [0, 0, 0, 0]


def test_task_that_a_node_of_a_failed_agent_never_saw_fails_and_does_not_wait_for_its_return():
    with Rig("fragile", node_retry_s=60.0) as rig:
        kill(rig.up("all", "other")["all", "second"])
        pids = rig.up("all")
        kill(pids["all", "first"], signal.SIGSTOP)
        rig.dispatch("e1", "all", "first", filler=8_000_000)  # fills the socket
        rig.run("e2", "all", "first")
        rig.descriptors()
        rig.descriptors()  # a turn has written what could be written
        kill(pids["all", "third"])
        rig.hear("node_given_up", agent="all", node="first")
        cut_off = rig.report("e1")["error"]
        assert (cut_off["code"], cut_off["details"]["reason"]) == ("node_crashed", "agent_failed")
        unseen = rig.report("e2")
        assert (unseen["started"], unseen["error"]["code"]) == (False, "node_unavailable")


def test_nodes_given_up_beyond_the_intensity_fail_their_agent():
    with Rig("fragile_alone", node_retry_s=60.0) as rig:
        pids = rig.up("alone", "other")
        for node in ("first", "second"):
            kill(pids["alone", node])
            kill(rig.serving("alone", node))
            rig.hear("node_given_up", agent="alone", node=node)
        rig.hear("agent_given_up", agent="alone")
        rig.hear("node_given_up", agent="alone", node="third")
        rig.wait_gone(pids["alone", "third"], pids["alone", None])
        assert rig.worker("other", "first")["status"] == "serving"


@pytest.mark.parametrize("agents", ["storm", "storm_of_all"])
def test_workers_that_crash_at_their_start_are_started_as_often_as_allowed_and_the_log_stays_small(agents):
    """P14, supervisor 1285, gunicorn 2504: a restart storm. What crashes at its start is given up."""
    with Rig(agents, broken="yes", node_retry_s=60.0) as rig:
        rig.hear("log", text="agent failed")
        rig.wait_until(lambda: all(rig.worker("storm", node)["status"] == "failed" for node in (None, *NODES)))
        workers, intensity = 4, 3
        starts = len((rig.home / "born").read_text())
        assert 4 <= starts <= workers * (1 + intensity)
        assert rig.worker("storm", "first")["pid"] == 0
        lines = rig.heard("log")
        assert len(lines) <= starts + workers + 5
