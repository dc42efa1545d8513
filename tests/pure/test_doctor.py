"""Findings of ``hayata doctor`` about machines that are not ours: what the system says is made up."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest

from hayata.errors import error_for
from hayata.messages import Finding
from hayata_supervisor.doctor import data, findings, machine, memory
from hayata_supervisor.process import cgroup, prologue, usage
from hayata_supervisor.store import directory

GIB = 2**30


def told(found: Iterable[Finding]) -> list[tuple[str, str]]:
    return [(finding.check, finding.status) for finding in found]


def test_check_that_breaks_is_a_failure_and_the_next_one_runs():
    def broken():
        raise RuntimeError("bug")

    def refused():
        yield findings.ok("a", "fine")
        raise error_for("permission_denied", "no", hint="ask")

    found = list(findings.run([("broken", broken), ("refused", refused), ("last", lambda: [findings.ok("last", "")])]))
    assert told(found) == [("broken", "fail"), ("a", "ok"), ("refused", "fail"), ("last", "ok")]
    assert (found[2].message, found[2].hint) == ("permission_denied: no", "ask")


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch):
    """Make up the control group, and what systemd says."""

    def make(limit: int | None, *, together: bool = False, unit: str | None = None, policy: str | None = None):
        found = None if limit is None else cgroup.MemoryGroup(Path("/g"), limit, 0, together)
        monkeypatch.setattr(cgroup, "memory_group", lambda proc: found)
        monkeypatch.setattr(cgroup, "kills_together", lambda proc: together)
        monkeypatch.setattr(cgroup, "service_unit", lambda proc: unit)
        monkeypatch.setattr(memory, "oom_policy", lambda unit, user: policy)
        return list(memory.check_memory(None))

    return make


def test_memory_without_a_limit_but_the_machines_warns(group):
    assert told(group(None)) == told(group(2**60)) == [("memory limit", "warn")]


def test_memory_limit_of_a_container_is_shown_with_what_an_edge_gets(group):
    (finding,) = group(GIB // 2)
    assert (finding.status, "0.4 GiB an edge" in finding.message or finding.message) == ("ok", True)


def test_memory_group_that_dies_together_warns(group):
    found = group(GIB // 2, together=True)
    assert told(found) == [("memory limit", "ok"), ("memory group", "warn")]
    assert "ends the supervisor" in found[1].message


@pytest.mark.parametrize(("policy", "status"), [("stop", "warn"), ("kill", "warn"), ("continue", "ok")])
def test_service_that_ends_with_one_worker_warns(group, policy: str, status: str):
    found = group(GIB // 2, unit="hayata.service", policy=policy)
    assert told(found)[1:] == [("service", status)]
    assert f"OOMPolicy={policy}" in found[1].message


def test_service_of_which_nothing_is_known_is_not_mentioned(group):
    assert len(group(GIB // 2, unit="hayata.service", policy=None)) == 1


@pytest.mark.parametrize(("script", "expected"), [("echo stop", "stop"), ("exit 1", None), ("echo", None)])
def test_oom_policy_is_asked_of_systemd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, expected: str | None
):
    program = tmp_path / "systemctl"
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\n{script}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert memory.oom_policy("x.service", user=True) == expected
    assert (tmp_path / "asked").read_text() == "--user show --property=OOMPolicy --value x.service\n"


def test_oom_policy_without_systemd_is_unknown(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "")
    assert memory.oom_policy("x.service", user=False) is None


@pytest.mark.parametrize(
    ("path", "unit"),
    [
        ("/system.slice/hayata.service", "hayata.service"),
        ("/system.slice/hayata.service/workers", "hayata.service"),
        ("/user.slice/user-1.slice/user@1.service/app.slice/hayata.service", "hayata.service"),
        ("/user.slice/user-1.slice/user@1.service/app.slice/terminal.scope", None),
        ("/", None),
    ],
)
@pytest.mark.parametrize("line", ["0::{}\n", "0::/\n9:name=systemd:{}\n4:memory:/other.service\n"])
def test_service_unit_is_the_nearest_service(tmp_path: Path, line: str, path: str, unit: str | None):
    (tmp_path / "cgroup").write_text(line.format(path))
    assert cgroup.service_unit(tmp_path) == unit


@pytest.mark.parametrize(
    ("magic", "status"),
    [(0x6969, "fail"), (0x65735546, "fail"), (0x01021994, "warn"), (0x794C7630, "warn"), (0xEF53, "ok")],
)
def test_file_system_of_the_data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, magic: int, status: str):
    monkeypatch.setattr(directory, "filesystem_type", lambda path: magic)
    found = dict(told(data.check_data_dir(tmp_path)))
    assert found["file system"] == status


@pytest.mark.parametrize(
    ("free", "inodes", "status"),
    [(GIB * 9, 10**6, "ok"), (GIB // 2, 10**6, "warn"), (2**20, 10**6, "fail"), (GIB * 9, 3, "fail")],
)
def test_room_for_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, inodes: int, status: str):
    said = SimpleNamespace(f_bavail=free // 4096, f_frsize=4096, f_files=10**7, f_favail=inodes)
    monkeypatch.setattr(os, "statvfs", lambda path: said)
    assert dict(told(data.check_data_dir(tmp_path)))["disk"] == status


def test_kernel_without_pidfds_fails_and_leaves_no_child(monkeypatch: pytest.MonkeyPatch):
    children = []

    def fork() -> int:
        children.append(os.fork())
        if not children[0]:
            signal.pause()
        return children[0]

    def refuse(pid: int) -> int:
        raise PermissionError(1, "Operation not permitted")

    for name in ("become_subreaper", "die_with_parent"):
        monkeypatch.setattr(machine.prctl, name, lambda: None)
    monkeypatch.setattr(prologue, "fork", fork)
    monkeypatch.setattr(machine, "open_pidfd", refuse)
    assert told(machine.check_kernel()) == [("kernel", "fail")]
    with pytest.raises(ProcessLookupError):
        os.kill(children[0], 0)


def test_kernel_that_says_less_than_it_could_warns(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(usage, "share_of", lambda pid: None)
    assert told(machine._look_at(os.getpid())) == [("proc", "warn")]


@pytest.mark.parametrize(("now", "status"), [(0.0, "warn"), (1_800_000_000.0, "ok")])
def test_clock_that_was_never_set_warns(monkeypatch: pytest.MonkeyPatch, now: float, status: str):
    monkeypatch.setattr(time, "time", lambda: now)
    assert told(machine.check_clock()) == [("clock", status)]


def test_few_processes_warn(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cgroup, "process_limit", lambda: 100)
    assert dict(told(machine.check_ulimits()))["processes"] == "warn"


def test_memory_files_that_are_refused_fail(monkeypatch: pytest.MonkeyPatch):
    def refuse(name: str, body: bytes) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(machine, "sealed_memfd", refuse)
    assert told(machine.check_memfd()) == [("memfd", "fail")]
