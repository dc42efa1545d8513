"""Workers that die, are killed, or should be: real processes, real signals."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hayata.messages import EdgeEnded, EdgeStarted, EdgeStartFailed, TaskCompleted, TaskInterrupted
from hayata_supervisor.process.pidfd import children_of, open_pidfd, send_signal, wait_dead
from tests.support.worker_harness import Node, Subreaper, Supervisor, details, open_files

pytest_plugins = ["tests.support.worker_fixtures"]


def _interrupted(node: Node, task: str, timeout_s: float = 20.0) -> TaskInterrupted:
    end = node.end_of(task, timeout_s)
    assert isinstance(end, TaskInterrupted), end
    assert details(end.error)["interrupted"] is True
    return end


def _kill_edge(node: Node) -> EdgeStarted:
    edge = node.edge()
    node.wait(lambda: edge.edge in node.edge_pidfds)
    send_signal(node.edge_pidfds[edge.edge])
    return edge


def _family(node: Node, record: Path) -> list[int]:
    """Start a task with a child and a daemon; return their pidfds, opened while the task holds them alive."""
    node.run("family", {"do": "start_family", "record": str(record)})
    node.wait(lambda: "family" in node.text())
    pids = [int(pid) for pid in node.wait(lambda: _lines(record, 2))]
    return [open_pidfd(pid) for pid in pids]


def _lines(path: Path, count: int) -> list[str] | None:
    lines = path.read_text().split()
    return lines if len(lines) == count else None


def _all_dead(pidfds: list[int], timeout_s: float) -> bool:
    due = time.monotonic() + timeout_s
    if not all(wait_dead([pidfd], max(0.0, due - time.monotonic())) for pidfd in pidfds):
        return False
    for pidfd in pidfds:
        os.close(pidfd)
    return True


def test_edge_killed_takes_its_subprocess_and_its_daemon_along_p1(supervisor: Supervisor, tmp_path: Path):
    node = supervisor.node("single")
    family = _family(node, tmp_path / "family")
    _kill_edge(node)
    end = _interrupted(node, "family")
    assert end.error.code == "edge_crashed"
    assert details(end.error)["signal"] == "SIGKILL"
    # The verdict comes after the burial: they are dead by now, not soon.
    assert _all_dead(family, 0.0)
    assert children_of(node.pid) == [node.edge().pid]


def test_node_killed_takes_everything_along(supervisor: Supervisor, tmp_path: Path):
    node = supervisor.node("single")
    family = _family(node, tmp_path / "family")
    pidfd = open_pidfd(node.edge().pid)
    started = time.monotonic()
    node.kill()
    # The edge dies by the kernel's hand: nobody sweeps yet.
    assert wait_dead([pidfd], 1.0)
    node.wait_dead()
    supervisor.sweep()
    assert _all_dead([*family, pidfd], 1.0)
    assert time.monotonic() - started < 1.0


def test_supervisor_killed_takes_forkserver_agent_node_and_edge_along(tmp_path: Path):
    """A supervisor of its own, in a process that kills itself; its children come to us."""
    pids = tmp_path / "pids"
    with Subreaper():
        command = [sys.executable, "-m", "tests.support.worker_doomed", str(pids)]
        doomed = os.spawnve(os.P_NOWAIT, sys.executable, command, {**os.environ, "TMPDIR": str(tmp_path)})
        assert os.waitstatus_to_exitcode(os.waitpid(doomed, 0)[1]) == -signal.SIGKILL
        begun = time.monotonic()
        roles = dict(line.split() for line in pids.read_text().splitlines())
        assert set(roles) == {"forkserver", "agent", "node", "edge"}
        # They are our children now, unreaped, so their numbers are still theirs; but the node may have outlived its
        # edge for long enough to reap it.
        left = []
        for pid in map(int, roles.values()):
            with contextlib.suppress(ProcessLookupError):
                left.append((pid, open_pidfd(pid)))
        assert {int(roles[role]) for role in ("forkserver", "agent", "node")} <= {pid for pid, _ in left}
        assert _all_dead([pidfd for _, pidfd in left], 1.0)
        assert time.monotonic() - begun < 1.0
        for pid, _ in left:
            os.waitpid(pid, 0)


def test_two_hundred_killed_tasks_leave_no_zombie_p4(supervisor: Supervisor):
    """P4, rq 1193: a killed task is reaped."""
    node = supervisor.node("single")
    for number in range(200):
        end = _interrupted(node, node.run(f"t{number}", {"do": "kill_self"}))
        assert details(end.error)["signal"] == "SIGKILL"
    assert len(children_of(node.pid)) <= 1
    assert isinstance(node.end_of(node.run("last", {"do": "facts"})), TaskCompleted)
    assert children_of(node.pid) == [node.edge().pid]


def test_hundred_crashes_leak_no_descriptor_p8(supervisor: Supervisor):
    """P8, circus 315, in the node whose edges flap."""
    node = supervisor.node("single")
    held = 0
    for number in range(105):
        _interrupted(node, node.run(f"t{number}", {"do": "exit_hard"}))
        if number == 4:
            node.call("settle", {"do": "facts"})
            held = len(open_files(node.pid))
    node.call("last", {"do": "facts"})
    assert len(open_files(node.pid)) == held


def test_worker_killed_is_eof_at_once_p9(supervisor: Supervisor):
    """P9, dramatiq 707: nobody else holds the end that the worker wrote to."""
    for worker in (supervisor.node("single"), supervisor.fork("workshop", None)):
        killed = time.monotonic()
        worker.kill()
        eof = worker.wait(lambda worker=worker: worker.eof_at)
        assert eof - killed < 0.05


@pytest.mark.parametrize(
    ("action", "detail", "value"),
    [
        ("abort", "signal", "SIGABRT"),
        ("segfault", "signal", "SIGSEGV"),
        ("kill_self", "signal", "SIGKILL"),
        ("exit_hard", "exit_code", 3),
    ],
)
def test_task_that_ends_its_process_is_interrupted_and_the_next_runs_p17(
    supervisor: Supervisor, action: str, detail: str, value: object
):
    node = supervisor.node("pair")
    node.run("neighbour", {"do": "sleep", "seconds": 0.5})
    end = _interrupted(node, node.run("a", {"do": action}))
    assert end.error.code == "edge_crashed"
    assert details(end.error)[detail] == value
    assert end.started
    assert isinstance(node.end_of("neighbour"), TaskCompleted)
    assert isinstance(node.end_of(node.run("b", {"do": "facts"})), TaskCompleted)
    assert not [message for message in node.messages if isinstance(message, EdgeStartFailed)]


def test_attempt_after_a_timeout_begins_when_the_old_one_is_dead_p18(supervisor: Supervisor, tmp_path: Path):
    node = supervisor.node("pair")
    record = tmp_path / "record"
    for attempt in range(5):
        node.run(f"a{attempt}", {"do": "overlap", "hang": True, "record": str(record)}, timeout_s=0.1)
        end = _interrupted(node, f"a{attempt}")
        assert end.error.code == "execution_timeout"
        size = record.stat().st_size
        node.call(f"b{attempt}", {"do": "overlap", "hang": False, "record": str(record)})
        # Nobody but the new attempt has written since the old one was reported.
        assert len(record.read_bytes()[size:].splitlines()) == 1


def test_loop_without_end_is_killed_at_its_deadline_d10(supervisor: Supervisor):
    """D10, langgraph 8842: a timeout works for sync code."""
    node = supervisor.node("single")
    node.call("warm", {"do": "facts"})
    begun = time.monotonic()
    end = _interrupted(node, node.run("a", {"do": "spin"}, timeout_s=0.5))
    assert 0.5 <= time.monotonic() - begun < 0.6
    assert end.error.code == "execution_timeout"
    assert details(end.error) == {"interrupted": True, "reason": "timeout", "timeout_s": 0.5}


def test_deadlines_of_many_tasks_hold_in_any_order(supervisor: Supervisor):
    node = supervisor.node("many")
    begun = time.monotonic()
    limits = {"a": 0.6, "b": 0.2, "c": 0.4}
    for task, limit in limits.items():
        node.run(task, {"do": "wait", "seconds": 30}, timeout_s=limit)
    for task in "bca":
        _interrupted(node, task)
        assert limits[task] <= time.monotonic() - begun < limits[task] + 0.15
    assert len(node.edges) == 1, "cancelled coroutines don't cost the process"


def test_stubborn_coroutine_is_killed_after_a_second_with_its_neighbour(supervisor: Supervisor):
    node = supervisor.node("many")
    node.run("neighbour", {"do": "wait", "seconds": 60})
    node.run("stubborn", {"do": "stubborn"}, timeout_s=0.2)
    begun = time.monotonic()
    assert _interrupted(node, "stubborn").error.code == "execution_timeout"
    assert 1.0 < time.monotonic() - begun < 1.6
    neighbour = _interrupted(node, "neighbour")
    assert neighbour.error.code == "edge_crashed"
    assert details(neighbour.error)["reason"] == "neighbour"
    assert isinstance(node.end_of(node.run("next", {"do": "wait", "seconds": 0})), TaskCompleted)


def test_coroutine_that_swallows_its_cancellation_is_interrupted_all_the_same(supervisor: Supervisor):
    node = supervisor.node("many")
    end = _interrupted(node, node.run("a", {"do": "swallow"}, timeout_s=0.2))
    assert end.error.code == "execution_timeout"


def test_coroutine_that_cancels_itself_has_failed(supervisor: Supervisor):
    node = supervisor.node("many")
    end = node.end_of(node.run("a", {"do": "cancel_self"}))
    assert (type(end).__name__, end.error.code) == ("TaskFailed", "node_exception")
    assert details(end.error)["type"] == "CancelledError"


@pytest.mark.parametrize(("name", "action"), [("single", "spin"), ("many", "wait")])
def test_kill_task_ends_it_with_the_reason(supervisor: Supervisor, name: str, action: str):
    node = supervisor.node(name)
    node.run("a", {"do": action, "seconds": 60})
    node.edge()
    node.kill_task("a", "sibling failed")
    end = _interrupted(node, "a")
    assert end.error.code == "cancelled"
    assert details(end.error)["reason"] == "sibling failed"


def test_kill_of_a_finished_task_does_nothing(supervisor: Supervisor):
    node = supervisor.node("single")
    pid = node.call("a", {"do": "facts"})["pid"]
    node.kill_task("a")
    assert node.call("b", {"do": "facts"})["pid"] == pid


def test_kill_racing_with_the_result_gives_one_or_the_other(supervisor: Supervisor):
    node = supervisor.node("single")
    ends = set()
    for number in range(60):
        task = node.run(f"t{number}", {"do": "sleep", "seconds": 0.0005 * (number % 8)})
        node.wait(lambda task=task: "asleep" in node.text(task) or task in node.ends)
        node.kill_task(task)
        ends.add(type(node.end_of(task)).__name__)
    assert ends <= {"TaskCompleted", "TaskInterrupted"}


def test_result_in_the_stream_wins_over_the_death(supervisor: Supervisor):
    """Stop the node while the edge answers and is killed: the node finds result and death together."""
    node = supervisor.node("single")
    node.call("warm", {"do": "facts"})
    edge = node.edge()
    home = os.readlink(f"/proc/{edge.pid}/cwd")
    node.run("a", {"do": "wander", "seconds": 0.3})
    node.wait(lambda: "away" in node.text("a"))
    os.kill(node.pid, signal.SIGSTOP)
    try:
        pidfd = node.edge_pidfds[edge.edge]
        assert os.readlink(f"/proc/{edge.pid}/cwd") == "/"
        # The edge goes home when it has sent the result.
        _wait_until(lambda: os.readlink(f"/proc/{edge.pid}/cwd") == home)
        send_signal(pidfd)
        assert wait_dead([pidfd], 5.0)
    finally:
        os.kill(node.pid, signal.SIGCONT)
    assert isinstance(node.end_of("a"), TaskCompleted)


def _wait_until(true: Callable[[], bool], timeout_s: float = 5.0) -> None:
    due = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < due
        os.sched_yield()


def test_idle_edge_killed_is_a_failed_start_and_is_replaced(supervisor: Supervisor):
    node = supervisor.node("single")
    node.call("a", {"do": "facts"})
    killed = _kill_edge(node)
    assert node.wait_for(EdgeStartFailed).edge == killed.edge
    assert node.wait_for(EdgeEnded).pid == killed.pid
    assert node.edge().pid != killed.pid
    assert isinstance(node.end_of(node.run("b", {"do": "facts"})), TaskCompleted)


def test_task_that_closes_every_descriptor_delivers_nothing(supervisor: Supervisor, tmp_path: Path):
    node = supervisor.node("single")
    record = tmp_path / "record"
    end = _interrupted(node, node.run("a", {"do": "close_everything", "record": str(record)}))
    assert end.error.code == "edge_crashed"
    assert not record.exists(), "a frame was written to a socket of the user's"
    assert isinstance(node.end_of(node.run("b", {"do": "facts"})), TaskCompleted)


def test_stopped_edge_is_killed_at_its_deadline(supervisor: Supervisor):
    node = supervisor.node("single")
    node.call("warm", {"do": "facts"})
    node.run("a", {"do": "sleep", "seconds": 60}, timeout_s=0.4)
    node.wait(lambda: "asleep" in node.text("a"))
    os.kill(node.edge().pid, signal.SIGSTOP)
    assert _interrupted(node, "a").error.code == "execution_timeout"


def test_agent_killed_is_dead_alone(supervisor: Supervisor):
    agent = supervisor.fork("workshop", None)
    node = supervisor.node("single")
    agent.kill()
    assert agent.wait_dead().signal == signal.SIGKILL
    assert isinstance(node.end_of(node.run("a", {"do": "facts"})), TaskCompleted)
