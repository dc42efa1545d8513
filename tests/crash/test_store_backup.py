"""Backups: taken while the daemon works, whole, restored by starting a daemon on them."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import lmdb
import pytest

from hayata import HayataError, maintenance
from hayata import messages as m
from hayata.client.records import TERMINAL
from hayata_supervisor.store import backup
from hayata_supervisor.store.lmdb_store import open_store
from tests.support.crash_site import Daemon, Site
from tests.support.eventually import eventually
from tests.support.ledger import audit, check_events
from tests.support.store_histories import every_kind
from tests.support.store_rig import ENVIRONMENT

WAIT_S = 20.0


@pytest.fixture
def daemon(site: Site) -> Daemon:
    """One agent is enough here, and starts sooner than nine."""
    return site.daemon(agents="short").start()


def offline(data_dir: Path, to: Path, request_id: str = "r") -> m.StoreReport:
    report = maintenance.run("backup", ["--data-dir", str(data_dir), "--to", str(to), "--request-id", request_id])
    assert isinstance(report, m.StoreReport)
    return report


def verify(data_dir: Path | str) -> dict[str, int]:
    report = maintenance.run("verify", ["--data-dir", str(data_dir)])
    assert isinstance(report, m.StoreReport)
    assert report.problems == []
    return report.counts


def contents(data_dir: Path) -> list[tuple[str, list[tuple[bytes, bytes]]]]:
    """Every record of a store."""
    env = lmdb.open(str(data_dir / "store"), readonly=True, lock=False, max_dbs=32)
    with env.begin() as txn:
        names = [bytes(name) for name, _ in txn.cursor()]
        found = [
            (
                name.decode(),
                [(bytes(k), bytes(v)) for k, v in txn.cursor(env.open_db(name, txn=txn, create=False))],
            )
            for name in names
        ]
    env.close()
    return found


@pytest.fixture
def made(tmp_path) -> Path:
    store = open_store(tmp_path / "made", ballast_bytes=0)
    for history in every_kind():
        history.store(store)
    store.close()
    return tmp_path / "made"


# ----------------------------------------------------------------------------------------------- under a load


def test_backups_taken_at_random_moments_under_load_verify_and_restore_and_the_original_is_untouched(
    site: Site,
):
    daemon = site.daemon(agents="short").start()
    chance = random.Random(5)
    stop = threading.Event()

    def load() -> list[str]:
        ids = []
        while not stop.is_set():
            ids.append(daemon.client.run("short", {}).id)
            daemon.client.invocation(ids[-1]).result(timeout=WAIT_S)
        return ids

    with ThreadPoolExecutor(3) as threads:
        loads = [threads.submit(load) for _ in range(3)]
        try:
            for number in range(2):
                size = site.ledger.size() + chance.randrange(5_000)
                eventually(lambda size=size: site.ledger.size() > size, "work that goes on")
                report = daemon.client.backup(f"{site.home}/b{number}")
                assert (report.problems, report.directory) == ((), f"{site.home}/b{number}")
        finally:
            stop.set()
        done = [id for each in loads for id in each.result()]
    audit(daemon.client, site.ledger, done, reruns={"again": 3})
    assert daemon.client.verify().problems == ()
    assert not list(Path(site.home).glob(".*partial*"))
    daemon.stop()
    counts = [verify(f"{site.home}/b{number}") for number in range(2)]
    assert 0 < counts[0]["records"] < counts[1]["records"]
    restored = site.daemon(agents="short", data_dir="b1", sock="s2").start()
    _check_restored(restored, counts[1]["invocations"])


def _check_restored(daemon: Daemon, count: int) -> None:
    """Everything in a backup is there, ends or rests, and the daemon serves."""
    found = daemon.client.invocations(limit=1000)
    assert len(found) == count
    for invocation in found:
        eventually(lambda each=invocation: each.status() in TERMINAL | {"uncertain"}, "end or rest")
        for task in invocation.tasks():
            if task.status == "uncertain":
                daemon.client.reconcile(invocation.id, task.id, retry=True)
        invocation.result(timeout=WAIT_S)
        check_events(list(invocation.events(until="now")), "completed")
    assert daemon.client.call("short", {}, timeout=WAIT_S)


def test_daemon_works_on_while_a_backup_takes_long(site: Site):
    daemon = site.daemon(agents="short").start(HAYATA_FAILPOINTS="maintenance.before_rename=delay(0.8)")
    daemon.client.call("short", {}, timeout=WAIT_S)
    with ThreadPoolExecutor(1) as thread:
        began = time.monotonic()
        taken = thread.submit(daemon.client.backup, f"{site.home}/b")
        eventually(lambda: list(Path(site.home).glob(".b.*")), "the copy in the making")
        with pytest.raises(HayataError, match="under way"):
            daemon.client.backup(f"{site.home}/b")
        longest = 0.0
        while not taken.done():
            before = time.monotonic()
            daemon.client.call("short", {}, timeout=WAIT_S)
            longest = max(longest, time.monotonic() - before)
        assert taken.result().counts["invocations"] == 1
        assert time.monotonic() - began > 0.8
    assert longest < 1.0
    assert len(daemon.client.invocations()) > 2


# ------------------------------------------------------------------------------------------------------ kills


def test_supervisor_killed_in_the_midst_of_a_backup_leaves_none_and_the_next_one_makes_it(site: Site):
    daemon = site.daemon(agents="short").start(
        HAYATA_FAILPOINTS="maintenance.before_rename=delay(30)@1@once:" + f"{site.home}/once"
    )
    daemon.client.call("short", {}, timeout=WAIT_S)
    with ThreadPoolExecutor(1) as thread:
        taken = thread.submit(daemon.client.backup, f"{site.home}/b")
        eventually(lambda: os.path.exists(f"{site.home}/once"), "the copy is complete, and not renamed")
        assert not os.path.exists(f"{site.home}/b")
        daemon.kill_supervisor()
        assert taken.result(timeout=WAIT_S).problems == ()  # the client has asked the next supervisor
    assert verify(f"{site.home}/b")["invocations"] == 1
    assert not list(Path(site.home).glob(".b.*"))
    assert daemon.client.verify().problems == ()


@pytest.mark.parametrize(("point", "there"), [("maintenance.before_rename", False), ("maintenance.after_rename", True)])
def test_killed_at_its_rename_a_backup_is_whole_or_not_there(made, tmp_path, monkeypatch, point, there):
    with monkeypatch.context() as patched:
        patched.setenv("HAYATA_FAILPOINTS", f"{point}=kill")
        with pytest.raises(HayataError, match="SIGKILL"):
            offline(made, tmp_path / "b")
    assert (tmp_path / "b").exists() is there
    assert (tmp_path / ".b.hayata-partial").exists() is not there
    report = offline(made, tmp_path / "b")  # the same request: what it has made already is given again
    assert verify(tmp_path / "b") == report.counts
    assert not (tmp_path / ".b.hayata-partial").exists()


def test_workers_that_die_meanwhile_do_not_take_the_backup_along(site: Site):
    daemon = site.daemon(agents="short").start(HAYATA_FAILPOINTS="maintenance.before_rename=delay(1)")
    with ThreadPoolExecutor(1) as thread:
        taken = thread.submit(daemon.client.backup, f"{site.home}/b")
        eventually(lambda: list(Path(site.home).glob(".b.*/backup.json")), "the copy in the making")
        tree = daemon.tree()
        for seen in tree:
            if seen.role == "node":
                seen.kill()  # after each of them the supervisor sweeps what it does not know
        assert taken.result(timeout=WAIT_S).problems == ()
    assert not next(seen for seen in tree if seen.role == "supervisor").dead()
    assert verify(f"{site.home}/b")["invocations"] == 0


_READER = """
import sys, time
from pathlib import Path
from hayata_supervisor.store.opening import open_to_read
env = open_to_read(Path(sys.argv[1]), shared=True)
txn = env.begin()
print(txn.id(), flush=True)
time.sleep(60)
"""


def test_place_of_a_reader_that_was_killed_is_freed(made):
    store = open_store(made, ballast_bytes=0)
    command = [sys.executable, "-c", _READER, str(made / "store" / "data.mdb")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=ENVIRONMENT) as reader:
        assert reader.stdout.readline()
        assert str(reader.pid) in store._env.readers()
        store.tidy()
        assert str(reader.pid) in store._env.readers()  # it lives, and reads
        reader.kill()
    assert str(reader.pid) in store._env.readers()
    store.tidy()
    assert str(reader.pid) not in store._env.readers()
    store.close()


def test_runtime_that_stops_ends_the_backup_that_is_under_way(site: Site):
    daemon = site.daemon(agents="short").start(HAYATA_FAILPOINTS="maintenance.before_rename=delay(60)")
    with ThreadPoolExecutor(1) as thread:
        taken = thread.submit(daemon.client.backup, f"{site.home}/b")
        eventually(lambda: list(Path(site.home).glob(".b.*/backup.json")), "the copy in the making")
        daemon.stop()
        with pytest.raises(HayataError) as lost:
            taken.result(timeout=WAIT_S)
    assert lost.value.code == "daemon_unavailable"
    assert not os.path.exists(f"{site.home}/b")


# ----------------------------------------------------------------------------------------------------- copies


def test_offline_backup_has_every_record_and_the_original_is_untouched(made, tmp_path):
    before = (made / "store" / "data.mdb").read_bytes()
    report = offline(made, tmp_path / "b")
    assert (report.counts["invocations"], report.directory) == (7, str(tmp_path / "b"))
    assert contents(tmp_path / "b") == contents(made)
    assert (made / "store" / "data.mdb").read_bytes() == before
    assert (tmp_path / "b").stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "b").rglob("*"))
    store = open_store(tmp_path / "b", ballast_bytes=0)
    assert {each.header.name for each in store.load_open()} == {"open", "uncertain", "long", "queued"}
    store.close()


def test_backup_of_a_store_that_is_not_whole_is_refused_and_nothing_is_left(made, tmp_path):
    store = open_store(made, ballast_bytes=0)
    with store._env.begin(write=True) as txn:
        txn.delete(b"open", db=store._tables["name"])
    store.close()
    with pytest.raises(HayataError, match="'open'") as refused:
        offline(made, tmp_path / "b")
    assert refused.value.code == "store_corrupt"
    assert os.listdir(tmp_path) == ["made"]


def test_directory_that_is_taken_or_has_no_place_is_refused_and_left_alone(made, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    offline(made, tmp_path / "b")
    for name in ("full", "file", "link", "b", "missing/below", "file/below"):
        with pytest.raises(HayataError) as refused:
            offline(made, tmp_path / name, "another request")
        assert refused.value.code == "invalid_options", name
    assert os.listdir(tmp_path / "full") == ["thesis.tex"]
    assert not list(tmp_path.glob(".*"))
    (tmp_path / "empty").mkdir()
    assert offline(made, tmp_path / "empty").counts["invocations"] == 7


def test_store_whose_pages_lmdb_cannot_account_for_is_copied_record_by_record(made, tmp_path, monkeypatch):
    class Leaking:
        def __init__(self, env: lmdb.Environment) -> None:
            self._env = env

        def copyfd(self, fd: int, compact: bool) -> None:
            os.write(fd, b"half a copy")
            raise lmdb.IncompatibleError("a page leak")

        def __getattr__(self, name: str) -> object:
            return getattr(self._env, name)

    monkeypatch.setattr(backup, "_PUT_AT_ONCE", 7)
    env = backup.opening.open_to_read(made / "store" / "data.mdb")
    (tmp_path / "b" / "store").mkdir(parents=True)
    backup._copy(Leaking(env), tmp_path / "b" / "store" / "data.mdb")
    env.close()
    assert contents(tmp_path / "b") == contents(made)
    assert verify(tmp_path / "b")["invocations"] == 7


def test_copied_data_directory_and_backup_do_not_disturb_the_original(daemon: Daemon):
    site = daemon.site
    waiting = daemon.client.run("short", {"first_gate": "gate"})
    site.ledger.wait("start", invocation=waiting.id, node="first")
    daemon.client.backup(f"{site.home}/b")
    assert "starts" not in os.listdir(f"{site.home}/b")
    other = site.daemon(agents="short", data_dir="b", sock="s2").start()
    copy = other.client.invocation(waiting.id)
    eventually(lambda: copy.status() == "uncertain", "what was running in a backup is uncertain")
    assert waiting.status() == "running"
    site.open_gate("gate")
    assert len(waiting.result(timeout=WAIT_S)["state"]["log"]) == 3
    assert copy.status() == "uncertain"
