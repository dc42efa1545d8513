"""What is opened is ours, whole and writable, or the refusal says why, by its code."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import lmdb
import pytest

from hayata.errors import CallerError, HayataError, Unavailable
from hayata_supervisor.store import directory, layout, opening
from hayata_supervisor.store.interface import Commit
from hayata_supervisor.store.lmdb_store import open_store
from tests.support.store_child import batch, written
from tests.support.store_commits import first, header, last, new_id
from tests.support.store_rig import run


def refused(data_dir: Path, code: str) -> HayataError:
    with pytest.raises(HayataError) as caught:
        open_store(data_dir)
    assert caught.value.code == code
    assert caught.value.hint or code == "invalid_options"
    return caught.value


def filled(data_dir: Path, batches: int = 20) -> Path:
    store = open_store(data_dir, ballast_bytes=0)
    for number in range(1, batches + 1):
        store.write(batch(number))
    store.close()
    return data_dir / "store" / "data.mdb"


def raw(data_dir: Path) -> lmdb.Environment:
    """The environment as another program would open it."""
    return lmdb.open(str(data_dir / "store"), create=False, max_dbs=32, map_size=1 << 28)


# ---------------------------------------------------------------------------------------------- the directory


def test_missing_directory_is_made_for_its_owner_alone(tmp_path):
    data_dir = tmp_path / "a" / "b"
    store = open_store(data_dir)
    assert data_dir.stat().st_mode & 0o777 == 0o700
    assert (data_dir / "store").stat().st_mode & 0o777 == 0o700
    for path in (data_dir / "store" / "data.mdb", data_dir / "store.lock", data_dir / "ballast"):
        assert path.stat().st_mode & 0o077 == 0
    assert len(store.uuid) == 16
    store.close()
    again = open_store(data_dir)
    assert again.uuid == store.uuid
    again.close()


def test_directory_of_other_files_is_not_ours_and_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    error = refused(tmp_path, "invalid_options")
    assert isinstance(error, CallerError)
    assert "not a Hayata data directory" in error.message
    assert "thesis.tex" in error.message
    assert os.listdir(tmp_path) == ["thesis.tex"]


def test_directory_with_only_the_guards_things_is_taken(tmp_path):
    (tmp_path / "guard.lock").touch()
    open_store(tmp_path).close()


def test_environment_of_another_program_is_not_ours(tmp_path):
    (tmp_path / "store").mkdir()
    env = raw(tmp_path)
    with env.begin(write=True) as txn:
        txn.put(b"theirs", b"value")
    env.close()
    assert "another program's" in refused(tmp_path, "invalid_options").message


def test_file_in_the_place_of_the_directory_is_refused(tmp_path):
    (tmp_path / "file").touch()
    refused(tmp_path / "file", "invalid_options")
    refused(tmp_path / "file" / "below", "invalid_options")


def test_other_schema_is_refused_by_its_number(tmp_path):
    filled(tmp_path)
    env = raw(tmp_path)
    with env.begin(write=True) as txn:
        body = (9).to_bytes(8, "big")
        txn.put(b"schema", layout.seal(b"schema", body), db=env.open_db(b"meta", txn=txn, create=False))
    env.close()
    assert refused(tmp_path, "invalid_options").details["schema"] == 9


@pytest.mark.parametrize("magic", directory._REFUSED_FILESYSTEMS)
def test_network_and_user_space_file_systems_are_refused(tmp_path, monkeypatch, magic):
    monkeypatch.setattr(directory, "filesystem_type", lambda path: magic)
    error = refused(tmp_path, "unsupported_platform")
    assert error.details["filesystem"] in error.message
    assert os.listdir(tmp_path) == []


def test_file_system_type_is_the_kernels():
    assert directory.filesystem_type(Path("/proc")) == 0x9FA0


def test_directory_that_may_not_be_written_is_permission_denied(tmp_path):
    data_dir = tmp_path / "data"
    filled(data_dir)
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    if os.geteuid() != 0:
        data_dir.chmod(0o500)
        (data_dir / "store.lock").chmod(0o400)
        refused(data_dir, "permission_denied")
        refused(closed / "new", "permission_denied")
        data_dir.chmod(0o700)
        return
    # Root may write anything, but not on a file system that is mounted read-only.
    script = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'
    before = ["unshare", "-m", "sh", "-c", script, str(tmp_path)]
    if subprocess.run([*before, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("may not mount")
    assert run("try", data_dir, before=before) == ["error permission_denied"]
    assert run("try", tmp_path / "new", before=before) == ["error permission_denied"]


def test_leftovers_of_a_creation_cut_off_by_a_power_cut_are_made_anew_s6(tmp_path):
    """S6, etcd 16596: a crash while the store is created."""
    for index, content in enumerate((None, b"", bytes(8192), os.urandom(8192))):
        data_dir = tmp_path / str(index)
        new = data_dir / "store.new"
        new.mkdir(parents=True)
        if content is not None:
            (new / "data.mdb").write_bytes(content)
            (new / "lock.mdb").write_bytes(content)
        store = open_store(data_dir)
        assert store.write(batch(1)) == [None] * 4
        store.close()
        assert not new.exists()


def test_address_space_that_is_limited_gives_a_smaller_map_that_grows(tmp_path):
    script = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30));"
        "sys.argv[1:] = ['batches', sys.argv[1], '3'];"
        "from tests.support.store_child import main; main()"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        capture_output=True, text=True, check=True, env=environment,
    )  # fmt: skip
    assert done.stdout.split() == ["open", "0", "1", "2", "3"]


# ------------------------------------------------------------------------------------------------- truncation


def test_file_cut_off_anywhere_is_corrupt_before_lmdb_can_die_of_it(tmp_path):
    data = filled(tmp_path)
    size = data.stat().st_size
    whole = data.read_bytes()
    cuts = [0, 1, 100, 4096, 4097, 4200, 8191, 8192, size // 2, size - 4096, size - 1]
    refusals = []
    for cut in [*cuts, *random.Random(3).sample(range(size), 10)]:
        data.write_bytes(whole[:cut])
        try:
            store = open_store(tmp_path, ballast_bytes=0)
        except Unavailable as error:
            refusals.append((error.code, error.details["record"]))
        else:  # nothing was lost but free pages
            assert written(store) == 20
            store.close()
            assert data.stat().st_size >= size
    assert set(refusals) == {("store_corrupt", "data.mdb")}
    assert len(refusals) > 12


def test_file_that_lacks_nothing_but_free_pages_is_made_long_enough(tmp_path):
    data = filled(tmp_path)
    store = open_store(tmp_path)
    size = (store._env.info()["last_pgno"] + 1) * 4096
    with store._env.begin(write=True) as txn:
        for _ in range(2):
            txn.put(b"scratch", bytes(100_000))
            txn.delete(b"scratch")
    needed = (store._env.info()["last_pgno"] + 1) * 4096
    assert needed > size
    store.close()
    os.truncate(data, size)  # as LMDB leaves it, when a crash comes before the store lengthens it
    store = open_store(tmp_path)
    assert written(store) == 20
    store.close()
    assert data.stat().st_size >= needed


def test_file_that_lmdb_itself_left_short_is_made_long_enough(tmp_path):
    # Pages taken and given back in one transaction are counted and never written.
    data = filled(tmp_path)
    store = open_store(tmp_path)
    for turn in range(200):
        with store._env.begin(write=True) as txn:
            for size in (100_000, 10, 20_000):
                txn.put(b"scratch%d" % (turn % 3), bytes(size))
                txn.delete(b"scratch%d" % ((turn + 1) % 3))
            txn.delete(b"scratch%d" % (turn % 3))
        needed = (store._env.info()["last_pgno"] + 1) * 4096
        if data.stat().st_size < needed:
            break
    else:
        pytest.fail("this LMDB leaves no file short")
    store.write(batch(21))
    assert data.stat().st_size >= needed
    store.close()
    store = open_store(tmp_path)
    assert written(store) == 21
    store.close()


@pytest.mark.parametrize("name", ["data.mdb", ""])
def test_store_whose_file_is_missing_is_corrupt_and_not_made_anew(tmp_path, name):
    filled(tmp_path)
    path = tmp_path / "store" / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    if name == "":
        path.mkdir()
    refused(tmp_path, "store_corrupt")
    assert not (tmp_path / "store" / "data.mdb").exists()


def test_table_that_is_missing_is_corrupt(tmp_path):
    filled(tmp_path)
    env = raw(tmp_path)
    with env.begin(write=True) as txn:
        txn.drop(env.open_db(b"journal", txn=txn))
    env.close()
    assert "journal" in refused(tmp_path, "store_corrupt").message


# -------------------------------------------------------------------------------------------------- bit flips

ONE, TWO = new_id(1000), new_id(2000)
PLANTED = {
    "journal": (b"JOURNAL-BODY", f"journal of invocation {ONE.hex()}, number 2"),
    "snap": (b"SNAP-BODY", f"snap of invocation {ONE.hex()}"),
    "session": (b"SESSION-BODY", "session of 'agent\\x00SESSION'"),
    "inv": (b"VERSION-TEXT", f"inv of invocation {ONE.hex()}"),
}


def planted(data_dir: Path) -> Path:
    store = open_store(data_dir, ballast_bytes=0)
    one = header(ONE, "one", version="VERSION-TEXT", session="SESSION", key="k")
    store.write(
        [
            Commit(ONE, 1, b"1", header=one, open=True, snapshot=b"SNAP-BODY"),
            Commit(ONE, 2, b"JOURNAL-BODY", memory=("SESSION", b"SESSION-BODY")),
            first(TWO, "two"),
        ]
    )
    store.close()
    return data_dir / "store" / "data.mdb"


def flip(data: Path, needle: bytes, bit: int) -> None:
    content = bytearray(data.read_bytes())
    at = content.find(needle)
    assert at >= 0
    while at >= 0:  # old copies of a page hold it too
        content[at + bit // 8] ^= 1 << bit % 8
        at = content.find(needle, at + 1)
    data.write_bytes(content)


@pytest.mark.parametrize("table", PLANTED)
def test_flipped_bit_in_a_value_is_corrupt_and_names_the_record(tmp_path, table):
    needle, record = PLANTED[table]
    data = planted(tmp_path / "0")
    for bit in random.Random(5).sample(range(len(needle) * 8), 6):
        copy = tmp_path / str(bit + 1)
        shutil.copytree(tmp_path / "0", copy)
        flip(copy / "store" / data.name, needle, bit)
        store = open_store(copy, ballast_bytes=0)
        for read in (lambda store=store: list(store.load_open()), lambda store=store: store.load(ONE)):
            with pytest.raises(Unavailable) as caught:
                read()
            assert caught.value.code == "store_corrupt"
            assert caught.value.details["record"] == record
            assert caught.value.details["table"] == table
            assert record in caught.value.message
        assert store.load(TWO).header.name == "two"
        store.close()


@pytest.mark.parametrize(
    ("table", "key", "record"), [("name", b"one", "name of 'one'"), ("key", b"agent\0k", "key of")]
)
def test_flipped_bit_in_a_name_or_key_is_corrupt_for_reader_and_writer(tmp_path, table, key, record):
    planted(tmp_path)
    env = raw(tmp_path)
    with env.begin(write=True) as txn:
        db = env.open_db(table.encode(), txn=txn, create=False)
        value = bytearray(txn.get(key, db=db))
        value[7] ^= 4
        txn.put(key, bytes(value), db=db)
    env.close()
    store = open_store(tmp_path)
    three = new_id(3000)
    name = "one" if table == "name" else "three"
    for call in (
        lambda: store.find("one") if table == "name" else store.find_key("agent", "k"),
        lambda: store.write([first(three, name, key="k"), Commit(TWO, 2, b"")]),
    ):
        with pytest.raises(Unavailable, match=record) as caught:
            call()
        assert caught.value.code == "store_corrupt"
    assert store.header(three) is None
    assert store.write([Commit(TWO, 2, b"")]) == [None]
    store.close()


def test_record_under_the_key_of_another_is_corrupt(tmp_path):
    planted(tmp_path)
    env = raw(tmp_path)
    with env.begin(write=True) as txn:
        db = env.open_db(b"journal", txn=txn, create=False)
        txn.put(layout.journal_key(TWO, 1), txn.get(layout.journal_key(ONE, 2), db=db), db=db)
    env.close()
    store = open_store(tmp_path)
    with pytest.raises(Unavailable, match="its checksum is wrong"):
        store.load(TWO)
    store.close()


def test_record_that_is_missing_is_corrupt(tmp_path):
    planted(tmp_path)
    env = raw(tmp_path)
    with env.begin(write=True) as txn:
        db = env.open_db(b"journal", txn=txn, create=False)
        value = txn.pop(layout.journal_key(ONE, 2), db=db)
        txn.put(layout.journal_key(ONE, 3), value, db=db)
    env.close()
    store = open_store(tmp_path)
    with pytest.raises(Unavailable, match=r"number 2: it is missing") as caught:
        store.load(ONE)
    assert caught.value.code == "store_corrupt"
    store.close()


def test_flipped_bit_in_the_store_identity_is_corrupt(tmp_path):
    store = open_store(tmp_path)
    identity = store.uuid
    store.close()
    flip(tmp_path / "store" / "data.mdb", identity, 17)
    assert refused(tmp_path, "store_corrupt").details["record"] == "meta of 'uuid'"


def test_flipped_bytes_anywhere_are_never_taken_for_good(tmp_path):
    """Any damage gives the truth or `store_corrupt`, never something else."""
    data = filled(tmp_path, batches=6)
    whole = data.read_bytes()
    chance = random.Random(11)
    outcomes: dict[str, int] = {}
    for _ in range(120):
        content = bytearray(whole)
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        data.write_bytes(content)
        try:
            store = open_store(tmp_path, ballast_bytes=0)
            try:
                assert written(store) in (5, 6)  # 5: the flip made the newest meta page the older one
            finally:
                store.close()
            outcome = "whole"
        except HayataError as error:
            outcome = error.code
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
    assert set(outcomes) == {"whole", "store_corrupt"}


# -------------------------------------------------------------------------------------------------- retention


def test_ended_invocation_is_in_the_order_of_retention(tmp_path):
    store = open_store(tmp_path)
    store.write([first(ONE, "one"), first(TWO, "two")])
    store.write([last(ONE, "one", 2, ended_at=2000.5), last(TWO, "two", 2, ended_at=1000.25)])
    store.close()
    env = raw(tmp_path)
    with env.begin() as txn:
        keys = [bytes(key) for key, _ in txn.cursor(env.open_db(b"gc", txn=txn, create=False))]
    env.close()
    assert keys == [layout.gc_key(1000.25, TWO), layout.gc_key(2000.5, ONE)]


def test_open_flags_are_those_that_keep_acknowledged_commits(tmp_path):
    store = open_store(tmp_path)
    flags = store._env.flags()
    assert flags["sync"]
    assert flags["metasync"]
    assert not flags["writemap"]
    assert not flags["map_async"]
    assert store._env.lib_version()[:2] == (0, 9)
    assert store._env.max_readers() == 64
    assert store._env.info()["map_size"] == opening.DEFAULT_MAP_BYTES
    store.close()
