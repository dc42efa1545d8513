"""Pruning, killed anywhere: an invocation is there whole or it is gone, and its id begins a fresh one."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from hayata import HayataError, maintenance
from hayata import messages as m
from hayata.values import decode
from hayata_supervisor.store import layout, retention
from hayata_supervisor.store.lmdb_store import LmdbStore, open_store
from hayata_supervisor.store.verifying import verify_file
from hayata_supervisor.stored import check_stored
from tests.support.crash_site import Daemon, Site
from tests.support.eventually import eventually
from tests.support.ledger import audit
from tests.support.store_histories import History

WAIT_S = 20.0


@pytest.fixture
def daemon(site: Site) -> Daemon:
    """One agent is enough here, and starts sooner than nine."""
    return site.daemon(agents="short").start()


def prune(data_dir: Path, *options: str) -> m.Pruned:
    pruned = maintenance.run("prune", ["--data-dir", str(data_dir), *options])
    assert isinstance(pruned, m.Pruned)
    return pruned


def verified(data_dir: Path) -> dict[str, int]:
    """Verify here, and require that all is whole."""
    return verify_file(
        data_dir / "store" / "data.mdb",
        fold=check_stored,
        decode=decode,
        tell=lambda *problem: pytest.fail(str(problem)),
    )


def opened(data_dir: Path) -> LmdbStore:
    return open_store(data_dir, ballast_bytes=0)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """Five that have ended, of 3, 23, 243, 23 and 243 records, the long ones with a snapshot; and one that is open."""
    data_dir = tmp_path_factory.mktemp("made")
    store = opened(data_dir)
    for index, steps in enumerate((1, 11, 121, 11, 121)):
        history = History(f"n{index}", key=f"k{index}", ms=1000 * index + 1000).begin()
        for _ in range(steps):
            history.step(900)
        history.finish().store(store)
    History("open", ms=9000).begin().step().store(store)
    store.close()
    return data_dir


@pytest.mark.parametrize("point", ["store.before_remove", "store.after_remove"])
def test_killed_at_every_removal_an_id_that_is_used_again_begins_a_fresh_run_d12(made, tmp_path, monkeypatch, point):
    """D12, dbos 769: an interrupted cleanup, and an id that is used again."""
    kills = []
    for nth in range(1, 20):
        data_dir = shutil.copytree(made, tmp_path / str(nth))
        with monkeypatch.context() as patched:
            patched.setenv("HAYATA_FAILPOINTS", f"{point}=kill@{nth}")
            try:
                prune(data_dir, "--older-than-s", "0")
                break
            except HayataError as error:
                kills.append(error.message)
        verified(data_dir)
        store = opened(data_dir)
        there = [name for name in ("n0", "n1", "n2", "n3", "n4") if store.find(name)]
        for name in {"n0", "n1", "n2", "n3", "n4"} - set(there):
            fresh = History(name, key=f"k{name[1:]}", ms=20_000).begin().store(store)
            assert store.find(name).id == fresh.id
            assert [number for number, _ in store.records(fresh.id, 1)] == [1]
            assert store.load(fresh.id).snapshot is None
        store.close()
        counts = verified(data_dir)
        assert counts["open"] == 6 - len(there)
        assert prune(data_dir, "--older-than-s", "0").invocations == len(there)
        counts = verified(data_dir)
        assert (counts["ended"], counts["leaving"], counts["snapshots"]) == (0, 0, 0)
        assert counts["invocations"] == 6 - len(there)
        assert counts["records"] == 3 + (5 - len(there))  # the open one, and one of each fresh one
    assert len(kills) >= 3, "there were not many transactions"
    assert all("signal SIGKILL" in message for message in kills)


def test_open_invocation_that_is_in_gc_by_damage_is_not_removed(made, tmp_path):
    data_dir = shutil.copytree(made, tmp_path / "data")
    store = opened(data_dir)
    id = store.find("n3").id
    with store._env.begin(write=True) as txn:
        txn.put(id, layout.seal(id, b""), db=store._tables["open"])
    assert retention.run(retention.prune(store, retention.Rule(1e9))).invocations == 4
    assert store.find("n3").id == id
    store.close()


def test_daemon_started_on_a_half_pruned_store_runs_the_same_id_afresh_and_ends_the_removal_d12(
    site: Site, monkeypatch
):
    """D12, dbos 769: an interrupted cleanup, and an id that is used again."""
    daemon = site.daemon(agents="short").start()
    names = [f"n{index}" for index in range(25)]
    for name in names:
        daemon.client.run("short", {}, invocation_id=name, key=name)
    results = {name: daemon.client.invocation(name).result(timeout=WAIT_S) for name in names}
    daemon.stop()
    with monkeypatch.context() as patched:
        patched.setenv("HAYATA_FAILPOINTS", "store.after_remove=kill@1")
        with pytest.raises(HayataError, match="SIGKILL"):
            prune(Path(daemon.data_dir), "--older-than-s", "0")
    assert verified(Path(daemon.data_dir))["leaving"] <= 1
    daemon.start()
    left = {invocation.id for invocation in daemon.client.invocations(limit=100)}
    assert 0 < len(left) < len(names)
    for name in names:
        again = daemon.client.run("short", {}, invocation_id=name, key=name)
        assert (again.result(timeout=WAIT_S) == results[name]) is (name in left)
        assert len(daemon.site.ledger.attempts(name, "left")) == (1 if name in left else 2)
    eventually(lambda: not daemon.client.verify().counts["leaving"], "end of the removal that was cut off")
    assert daemon.client.verify().problems == ()


def test_supervisor_killed_in_the_middle_of_a_prune_loses_nothing_that_stays(site: Site, tmp_path):
    once = tmp_path / "once"
    daemon = site.daemon(agents="short").start(HAYATA_FAILPOINTS=f"store.after_remove=kill@1@once:{once}")
    names = [f"n{index}" for index in range(25)]
    for name in names:
        daemon.client.run("short", {}, invocation_id=name)
    for name in names:
        daemon.client.invocation(name).result(timeout=WAIT_S)
    open_one = daemon.client.run("short", {"first_gate": "gate"})
    daemon.site.ledger.wait("start", invocation=open_one.id, node="first")
    pruned = daemon.client.prune(0, keep=5)  # asked again of the next supervisor by the client
    assert once.exists()
    assert pruned.invocations < 20
    left = [invocation.id for invocation in daemon.client.invocations(status="completed", limit=100)]
    assert len(left) == 5
    audit(daemon.client, site.ledger, left, reruns={"again": 3})
    assert daemon.client.verify().problems == ()
    eventually(lambda: open_one.status() == "uncertain", "the open one is classified")
    assert daemon.client.prune(0).invocations == 5
    assert [invocation.id for invocation in daemon.client.invocations()] == [open_one.id]  # never an uncertain one


def test_pruned_space_is_used_again_d8(tmp_path):
    """D8, langgraph 8531: what was pruned makes room."""
    data_dir = tmp_path / "data"
    store = opened(data_dir)
    sizes = []
    for turn in range(6):
        for index in range(20):
            history = History(f"n{index}", key=f"k{index}", ms=1000 + index).begin()
            for _ in range(20):
                history.step(2000 + 100 * turn)
            history.finish().store(store)
        pruned = retention.run(retention.prune(store, retention.Rule(1e9)))
        assert pruned.invocations == 20
        sizes.append((data_dir / "store" / "data.mdb").stat().st_size)
    History("goes-on", ms=5000).begin().step().store(store)
    store.close()
    assert sizes[-1] <= 1.3 * sizes[0], sizes
    assert verified(data_dir)["invocations"] == 1
    before = sizes[-1]
    pruned = prune(data_dir, "--compact")
    assert (pruned.bytes_before, pruned.bytes_after) == (
        before,
        (data_dir / "store" / "data.mdb").stat().st_size,
    )
    assert pruned.bytes_after < before / 10
    store = opened(data_dir)
    assert store.find("goes-on").status == "running"
    store.close()


@pytest.mark.parametrize("point", ["maintenance.before_replace", "maintenance.after_replace"])
def test_killed_at_the_swap_of_the_compacted_file_the_store_is_whole(made, tmp_path, monkeypatch, point):
    data_dir = shutil.copytree(made, tmp_path / "data")
    counts = verified(data_dir)
    with monkeypatch.context() as patched:
        patched.setenv("HAYATA_FAILPOINTS", f"{point}=kill")
        with pytest.raises(HayataError, match="SIGKILL"):
            prune(data_dir, "--compact")
    assert (data_dir / "store.compact").exists()
    after = verified(data_dir)
    assert {**after, "bytes": 0} == {**counts, "bytes": 0}
    assert (after["bytes"] < counts["bytes"]) is (point == "maintenance.after_replace")
    assert prune(data_dir, "--compact").invocations == 0
    assert not (data_dir / "store.compact").exists()
    store = opened(data_dir)
    assert store.find("open").status == "running"
    store.close()


def test_copy_that_is_not_whole_does_not_replace_the_store(made, tmp_path):
    data_dir = shutil.copytree(made, tmp_path / "data")
    store = opened(data_dir)
    with store._env.begin(write=True) as txn:
        txn.delete(b"n3", db=store._tables["name"])
    store.close()
    before = (data_dir / "store" / "data.mdb").read_bytes()
    with pytest.raises(HayataError, match="n3") as refused:
        prune(data_dir, "--compact")
    assert refused.value.code == "store_corrupt"
    assert (data_dir / "store" / "data.mdb").read_bytes() == before
    assert not (data_dir / "store.compact").exists()


def test_retention_of_the_configuration_is_applied_by_the_daemon(site: Site):
    daemon = site.daemon(agents="short").start()
    done = [daemon.client.run("short", {}) for _ in range(3)]
    for invocation in done:
        invocation.result(timeout=WAIT_S)
    daemon.stop()
    ended = time.time()
    eventually(lambda: time.time() > ended + 1.0, "a second", 5.0)
    daemon.start(HAYATA_RETENTION="1s")
    resting = daemon.client.run("short", {"first_gate": "gate"})
    eventually(lambda: len(daemon.client.invocations()) == 1, "the old ones are removed")
    assert daemon.client.invocations()[0].id == resting.id
    assert "pruned" in site.log.read_text()


def test_prune_beside_a_load_holds_nobody_up_and_removes_only_what_has_ended(daemon: Daemon):
    for _ in range(60):
        daemon.client.run("short", {})
    running = [daemon.client.run("short", {"first_gate": "gate"}) for _ in range(3)]
    total = 0
    while daemon.client.stats()["open_invocations"] > 3:
        total += daemon.client.prune(0.0).invocations
    total += daemon.client.prune(0.0).invocations
    assert total == 60
    daemon.site.open_gate("gate")
    for invocation in running:
        assert len(invocation.result(timeout=WAIT_S)["state"]["log"]) == 3
    assert daemon.client.verify().problems == ()


def test_prune_refuses_what_makes_no_sense(daemon: Daemon):
    for options in (
        {"older_than": "soon"},
        {"older_than": -1},
        {"older_than": "1d", "keep": -1},
        {"older_than": 1, "status": "open"},
    ):
        with pytest.raises(HayataError) as refused:
            daemon.client.prune(**options)
        assert refused.value.code == "invalid_options"
