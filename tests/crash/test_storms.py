"""Storms: hundreds of kills and restarts, after which everything is as it was; and user code that has children of its
own while workers die all around it.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import hayata
from tests.support.crash_site import Daemon, Seen, flat
from tests.support.eventually import eventually
from tests.support.shared_daemon import WAIT_S, app, serving, supervisor, undisturbed

LONG_S = 120.0
DEATHS = 50
"""Of one task; in their daemons' log and in the tree nothing of them may stay."""


@pytest.fixture(scope="module")
def shared() -> Iterator[Daemon]:
    with serving(app("storms"), HAYATA_LOG_FORMAT="json") as daemon:
        yield daemon


@pytest.fixture
def daemon(shared: Daemon) -> Iterator[Daemon]:
    """The shared daemon, that must be the same afterwards, and serve."""
    with undisturbed(shared, "echo"):
        yield shared


def states(daemon: Daemon) -> dict[int, tuple[str, int, str]]:
    """Of all processes: pid → name, parent, state."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                head, _, tail = Path(f"/proc/{name}/stat").read_text().rpartition(")")
            except OSError:
                continue
            state, parent, *_ = tail.split()
            found[int(name)] = (head.partition("(")[2], int(parent), state)
    return found


def misplaced(daemon: Daemon) -> list[str]:
    """Zombies below the guard, and processes that are no workers."""
    found = states(daemon)
    ours, front = set(), [daemon.guard.pid]
    while front:
        ours.add(pid := front.pop())
        front += [child for child, (_, parent, _) in found.items() if parent == pid]
    lost = ours - {each.pid for each in flat(daemon.client.tree())}
    return [f"{pid} {found[pid]}" for pid in lost if found[pid][2] in "ZX" or not found[pid][0].startswith("h:")]


def descriptors(daemon: Daemon) -> dict[str, int]:
    """How many each process but the edges has open, and not because of edges, by role and name."""
    found = {}
    tree = list(flat(daemon.client.tree()))
    edges = {each.pid: sum(child.role == "edge" for child in each.children) for each in tree}
    for each in tree:
        # A node has its edge's pidfd, stream, stdout and stderr; the supervisor their pidfds, and one of each node
        # that has some, for the watcher.
        theirs = 4 * edges[each.pid]
        if each.role == "supervisor":
            theirs = sum(count + 1 for count in edges.values() if count)
        if each.role != "edge":
            found[f"{each.role} {each.name}"] = len(os.listdir(f"/proc/{each.pid}/fd")) - theirs
    return found


def quiet(daemon: Daemon) -> dict[str, int]:
    """Wait until all serve with one edge at most and nothing is misplaced; the descriptors then."""

    def settled() -> dict[str, int] | None:
        tree = flat(daemon.client.tree())
        if any(each.status != "serving" for each in tree) or misplaced(daemon):
            return None
        return descriptors(daemon)

    return eventually(settled, f"a quiet tree; misplaced: {misplaced(daemon)}", timeout_s=30.0)


def test_thousand_killed_tasks_leave_no_zombie_and_nothing_that_they_had_started_p4(daemon: Daemon):
    """P4, rq 1193: each is reaped, with the zombie, the child and the daemon that it leaves."""
    runs = [daemon.client.run("die", {"deaths": DEATHS}) for _ in range(1_000 // DEATHS)]
    assert [run.result(timeout=LONG_S) for run in runs] == [{"attempts": DEATHS + 1}] * len(runs)
    eventually(lambda: not misplaced(daemon), "no zombie and no orphan")


def test_recycled_workers_start_beside_a_supervisor_whose_threads_are_busy_p6(daemon: Daemon):
    """P6, numpy 9248: nobody forks beside a thread, so no fork inherits a lock that nobody will give back."""
    runs = [daemon.client.run("count") for _ in range(16)]  # 512 steps: commits and logs without a pause
    assert [run.result(timeout=LONG_S) for run in runs] == [32] * len(runs)  # a new process for each step
    assert not [line for line in log(daemon) if "timed out" in line["event"] or "timeout" in str(line.get("error"))]


def log(daemon: Daemon) -> list[dict]:
    """The daemon's log; each line of it is whole, or this raises."""
    return [json.loads(line) for line in daemon.site.log.read_text().splitlines()]


def test_two_hundred_kills_while_the_supervisor_logs_p7(daemon: Daemon):
    """P7, gunicorn 2564: deaths come as signals, and no handler of ours logs, or is in the way of a line that is."""
    before = len(log(daemon))
    runs = [daemon.client.run("die", {"deaths": DEATHS}) for _ in range(4)]
    for _ in range(10):
        for each in kill(daemon, "agent", "node"):
            assert each.dead(WAIT_S)
        eventually(lambda: all(each.status == "serving" for each in flat(daemon.client.tree())), "workers", LONG_S)
    assert [run.result(timeout=LONG_S) for run in runs] == [{"attempts": DEATHS + 1}] * 4
    lines = log(daemon)[before:]
    assert len([line for line in lines if line["event"].startswith("about to die")]) >= 4 * DEATHS - 40
    assert len([line for line in lines if line["event"] == "worker died"]) >= 80
    assert not [line for line in lines if "Traceback" in str(line)]


def kill(daemon: Daemon, *roles: str) -> list[Seen]:
    """Kill all workers of these roles but the ones whose tasks would be cut off for good."""
    victims = [each for each in daemon.tree() if each.role in roles]
    for each in victims:
        each.kill()
    return victims


def test_crash_restarts_leave_descriptors_as_they_were_p8(daemon: Daemon):
    """P8, circus 315: also those of nodes whose edges flap; `bench.restarts` does five hundred."""
    daemon.client.call("die", {"deaths": 10}, timeout=LONG_S)
    before = quiet(daemon)
    pid = supervisor(daemon).pid
    for number in range(8):
        for each in kill(daemon, "agent", "node", "edge", *["forkserver"] * (number == 0)):
            assert each.dead(WAIT_S)
        daemon.client.call("die", {"deaths": 5}, timeout=LONG_S)
        after = quiet(daemon)
    assert supervisor(daemon).pid == pid
    grown = {name: (before[name], count) for name, count in after.items() if count > before[name]}
    assert not grown, "descriptors before and after"


# ---- own children ----------------------------------------------------------------------------------------------


def test_user_code_gets_the_exit_status_of_its_own_children_p5(daemon: Daemon):
    """P5, gunicorn 2807: in bodies, lifespans, policies and probes, while other workers die and are reaped."""
    storm = [daemon.client.run("die", {"deaths": 100}) for _ in range(4)]
    runs = [daemon.client.run("own") for _ in range(4)]
    assert [run.result(timeout=LONG_S) for run in runs] == ["all mine"] * 4
    children = daemon.site.ledger.lines("child")
    where = {"lifespan", "async lifespan", "body", "async body", "policy", "probe"}
    assert {line["where"] for line in children} == where
    assert {line["code"] for line in children} == {7}
    assert [run.result(timeout=LONG_S)["attempts"] for run in storm] == [101] * 4


def test_program_that_embeds_a_runtime_gets_the_exit_status_of_its_own_children_p5(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """P5, gunicorn 2807, in the process that has called `hayata.start`."""
    monkeypatch.setenv("CRASH_HOME", str(tmp_path))
    monkeypatch.setenv("CRASH_AGENTS", "")
    with hayata.start(app("storms"), data_dir=tmp_path / "d") as runtime:
        storm = [runtime.run("die", {"deaths": 30}) for _ in range(4)]
        codes = set()
        while any(run.status() == "running" for run in storm):
            codes.add(subprocess.run(["sh", "-c", "sleep 0.01; exit 7"]).returncode)
        assert [run.result(timeout=LONG_S)["attempts"] for run in storm] == [31] * 4
        ending = subprocess.Popen(["sh", "-c", "sleep 0.2; exit 8"])  # while the guard ends and is reaped
    assert codes == {7}
    assert ending.wait(WAIT_S) == 8
