"""Claiming a data directory, in a process of another user where that matters."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support.guard_rig import ROOT

_CLAIM = """
import os, sys
sys.path[:0] = sys.argv[2:]
from hayata.errors import HayataError
from hayata_supervisor.process import data_dir
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(54321)
    os.setuid(54321)
try:
    data_dir.claim(sys.argv[1])
except HayataError as error:
    print(error.code)
else:
    print("claimed")
"""


def _claim(path):
    done = subprocess.run(
        [sys.executable, "-c", _CLAIM, str(path), str(ROOT), str(ROOT / "supervisor")],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout.split()[0]


@pytest.fixture
def open_path():
    """A directory that other users can reach, which pytest's own are not."""
    with tempfile.TemporaryDirectory(prefix="hg-", dir="/tmp") as path:
        os.chmod(path, 0o755)
        yield Path(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user's directory")
def test_other_users_directory_is_refused_even_where_it_can_be_written(open_path):
    directory = open_path / "theirs"
    directory.mkdir()
    os.chown(directory, 12345, 12345)
    directory.chmod(0o777)
    assert _claim(directory) == "permission_denied"
    assert list(directory.iterdir()) == []


def test_directory_without_write_permission_is_refused(open_path):
    directory = open_path / "ours"
    directory.mkdir()
    if os.geteuid() == 0:
        os.chown(directory, 54321, 54321)
    (directory / "guard.lock").touch()
    (directory / "guard.lock").chmod(0o666)
    directory.chmod(0o555)
    try:
        assert _claim(directory) == "permission_denied"
    finally:
        directory.chmod(0o755)


def test_missing_parents_are_made(open_path):
    if os.geteuid() == 0:
        os.chown(open_path, 54321, 54321)
    assert _claim(open_path / "a" / "b" / "c") == "claimed"
    assert (open_path / "a" / "b" / "c").stat().st_mode & 0o777 == 0o700
