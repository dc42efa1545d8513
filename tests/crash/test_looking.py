"""``hayata tree`` and ``stats``: what they say of a daemon whose workers have been killed is true."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hayata.client.records import Process
from tests.support.crash_site import Daemon, Site, flat
from tests.support.eventually import DEADLINE_S, eventually

ROOT = Path(__file__).parents[2]


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    yield site
    site.close()


def find(daemon: Daemon, role: str, name: str = "") -> list[Process]:
    return [process for process in flat(daemon.client.tree()) if process.role == role and name in process.name]


def held(site: Site, daemon: Daemon) -> tuple[str, int]:
    """A task that waits in its body: execution id and pid of its edge."""
    invocation = daemon.client.run("again", {"act_gate": "act"})
    start = site.ledger.wait("start", invocation=invocation.id, node="act")
    return start["execution"], start["pid"]


def test_tree_names_the_task_of_each_edge_with_its_age(site: Site):
    daemon = site.daemon(agents="again").start()
    held_tasks = [held(site, daemon) for _ in range(3)]
    edges = {process.pid: process for process in find(daemon, "edge")}
    for execution, pid in held_tasks:
        (found,) = edges[pid].tasks
        assert found == execution
        assert 0 <= edges[pid].tasks[found] < DEADLINE_S
    (node,) = find(daemon, "node", "again/act")
    assert node.tasks == {}
    site.open_gate("act")
    eventually(lambda: not any(process.tasks for process in find(daemon, "edge")), "the end of the tasks")


def test_tree_of_a_node_that_hangs_comes_without_its_word(site: Site):
    daemon = site.daemon(agents="again").start()
    execution, _ = held(site, daemon)
    (node,) = find(daemon, "node", "again/act")
    os.kill(node.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        (seen,) = find(daemon, "node", "again/act")
        assert time.monotonic() - began < DEADLINE_S / 2
        assert set(seen.tasks) == {execution}
        assert all(not edge.tasks for edge in seen.children)
    finally:
        os.kill(node.pid, signal.SIGCONT)
        site.open_gate("act")


def test_tree_tells_restarts_and_how_the_last_ones_ended(site: Site):
    daemon = site.daemon(agents="again").start()
    (root,) = find(daemon, "guard")
    assert root.started_at is not None
    assert abs(root.started_at - time.time()) < DEADLINE_S
    assert all(process.memory_bytes and process.cpu_s is not None for process in flat(root) if process.pid)
    daemon.kill_supervisor()
    (supervisor,) = find(daemon, "supervisor")
    assert (supervisor.restarts, supervisor.last_exit) == (1, "signal SIGKILL")
    assert daemon.client.stats()["supervisor_restarts"] == 1
    daemon.wait_serving()
    (node,) = eventually(lambda: [each for each in find(daemon, "node", "again/act") if each.pid], "the node")
    os.kill(node.pid, signal.SIGKILL)
    eventually(lambda: find(daemon, "node", "again/act")[0].restarts == 1, "the next node")
    assert find(daemon, "node", "again/act")[0].last_exit == "signal SIGKILL"
    assert daemon.client.stats()["worker_restarts"] == 1
    _, pid = held(site, daemon)
    os.kill(pid, signal.SIGKILL)
    last_exits = lambda: [edge.last_exit for edge in find(daemon, "node", "again/act")[0].children]  # noqa: E731
    eventually(lambda: "signal SIGKILL" in last_exits(), "the next edge")
    assert daemon.client.stats()["interrupted_tasks"] == 1
    site.open_gate("act")


def test_stats_count_what_was_done_and_are_all_documented(site: Site):
    daemon = site.daemon(agents="again").start()
    for _ in range(3):
        daemon.client.call("again", {}, timeout=DEADLINE_S)
    values = daemon.client.stats()
    expected = {"completed_tasks": 9, "ended_invocations": 3, "open_invocations": 0, "running_tasks": 0}
    assert {name: values[name] for name in expected} == expected
    assert values["records"] >= 9
    assert 0 < values["commit_p50_ms"] <= values["commit_p99_ms"] < 1000 * DEADLINE_S
    assert values["store_bytes"] == os.stat(f"{daemon.data_dir}/store/data.mdb").st_size
    table = re.findall(r"^\| (`.*`) \| [cg] \|", (ROOT / "docs" / "operations.md").read_text(), re.MULTILINE)
    assert {name for cell in table for name in re.findall(r"`(\w+)`", cell)} == set(values)
