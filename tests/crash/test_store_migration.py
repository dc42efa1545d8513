"""Stores of earlier schemas: opened, migrated whole or not at all, refused when nobody knows how."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import lmdb
import pytest

from hayata.errors import CallerError
from hayata.values import decode
from hayata_supervisor.store import layout, migration, opening
from hayata_supervisor.store.lmdb_store import open_store
from hayata_supervisor.store.verifying import verify_file
from hayata_supervisor.stored import check_stored, restored
from tests.support import store_schema_1 as old
from tests.support.store_commits import first, new_id
from tests.support.store_rig import ENVIRONMENT, ROOT


@pytest.fixture
def data_dir(tmp_path) -> Path:
    old.write(tmp_path / "data")
    return tmp_path / "data"


def problems(data_dir: Path) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    path = data_dir / "store" / "data.mdb"
    verify_file(path, fold=check_stored, decode=decode, tell=lambda *each: found.append(each))
    return found


def tables_of(data_dir: Path) -> dict[str, dict[bytes, bytes]]:
    env = lmdb.open(str(data_dir / "store"), readonly=True, lock=False, max_dbs=32)
    with env.begin() as txn:
        names = [bytes(name) for name, _ in txn.cursor()]
        found = {
            name.decode(): {
                bytes(key): bytes(value) for key, value in txn.cursor(env.open_db(name, txn=txn, create=False))
            }
            for name in names
        }
    env.close()
    return found


# ---------------------------------------------------------------------------------------------------- schema 1


def test_store_that_the_first_version_wrote_is_whole_and_goes_on(data_dir):
    assert problems(data_dir) == []
    store = open_store(data_dir, ballast_bytes=0)
    assert store.uuid == old.UUID
    assert store.schema_before == 1
    done, open_one = store.find("done"), store.find("open")
    assert (done.id, done.status, done.ended_at) == (old.DONE, "completed", 1700000002.5)
    assert store.find_key("agent", "key").id == old.DONE
    assert store.find_key("agent", old.LONG).id == open_one.id == old.OPEN
    assert [number for number, _ in store.records(old.DONE, 1)] == [1, 2, 3, 4]
    assert decode(store.memory("agent", "chat")) == [{"role": "user", "content": "hi"}]
    (loaded,) = store.load_open()
    invocation = restored(loaded)
    assert (invocation.status, invocation.number, invocation.step) == ("running", 3, 1)
    assert {key: decode(value) for key, value in invocation.state.items()} == {"log": ["first"], "text": "é"}
    assert store.write([first(new_id(1), "new")]) == [None]
    assert [each.header.name for each in store.ended(b"", 2e9, 9)] == ["done"]
    store.close()


# --------------------------------------------------------------------------------------------------- migration


def _number_sessions(txn: lmdb.Transaction, open_table: migration.OpenTable) -> None:
    """A migration as one could be: sessions move to a new table under other keys."""
    before, after = open_table("session"), open_table("session2")
    for key, value in list(txn.cursor(before)):
        if os.environ.get("DIE_IN_MIGRATION"):
            os.kill(os.getpid(), signal.SIGKILL)
        body = layout.unseal("session", bytes(key), bytes(value))
        txn.put(b"2" + key, layout.seal(b"2" + key, body), db=after)
        txn.delete(key, db=before)


def _mark(txn: lmdb.Transaction, open_table: migration.OpenTable) -> None:
    txn.put(b"marked", layout.seal(b"marked", b"yes"), db=open_table("meta"))


def _set_schema(patch: pytest.MonkeyPatch, schema: int, steps: dict[int, migration.Migration]) -> None:
    patch.setattr(layout, "SCHEMA", schema)
    patch.setattr(migration, "MIGRATIONS", steps)


def test_older_store_is_migrated_step_by_step_when_it_is_opened(data_dir, monkeypatch):
    _set_schema(monkeypatch, 3, {1: _number_sessions, 2: _mark})
    store = open_store(data_dir, ballast_bytes=0)
    assert store.schema_before == 1
    assert store.find("done").status == "completed"
    store.close()
    tables = tables_of(data_dir)
    assert layout.unseal("meta", b"schema", tables["meta"][b"schema"]) == (3).to_bytes(8, "big")
    assert list(tables["session2"]) == [b"2agent\0chat"]
    assert tables["session"] == {}
    assert b"marked" in tables["meta"]
    again = open_store(data_dir, ballast_bytes=0)
    assert again.schema_before == 3
    again.close()
    monkeypatch.undo()
    with pytest.raises(CallerError) as refused:  # the old version does not touch it any more
        open_store(data_dir)
    assert refused.value.details == {"data_dir": str(data_dir), "schema": 3, "known": layout.SCHEMA}


_KILLED = """
import sys
from pathlib import Path
import pytest
from hayata_supervisor.store.lmdb_store import open_store
from tests.crash.test_store_migration import _mark, _number_sessions, _set_schema
_set_schema(pytest.MonkeyPatch(), 3, {1: _number_sessions, 2: _mark})
open_store(Path(sys.argv[1]), ballast_bytes=0)
"""


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("DIE_IN_MIGRATION", "1"),
        ("HAYATA_FAILPOINTS", "store.before_migrate=kill"),
        ("HAYATA_FAILPOINTS", "store.before_enter=kill"),
        ("HAYATA_FAILPOINTS", "store.after_enter=kill"),
    ],
)
def test_killed_in_the_midst_of_a_migration_the_store_is_of_one_schema_or_the_other(
    data_dir, monkeypatch, variable, value
):
    before = tables_of(data_dir)
    done = subprocess.run(
        [sys.executable, "-c", _KILLED, str(data_dir)], cwd=ROOT, env={**ENVIRONMENT, variable: value}, check=False
    )
    assert done.returncode == -signal.SIGKILL
    after = tables_of(data_dir)
    if value == "store.after_enter=kill":
        assert list(after["session2"]) == [b"2agent\0chat"]
        _set_schema(monkeypatch, 3, {1: _number_sessions, 2: _mark})
        open_store(data_dir, ballast_bytes=0).close()
        return
    assert after == before
    assert problems(data_dir) == []
    open_store(data_dir, ballast_bytes=0).close()  # the old version still can
    _set_schema(monkeypatch, 3, {1: _number_sessions, 2: _mark})
    store = open_store(data_dir, ballast_bytes=0)  # and so can the new one
    assert store.schema_before == 1
    store.close()
    assert list(tables_of(data_dir)["session2"]) == [b"2agent\0chat"]


def test_migration_that_needs_more_room_than_the_map_has_gets_it(data_dir, monkeypatch):
    def bloat(txn: lmdb.Transaction, open_table: migration.OpenTable) -> None:
        for number in range(200):
            txn.put(b"%d" % number, bytes(1 << 20), db=open_table("bloat"))

    _set_schema(monkeypatch, 2, {1: bloat})
    monkeypatch.setattr(opening, "DEFAULT_MAP_BYTES", 64 << 20)
    store = open_store(data_dir, map_size_bytes=64 << 20, ballast_bytes=0)
    assert store.find("open").status == "running"
    store.close()


def test_schema_that_nobody_can_migrate_is_refused_and_left_alone(data_dir, monkeypatch):
    before = tables_of(data_dir)
    _set_schema(monkeypatch, 3, {2: _mark})
    with pytest.raises(CallerError) as refused:
        open_store(data_dir)
    assert (refused.value.code, refused.value.details["schema"]) == ("invalid_options", 1)
    assert tables_of(data_dir) == before
    assert any("it is 1" in problem for _, problem in problems(data_dir))


def test_every_schema_before_this_one_has_its_migration():
    assert sorted(migration.MIGRATIONS) == list(range(1, layout.SCHEMA))
    assert layout.SCHEMA == 1, "a new schema: keep a writer of the old one, and open what it writes"
