"""One process at a time has the store, and it notices when that is no longer so."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess

import pytest

from hayata.errors import Unavailable
from hayata_supervisor.store.interface import StoreRemoved
from hayata_supervisor.store.lmdb_store import open_store
from tests.support.store_child import batch, written
from tests.support.store_rig import child, run


def test_second_process_is_refused_and_the_first_still_serves(tmp_path):
    with child("hold", tmp_path) as holder:
        assert holder.hear() == "open"
        for _ in range(3):
            with pytest.raises(Unavailable) as caught:
                open_store(tmp_path)
            assert caught.value.code == "data_dir_in_use"
            assert str(tmp_path) in caught.value.message
        assert run("try", tmp_path) == ["error data_dir_in_use"]
        holder.ask()
        assert holder.hear() == "stored 1"


def test_killed_holder_leaves_the_store_free_at_once(tmp_path):
    with child("hold", tmp_path) as holder:
        assert holder.hear() == "open"
        holder.ask()
        assert holder.hear() == "stored 1"
        holder.process.send_signal(signal.SIGKILL)
        holder.process.wait()
        store = open_store(tmp_path)
        assert written(store) == 1
        store.close()


def test_second_opening_in_the_same_process_is_refused_and_the_lock_is_kept(tmp_path):
    store = open_store(tmp_path)
    for _ in range(2):
        with pytest.raises(Unavailable) as caught:
            open_store(tmp_path)
        assert caught.value.code == "data_dir_in_use"
    assert run("try", tmp_path) == ["error data_dir_in_use"]
    store.close()
    assert run("try", tmp_path) == ["open"]
    open_store(tmp_path).close()


def test_failed_opening_gives_the_lock_back(tmp_path):
    open_store(tmp_path).close()
    (tmp_path / "store" / "data.mdb").rename(tmp_path / "store" / "elsewhere")
    with pytest.raises(Unavailable):
        open_store(tmp_path)
    (tmp_path / "store" / "elsewhere").rename(tmp_path / "store" / "data.mdb")
    open_store(tmp_path).close()


def test_store_opened_behind_its_back_is_broken_at_the_next_commit(tmp_path):
    with child("hold", tmp_path) as holder:
        assert holder.hear() == "open"
        holder.ask()
        assert holder.hear() == "stored 1"
        (tmp_path / "store.lock").unlink()  # so that nothing but the epoch is left to tell
        store = open_store(tmp_path)
        store.write(batch(2))
        holder.ask()
        assert holder.hear().startswith("broken another process")
        assert written(store) == 2
        store.close()


def test_store_removed_while_in_use_is_broken_at_the_next_commit(tmp_path):
    store = open_store(tmp_path / "data")
    store.write(batch(1))
    shutil.rmtree(tmp_path / "data")
    with pytest.raises(StoreRemoved, match="removed"):
        store.write(batch(2))
    store.close()


def test_descriptors_of_the_store_do_not_reach_a_child_program(tmp_path):
    store = open_store(tmp_path)
    ours = _descriptors_into(tmp_path)
    assert len(ours) >= 4  # the lock, LMDB's lock, its two of the data file
    listed = subprocess.run(["ls", "-l", "/proc/self/fd"], close_fds=False, capture_output=True, text=True, check=True)
    assert str(tmp_path) not in listed.stdout
    assert not [fd for fd in ours if os.get_inheritable(fd)]
    store.close()
    assert _descriptors_into(tmp_path) == []


def _descriptors_into(directory) -> list[int]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith(str(directory)):
                found.append(int(name))
        except FileNotFoundError:
            continue  # the descriptor of the listing itself
    return found


def test_fork_after_a_read_leaves_the_parent_whole_and_the_child_refused_s1(tmp_path):
    """S1, py-lmdb 346, 363: a fork after a read."""
    assert run("fork", tmp_path) == ["refused"] * 6 + ["parent 2"]
