"""Limits as arithmetic, control groups as files, and what a definition may say."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from hayata import Agent, DefinitionError, Finish, Node
from hayata.manifest import agent_manifest
from hayata.messages import ErrorInfo, NodeManifest
from hayata.values import decode
from hayata_supervisor import node_worker
from hayata_supervisor.core.limits import container_default, tasks_of_edge
from hayata_supervisor.node_limits import Limits, MemoryLimit
from hayata_supervisor.node_tasks import Death, Task, edge_lost
from hayata_supervisor.process import cgroup, clock, usage
from hayata_supervisor.process.pidfd import Exit

GIB = 2**30


@pytest.mark.parametrize(
    ("container", "used", "expected"),
    [
        (None, GIB, None),
        (64 * GIB, GIB, None),
        (65 * GIB, GIB, None),
        (10 * GIB, 0, 9 * GIB),
        (10 * GIB, GIB, 8 * GIB),
        (10 * GIB, 4 * GIB, 5 * GIB),
        (10 * GIB, 9 * GIB, 5 * GIB),
        (1, 0, 1),
    ],
)
def test_container_default_is_nine_tenths_less_the_rest_and_never_below_half(
    container: int | None, used: int, expected: int | None
):
    assert container_default(container, 64 * GIB, used) == expected


@pytest.mark.parametrize(("most", "least"), [(1, 1), (3, 3), (9, 9), (10, 9), (1000, 900)])
def test_tasks_of_edges_are_spread_over_a_tenth(most: int, least: int):
    assert {tasks_of_edge(most, drawn) for drawn in range(5000)} == set(range(least, most + 1))


def test_limits_of_a_node_are_in_the_manifest_where_its_worker_needs_them():
    def work(state):
        return {}

    node = Node(work, memory_limit=64 * 2**20, cpu_limit=2, open_files=100, address_space_limit=GIB)
    agent = Agent(id="a", nodes=[node], decision_policy=lambda context: Finish(None))
    (manifest,) = agent_manifest(agent).nodes
    assert (manifest.memory_limit_bytes, manifest.cpu_limit_s) == (64 * 2**20, 2)


def test_cpu_limit_of_a_coroutine_is_refused():
    async def work(state):
        return {}

    with pytest.raises(DefinitionError) as refusal:
        Node(work, cpu_limit=2)
    assert [problem["path"] for problem in refusal.value.details["problems"]] == ["cpu_limit"]


# control groups: a tree of files that looks like the kernel's


class Tree:
    def __init__(self, home: Path) -> None:
        self.home = home
        self.proc = home / "proc"
        self.proc.mkdir()

    def write(self, path: str, **values: object) -> None:
        directory = self.home / path
        directory.mkdir(parents=True, exist_ok=True)
        for name, value in values.items():
            (directory / name.replace("__", ".")).write_text(f"{value}\n")

    def process(self, groups: str, *mounts: str) -> None:
        """Lines of ``/proc/self/cgroup``; ``root mounted-at type options`` for each mount."""
        (self.proc / "cgroup").write_text(groups)
        lines = ["22 1 8:1 / / rw,relatime - ext4 /dev/root rw"]
        for mount in mounts:
            root, at, kind, options = mount.split()
            lines.append(f"31 22 0:28 {root} {self.home}/{at} rw,nosuid shared:9 - {kind} {kind} {options}")
        (self.proc / "mountinfo").write_text("\n".join(lines) + "\n")


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_memory_group_of_version_two_is_the_tightest_on_the_way_up(tree: Tree):
    tree.write("cg/system.slice/hayata.service", memory__max=4 * GIB, memory__current=GIB, memory__oom__group=0)
    tree.write("cg/system.slice", memory__max=2 * GIB, memory__current=3 * GIB, memory__oom__group=1)
    (tree.home / "cg/system.slice/memory.stat").write_text(f"anon 5\nfile {2 * GIB}\nshmem {GIB}\n")
    tree.write("cg")
    tree.process("0::/system.slice/hayata.service\n", "/ cg cgroup2 rw,nsdelegate")
    found = cgroup.memory_group(tree.proc)
    assert found == (tree.home / "cg/system.slice", 2 * GIB, 2 * GIB, True)
    assert cgroup.service_unit(tree.proc) == "hayata.service"


def test_memory_group_of_a_container_is_what_is_mounted(tree: Tree):
    tree.write("cg", memory__max=GIB, memory__current=5, memory__oom__group=0, pids__max=100)
    tree.process("0::/\n", "/ cg cgroup2 rw")
    assert cgroup.memory_group(tree.proc) == (tree.home / "cg", GIB, 5, False)
    assert cgroup.process_limit(tree.proc) == 100
    assert cgroup.service_unit(tree.proc) is None


@pytest.mark.parametrize("root", ["/docker/abc", "/"])
def test_memory_group_of_version_one_is_found_in_the_container_and_outside(tree: Tree, root: str):
    below = "" if root == "/docker/abc" else "docker/abc"
    tree.write(f"cg/memory/{below}", memory__limit_in_bytes=GIB, memory__usage_in_bytes=900)
    (tree.home / "cg/memory" / below / "memory.stat").write_text("total_cache 500\ntotal_shmem 100\n")
    if below:
        tree.write("cg/memory", memory__limit_in_bytes=9223372036854771712)
    tree.process(
        "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/\n",
        f"{root} cg/cpu cgroup rw,cpu,cpuacct",
        f"{root} cg/memory cgroup rw,memory",
        "/ cg/unified cgroup2 rw",
    )
    assert cgroup.memory_group(tree.proc) == (tree.home / "cg/memory" / below, GIB, 500, False)


def test_memory_group_without_a_limit_is_none(tree: Tree):
    tree.write("cg/user.slice", memory__max="max", memory__current=5)
    tree.process("0::/user.slice\n", "/ cg cgroup2 rw")
    assert cgroup.memory_group(tree.proc) is None
    assert cgroup.memory_group(tree.home / "nowhere") is None


@pytest.mark.parametrize(
    ("kind", "groups", "name", "text"),
    [
        ("cgroup2", "0::/a/b\n", "memory__events", "low 0\noom 1\noom_kill 3\noom_group_kill 0"),
        ("cgroup", "4:memory:/a/b\n", "memory__oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 3"),
    ],
)
def test_kills_for_memory_are_the_groups_own(tree: Tree, kind: str, groups: str, name: str, text: str):
    tree.write("cg/a/b", **{name: text})
    tree.write("cg/a", **{name: text.replace("3", "7")})
    tree.process(groups, f"/ cg {kind} rw,memory")
    assert cgroup.oom_kills(tree.proc) == 3
    (tree.home / "cg/a/b" / name.replace("__", ".")).unlink()
    assert cgroup.oom_kills(tree.proc) == 7


def test_kills_for_memory_without_a_group_are_the_machines(tree: Tree):
    lines = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    assert cgroup.oom_kills(tree.proc) == int(lines.get("oom_kill", 0))


@pytest.mark.parametrize(
    ("end", "killed", "out_of_memory", "reason"),
    [
        (Exit(None, signal.SIGKILL), "", True, "out_of_memory"),
        (Exit(None, signal.SIGKILL), "", False, "crash"),
        (Exit(None, signal.SIGSEGV), "", True, "crash"),
        (Exit(1, None), "", True, "crash"),
    ],
)
def test_death_says_whether_the_kernel_was_out_of_memory(end: Exit, killed: str, out_of_memory: bool, reason: str):
    error = edge_lost(Death(end, killed, neighbour=False, stopping="", out_of_memory=out_of_memory))
    told = decode(error.details)
    assert (error.code, told["reason"], told["interrupted"]) == ("edge_crashed", reason, True)
    assert told.get("signal", told.get("exit_code")) == (end.signal_name or end.code)


def test_kill_for_memory_counts_for_one_death(monkeypatch: pytest.MonkeyPatch):
    counts = iter([5, 6, 6, 8])
    monkeypatch.setattr(cgroup, "oom_kills", lambda: next(counts))
    worker = node_worker.NodeWorker.__new__(node_worker.NodeWorker)
    worker._oom_kills = 5
    assert [worker._kernel_has_killed() for _ in range(4)] == [False, True, False, True]


def test_usage_of_a_process_that_is_gone_is_nothing():
    gone = 2**22 + 1  # above the kernel's greatest
    assert usage.memory_of(gone) == (0, 0)
    assert usage.share_of(gone) is None
    assert usage.cpu_s(gone) == 0
    assert usage.with_descendants(gone) == [gone]


# looks: what the system says is made up, and time is turned by hand

MIB = 2**20


class Edge:
    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.tasks: dict[str, Task] = {}
        self.exit = None
        self.killed = ""

    def take(self, name: str) -> Task:
        self.tasks[name] = task = Task(name, None, b"")
        return task


class Rig:
    """A node's limits, with two edges whose memory, shares and CPU time the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, memory: MemoryLimit | None, cpu_limit_s: float | None) -> None:
        self.now = 100.0
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.over: list[tuple[Edge, str, dict]] = []
        self.edges = [Edge(1), Edge(2)]
        self.memory = dict.fromkeys((1, 2, os.getpid()), usage.Memory(10 * MIB, 10 * MIB))
        self.shares: dict[int, int | None] = {}
        self.counted: list[int] = []
        self.count_takes_s = 0.0
        self.cpu: dict[int, float] = {1: 5.0, 2: 5.0}
        self.children: dict[int, list[int]] = {}
        monkeypatch.setattr(clock, "monotonic", lambda: self.now)
        monkeypatch.setattr(usage, "memory_of", lambda pid: self.memory.get(pid, usage.Memory(0, 0)))
        monkeypatch.setattr(usage, "share_of", self._count)
        monkeypatch.setattr(usage, "cpu_s", lambda pid: self.cpu.get(pid, 0.0))
        monkeypatch.setattr(usage, "with_descendants", lambda pid: [pid, *self.children.get(pid, [])])
        node = NodeManifest("n", False, 2, None, None, 0, False, 1000, 5.0, cpu_limit_s=cpu_limit_s)
        self.limits = Limits(cast(Any, self), node, memory, lambda: cast(Any, self.edges), cast(Any, self))

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> object:
        self.timers.append((self.now + delay_s, callback))
        return object()

    def edge_over(self, edge: Edge, why: str, verdict: ErrorInfo) -> None:
        edge.killed = why
        self.over.append((edge, why, decode(verdict.details)))

    def _count(self, pid: int) -> int | None:
        self.counted.append(pid)
        self.now += self.count_takes_s
        return self.shares.get(pid)

    def turn(self) -> None:
        """Let the time of the next timer come."""
        (due, callback), self.timers = self.timers[0], self.timers[1:]
        self.now = max(self.now, due)
        callback()

    def begin(self, edge: Edge, name: str = "t") -> None:
        self.limits.began(edge.take(name), cast(Any, edge))


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Rig]:
    def make(limit_mib: int | None = 100, cpu_limit_s: float | None = None) -> Rig:
        memory = None if limit_mib is None else MemoryLimit(limit_mib * MIB, of_container=False)
        return Rig(monkeypatch, memory, cpu_limit_s)

    return make


def test_node_without_limits_never_looks(rig: Callable[..., Rig]):
    assert not rig(None).limits.active
    assert rig(None, 1.0).limits.active
    assert rig(100).limits.active


def test_looks_come_four_times_a_second_while_tasks_run_and_one_more_time(rig: Callable[..., Rig]):
    made = rig()
    made.begin(made.edges[0])
    made.begin(made.edges[1])
    assert [due for due, _ in made.timers] == [100.25]
    made.turn()
    assert [due for due, _ in made.timers] == [100.5]
    made.edges[0].tasks.clear()
    made.edges[1].tasks.clear()
    made.memory[1] = usage.Memory(200 * MIB, 200 * MIB)
    made.turn()
    assert [(edge.pid, why) for edge, why, _ in made.over] == [(1, "memory_limit")]
    assert made.timers == []
    made.begin(made.edges[1])
    assert len(made.timers) == 1


def test_pages_are_not_counted_where_bounds_decide(rig: Callable[..., Rig]):
    made = rig()
    made.begin(made.edges[0])
    made.memory[1] = usage.Memory(90 * MIB, 100 * MIB)
    made.turn()
    assert made.over == []
    made.memory[1] = usage.Memory(111 * MIB, 120 * MIB)
    made.turn()
    (_, _, told), *rest = made.over
    assert (told["measured_bytes"], rest, made.counted) == (101 * MIB, [], [])


def test_pages_are_counted_of_the_largest_first_and_only_until_it_is_clear(rig: Callable[..., Rig]):
    made = rig()
    made.children[1] = [11, 12]
    made.memory |= {1: usage.Memory(60 * MIB, 60 * MIB), 11: usage.Memory(50 * MIB, 50 * MIB)}
    made.memory[12] = usage.Memory(20 * MIB, 20 * MIB)
    made.shares = {1: 25 * MIB, 11: 50 * MIB, 12: 20 * MIB}
    made.begin(made.edges[0])
    made.turn()
    assert (made.counted, made.over) == ([1], [])
    made.shares[1] = 40 * MIB
    made.turn()
    assert made.counted == [1, 1, 11, 12]
    assert made.over[0][2]["measured_bytes"] == 110 * MIB


def test_process_whose_share_is_a_secret_counts_in_full(rig: Callable[..., Rig]):
    made = rig()
    made.memory[1] = usage.Memory(60 * MIB, 101 * MIB)
    made.begin(made.edges[0])
    made.turn()
    assert made.over[0][2]["measured_bytes"] == 101 * MIB


def test_counting_takes_a_twentieth_of_the_time(rig: Callable[..., Rig]):
    made = rig()
    made.memory[1] = usage.Memory(105 * MIB, 105 * MIB)
    made.shares[1] = 90 * MIB
    made.count_takes_s = 0.1
    made.begin(made.edges[0])
    for _ in range(80):
        made.turn()
    assert made.now > 119
    assert 8 <= len(made.counted) <= 11
    assert made.over == []


def test_looks_at_many_processes_take_a_twentieth_of_the_time(rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch):
    made = rig()

    def slowly(pid: int) -> list[int]:
        made.now += 0.05
        return [pid]

    monkeypatch.setattr(usage, "with_descendants", slowly)
    made.begin(made.edges[0])
    made.turn()
    assert made.timers[0][0] - made.now == pytest.approx(1.0)


def test_slow_count_does_not_put_off_the_next_look(rig: Callable[..., Rig]):
    made = rig()
    made.memory[1] = usage.Memory(105 * MIB, 105 * MIB)
    made.shares[1] = 90 * MIB
    made.count_takes_s = 0.3
    made.begin(made.edges[0])
    made.turn()
    assert made.timers[0][0] - made.now == pytest.approx(0.25)


def test_cpu_time_is_counted_from_the_hand_over_with_descendants(rig: Callable[..., Rig]):
    made = rig(None, 2.0)
    made.begin(made.edges[0])
    made.children[1] = [11]
    made.cpu |= {1: 6.0, 11: 0.9}
    made.turn()
    assert made.over == []
    made.cpu[11] = 1.5
    made.turn()
    assert [(why, told["measured_s"]) for _, why, told in made.over] == [("cpu_limit", 2.5)]


def test_look_without_descriptors_is_no_verdict(rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch):
    made = rig(100, 2.0)

    def refuse(pid: int) -> list[int]:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(usage, "with_descendants", refuse)
    made.begin(made.edges[0])
    made.turn()
    assert made.over == []
    assert len(made.timers) == 1


# which limit a node has


def manifest(memory_limit_bytes: int | None) -> NodeManifest:
    return NodeManifest("n", False, 2, None, None, 0, False, 1000, 5.0, memory_limit_bytes=memory_limit_bytes)


@pytest.mark.parametrize(
    ("own", "container", "expected"),
    [
        (None, None, None),
        (GIB, None, MemoryLimit(GIB, of_container=False)),
        (None, 2**20 * 100, MemoryLimit(2**20 * 80, of_container=True)),
        (GIB, 2**20 * 100, MemoryLimit(GIB, of_container=False)),
        (None, 2**60, None),
    ],
)
def test_node_has_its_own_limit_or_what_its_container_leaves(
    monkeypatch: pytest.MonkeyPatch, own: int | None, container: int | None, expected: MemoryLimit | None
):
    found = None if container is None else cgroup.MemoryGroup(Path("/g"), container, 2**20 * 10, False)
    monkeypatch.setattr(cgroup, "memory_group", lambda: found)
    assert node_worker.memory_limit(manifest(own)) == expected


def test_hint_says_whose_limit_it_was(rig: Callable[..., Rig]):
    limits = rig().limits
    hints = [limits._too_much(MemoryLimit(GIB, of_container), 2 * GIB, 1).hint for of_container in (True, False)]
    assert ["container" in hint for hint in hints] == [True, False]
    assert all("memory_limit" in hint for hint in hints)
