"""When a lock is lost: its path leads somewhere else by now."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hayata_supervisor.process import locks


def leave(directory: Path) -> None:
    pass


def unlink(directory: Path) -> None:
    (directory / "lock").unlink()


def replace(directory: Path) -> None:
    (directory / "other").touch()
    (directory / "other").rename(directory / "lock")


def remove(directory: Path) -> None:
    shutil.rmtree(directory)


def move(directory: Path) -> None:
    directory.rename(f"{directory}-moved")


def cover(directory: Path) -> None:
    shutil.rmtree(directory)
    directory.touch()


@pytest.mark.parametrize(
    ("change", "lost"), [(leave, False), (unlink, True), (replace, True), (remove, True), (move, True), (cover, True)]
)
def test_lock_is_lost_when_its_path_leads_elsewhere(tmp_path: Path, change: Callable[[Path], None], lost: bool):
    directory = tmp_path / "d"
    directory.mkdir()
    lock = locks.take(str(directory / "lock"))
    assert lock is not None
    change(directory)
    assert lock.is_lost == lost
    lock.release()


def test_lock_whose_path_can_not_be_looked_at_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    lock = locks.take(str(tmp_path / "lock"))
    assert lock is not None

    def refuse(path: str) -> os.stat_result:
        raise PermissionError(path)

    monkeypatch.setattr(os, "lstat", refuse)
    assert not lock.is_lost
    monkeypatch.undo()
    lock.release()
