"""The data directory: whose it is, on what file system it lies, and who holds it. Knows nothing of LMDB.

| in it, mode 0700 | what it is |
|---|---|
| ``guard.lock`` | the guard's |
| ``store.lock`` | the supervisor's: an fcntl lock for as long as the store is open |
| ``store/`` | the LMDB environment: ``data.mdb``, ``lock.mdb`` |
| ``store.new/`` | one in the making; when a crash leaves it, the next start makes it anew |
| ``store.compact/`` | a compacted copy in the making; when a crash leaves it, the next one makes it anew |
| ``ballast`` | blocks to give back when the disk is full |
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
from pathlib import Path
from typing import Final

from hayata.errors import CallerError, HayataError, Unavailable

LOCK: Final = "store.lock"
STORE: Final = "store"
STORE_NEW: Final = "store.new"
BALLAST: Final = "ballast"
PROBE: Final = "store.probe"
COMPACTED: Final = "store.compact"
DATA: Final = "data.mdb"

_OURS = frozenset(
    {
        LOCK,
        STORE,
        STORE_NEW,
        COMPACTED,
        BALLAST,
        PROBE,
        "guard.lock",
        "hayata.toml",
        "hayata.sock.lock",
        "starts",
    }
)

FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Error numbers that mean: no room. EFBIG is a limit on the size of files (RLIMIT_FSIZE)."""

PASSING: Final = frozenset({errno.EIO, errno.EAGAIN, errno.EINTR, errno.ENOMEM, errno.EMFILE, errno.ENFILE})
"""Error numbers that say nothing of the directory, and that may not come again."""

_PROBE_BYTES = 16 << 20

# Maps of these file systems aren't coherent with writes, or their locks and syncs can't be relied upon.
_REFUSED_FILESYSTEMS = {
    0x6969: "NFS",
    0xFF534D42: "CIFS",
    0xFE534D42: "SMB2",
    0x517B: "SMB",
    0x01021997: "9p",
    0x65735546: "FUSE",
    0x00C36400: "Ceph",
    0x5346414F: "AFS",
    0x73757245: "Coda",
    0x0BD00BD0: "Lustre",
    0x786F4256: "vboxsf",
}

_libc = ctypes.CDLL(None, use_errno=True)

# (device, inode) of the lock files that are held, and the pid that holds them. fcntl locks belong to a
# process: a second lock of the same file would be granted, and closing it would drop the first.
_held: dict[tuple[int, int], int] = {}


class StoreLock:
    """Exclusive use of a data directory, until `release` or the process's death.

    An fcntl lock, not flock: it isn't inherited by fork, so that no orphan can keep it.
    """

    def __init__(self, data_dir: Path) -> None:
        """Take the lock.

        Raises:
            Unavailable: ``data_dir_in_use``, or ``permission_denied``.
        """
        path = data_dir / LOCK
        # Before the file is opened: closing a second descriptor would drop the lock that is held already.
        if _is_held(path):
            raise _in_use(data_dir)
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as problem:
            raise refusal(data_dir, problem) from problem
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as problem:
            os.close(self._fd)
            if problem.errno in (errno.EACCES, errno.EAGAIN):
                raise _in_use(data_dir) from None
            raise refusal(data_dir, problem) from problem
        self._identity = _identity(os.fstat(self._fd))
        self._pid = os.getpid()
        _held[self._identity] = self._pid

    def release(self) -> None:
        """Give the directory back. Twice does no harm; a forked child holds nothing to give back."""
        if self._fd >= 0 and self._pid == os.getpid():
            _held.pop(self._identity, None)
            os.close(self._fd)
        self._fd = -1


class Ballast:
    """A file of real blocks, to be given back when the disk is full."""

    def __init__(self, data_dir: Path, size_bytes: int) -> None:
        """Put it in place, if it is wanted and there is room."""
        self._path = data_dir / BALLAST
        self._there = size_bytes > 0 and _allocate(self._path, 0, size_bytes)

    def drop(self) -> bool:
        """Remove it; False when it isn't there."""
        if not self._there:
            return False
        self._path.unlink(missing_ok=True)
        self._there = False
        return True


def prepare(data_dir: Path) -> Path:
    """Make the data directory if it is missing, and see that it is ours to use.

    Returns:
        Its absolute path.

    Raises:
        CallerError: ``invalid_options``: other files are in it, and no store.
        Unavailable: ``permission_denied``; ``unsupported_platform`` for network and user-space file systems.
    """
    data_dir = Path(os.path.abspath(data_dir))
    try:
        _make(data_dir)
        refuse_foreign(data_dir)
        kind = refused_filesystem(data_dir)
    except OSError as problem:
        raise refusal(data_dir, problem) from problem
    if kind is not None:
        raise Unavailable(
            "unsupported_platform",
            f"{data_dir} lies on {kind}, where neither memory maps nor locks can be relied upon",
            details={"data_dir": str(data_dir), "filesystem": kind},
            hint="put the data directory on a local file system",
        )
    return data_dir


def refused_filesystem(path: Path) -> str | None:
    """Name of the file system that ``path`` lies on, if a store can't be there.

    Raises:
        OSError: There is no such path.
    """
    return _REFUSED_FILESYSTEMS.get(filesystem_type(path))


def filesystem_type(path: Path) -> int:
    """The magic number of the file system that ``path`` lies on, from statfs(2)."""
    buffer = ctypes.create_string_buffer(256)
    if _libc.statfs(os.fsencode(path), buffer) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(path))
    return ctypes.c_long.from_buffer(buffer).value & 0xFFFFFFFF


def has_room(data_dir: Path, offset: int) -> bool:
    """Try whether 16 MiB can be had at ``offset`` of a file: statvfs knows nothing of quotas and limits."""
    path = data_dir / PROBE
    room = _allocate(path, offset, _PROBE_BYTES)
    path.unlink(missing_ok=True)
    return room


def lengthen(path: Path, size_bytes: int) -> None:
    """Make a file that long, with a hole at its end, durably."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.ftruncate(fd, size_bytes)
        os.fsync(fd)
    finally:
        os.close(fd)


def refusal(data_dir: Path, problem: OSError) -> HayataError:
    """The typed error for what the system said about the data directory."""
    details = {"data_dir": str(data_dir), "errno": problem.errno or 0}
    if problem.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return Unavailable(
            "permission_denied",
            f"{data_dir} can't be written: {problem.strerror}",
            details=details,
            hint="the data directory must belong to the user that runs Hayata, and be writable",
        )
    if problem.errno in FULL:
        return Unavailable("store_full", f"no room in {data_dir}", details=details, hint="make room on the disk")
    if problem.errno in PASSING:
        text = f"{data_dir} can't be used now: {problem.strerror}"
        return Unavailable("daemon_unavailable", text, details=details, hint="it is tried again")
    return CallerError(
        "invalid_options",
        f"{data_dir} can't be the data directory: {problem.strerror or problem}",
        details=details,
    )


def fsync_directory(path: Path) -> None:
    """Make what was created, renamed or removed in ``path`` durable."""
    fsync_path(path, os.O_DIRECTORY)


def fsync_path(path: Path, flags: int = 0) -> None:
    """Make a file durable."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _make(data_dir: Path) -> None:
    missing: list[Path] = []
    while not data_dir.is_dir():
        missing.append(data_dir)
        data_dir = data_dir.parent
    for path in reversed(missing):
        path.mkdir(mode=0o700, exist_ok=True)
        fsync_directory(path.parent)


def refuse_foreign(data_dir: Path) -> None:
    """Refuse a directory that other files are in, when no store says that it is ours.

    Raises:
        CallerError: ``invalid_options``.
    """
    if (data_dir / STORE / DATA).is_file():
        return
    names = set(os.listdir(data_dir))
    foreign = sorted(name for name in names - _OURS if not _is_socket(data_dir / name))
    if STORE in names and LOCK not in names:
        foreign.append(STORE)
    if foreign:
        raise CallerError(
            "invalid_options",
            f"{data_dir} is not a Hayata data directory: it holds {', '.join(foreign[:3])}"
            + (" and more" if len(foreign) > 3 else ""),
            details={"data_dir": str(data_dir), "found": foreign[:20]},
            hint="name a directory that is empty, missing, or a Hayata data directory",
        )


def _is_socket(path: Path) -> bool:
    try:
        return stat.S_ISSOCK(path.lstat().st_mode)
    except FileNotFoundError:
        return True  # gone meanwhile, so no objection to it


def _allocate(path: Path, offset: int, size_bytes: int) -> bool:
    """Allocate blocks in a file; without room for them the file is removed, and the answer is False."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, offset, size_bytes)
        finally:
            os.close(fd)
    except OSError:
        path.unlink(missing_ok=True)
        return False
    return True


def _is_held(path: Path) -> bool:
    try:
        return _held.get(_identity(path.stat())) == os.getpid()
    except OSError:
        return False  # what is wrong with it will be said when it is opened


def _in_use(data_dir: Path) -> Unavailable:
    return Unavailable(
        "data_dir_in_use",
        f"another supervisor has the data directory {data_dir}",
        details={"data_dir": str(data_dir)},
        hint="stop it first, or name another directory",
    )


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
