"""S5: a full disk is an error that ends when there is room, and nothing that was acknowledged is lost."""

from __future__ import annotations

import resource
import subprocess
from pathlib import Path

import pytest
from lmdb.verify import verify

from hayata.errors import Unavailable
from hayata_supervisor.store.interface import Commit
from hayata_supervisor.store.lmdb_store import open_store
from tests.support.store_commits import first, new_id
from tests.support.store_rig import run

MOUNT = 'mount -t tmpfs -o size=6m tmpfs "$0" && head -c 1000000 /dev/zero > "$0/filler" && exec "$@"'


def test_limit_on_file_size_is_store_full_and_ends_with_it_s5(tmp_path):
    """S5, py-lmdb 161: a full disk."""
    said = run("full", tmp_path, 3 << 19)
    assert said[:3] == ["error store_full from Error"] * 3  # a short write, which LMDB calls EIO
    assert said[3] == "error store_full"
    assert said[4].startswith("went on ")
    assert int(said[5].split()[1]) > 300
    assert verify(str(tmp_path / "store")) == []


def test_full_disk_is_store_full_and_ends_when_there_is_room_s5(tmp_path):
    """S5, py-lmdb 161: a full disk."""
    before = ["unshare", "-m", "sh", "-c", MOUNT, str(tmp_path)]
    if subprocess.run([*before, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("may not mount a small file system")
    said = run("full", tmp_path / "data", tmp_path / "filler", before=before)
    assert [line.split()[:2] for line in said[:4]] == [["error", "store_full"]] * 4
    # The ballast is a mebibyte: what was accepted went on for a good while, and no new invocation ate of it.
    assert int(said[4].split()[2]) > 300
    assert int(said[5].split()[1]) > 300


def test_batch_refused_for_want_of_room_is_stored_when_it_is_written_again(tmp_path):
    store = open_store(tmp_path, ballast_bytes=1 << 16)
    one, two = new_id(1), new_id(2)
    store.write([first(one, "one")])
    with _file_size_limit(tmp_path):
        for _ in range(2):
            with pytest.raises(Unavailable) as caught:
                store.write([first(two, "two"), Commit(one, 2, bytes(1 << 20))])
            assert caught.value.code == "store_full"
        assert (tmp_path / "ballast").exists()
        with pytest.raises(Unavailable):
            store.write([Commit(one, 2, bytes(1 << 20))])
        assert not (tmp_path / "ballast").exists()
        assert store.header(two) is None
        assert list(store.records(one, 1)) == [(1, b"first")]
    assert store.write([first(two, "two"), Commit(one, 2, bytes(1 << 20))]) == [None, None]
    store.close()


class _file_size_limit:
    """No file of this process may grow beyond the store's present size, roughly."""

    def __init__(self, data_dir: Path) -> None:
        self._bytes = (data_dir / "store" / "data.mdb").stat().st_size + 65536

    def __enter__(self) -> None:
        self._before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self._bytes, self._before[1]))

    def __exit__(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self._before)
