"""A data directory that goes away under a running daemon: noticed, said aloud, and never replaced by an empty one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hayata import HayataError
from hayata_supervisor.store.lmdb_store import open_store
from tests.support.crash_site import DEADLINE_S, Daemon, Site

EXIT_CORRUPT = 65


def remove_all(daemon: Daemon) -> None:
    shutil.rmtree(daemon.data_dir)


def move(daemon: Daemon) -> None:
    Path(daemon.data_dir).rename(f"{daemon.data_dir}-moved")


def replace(daemon: Daemon) -> None:
    shutil.rmtree(daemon.data_dir)
    Path(daemon.data_dir).mkdir()
    (Path(daemon.data_dir) / "guard.lock").touch()


def remove_store_and_run(daemon: Daemon) -> None:
    shutil.rmtree(Path(daemon.data_dir) / "store")
    with pytest.raises(HayataError):
        daemon.client.run("short", {})


def remove_store_and_kill(daemon: Daemon) -> None:
    shutil.rmtree(Path(daemon.data_dir) / "store")
    daemon.kill_supervisor()


def remove_all_and_kill(daemon: Daemon) -> None:
    shutil.rmtree(daemon.data_dir)
    daemon.kill_supervisor()


@pytest.mark.parametrize(
    "lose", [remove_all, move, replace, remove_store_and_run, remove_store_and_kill, remove_all_and_kill]
)
def test_daemon_whose_store_is_removed_says_so_and_ends(site: Site, lose: Callable[[Daemon], None]):
    daemon = site.daemon(agents="short").start()
    daemon.client.call("short", {}, invocation_id="kept", timeout=DEADLINE_S)
    lose(daemon)
    assert daemon.guard.wait(DEADLINE_S) == EXIT_CORRUPT
    log = site.log.read_text()
    assert "store_corrupt" in log
    assert "removed" in log
    assert not (Path(daemon.data_dir) / "store").exists()
    if lose is move:
        store = open_store(Path(f"{daemon.data_dir}-moved"))
        assert store.find("kept")
        store.close()
