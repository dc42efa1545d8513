"""Lock files: who holds one is the lock's owner, whatever the file says or says not.

The locks are POSIX record locks (``fcntl.lockf``): they are not inherited by a fork, so an orphan can't hold
its dead parent's, and the kernel can name the holder. Their trap is that closing *any* descriptor of the file
in the owning process gives the lock back: open each lock file once.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct

_FLOCK = "hhqqi"  # l_type, l_whence, l_start, l_len, l_pid


class FileLock:
    """A lock that this process holds until `release` or its death."""

    def __init__(self, fd: int, path: str) -> None:
        self.fd = fd
        self.path = path

    @property
    def identity(self) -> tuple[int, int]:
        """Device and inode of the lock file."""
        stat = os.fstat(self.fd)
        return stat.st_dev, stat.st_ino

    @property
    def is_lost(self) -> bool:
        """Whether its path leads to another file by now, or to none: then anybody may take a lock there.

        A path that can't be looked at, for want of permission or by a broken disk, says nothing.
        """
        try:
            return _identity(self.path) != self.identity
        except NotADirectoryError:
            return True
        except OSError:
            return False

    def release(self, *, unlink: bool = False) -> None:
        """Give it back; with ``unlink`` the file goes first, which `take` knows how to bear."""
        if self.fd < 0:
            return
        if unlink and _identity(self.path) == self.identity:
            os.unlink(self.path)
        os.close(self.fd)
        self.fd = -1


def take(path: str) -> FileLock | None:
    """Take the lock on ``path``, a file of mode 0600 if it must be made; None when another process has it.

    Raises:
        OSError: The file can't be opened or locked.
    """
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return None
            raise
        lock = FileLock(fd, path)
        if _identity(path) == lock.identity:
            return lock
        # Its holder unlinked the file between our open and our lock: what we hold has no name.
        lock.release()


def holder(path: str) -> int | None:
    """The pid that holds the lock on ``path``; None when it is free or missing, 0 when it can't be named.

    Must not be used by the process that holds it: closing the file would give the lock back.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        question = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = struct.unpack(_FLOCK, fcntl.fcntl(fd, fcntl.F_GETLK, question))
    finally:
        os.close(fd)
    if kind == fcntl.F_UNLCK:
        return None
    return int(pid) if pid > 0 else 0  # 0 or -1: it lives in another pid namespace


def _identity(path: str) -> tuple[int, int] | None:
    try:
        stat = os.lstat(path)
    except FileNotFoundError:
        return None
    return stat.st_dev, stat.st_ino
