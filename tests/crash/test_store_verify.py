"""``hayata verify`` finds a whole store whole, and names the record of whatever is wrong with another."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import lmdb
import lmdb.verify
import msgspec
import pytest

from hayata import HayataError, maintenance
from hayata import messages as m
from hayata.values import decode
from hayata_supervisor.core import facts as f
from hayata_supervisor.store import layout
from hayata_supervisor.store.interface import Header
from hayata_supervisor.store.lmdb_store import open_store
from hayata_supervisor.store.verifying import verify_file
from hayata_supervisor.stored import check_stored
from tests.support.store_histories import History, encode, every_kind


def verify(data_dir: Path) -> m.StoreReport:
    report = maintenance.run("verify", ["--data-dir", str(data_dir)])
    assert isinstance(report, m.StoreReport)
    assert report.found >= len(report.problems)
    return report


def problems(data_dir: Path) -> list[tuple[str, str]]:
    """The same in this process, which is quicker, where nothing can end it."""
    found: list[tuple[str, str]] = []
    data = data_dir / "store" / "data.mdb"
    verify_file(data, fold=check_stored, decode=decode, tell=lambda *each: found.append(each))
    return found


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    data_dir = tmp_path_factory.mktemp("made")
    store = open_store(data_dir, ballast_bytes=0)
    for history in every_kind():
        history.store(store)
    store.close()
    return data_dir


@pytest.fixture
def data_dir(made, tmp_path) -> Path:
    return shutil.copytree(made, tmp_path / "data")


class Tables:
    """Changes to a store behind its back."""

    def __init__(self, data_dir: Path) -> None:
        self._env = lmdb.open(str(data_dir / "store"), create=False, max_dbs=32, map_size=1 << 28)

    def change(self, table: str, key: bytes, body: bytes | None, *, sealed: bool = True) -> None:
        with self._env.begin(write=True) as txn:
            db = self._env.open_db(table.encode(), txn=txn, create=False)
            if body is None:
                assert txn.delete(key, db=db)
            else:
                txn.put(key, layout.seal(key, body) if sealed else body, db=db)

    def get(self, table: str, key: bytes) -> bytes:
        with self._env.begin() as txn:
            value = txn.get(key, db=self._env.open_db(table.encode(), txn=txn, create=False))
        return layout.unseal(table, key, value)

    def keys(self, table: str) -> list[bytes]:
        with self._env.begin() as txn:
            return [bytes(key) for key, _ in txn.cursor(self._env.open_db(table.encode(), txn=txn, create=False))]

    def header(self, name: str) -> Header:
        id = self.get("name", name.encode())
        return msgspec.msgpack.decode(self.get("inv", id), type=Header)

    def set_header(self, name: str, **fields: object) -> None:
        header = msgspec.structs.replace(self.header(name), **fields)
        self.change("inv", self.header(name).id, encode(header))

    def set_record(self, name: str, number: int, change: Callable[[f.Record], f.Record]) -> None:
        key = layout.journal_key(self.header(name).id, number)
        self.change("journal", key, f.encode_record(change(f.decode_record(self.get("journal", key)))))

    def close(self) -> None:
        self._env.close()


@pytest.fixture
def tables(data_dir):
    tables = Tables(data_dir)
    yield tables
    tables.close()


def test_store_of_every_kind_of_invocation_is_whole(made):
    report = verify(made)
    assert (report.problems, report.found) == ([], 0)
    counts = report.counts
    assert (counts["invocations"], counts["open"], counts["ended"], counts["names"]) == (7, 4, 3, 7)
    assert (counts["keys"], counts["sessions"], counts["snapshots"], counts["leaving"]) == (2, 1, 1, 0)
    assert counts["bytes"] == os.stat(made / "store" / "data.mdb").st_size


def test_verification_changes_nothing(data_dir):
    before = (data_dir / "store" / "data.mdb").read_bytes()
    verify(data_dir)
    assert (data_dir / "store" / "data.mdb").read_bytes() == before
    assert set(os.listdir(data_dir)) == {"store", "store.lock", "guard.lock"}


def test_directory_without_a_store_is_refused_and_stays_empty(tmp_path):
    for where in (tmp_path, tmp_path / "missing"):
        with pytest.raises(HayataError) as refused:
            verify(where)
        assert refused.value.code == "invalid_options"
    assert os.listdir(tmp_path) == []


def test_store_in_use_is_refused_and_left_alone(data_dir):
    store = open_store(data_dir, ballast_bytes=0)
    for command, *options in (("verify",), ("backup", "--to", f"{data_dir}2"), ("prune", "--compact")):
        with pytest.raises(HayataError) as refused:
            maintenance.run(command, ["--data-dir", str(data_dir), *options])
        assert refused.value.code == "data_dir_in_use"
        assert "--data-dir" in refused.value.hint
    History("more", ms=9000).begin().store(store)
    store.close()
    assert not Path(f"{data_dir}2").exists()


# ----------------------------------------------------------------------------------------------------- damage

DAMAGE: dict[str, tuple[Callable[[Tables], None], str, str]] = {
    "name that leads nowhere": (
        lambda t: t.change("name", b"stranger", bytes(16)),
        "name of 'stranger'",
        "which is missing",
    ),
    "name that leads to another": (
        lambda t: t.change("name", b"stranger", t.header("open").id),
        "name of 'stranger'",
        "leads to invocation 'open'",
    ),
    "name that is missing": (
        lambda t: t.change("name", b"open", None),
        "inv of",
        "its name 'open' doesn't lead to it",
    ),
    "key that is missing": (
        lambda t: t.change("key", b"agent\0k2", None),
        "inv of",
        "its key 'k2' doesn't lead to it",
    ),
    "key that leads to another": (
        lambda t: t.change("key", b"agent\0k9", t.header("open").id),
        "key of",
        "whose key is 'k2'",
    ),
    "open and ended": (
        lambda t: t.change("open", t.header("done").id, b""),
        "inv of",
        "it has ended, and is open",
    ),
    "neither open nor ended": (
        lambda t: t.change("open", t.header("open").id, None),
        "inv of",
        "it has not ended, and is not open",
    ),
    "open without an invocation": (lambda t: t.change("open", bytes(16), b""), "open of", "is missing"),
    "ended and not in gc": (
        lambda t: t.change("gc", t.keys("gc")[0], None),
        "inv of",
        "it has ended, and is not in gc",
    ),
    "gc of an open one": (
        lambda t: t.change("gc", layout.gc_key(5.0, t.header("open").id), b""),
        "gc of",
        "says that it ended at None",
    ),
    "gc without an invocation": (
        lambda t: t.change("gc", layout.gc_key(5.0, bytes(16)), b""),
        "gc of",
        "its invocation is missing",
    ),
    "record that is missing": (
        lambda t: t.change("journal", layout.journal_key(t.header("done").id, 3), None),
        "number 3",
        "later ones are there",
    ),
    "journal that is missing": (
        lambda t: t.change("journal", layout.journal_key(t.header("queued").id, 1), None),
        "inv of",
        "it has no journal",
    ),
    "journal without an invocation": (
        lambda t: t.change("journal", layout.journal_key(bytes(16), 1), b""),
        "number 1",
        "its invocation is missing",
    ),
    "snapshot without an invocation": (
        lambda t: t.change("snap", bytes(16), bytes(4)),
        "snap of",
        "its invocation is missing",
    ),
    "snapshot of a record to come": (
        lambda t: t.change("snap", t.header("open").id, layout.snapshot_body(99, b"")),
        "snap of",
        "the newest is 3",
    ),
    "messages that can't be read": (
        lambda t: t.change("session", b"agent\0session-done", b"\xc1"),
        "session of",
        "can't be read",
    ),
    "schema of another version": (
        lambda t: t.change("meta", b"schema", (7).to_bytes(8, "big")),
        "meta of 'schema'",
        "it is 7",
    ),
    "uuid that is missing": (lambda t: t.change("meta", b"uuid", None), "meta of 'uuid'", "missing"),
    "header that says another status": (
        lambda t: t.set_header("open", status="uncertain"),
        "inv of",
        "says status 'uncertain', its journal 'running'",
    ),
    "header that says another version": (
        lambda t: t.set_header("uncertain", version="3", status="running"),
        "inv of",
        "says status 'running'",
    ),
    "header of another id": (
        lambda t: t.set_header("queued", id=bytes(16)),
        "inv of",
        "it says that its id is",
    ),
    "record that is no record": (
        lambda t: t.change("journal", layout.journal_key(t.header("open").id, 2), b"\x01"),
        "inv of",
        "record 2 can't be folded",
    ),
    "facts out of order": (
        lambda t: t.set_record("open", 2, lambda r: msgspec.structs.replace(r, facts=r.facts[::-1])),
        "inv of",
        "record 2 can't be folded",
    ),
    "event number given out twice": (
        lambda t: t.set_record("open", 2, lambda r: msgspec.structs.replace(r, sequence=1)),
        "inv of",
        "event number 1 out again",
    ),
    "event number beyond the reserve": (
        lambda t: t.set_record("open", 2, lambda r: msgspec.structs.replace(r, reserved=0)),
        "inv of",
        "gives out more",
    ),
    "facts after the end": (
        lambda t: t.change(
            "journal",
            layout.journal_key(t.header("dropped").id, 3),
            f.encode_record(f.Record(9.0, 9, 9, [f.Recovered(0.0)])),
        ),
        "inv of",
        "comes after the end",
    ),
    "snapshot that isn't the fold": (
        lambda t: _other_state(t),
        "inv of",
        "is not what the journal folds to: state",
    ),
    "snapshot that can't be read": (
        lambda t: t.change("snap", t.header("long").id, t.get("snap", t.header("long").id)[:4] + b"\x90"),
        "inv of",
        "can't be read",
    ),
    "header that is no header": (
        lambda t: t.change("inv", t.header("queued").id, b"\x01"),
        "inv of",
        "it isn't a header",
    ),
    "key of the wrong length": (lambda t: t.change("inv", b"short", b""), "inv of", "its key isn't an id"),
    "gc key of the wrong length": (
        lambda t: t.change("gc", b"short", b""),
        "gc of",
        "isn't a time and an id",
    ),
    "journal key of the wrong length": (
        lambda t: t.change("journal", b"short", b""),
        "journal of",
        "isn't an id and a number",
    ),
}


def _other_state(tables: Tables) -> None:
    id = tables.header("long").id
    body = tables.get("snap", id)
    at = body.rindex(b"x" * 100)
    tables.change("snap", id, body[:at] + b"y" + body[at + 1 :])


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_found_and_its_record_named(data_dir, tables, what):
    damage, record, problem = DAMAGE[what]
    damage(tables)
    tables.close()
    found = problems(data_dir)
    assert any(record in each and problem in why for each, why in found), found
    assert len(found) <= 4, "one damage, and at most what follows from it"


@pytest.mark.parametrize("table", ["meta", "inv", "open", "name", "key", "journal", "snap", "session", "gc"])
def test_value_whose_checksum_is_wrong_is_named(data_dir, tables, table):
    key = tables.keys(table)[-1]
    body = tables.get(table, key)
    sealed = bytearray(layout.seal(key, body))
    sealed[-1] ^= 1
    tables.change(table, key, bytes(sealed), sealed=False)
    tables.close()
    found = problems(data_dir)
    assert (layout.describe(table, key), "its checksum is wrong") in found


# -------------------------------------------------------------------------------------------------- structure


def test_flipped_bytes_in_pages_are_found_or_harmless_and_never_a_traceback(data_dir):
    """Damage anywhere: the verification ends with a report, and one that finds nothing has lost nothing."""
    data = data_dir / "store" / "data.mdb"
    whole = data.read_bytes()
    chance = random.Random(3)
    outcomes = {True: 0, False: 0}
    for _ in range(6):
        content = bytearray(whole)
        for _ in range(3):
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        data.write_bytes(content)
        report = verify(data_dir)
        outcomes[report.found == 0] += 1
        if not report.found:
            assert report.counts["invocations"] == 7
    assert outcomes[False] > 1


def test_file_that_is_cut_off_is_found_before_it_can_end_anybody(data_dir):
    data = data_dir / "store" / "data.mdb"
    os.truncate(data, data.stat().st_size // 2)
    assert any("cut off" in problem for _, problem in problems(data_dir))
    os.truncate(data, 100)
    assert [record for record, _ in problems(data_dir)] == ["data.mdb"]
    data.unlink()
    assert [(each.record, each.problem) for each in verify(data_dir).problems] == [("data.mdb", "it is missing")]


def test_reader_that_is_killed_is_a_problem_of_what_it_read():
    collector = maintenance.Collector()
    collector.feed(b"")
    report = collector.ended(maintenance.how_ended(-11), verifies=True)
    assert report == m.StoreReport(
        {}, [m.StoreProblem("data.mdb", "whoever reads it comes to an end: signal SIGSEGV")], 1
    )


def test_pages_that_belong_to_nobody_are_counted_and_no_problem(data_dir, monkeypatch):
    leak = "3 page(s) are neither reachable nor in the freeDB -- a leak (first: page 7)"
    monkeypatch.setattr(lmdb.verify, "verify", lambda path, subdir: [leak])
    counts = verify_file(
        data_dir / "store" / "data.mdb",
        fold=check_stored,
        decode=decode,
        tell=lambda *each: pytest.fail(str(each)),
    )
    assert (counts["leaks"], counts["invocations"]) == (1, 7)
