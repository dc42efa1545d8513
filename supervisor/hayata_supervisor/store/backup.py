"""Copies of a store: a backup, a snapshot to verify, and the compacted file in place of the old one.

The store that is copied may be in use by another process: a read transaction holds the pages that it sees,
and until it ends the file of the running store grows where it would have used old pages again. So copying is
one sequential read, and whatever takes longer works on the copy.

A backup is a data directory: a daemon started on it goes on from there. It has no start notes, so that
what was marked as running in it is uncertain, as after a power cut.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Final

import lmdb
import msgspec

from hayata.errors import CallerError, HayataError, Unavailable
from hayata_supervisor import failpoints
from hayata_supervisor.store import directory, layout, opening
from hayata_supervisor.store.directory import DATA, STORE

NOTE: Final = "backup.json"
"""What a backup says of itself."""

_PUT_AT_ONCE = 200


class Note(msgspec.Struct):
    """See `NOTE`. ``made_at``: wall seconds; ``counts``: what the verification has counted."""

    request_id: str
    made_at: float
    source: str
    counts: dict[str, int]


def back_up(
    data_dir: Path,
    target: Path,
    *,
    shared: bool,
    request_id: str,
    now_s: float,
    verify: Callable[[Path], dict[str, int]],
) -> Note:
    """Copy the store of ``data_dir`` to ``target``, which must not exist, or be an empty directory.

    Nothing is at ``target`` until the copy is complete, verified and on the disk.

    Args:
        data_dir: The data directory.
        target: The backup's.
        shared: Another process has the store open.
        request_id: Names the request: a backup that it has made already is given again.
        now_s: Wall time.
        verify: Verifies a data directory; returns counts, or raises.

    Raises:
        CallerError: ``invalid_options``: there is something at ``target``, or no place for it.
        Unavailable: ``store_corrupt``, ``store_full``, ``permission_denied``.
    """
    made = _made_before(target, request_id)
    if made is not None:
        return made
    try:
        with _partial(target) as partial:
            store = partial / STORE
            store.mkdir(mode=0o700)
            source = data_dir / STORE / DATA
            env = opening.open_to_read(source, shared=shared)
            try:
                _copy(env, store / DATA)
            finally:
                env.close()
            directory.fsync_path(store / DATA)
            note = Note(request_id, now_s, str(data_dir), verify(partial))
            _write(partial / NOTE, msgspec.json.encode(note))
            for path in (partial / NOTE, store, partial):
                directory.fsync_path(path)
            failpoints.hit("maintenance.before_rename")
            partial.rename(target)
            failpoints.hit("maintenance.after_rename")
            directory.fsync_directory(target.parent)
    except OSError as problem:
        raise _refusal(target, problem) from problem
    except lmdb.Error as problem:
        raise _uncopied(target, problem) from problem
    return note


def _made_before(target: Path, request_id: str) -> Note | None:
    """The backup that an earlier try of this request has made; its answer was lost.

    Raises:
        CallerError: Something else is there, or there is no place.
    """
    if not target.parent.is_dir():
        raise CallerError(
            "invalid_options",
            f"there is no directory {target.parent} to put a backup in",
            details={"directory": str(target)},
            hint="make it first",
        )
    try:
        note = msgspec.json.decode((target / NOTE).read_bytes(), type=Note)
    except (OSError, msgspec.DecodeError):
        note = None
    if note is not None and note.request_id == request_id:
        return note
    if os.path.lexists(target) and not (target.is_dir() and not any(target.iterdir())):
        raise CallerError(
            "invalid_options",
            f"{target} exists already, and is no empty directory",
            details={"directory": str(target)},
            hint="name a directory that does not exist",
        )
    return None


@contextmanager
def _partial(target: Path) -> Iterator[Path]:
    """A directory beside ``target`` to make the copy in; what is left there at the end is removed.

    It is locked while it is in use, so that the next try knows one that a kill has left behind.
    """
    path = target.parent / f".{target.name}.hayata-partial"
    path.mkdir(mode=0o700, exist_ok=True)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CallerError(
                "invalid_options",
                f"another backup to {target} is under way",
                details={"directory": str(target)},
            ) from None
        _empty(path)
        try:
            yield path
        finally:
            if path.exists() and os.path.samestat(path.stat(), os.fstat(fd)):
                shutil.rmtree(path)
    finally:
        os.close(fd)


def _empty(path: Path) -> None:
    for entry in path.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


@contextmanager
def snapshot(data_dir: Path) -> Iterator[Path]:
    """Copy the data file of a store that another process has open, page by page as it is.

    Yields:
        The copy's path. It has no name in any directory, so that a kill leaves nothing behind.

    Raises:
        Unavailable: ``store_full``: no room for the copy. ``store_corrupt``, ``permission_denied``.
    """
    with ExitStack() as opened:
        try:
            file = opened.enter_context(tempfile.TemporaryFile(dir=data_dir))
            _copy_pages(data_dir, file)
        except OSError as problem:
            raise directory.refusal(data_dir, problem) from problem
        except lmdb.Error as problem:
            raise _uncopied(data_dir, problem) from problem
        yield Path(f"/proc/self/fd/{file.fileno()}")


def _copy_pages(data_dir: Path, file: IO[bytes]) -> None:
    env = opening.open_to_read(data_dir / STORE / DATA, shared=True)
    try:
        env.copyfd(file.fileno(), compact=False)
    finally:
        env.close()


def compact(data_dir: Path, verify: Callable[[Path], object]) -> tuple[int, int]:
    """Put a file without free pages in the place of the data file. Nobody may have the store open.

    The new file is complete, verified and on the disk before one rename replaces the old one.

    Args:
        data_dir: The data directory, whose locks are held.
        verify: Verifies a data directory, or raises.

    Returns:
        Bytes before and after.

    Raises:
        Unavailable: ``store_full``, ``store_corrupt``, ``permission_denied``. The store is as it was.
    """
    data, new = data_dir / STORE / DATA, data_dir / directory.COMPACTED
    before = data.stat().st_size
    try:
        if new.exists():
            shutil.rmtree(new)
        (new / STORE).mkdir(mode=0o700, parents=True)
        try:
            copy = new / STORE / DATA
            env = opening.open_to_read(data)
            try:
                _copy(env, copy)
            finally:
                env.close()
            directory.fsync_path(copy)
            verify(new)
            after = copy.stat().st_size
            failpoints.hit("maintenance.before_replace")
            os.replace(copy, data)
            failpoints.hit("maintenance.after_replace")
            directory.fsync_directory(data.parent)
        finally:
            shutil.rmtree(new)
    except OSError as problem:
        raise directory.refusal(data_dir, problem) from problem
    except lmdb.Error as problem:
        raise _uncopied(data_dir, problem) from problem
    return before, after


def _copy(env: lmdb.Environment, to: Path) -> None:
    """Copy what is in use, without free pages, to a file that does not exist."""
    try:
        with open(to, "xb", opener=_private) as file:
            env.copyfd(file.fileno(), compact=True)
    except lmdb.IncompatibleError:
        # LMDB counts the pages in use and the free ones, and refuses when some belong to nobody.
        to.unlink()
        _rebuild(env, to)


def _write(path: Path, data: bytes) -> None:
    with open(path, "xb", opener=_private) as file:
        file.write(data)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _rebuild(env: lmdb.Environment, to: Path) -> None:
    """Write every record anew."""
    size = env.info()["map_size"]
    new = lmdb.open(str(to), lib_version=0, subdir=False, lock=False, map_size=size, mode=0o600, max_dbs=32)
    try:
        with env.begin() as source:
            for name in layout.TABLES:
                items = iter(source.cursor(env.open_db(name.encode(), txn=source, create=False)))
                more = True
                while more:
                    some = list(itertools.islice(items, _PUT_AT_ONCE))
                    with new.begin(write=True) as txn:
                        txn.cursor(new.open_db(name.encode(), txn=txn)).putmulti(some, append=True)
                    more = len(some) == _PUT_AT_ONCE
    finally:
        new.close()


def _refusal(target: Path, problem: OSError) -> HayataError:
    refusal = directory.refusal(target, problem)
    if refusal.code == "invalid_options":
        refusal.message = f"no backup can be made in {target}: {problem.strerror or problem}"
    return refusal


def _uncopied(path: Path, problem: lmdb.Error) -> Unavailable:
    if problem.code in directory.FULL:
        return Unavailable(
            "store_full",
            f"no room for the copy in {path}",
            details={"data_dir": str(path)},
            hint="make room on the disk; nothing was changed",
        )
    return Unavailable(
        "store_corrupt",
        f"the store can't be copied: {problem}",
        details={"record": DATA},
        hint="hayata verify tells more",
    )
