"""SIGKILL and power cuts at any moment: the store holds what was acknowledged, or one batch more."""

from __future__ import annotations

import os
import random
import re
import select
import shutil
import signal

import pytest

from hayata_supervisor.store.lmdb_store import open_store
from tests.power import main as cut_power
from tests.support.store_child import batch, written
from tests.support.store_rig import child, run, run_to_end
from tests.support.store_strace import can_strace, strace

KILLS = 60


def test_killed_at_random_moments_holds_the_acknowledged_batches_or_one_more(tmp_path):
    chance = random.Random(7)
    acknowledged = found = 0
    with child("nursery", tmp_path) as nursery:
        for _ in range(KILLS):
            nursery.ask()
            pid = int(nursery.hear().split()[1])
            assert nursery.hear() == f"open {found}"
            for _ in range(chance.randrange(6)):
                acknowledged = int(nursery.hear())
            select.select([], [], [], chance.random() * 0.002)
            os.kill(pid, signal.SIGKILL)
            while (line := nursery.hear()) != "dead":
                acknowledged = int(line)
            store = open_store(tmp_path, ballast_bytes=0)
            try:
                found = written(store)
            finally:
                store.close()
            assert found in (acknowledged, acknowledged + 1)
            acknowledged = found
    assert found > KILLS


needs_strace = pytest.mark.skipif(not can_strace(), reason="strace is missing, or may not trace")


@needs_strace
@pytest.mark.parametrize(("call", "least"), [("pwrite64", 3), ("writev", 3), ("fdatasync", 3)])
def test_killed_at_every_call_of_commits_holds_the_acknowledged_batches_or_one_more(tmp_path, call, least):
    assert run("batches", tmp_path / "0", 3)[-1] == "3"
    for nth in range(1, 100):
        data_dir = shutil.copytree(tmp_path / "0", tmp_path / str(nth))
        inject = f"{call}:signal=SIGKILL:when={nth}"
        done = run_to_end("batches", data_dir, 5, before=strace(inject, data_dir / "store" / "data.mdb"))
        said = done.stdout.split()
        acknowledged = int(said[-1]) if said else 3
        store = open_store(data_dir, ballast_bytes=0)
        try:
            assert written(store) in (acknowledged, acknowledged + 1)
        finally:
            store.close()
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL
    assert acknowledged == 5
    assert nth > least, "the kills did not reach the commits"


@needs_strace
@pytest.mark.parametrize(
    ("call", "least"),
    [("mkdir", 2), ("openat", 4), ("pwrite64", 2), ("fdatasync", 2), ("fsync", 3), ("rename", 1)],
)
def test_killed_at_every_call_of_its_creation_is_created_by_the_next_start_s6(tmp_path, call, least):
    """S6, etcd 16596: a crash while the store is created."""
    for nth in range(1, 100):
        data_dir = tmp_path / str(nth)
        names = ("", "store.new", "store.new/data.mdb", "store.new/lock.mdb", "store")
        inject = f"{call}:signal=SIGKILL:when={nth}"
        done = run_to_end("try", data_dir, before=strace(inject, *(data_dir / name for name in names)))
        store = open_store(data_dir, ballast_bytes=0)
        assert store.write(batch(1)) == [None] * 4
        store.close()
        assert not (data_dir / "store.new").exists()
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL
    assert nth > least, "the kills did not reach the creation"


@needs_strace
def test_creation_is_synced_before_it_is_renamed_and_the_rename_after_it_s6(tmp_path):
    """S6, etcd 16596: a crash while the store is created."""
    data_dir, log = tmp_path / "data", tmp_path / "log"
    prefix = ["strace", "-f", "-qq", "-y", "-e", "trace=fsync,rename", "-o", str(log)]
    assert run("try", data_dir, before=prefix) == ["open"]
    calls = [line.split(maxsplit=1)[1] for line in log.read_text().splitlines()]
    where = []
    for call, path in (
        ("fsync(", f"<{tmp_path}>)"),  # the data directory's own entry
        ("fsync(", f"<{data_dir}/store.new/data.mdb>)"),
        ("fsync(", f"<{data_dir}/store.new>)"),
        ("rename(", f'"{data_dir}/store")'),
        ("fsync(", f"<{data_dir}>)"),
    ):
        where += [index for index, line in enumerate(calls) if line.startswith(call) and path in line][:1]
    assert len(where) == 5
    assert where == sorted(where)


@needs_strace
def test_power_cut_at_any_moment_leaves_the_acknowledged_batches_or_one_more_and_the_control_loses_some(capsys):
    """``make crash`` looks at more images than this."""
    assert cut_power(["--images", "400"]) == 0
    assert re.fullmatch(
        r"power cut: 400 images, 0 violations; "
        r"control \(metasync=False\): [1-9]\d* of 400 images lost acknowledged commits\n",
        capsys.readouterr().out,
    )


@needs_strace
@pytest.mark.parametrize("call", ["pwrite64", "writev", "fdatasync"])
def test_disk_error_at_a_commit_is_broken_and_the_next_process_reads_the_truth(tmp_path, call):
    run("batches", tmp_path, 3)
    data = tmp_path / "store" / "data.mdb"
    # The first two of either call belong to the opening, which counts the epoch.
    said = run("batches", tmp_path, 9, before=strace(f"{call}:error=EIO:when=4+", data))
    assert said[-1].startswith("broken ")
    acknowledged = int(said[-2].split()[-1])
    store = open_store(tmp_path, ballast_bytes=0)
    try:
        assert written(store) in (acknowledged, acknowledged + 1)
    finally:
        store.close()
