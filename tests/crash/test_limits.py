"""Limits of memory, CPU time and files: real allocations, real processes, and what dies with them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hayata.messages import EdgeEnded, StopWorker, TaskCompleted, TaskFailed, TaskInterrupted
from hayata_supervisor.process.pidfd import open_pidfd, send_signal, wait_dead
from tests.support.limited_app import CPU_S, LIMIT_MIB, MIB
from tests.support.worker_harness import ROOT, Node, Supervisor, details

APP = str(ROOT / "tests/support/limited_app.py")
GONE_S = 1.0
SEEN_S = 0.8
"""Long enough for two looks, whatever else the machine does."""


@pytest.fixture(scope="module")
def shared() -> Iterator[Supervisor]:
    supervisor = Supervisor(APP)
    try:
        supervisor.start()
        yield supervisor
    finally:
        supervisor.close()


@pytest.fixture
def supervisor(shared: Supervisor) -> Iterator[Supervisor]:
    try:
        yield shared
    finally:
        shared.release()


def _cut_off(node: Node, task: str, reason: str) -> dict:
    end = node.end_of(task)
    assert isinstance(end, TaskInterrupted), end
    told = details(end.error)
    assert (end.error.code, told["interrupted"], told["reason"]) == ("edge_crashed", True, reason), told
    assert end.started
    assert end.error.hint
    return told


def _pidfds(record: Path, edge: int) -> list[int]:
    return [open_pidfd(pid) for pid in (edge, *map(int, record.read_text().split()))]


def _all_dead(pidfds: list[int], since: float) -> bool:
    """Whether all of them, edge first, had ended within a second."""
    dead = [bool(wait_dead([pidfd], max(0.0, since + GONE_S - time.monotonic()))) for pidfd in pidfds]
    for pidfd in pidfds:
        os.close(pidfd)
    return len(dead) == 3 and all(dead)


# ---- memory ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", ["hold", "hold_in_child"])
def test_task_over_its_memory_limit_is_killed_and_says_so(supervisor: Supervisor, action: str):
    node = supervisor.node("memory")
    first = node.call("a", {"do": "echo"})["pid"]
    node.run("b", {"do": action, "mib": 2 * LIMIT_MIB})
    told = _cut_off(node, "b", "memory_limit")
    assert told["limit_bytes"] == LIMIT_MIB * MIB
    assert LIMIT_MIB < told["measured_bytes"] / MIB < 3 * LIMIT_MIB
    assert node.call("c", {"do": "echo"})["pid"] != first
    assert not Path(f"/proc/{first}").exists()


def test_task_below_its_memory_limit_is_left_alone_and_charged_only_its_part_of_the_app(supervisor: Supervisor):
    """All of the app, 64 MiB that the workers share, and what is taken would be over the limit."""
    node = supervisor.node("memory")
    pid = node.call("a", {"do": "take", "mib": LIMIT_MIB // 2, "seconds": SEEN_S})["pid"]
    assert node.call("b", {"do": "echo"})["pid"] == pid


def test_pages_of_a_file_are_not_counted(supervisor: Supervisor, tmp_path: Path):
    file = tmp_path / "large"
    file.touch()
    node = supervisor.node("memory")
    assert node.call("a", {"do": "map_file", "path": str(file), "seconds": SEEN_S}) == {"total": 0}


def test_memory_that_a_task_shares_with_its_forks_counts_once(supervisor: Supervisor):
    node = supervisor.node("memory")
    node.call("a", {"do": "share", "copy": False, "seconds": SEEN_S})
    node.run("b", {"do": "share", "copy": True, "seconds": 60})
    assert _cut_off(node, "b", "memory_limit")["measured_bytes"] > LIMIT_MIB * MIB


def test_neighbouring_edge_goes_on_when_one_is_over_its_memory_limit(supervisor: Supervisor):
    node = supervisor.node("pair")
    node.run("a", {"do": "sleep", "seconds": 2 * SEEN_S})
    node.run("b", {"do": "hold", "mib": 2 * LIMIT_MIB})
    _cut_off(node, "b", "memory_limit")
    assert isinstance(node.end_of("a"), TaskCompleted)


def test_coroutines_of_an_edge_over_its_memory_limit_are_all_told(supervisor: Supervisor):
    node = supervisor.node("many")
    for task in "abc":
        node.run(task, {"do": "wait", "seconds": 60})
    node.run("d", {"do": "hold", "mib": 2 * LIMIT_MIB})
    for task in "abcd":
        assert _cut_off(node, task, "memory_limit")["executions"] == 4
    assert node.call("e", {"do": "wait", "seconds": 0})["pid"]


def test_what_ended_tasks_have_left_replaces_the_idle_edge(supervisor: Supervisor):
    node = supervisor.node("memory")
    for number in range(20):  # on a busy machine the look may come while the task runs, and then it is cut off
        end = node.end_of(node.run(f"t{number}", {"do": "leak", "mib": LIMIT_MIB}))
        ended = node.wait_for(EdgeEnded)
        assert ended.reason == "memory_limit"
        if isinstance(end, TaskCompleted):
            break
    assert isinstance(end, TaskCompleted)
    assert node.call("a", {"do": "echo"})["pid"] != ended.pid


def test_address_space_limit_is_the_kernels(supervisor: Supervisor):
    node = supervisor.node("space")
    assert node.call("a", {"do": "limits"})["address_space"] == (2048 * MIB, 2048 * MIB)
    end = node.end_of(node.run("b", {"do": "hold", "mib": 2048}))
    assert details(end.error)["type"] in ("MemoryError", "OSError")
    assert node.call("c", {"do": "echo"})["pid"] == node.edge().pid


def test_kernel_prefers_an_edge_and_what_it_started(supervisor: Supervisor):
    above, edge, child = supervisor.node("free").call("a", {"do": "limits"})["oom_score_adj"]
    assert edge == child == min(1000, above + 300)


# ---- CPU time, files, tasks --------------------------------------------------------------------------------


@pytest.mark.parametrize("action", ["burn", "burn_in_child"])
def test_task_over_its_cpu_limit_is_killed_and_says_so(supervisor: Supervisor, action: str):
    node = supervisor.node("cpu")
    node.run("a", {"do": action, "cpu_s": 60})
    told = _cut_off(node, "a", "cpu_limit")
    assert told["limit_s"] == CPU_S
    assert CPU_S < told["measured_s"] < CPU_S + 5
    assert node.call("b", {"do": "echo"})


def test_cpu_time_of_one_task_is_not_the_next_ones(supervisor: Supervisor):
    node = supervisor.node("cpu")
    pids = {node.call(task, {"do": "burn", "cpu_s": CPU_S * 2 / 3})["pid"] for task in "abcd"}
    assert len(pids) == 1
    node.call("e", {"do": "sleep", "seconds": 2 * CPU_S})


def test_open_files_limit_is_an_error_in_the_body(supervisor: Supervisor):
    node = supervisor.node("files")
    told = node.call("a", {"do": "open_many"})
    assert told["errno"] == 24
    assert 10 < told["count"] < 40
    assert node.call("b", {"do": "echo"})["pid"] == told["pid"]


def test_edges_of_a_node_are_not_replaced_all_at_once(supervisor: Supervisor):
    """Their numbers of tasks differ by up to a tenth: 36 to 40."""
    node = supervisor.node("spread")
    pids = [node.call(f"t{number}", {"do": "echo"})["pid"] for number in range(200)]
    runs = [pids.count(pid) for pid in dict.fromkeys(pids)][:-1]
    assert all(36 <= run <= 40 for run in runs), runs


# ---- descendants -------------------------------------------------------------------------------------------


def _family(node: Node, record: Path, then: dict, timeout_s: float | None = None) -> list[int]:
    """Run a task that starts a child and a daemon; their pidfds, and the edge's first."""
    node.run("f", {"do": "family", "record": str(record), **then}, timeout_s=timeout_s)
    node.wait(lambda: "family" in node.text())
    return _pidfds(record, node.edge().pid)


@pytest.mark.parametrize("how", ["kill -9", "kill_task", "deadline", "memory_limit", "cpu_limit"])
def test_end_of_an_edge_is_the_end_of_all_that_its_task_has_started_p1(
    supervisor: Supervisor, tmp_path: Path, how: str
):
    """P1, ray 42861: a subprocess, and a daemon that a double fork and a session of its own hide."""
    name = {"memory_limit": "memory", "cpu_limit": "cpu"}.get(how, "free")
    then = {
        "memory_limit": {"then": "hold", "mib": 2 * LIMIT_MIB},
        "cpu_limit": {"then": "burn", "cpu_s": 60},
    }.get(how, {"then": "sleep", "seconds": 60})
    node = supervisor.node(name)
    pidfds = _family(node, tmp_path / "family", then, timeout_s=2.0 if how == "deadline" else None)
    if how == "kill -9":
        edge = node.edge()
        node.wait(lambda: edge.edge in node.edge_pidfds)
        send_signal(node.edge_pidfds[edge.edge])
    elif how == "kill_task":
        node.kill_task("f")
    node.end_of("f")
    # The end is told only after the burial.
    assert [bool(wait_dead([pidfd], 0)) for pidfd in pidfds] == [True] * 3
    for pidfd in pidfds:
        os.close(pidfd)


def test_leftovers_of_a_task_that_ended_well_die_within_a_second_p1(supervisor: Supervisor, tmp_path: Path):
    """P1, ray 42861, without a crash: the edge is retired, and all below it goes with it."""
    node = supervisor.node("free")
    pidfds = _family(node, tmp_path / "family", {"then": "wait"})
    (tmp_path / "family.go").touch()
    assert isinstance(node.end_of("f"), TaskCompleted)
    since = time.monotonic()
    assert node.wait_for(EdgeEnded).reason.startswith("left a child process")
    assert _all_dead(pidfds, since)


def test_stop_waits_for_a_child_that_ignores_term_and_takes_it_along_p3(supervisor: Supervisor, tmp_path: Path):
    """P3, circus 1044: the node has ended only when the tree below it has."""
    node = supervisor.node("free")
    pidfds = _family(node, tmp_path / "family", {"then": "wait"})
    node.send(StopWorker())
    (tmp_path / "family.go").touch()
    assert isinstance(node.end_of("f"), TaskCompleted)
    assert node.wait_dead().code == 0
    assert [bool(wait_dead([pidfd], 0)) for pidfd in pidfds] == [True] * 3
    for pidfd in pidfds:
        os.close(pidfd)


def test_process_that_is_always_another_one_dies_with_its_edge_p1(supervisor: Supervisor, tmp_path: Path):
    """P1, ray 42861: each forks the next, in a session of its own, and exits, faster than one could look them up."""
    record = tmp_path / "chain"
    node = supervisor.node("free")
    node.run("a", {"do": "chain", "record": str(record)})
    node.wait(lambda: "chain" in node.text())
    node.kill_task("a")
    assert isinstance(node.end_of("a"), TaskInterrupted)
    (*_, last) = record.read_text().split()
    assert not Path(f"/proc/{last}").exists()
    seen = record.stat().st_size
    assert node.call("b", {"do": "sleep", "seconds": 0.1})
    assert record.stat().st_size == seen


def test_result_of_more_than_four_gigabytes_is_an_error_and_the_edge_stays_p11(supervisor: Supervisor):
    """P11, loky 143, beyond what any length in the protocol can say."""
    node = supervisor.node("free")
    end = node.end_of(node.run("a", {"do": "huge", "bytes": 2**32 + 1}), timeout_s=60)
    assert isinstance(end, TaskFailed)
    assert end.error.code in ("unserializable_value", "frame_too_large")
    assert node.call("b", {"do": "echo"})["pid"] == node.edge().pid
