"""Limits as arithmetic, control groups as files, and what a definition may say."""

from __future__ import annotations

from pathlib import Path

import pytest

from hayata import Agent, DefinitionError, Finish, Node
from hayata.manifest import agent_manifest
from hayata_supervisor.core.limits import container_default, tasks_of_edge
from hayata_supervisor.process import cgroup, usage

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


def test_usage_of_a_process_that_is_gone_is_nothing():
    gone = 2**22 + 1  # above the kernel's greatest
    assert usage.memory_of(gone) == (0, 0)
    assert usage.share_of(gone) is None
    assert usage.cpu_s(gone) == 0
    assert usage.with_descendants(gone) == [gone]
