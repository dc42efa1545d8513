"""The data directory and what is in it, the socket, and the daemon that has them."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import hayata
from hayata import maintenance
from hayata import messages as m
from hayata.address import check_socket_path
from hayata.client.core import Lost
from hayata.client.transport import daemon_package
from hayata.errors import HayataError
from hayata.messages import Finding
from hayata_supervisor.doctor.findings import fail, ok, warn
from hayata_supervisor.process import locks
from hayata_supervisor.process.data_dir import GUARD_LOCK
from hayata_supervisor.store import directory, opening, structure

_ANSWER_S = 5.0
_LEAST_FREE_BYTES = 64 << 20
_ENOUGH_FREE_BYTES = 1 << 30
_LEAST_INODES = 100
_QUICK_BYTES = 64 << 20
"""A store of this size is verified in a second or two."""
_TMPFS, _OVERLAY = 0x01021994, 0x794C7630


def holder(data_dir: Path) -> int | None:
    """Pid of the guard that has the data directory; 0 if it can't be named, None without one."""
    try:
        return locks.holder(str(data_dir / GUARD_LOCK))
    except OSError:
        return None


def check_data_dir(data_dir: Path) -> Iterator[Finding]:
    """Whether a daemon could use it, or make it."""
    place = data_dir
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        yield fail("data dir", f"{place} is no directory", "name another with --data-dir")
        return
    if place == data_dir:
        directory.refuse_foreign(data_dir)
        yield from _owner(data_dir)
    else:
        yield ok("data dir", f"{data_dir} would be made")
    if not os.access(place, os.W_OK | os.X_OK):
        yield fail("data dir", f"{place} can't be written", "it must belong to the user that runs the daemon")
    yield _filesystem(place)
    yield _room(place)


def _owner(data_dir: Path) -> Iterator[Finding]:
    found = data_dir.stat()
    if found.st_uid != os.geteuid():
        yield fail("data dir", f"{data_dir} belongs to user {found.st_uid}", "ask as the user that runs the daemon")
    elif found.st_mode & 0o077:
        mode = stat.S_IMODE(found.st_mode)
        yield warn("data dir", f"{data_dir} has mode {mode:04o}: others can look into it", f"chmod 700 {data_dir}")
    else:
        yield ok("data dir", str(data_dir))


def _filesystem(place: Path) -> Finding:
    refused = directory.refused_filesystem(place)
    if refused is not None:
        message = f"{place} lies on {refused}, where neither memory maps nor locks can be relied upon"
        return fail("file system", message, "put the data directory on a local file system")
    kind = directory.filesystem_type(place)
    if kind == _TMPFS:
        message = f"{place} lies in memory: nothing in it survives a reboot"
        return warn("file system", message, "put the data directory on a disk")
    if kind == _OVERLAY:
        message = f"{place} lies in a container's own layer, which goes with the container"
        return warn("file system", message, "mount a volume for the data directory")
    return ok("file system", "local")


def _room(place: Path) -> Finding:
    found = os.statvfs(place)
    free = found.f_bavail * found.f_frsize
    text = f"{free / 1e9:.1f} GB free"
    if free < _LEAST_FREE_BYTES:
        return fail("disk", text, "make room: a full disk refuses every run")
    if found.f_files and found.f_favail < _LEAST_INODES:
        return fail("disk", f"{found.f_favail} inodes free", "remove files: there is no room for new ones")
    if free < _ENOUGH_FREE_BYTES:
        return warn("disk", text, "make room, or have old invocations removed: retention, hayata prune")
    return ok("disk", text)


def check_socket(path: str) -> Iterator[Finding]:
    """Whether a daemon could listen there, and whether only its user can connect."""
    check_socket_path(path)
    parent = os.path.dirname(path) or "."
    try:
        found = os.stat(parent)
    except FileNotFoundError:
        yield ok("socket", f"{path}; its directory would be made")
        return
    if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
        yield fail("socket", f"everybody may replace files in {parent}", f"chmod 700 {parent}, or another --socket")
        return
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        yield ok("socket", path)
        return
    if not stat.S_ISSOCK(found.st_mode):
        yield fail("socket", f"{path} exists and is no socket", "remove it, or choose another with --socket")
    elif found.st_uid != os.geteuid():
        yield fail("socket", f"{path} belongs to user {found.st_uid}", "a daemon serves its own user only")
    elif found.st_mode & 0o077:
        yield warn("socket", f"{path} has mode {stat.S_IMODE(found.st_mode):04o}", f"chmod 600 {path}")
    else:
        yield ok("socket", path)


def check_daemon(path: str, guard: int | None) -> Iterator[Finding]:
    """Whether one answers, and is of our version."""
    whose = f" of process {guard}" if guard else ""
    try:
        package = daemon_package(path, _ANSWER_S)
    except Lost as loss:
        if loss.refusal is not None and loss.refusal.code == "permission_denied":
            raise loss.refusal from None
        if guard is not None:
            yield fail(
                "daemon",
                f"a daemon{whose} has the data directory, and none answers at {path}",
                "name its socket with --socket, or see its log",
            )
        else:
            yield ok("daemon", "none runs")
        return
    except TimeoutError:
        yield fail("daemon", f"it does not answer within {_ANSWER_S:g} s{whose}", "see its log, and hayata tree")
        return
    if package != hayata.__version__:
        yield warn(
            "daemon",
            f"it is of version {package or 'unknown'}, and this is {hayata.__version__}",
            "restart it, or use the command that was installed with it",
        )
    else:
        yield ok("daemon", f"one of version {package} answers")


def _used_bytes(file: Path) -> int:
    """Check the head of a store's file.

    Raises:
        Unavailable: ``store_corrupt``.
    """
    try:
        return opening.check_file(file)
    except HayataError:
        # A crash may have come before the store lengthened it, and a daemon may be about to.
        if structure.lacks_only_free_pages(file):
            return file.stat().st_size
        raise


def check_store(data_dir: Path, guard: int | None) -> Iterator[Finding]:
    """Its file as far as that is quick: its head, and all of it if it is small and at rest."""
    file = data_dir / directory.STORE / directory.DATA
    if not file.exists():
        yield ok("store", "there is none yet")
        return
    used = _used_bytes(file)
    if file.stat().st_mtime > time.time() + 60:
        yield warn("clock", "the store was written in the future: the clock was set back", "set it, for example by NTP")
    if guard is not None:
        yield ok("store", f"{used / 1e6:.1f} MB; its head is whole. hayata verify reads all of it")
        return
    if used > _QUICK_BYTES:
        yield ok("store", f"{used / 1e6:.1f} MB; its head is whole. hayata verify --data-dir reads all of it")
        return
    # It takes no lock: a daemon that starts just now must not be refused for our sake.
    report = maintenance.run("verify", ["--private", "--data-dir", str(data_dir)])
    assert isinstance(report, m.StoreReport)
    if report.found and holder(data_dir) is not None:
        yield ok("store", "a daemon has begun to write it meanwhile. hayata verify reads all of it")
    elif report.found:
        first = report.problems[0]
        yield fail(
            "store",
            f"{report.found:,} problems, the first in {first.record}: {first.problem}",
            f"hayata verify --data-dir {data_dir} shows all; restore a backup",
        )
    else:
        yield ok("store", f"{used / 1e6:.1f} MB, all of it whole: {report.counts.get('invocations', 0):,} invocations")
