"""Workers that are stopped, that hang, and that only seem to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

import hayata
from hayata.errors import InvocationFailed
from hayata_supervisor import failpoints
from tests.support.eventually import eventually
from tests.support.tree_rig import HERE, TreeRig, kill

APP = f"{HERE / 'tree_hang_app.py'}:hang"
SHORT = {"hang_timeout_s": 0.5, "stopped_timeout_s": 0.5}
WORKERS = [(None, "agent"), ("holding", "node"), ("blocking", "node"), ("many", "node")]


class HangRig(TreeRig):
    """A tree of the hang app."""

    def __init__(self, **options):
        super().__init__(APP, **options)

    def __enter__(self):
        super().__enter__()
        self.hear("app_loaded")
        self.pids = {node: self.serving("hang", node) for node, _ in WORKERS}
        return self

    def run(self, execution, node="holding", **input):
        self.dispatch(execution, agent="hang", node=node, **input)

    def value(self, execution):
        return self.report(execution)["update"]["value"]

    def pid_of(self, role, name):
        return self.process(role, name)["pid"]

    def edge(self, node):
        (edge,) = self.process("node", f"hang/{node}")["children"]
        return edge

    def killed(self, reason):
        """Wait until somebody is killed for it."""
        return self.hear("log", text="worker killed", reason=reason)

    def nobody_was_killed(self):
        assert not self.heard("log", text="worker killed")
        assert not self.heard("log", text="worker died")
        assert not self.heard("log", text="edge killed")


def still(rig, role, name):
    """Pid, and what the tree says of it."""
    found = rig.process(role, name)
    return found["pid"], found["status"]


# Stopped


@pytest.mark.parametrize(("role", "name"), [("forkserver", APP), ("agent", "hang"), ("node", "hang/holding")])
def test_stopped_worker_is_seen_and_is_healthy_again_when_it_goes_on(role, name):
    with HangRig() as rig:
        pid = rig.pid_of(role, name)
        for _ in range(2):
            kill(pid, signal.SIGSTOP)
            rig.hear("log", text="worker stopped", level="warning", pid=pid)
            assert still(rig, role, name) == (pid, "stopped")
            kill(pid, signal.SIGCONT)
            rig.hear("log", text="worker goes on", pid=pid)
            assert still(rig, role, name) == (pid, "serving")
        rig.run("e1", value=1)
        assert rig.value("e1") == 1
        rig.nobody_was_killed()


def test_stopped_edge_is_seen_gets_no_task_and_is_healthy_again_when_it_goes_on():
    with HangRig() as rig:
        rig.run("e1", value=1)
        assert rig.value("e1") == 1
        edge = rig.edge("holding")
        kill(edge["pid"], signal.SIGSTOP)
        rig.hear("log", text="edge stopped", level="warning", edge=edge["name"])
        assert rig.edge("holding")["status"] == "stopped"
        rig.told("body")
        rig.run("e2", value=2)
        assert rig.value("e2") == 2
        assert rig.told("body")["pid"] != edge["pid"]
        kill(edge["pid"], signal.SIGCONT)
        rig.hear("log", text="edge goes on", edge=edge["name"])
        rig.run("e3", do="block")
        rig.run("e4", do="block")
        assert edge["pid"] in {rig.told("body")["pid"], rig.told("body")["pid"]}
        rig.nobody_was_killed()


def test_task_of_an_edge_that_was_stopped_and_goes_on_ends_well():
    with HangRig() as rig:
        gate = rig.home / "gate"
        rig.run("e1", do="block_until", gate=str(gate), value=1)
        pid = rig.told("body")["pid"]
        kill(pid, signal.SIGSTOP)
        rig.hear("log", text="edge stopped")
        gate.touch()
        kill(pid, signal.SIGCONT)
        assert rig.value("e1") == 1
        rig.run("e2", value=2)
        assert rig.value("e2") == 2
        rig.nobody_was_killed()


@pytest.mark.parametrize("node", ["holding", "blocking"])
def test_edge_that_stays_stopped_is_killed_and_its_task_says_so(node):
    with HangRig(stopped_timeout_s=0.5) as rig:
        rig.run("e1", node, hold_s=600)
        pid = rig.told("body")["pid"]
        kill(pid, signal.SIGSTOP)
        report = rig.report("e1")
        assert (report["type"], report["error"]["code"]) == ("TaskInterrupted", "edge_crashed")
        details = report["error"]["details"]
        assert (details["interrupted"], details["reason"], details["signal"]) == (True, "stopped", "SIGKILL")
        assert rig.hear("log", text="edge killed", reason="stopped")["level"] == "error"
        rig.wait_gone(pid)
        rig.run("e2", node, hold_s=0.01)
        assert rig.told("body")["pid"] != pid
        assert rig.report("e2")["type"] == "TaskCompleted"


def test_node_that_stays_stopped_is_killed_with_its_edges_and_its_task_says_so():
    with HangRig(stopped_timeout_s=0.5) as rig:
        rig.run("e1", do="block")
        edge = rig.told("body")["pid"]
        kill(rig.pids["holding"], signal.SIGSTOP)
        assert rig.killed("stopped")["pid"] == rig.pids["holding"]
        report = rig.report("e1")
        assert (report["type"], report["error"]["code"]) == ("TaskInterrupted", "node_crashed")
        assert report["error"]["details"]["reason"] == "stopped"
        assert rig.serving("hang", "holding") != rig.pids["holding"]
        rig.wait_gone(edge, rig.pids["holding"])
        assert "stopped for too long" in rig.process("node", "hang/holding")["last_exit"]


def test_agent_that_stays_stopped_is_killed_and_what_it_owes_is_asked_again():
    with HangRig(stopped_timeout_s=0.5) as rig:
        gate = rig.home / "gate"
        rig.evaluate(1, agent="hang", policy="wait", gate=str(gate), result=1)
        rig.told("policy")
        kill(rig.pids[None], signal.SIGSTOP)
        assert rig.killed("stopped")["pid"] == rig.pids[None]
        rig.told("policy")
        gate.touch()
        assert rig.answer(1)["result"] == 1


def test_forkserver_that_stays_stopped_is_replaced_and_forks():
    with HangRig(stopped_timeout_s=0.5) as rig:
        forkserver = rig.pid_of("forkserver", APP)
        kill(forkserver, signal.SIGSTOP)
        assert rig.killed("stopped")["pid"] == forkserver
        kill(rig.pids["holding"])
        assert rig.serving("hang", "holding") != rig.pids["holding"]


WAITING_APP = """
import signal
from pathlib import Path
from hayata import Agent

def wait(state, ctx):
    Path(ctx.input).touch()
    signal.pause()

agent = Agent(id="waiting", nodes=[wait])
"""


def processes(info, role):
    """All of a role, in the tree from ``info`` down."""
    below = [found for child in info.children for found in processes(child, role)]
    return [info, *below] if info.role == role else below


@pytest.mark.parametrize("role", ["edge", "node"])
def test_runtime_shows_who_is_stopped_and_says_so_in_the_error(role, tmp_path):
    app, began = tmp_path / "app.py", tmp_path / "began"
    app.write_text(WAITING_APP)
    with hayata.start(f"{app}:agent", data_dir=tmp_path / "d", stopped_timeout_s=8.0, log_level="error") as runtime:
        invocation = runtime.run("waiting", str(began))
        eventually(began.exists, "the body begins")
        (victim,) = processes(runtime.tree(), role)
        kill(victim.pid, signal.SIGSTOP)
        eventually(lambda: [each.status for each in processes(runtime.tree(), role)] == ["stopped"], "it is seen")
        command = [sys.executable, "-m", "hayata.cli", "tree", "--socket", runtime.socket]
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert [str(victim.pid) in line for line in shown.splitlines() if "stopped" in line] == [True]
        with pytest.raises(InvocationFailed) as failed:
            invocation.result(timeout=30)
        assert failed.value.code == f"{role}_crashed"
        assert failed.value.details["reason"] == "stopped"
        eventually(lambda: [each.status for each in processes(runtime.tree(), role)] == ["serving"], "another serves")


# Hung


@pytest.mark.parametrize("role", ["node", "forkserver"])
def test_worker_that_does_not_answer_is_killed_and_replaced(role, tmp_path, monkeypatch):
    """The failpoint is a loop that does not turn any more, which no signal tells of."""
    hung = tmp_path / "hung"
    monkeypatch.setenv(failpoints.VARIABLE, f"{role}.before_receive_ping=delay(600)@2@once:{hung}")
    with HangRig(hang_timeout_s=1.0) as rig:
        rig.run("e1", do="block")
        rig.run("e2", "many", do="block")
        killed = rig.killed("hung")
        assert int(hung.read_text().split()[-1]) == killed["pid"]
        if role == "node":
            again = rig.serving("hang", killed["node"])
            assert again != killed["pid"]
            execution = {"holding": "e1", "many": "e2"}.get(killed["node"])
            if execution is not None:
                report = rig.report(execution)
                assert (report["error"]["code"], report["error"]["details"]["reason"]) == ("node_crashed", "hung")
            assert "silent for too long" in rig.process("node", f"hang/{killed['node']}")["last_exit"]
        else:
            rig.hear("log", text="forkserver died", pid=killed["pid"])
            kill(rig.pids["many"])
            assert rig.serving("hang", "many") != rig.pids["many"]


def test_supervisor_that_was_stopped_itself_takes_nobody_for_hung_or_stopped():
    with HangRig(**SHORT) as rig:
        rig.run("e1", do="block")
        rig.told("body")
        everybody = [pid for pid in rig.marked() if pid != rig.driver]
        for pid in (rig.driver, *everybody):
            kill(pid, signal.SIGSTOP)
        rig._wait_for(lambda: False, "nothing", timeout_s=2.0, quiet=True)
        kill(rig.driver, signal.SIGCONT)
        for pid in everybody:
            kill(pid, signal.SIGCONT)
        rig.run("e2", value=2)
        assert rig.value("e2") == 2
        rig.nobody_was_killed()


@pytest.mark.parametrize("stopped", ["the supervisor", "everybody"])
def test_policy_is_not_timed_out_for_time_in_which_nobody_listened(stopped):
    with HangRig(policy_timeout_s=2.5) as rig:
        gate = rig.home / "gate"
        rig.evaluate(1, agent="hang", policy="wait", gate=str(gate), result=1)
        rig.told("policy")
        pids = [rig.driver, *(rig.marked() if stopped == "everybody" else ())]
        for pid in pids:
            kill(pid, signal.SIGSTOP)
        rig._wait_for(lambda: False, "nothing", timeout_s=4.5, quiet=True)
        for pid in pids:
            kill(pid, signal.SIGCONT)
        rig.hears_nothing("answered", for_s=0.5)
        gate.touch()
        assert rig.answer(1)["result"] == 1
        rig.nobody_was_killed()


# Busy


@pytest.mark.parametrize("node", ["holding", "blocking"])
def test_body_that_holds_the_interpreter_far_longer_than_all_patience_ends_well_p19(node):
    """P19, prefect 16459, 20887."""
    with HangRig(**SHORT) as rig:
        rig.run("e1", node, hold_s=3.0)
        rig.told("body")
        assert rig.value("e1") == {"holding": "held", "blocking": "blocked"}[node]
        rig.nobody_was_killed()


def test_body_that_holds_the_interpreter_is_killed_at_its_own_deadline_p19():
    with HangRig(**SHORT) as rig:
        rig.dispatch("e1", agent="hang", node="holding", hold_s=600, timeout_s=1.0)
        report = rig.report("e1")
        assert (report["type"], report["error"]["code"]) == ("TaskInterrupted", "execution_timeout")


def test_policy_that_holds_the_interpreter_within_its_limit_is_left_alone_p19():
    with HangRig(**SHORT) as rig:
        rig.evaluate(1, agent="hang", hold_s=3.0)
        assert rig.answer(1)["result"] == "held"
        rig.nobody_was_killed()


def test_policy_that_holds_the_interpreter_beyond_its_limit_times_out():
    with HangRig(policy_timeout_s=0.5) as rig:
        rig.evaluate(1, agent="hang", hold_s=600)
        rig.evaluate(2, agent="hang", result=2)
        assert rig.answer(1)["error"]["code"] == "policy_timeout"
        assert rig.answer(2)["result"] == 2
        assert rig.serving("hang") != rig.pids[None]


def test_slow_import_is_no_hang():
    """The start timeout alone judges it."""
    with HangRig(broken="3.0", **SHORT) as rig:
        rig.nobody_was_killed()
        assert rig.process("forkserver", APP)["restarts"] == 0


# A worker that does not read


def test_worker_that_does_not_read_holds_nobody_else_up():
    with HangRig() as rig:
        node = rig.pids["holding"]
        kill(node, signal.SIGSTOP)
        rig.hear("log", text="worker stopped", pid=node)
        for number in range(5):  # 160 MB: more than may wait for one worker
            rig.run(f"large{number}", filler=32 << 20, value=number, ledger=str(rig.home / "ledger"))
        for number in range(20):
            rig.run(f"small{number}", "many", value=number, ledger=str(rig.home / "ledger"))
            assert rig.value(f"small{number}") == number
        rig.evaluate(1, agent="hang", quiet=True, result=1)
        assert rig.answer(1)["result"] == 1
        assert not rig.heard("reported")
        kill(node, signal.SIGCONT)
        for number in range(5):
            assert rig.value(f"large{number}") == number
        rig.nobody_was_killed()


# Without PDEATHSIG


def test_edges_of_a_dead_node_die_without_pdeathsig_and_without_the_supervisor_s_loop(monkeypatch):
    """The edge watcher is alone: the kernel keeps no promise, and the loop does nothing before all is over."""
    monkeypatch.setenv("HAYATA_TEST_NO_PDEATHSIG", "1")
    with HangRig() as rig:
        for number in range(50):
            rig.run(f"e{number}", "many", do="block")
        edges = {rig.told("body")["pid"] for _ in range(50)}
        assert len(edges) == 50
        gate = rig.home / "gate"
        rig.order("block", gate=str(gate))
        rig.hear("blocked")
        kill(rig.pids["many"])
        rig._wait_for(lambda: all(is_zombie(pid) for pid in edges), "the end of 50 edges")
        gate.touch()
        reports = [rig.report(f"e{number}") for number in range(50)]
        assert {report["error"]["code"] for report in reports} == {"node_crashed"}
        rig.wait_gone(*edges)
        assert rig.serving("hang", "many") != rig.pids["many"]


def test_supervisor_that_dies_without_pdeathsig_leaves_what_the_guard_will_sweep(monkeypatch):
    """A control: here nobody is left who would kill them, so the switch is really off."""
    monkeypatch.setenv("HAYATA_TEST_NO_PDEATHSIG", "1")
    with HangRig() as rig:
        rig.run("e1", do="block")
        edge = rig.told("body")["pid"]
        kill(rig.pids["holding"], signal.SIGSTOP)
        rig.hear("log", text="worker stopped")
        kill(rig.driver, signal.SIGKILL)
        rig._driver.wait()
        assert os.path.exists(f"/proc/{edge}")
        for pid in rig.marked():
            kill(pid)


def is_zombie(pid):
    """Whether it is dead; nobody has reaped it yet."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] == b"Z"
    except FileNotFoundError:
        return True
