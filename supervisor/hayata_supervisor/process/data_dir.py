"""Claiming a data directory for the life of the guard."""

from __future__ import annotations

import errno
import os

from hayata.errors import HayataError, error_for
from hayata_supervisor.process import locks

GUARD_LOCK = "guard.lock"
STORE_LOCK = "store.lock"


def claim(path: str) -> locks.FileLock:
    """Make the directory (mode 0700) if it is missing, and lock it.

    Nothing in it is changed unless the lock is won; the lock file's content never matters.

    Raises:
        HayataError: ``data_dir_in_use``: a living daemon has it. ``permission_denied``: it is another user's,
            or it can't be written. ``invalid_options``: it can't be a directory.
    """
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        owner = os.stat(path).st_uid
        if owner != os.geteuid() != 0:
            raise _denied(path, f"it belongs to user {owner}")
        lock_path = os.path.join(path, GUARD_LOCK)
        lock = locks.take(lock_path)
        if lock is None:
            raise _in_use(path, locks.holder(lock_path))
        if not os.access(path, os.W_OK | os.X_OK):
            lock.release()
            raise _denied(path, "it can't be written")
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise _denied(path, reason) from error
        if isinstance(error, FileExistsError | NotADirectoryError | IsADirectoryError):
            reason = "it, or a part of it, exists and is no directory"
        raise error_for(
            "invalid_options",
            f"{path} can't be the data directory: {reason}",
            details={"path": path, "errno": error.errno},
            hint="choose another with --data-dir or HAYATA_DATA_DIR",
        ) from error
    return lock


def _denied(path: str, reason: str) -> HayataError:
    return error_for(
        "permission_denied",
        f"{path} can't be the data directory: {reason}",
        details={"path": path, "uid": os.geteuid()},
        hint="choose another with --data-dir or HAYATA_DATA_DIR, or have its owner run the daemon",
    )


def _in_use(path: str, pid: int | None) -> HayataError:
    return error_for(
        "data_dir_in_use",
        f"another runtime{f' (process {pid})' if pid else ''} uses {path}",
        details={"path": path, "pid": pid},
        hint="connect to it, stop it with `hayata stop`, or choose another directory with --data-dir",
    )
