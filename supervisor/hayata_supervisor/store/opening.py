"""Creating an LMDB environment whole or not at all, and opening it only if it can be trusted."""

from __future__ import annotations

import os
import shutil
import struct
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import lmdb

from hayata.errors import CallerError, HayataError, Unavailable
from hayata_supervisor import failpoints
from hayata_supervisor.store import directory, layout, migration, structure

DEFAULT_MAP_BYTES: Final = 64 << 30
_FIRST_MAP_BYTES = 16 << 20
_LEAST_MAP_BYTES = 64 << 20
_NUMBER = struct.Struct(">Q")

# mdb.c: a page header (16 bytes, flags at 10), then magic, version, address, map size, two databases of 48
# bytes, of which the first begins with the page size, the last page, the transaction id.
_META_PAGE = struct.Struct("=10xH4xIIQQI44x48xQQ")
_P_META = 0x08
_MAGIC = 0xBEEFC0DE
_FORMAT = 1


@dataclass(frozen=True)
class Opened:
    """An environment that was checked, and is ours.

    Attributes:
        tables: Handles by name, those of `layout.TABLES`.
        uuid: Names the store, for ever.
        epoch: Value of ``epoch`` as it is stored: every commit compares it.
        data_fd: An O_PATH descriptor of the data file, to see when it was removed.
        schema_before: What its schema was; it is `layout.SCHEMA` now.
    """

    env: lmdb.Environment
    tables: dict[str, lmdb._Database]
    uuid: bytes
    epoch: bytes
    data_fd: int
    schema_before: int


def open_environment(data_dir: Path, map_size_bytes: int) -> Opened:
    """Check and open the store of a data directory whose lock is held; create it when there is none.

    Raises:
        Unavailable: ``store_corrupt``, ``store_full``, ``permission_denied``.
        CallerError: ``invalid_options``: it is an LMDB environment, and not ours.
    """
    path = data_dir / directory.STORE
    try:
        if not path.exists():
            _create(data_dir)
        used_bytes = check_file(path / directory.DATA, mend=True)
        # Half of it free at least: LMDB makes a map that is too small just as large as the file, and then not
        # one page could be written.
        while map_size_bytes < 2 * used_bytes:
            map_size_bytes *= 2
        env = _environment(path, map_size_bytes, 2 * used_bytes)
        try:
            return _enter(env, data_dir)
        except BaseException:
            env.close()
            raise
    except OSError as problem:
        raise directory.refusal(data_dir, problem) from problem
    except lmdb.Error as problem:
        raise _refusal(data_dir, problem) from problem


def _create(data_dir: Path) -> None:
    """Create an empty store.

    Only a renamed directory counts, and it is renamed when everything in it is on the disk: a power cut
    otherwise leaves a file that can't be opened. What is left of an earlier attempt is removed.
    """
    new = data_dir / directory.STORE_NEW
    if new.exists():
        shutil.rmtree(new)
    new.mkdir(mode=0o700)
    env = _environment(new, _FIRST_MAP_BYTES, _FIRST_MAP_BYTES)
    try:
        with env.begin(write=True) as txn:
            tables = {name: env.open_db(name.encode(), txn=txn) for name in layout.TABLES}
            for key, body in (
                (b"schema", _NUMBER.pack(layout.SCHEMA)),
                (b"uuid", uuid.uuid4().bytes),
                (b"epoch", _NUMBER.pack(0)),
            ):
                txn.put(key, layout.seal(key, body), db=tables[layout.META])
            failpoints.hit("store.before_create")
        env.sync(True)
    finally:
        env.close()
    directory.fsync_path(new / directory.DATA)
    directory.fsync_directory(new)
    failpoints.hit("store.before_rename")
    new.rename(data_dir / directory.STORE)
    failpoints.hit("store.after_rename")
    directory.fsync_directory(data_dir)
    failpoints.hit("store.after_create")


def _environment(path: Path, map_size_bytes: int, least_bytes: int) -> lmdb.Environment:
    """Open LMDB. The map is only address space, but that can be limited: then a smaller one will grow."""
    while True:
        try:
            return lmdb.open(
                str(path),
                lib_version=0,
                map_size=map_size_bytes,
                mode=0o700,
                create=False,
                # Without either of these two, acknowledged commits are lost in a power cut.
                sync=True,
                metasync=True,
                # With it a full disk is a SIGBUS.
                writemap=False,
                map_async=False,
                max_dbs=32,
                max_readers=64,
                max_spare_txns=0,
            )
        except lmdb.MemoryError:
            map_size_bytes //= 2
            if map_size_bytes < max(least_bytes, _LEAST_MAP_BYTES):
                raise


def open_to_read(path: Path, *, shared: bool = False) -> lmdb.Environment:
    """Open a data file that was checked, to read it.

    Args:
        path: The file.
        shared: Another process may be writing it. Then what is read stays as it is for as long as a
            transaction lasts, and the file grows meanwhile. Without it nothing else is touched or made.

    Raises:
        lmdb.Error: It can't be opened.
    """
    map_size_bytes = DEFAULT_MAP_BYTES
    while map_size_bytes < 2 * os.stat(path).st_size:
        map_size_bytes *= 2
    while True:
        try:
            return lmdb.open(
                str(path.parent if shared else path),
                lib_version=0,
                map_size=map_size_bytes,
                subdir=shared,
                readonly=True,
                create=False,
                lock=shared,
                max_dbs=32,
                max_readers=64,
                max_spare_txns=0,
            )
        except lmdb.MemoryError:
            map_size_bytes //= 2
            if map_size_bytes < max(os.stat(path).st_size, _LEAST_MAP_BYTES):
                raise


def check_file(path: Path, *, mend: bool = False) -> int:
    """Refuse a file that LMDB would die of: one that is cut off ends in SIGBUS, at some later time.

    Args:
        path: The data file.
        mend: The file will be written: lengthen one that lacks only pages which are free. LMDB counts pages
            that one transaction took and gave back, and never writes them, and a crash may have come before
            the store did it.

    Returns:
        How many bytes of the file are in use.

    Raises:
        Unavailable: ``store_corrupt``.
    """
    try:
        fd = os.open(path, (os.O_RDWR if mend else os.O_RDONLY) | os.O_CLOEXEC)
    except FileNotFoundError:
        raise _damaged(path, "it is missing") from None
    try:
        size = os.fstat(fd).st_size
        first = _meta_page(path, os.pread(fd, _META_PAGE.size, 0))
        second = _meta_page(path, os.pread(fd, _META_PAGE.size, first[0]))
    finally:
        os.close(fd)
    page_bytes, last_page, _ = max(first, second, key=lambda meta: meta[2])
    needed = (last_page + 1) * page_bytes
    if size < needed:
        if not mend or not structure.lacks_only_free_pages(path):
            raise _damaged(path, f"it is cut off: {size} bytes of {needed}")
        directory.lengthen(path, needed)
    return needed


def _meta_page(path: Path, raw: bytes) -> tuple[int, int, int]:
    """Page size, last page and transaction id that a meta page tells."""
    if len(raw) < _META_PAGE.size:
        raise _damaged(path, "it is cut off in its meta pages")
    flags, magic, version, _, _, page_bytes, last_page, transaction = _META_PAGE.unpack(raw)
    is_meta = flags == _P_META and magic == _MAGIC and version == _FORMAT
    if not is_meta or not 256 <= page_bytes <= 65536 or page_bytes & (page_bytes - 1):
        raise _damaged(path, "its meta page isn't one")
    return page_bytes, last_page, transaction


def _enter(env: lmdb.Environment, data_dir: Path) -> Opened:
    """Read who the store is, and count ourselves as its newest owner."""
    _keep_from_children(data_dir / directory.STORE / directory.DATA)
    env.reader_check()
    while True:
        try:
            return _take_over(env, data_dir)
        except lmdb.MapFullError:  # a migration may write everything anew
            env.set_mapsize(env.info()["map_size"] * 2)


def _take_over(env: lmdb.Environment, data_dir: Path) -> Opened:
    """Check that it is ours, migrate it if it is older, and increase its epoch, all in one transaction."""
    path = data_dir / directory.STORE / directory.DATA
    with env.begin(write=True) as txn:
        present = {bytes(name).decode(errors="replace") for name, _ in txn.cursor()}
        if not present.intersection(layout.TABLES):
            raise _foreign(data_dir)

        def check_table(name: str) -> None:
            if name not in present:
                raise _damaged(path, f"table {name} is missing")

        check_table(layout.META)
        meta = env.open_db(layout.META.encode(), txn=txn, create=False)
        schema, identity, epoch = (
            layout.unseal(layout.META, key, txn.get(key, b"", db=meta)) for key in (b"schema", b"uuid", b"epoch")
        )
        before = int.from_bytes(schema, "big")
        _check_schema(data_dir, before)

        def open_table(name: str) -> lmdb._Database:
            present.add(name)
            return env.open_db(name.encode(), txn=txn)

        failpoints.hit("store.before_migrate")
        migration.migrate(txn, open_table, before)
        for name in layout.TABLES:
            check_table(name)
        tables = {name: env.open_db(name.encode(), txn=txn, create=False) for name in layout.TABLES}
        newest = layout.seal(b"epoch", _NUMBER.pack(_NUMBER.unpack(epoch)[0] + 1))
        txn.put(b"epoch", newest, db=meta)
        failpoints.hit("store.before_enter")
    failpoints.hit("store.after_enter")
    return Opened(env, tables, identity, newest, os.open(path, os.O_PATH | os.O_CLOEXEC), before)


def _check_schema(data_dir: Path, schema: int) -> None:
    if not migration.is_known(schema):
        raise CallerError(
            "invalid_options",
            f"{data_dir} was written by another version of Hayata:"
            f" its schema is {schema}, and this version knows {layout.SCHEMA}",
            details={"data_dir": str(data_dir), "schema": schema, "known": layout.SCHEMA},
            hint="use the version that wrote it, or a newer one, or name another directory",
        )


def _keep_from_children(path: Path) -> None:
    """LMDB opens the data file inheritable: a program that we start must not hold it."""
    data = path.stat()
    for name in os.listdir("/proc/self/fd"):
        try:
            status = os.fstat(int(name))
        except OSError:
            continue  # the descriptor of the listing itself, or one that another thread has closed
        if (status.st_dev, status.st_ino) == (data.st_dev, data.st_ino):
            os.set_inheritable(int(name), False)


def _damaged(path: Path, why: str) -> Unavailable:
    return Unavailable(
        "store_corrupt",
        f"the store can't be opened: {path}: {why}",
        details={"record": directory.DATA, "path": str(path), "reason": why},
        hint="restore a backup, or name another data directory",
    )


def _foreign(data_dir: Path) -> CallerError:
    return CallerError(
        "invalid_options",
        f"{data_dir} is not a Hayata data directory: its store is another program's",
        details={"data_dir": str(data_dir)},
        hint="name a directory that is empty, missing, or a Hayata data directory",
    )


def _refusal(data_dir: Path, problem: lmdb.Error) -> HayataError:
    if problem.code > 0:  # the system's; LMDB's own are negative
        return directory.refusal(data_dir, OSError(problem.code, os.strerror(problem.code)))
    return _damaged(data_dir / directory.STORE / directory.DATA, str(problem))
