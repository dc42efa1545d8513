"""Creating an LMDB environment so that a power cut can't leave half of one, and opening it only if it can be trusted."""

from __future__ import annotations

import os
import shutil
import struct
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import lmdb
from lmdb.verify import VerifyError, verify

from hayata.errors import CallerError, HayataError, Unavailable
from hayata_supervisor.store import directory, layout

DEFAULT_MAP_BYTES: Final = 64 << 30
_LEAST_MAP_BYTES = 64 << 20
_NUMBER = struct.Struct(">Q")

# mdb.c: a page header (16 bytes, flags at 10), then magic, version, address, map size, two databases of 48 bytes of
# which the first begins with the page size, the last page, the transaction id.
_META_PAGE = struct.Struct("=8xHH4xIIQQI44x48xQQ")
_P_META = 0x08
_MAGIC = 0xBEEFC0DE
_FORMAT = 1


@dataclass(frozen=True)
class Opened:
    """An environment that was checked, and is ours.

    Attributes:
        tables: Handles by name, `layout.TABLES`.
        epoch: Value stored as ``epoch``, as it is: every commit compares it.
        data_fd: An O_PATH descriptor of the data file, to see when it was removed.
    """

    env: lmdb.Environment
    tables: dict[str, lmdb._Database]
    uuid: bytes
    epoch: bytes
    data_fd: int


def create(data_dir: Path) -> None:
    """Create an empty store, whole or not at all.

    Only a renamed directory counts, and it is renamed when everything in it is on the disk. What a power cut left of
    an earlier attempt is removed.
    """
    new = data_dir / directory.STORE_NEW
    if new.exists():
        shutil.rmtree(new)
    new.mkdir(mode=0o700)
    env = _environment(new, 16 << 20)
    try:
        with env.begin(write=True) as txn:
            tables = {name: env.open_db(name.encode(), txn=txn) for name in layout.TABLES}
            meta = tables[layout.META]
            for key, body in (
                (b"schema", _NUMBER.pack(layout.SCHEMA)),
                (b"uuid", uuid.uuid4().bytes),
                (b"epoch", _NUMBER.pack(0)),
            ):
                txn.put(key, layout.seal(key, body), db=meta)
        env.sync(True)
    finally:
        env.close()
    fd = os.open(new / directory.DATA, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    directory.fsync_directory(new)
    new.rename(data_dir / directory.STORE)
    directory.fsync_directory(data_dir)


def open_environment(data_dir: Path, map_size_bytes: int) -> Opened:
    """Check and open the store of a data directory whose lock is held; create it when there is none.

    Raises:
        Unavailable: ``store_corrupt``, ``store_full``, ``permission_denied``.
        CallerError: ``invalid_options``: it is an LMDB environment, and not ours.
    """
    path = data_dir / directory.STORE
    try:
        if not path.exists():
            create(data_dir)
        _check_file(path / directory.DATA)
        env = _environment(path, map_size_bytes)
    except OSError as problem:
        raise directory.refusal(data_dir, problem) from problem
    except lmdb.Error as problem:
        raise _refusal(data_dir, problem) from problem
    data_fd = -1
    try:
        data_fd = os.open(path / directory.DATA, os.O_PATH | os.O_CLOEXEC)
        _keep_from_children(path)
        env.reader_check()
        tables, identity, epoch = _enter(env, data_dir)
    except BaseException as problem:
        env.close()
        if data_fd >= 0:
            os.close(data_fd)
        if isinstance(problem, lmdb.Error):
            raise _refusal(data_dir, problem) from problem
        raise
    return Opened(env, tables, identity, epoch, data_fd)


def _environment(path: Path, map_size_bytes: int) -> lmdb.Environment:
    """Open LMDB. The map is address space only, but address space can be limited: then a smaller one will grow."""
    while True:
        try:
            return lmdb.open(
                str(path),
                lib_version=0,
                map_size=map_size_bytes,
                mode=0o700,
                create=False,
                sync=True,
                metasync=True,
                writemap=False,
                map_async=False,
                max_dbs=32,
                max_readers=64,
                max_spare_txns=0,
            )
        except lmdb.MemoryError:
            if map_size_bytes <= _LEAST_MAP_BYTES:
                raise
            map_size_bytes //= 2


def _check_file(path: Path) -> None:
    """Refuse a file that LMDB would die of: one that is cut off ends in SIGBUS, at some later time.

    Raises:
        Unavailable: ``store_corrupt``.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
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
        # Pages that a transaction allocated and freed again are never written, so that LMDB itself may leave the file
        # short. Then nothing refers to what is missing, and the file can be made as long as it should be.
        if _findings(path):
            raise _damaged(path, f"it is cut off: {size} bytes of {needed}")
        os.truncate(path, needed)


def _findings(path: Path) -> list[str]:
    """What LMDB's structural verifier, which reads without a map, finds wrong."""
    try:
        return list(verify(str(path)))
    except VerifyError as problem:
        return [str(problem)]


def _meta_page(path: Path, raw: bytes) -> tuple[int, int, int]:
    """Page size, last page and transaction id that a meta page tells."""
    if len(raw) < _META_PAGE.size:
        raise _damaged(path, "it is cut off in its meta pages")
    _, flags, magic, version, _, _, page_bytes, last_page, transaction = _META_PAGE.unpack(raw)
    power_of_two = page_bytes & (page_bytes - 1) == 0
    if flags != _P_META or magic != _MAGIC or version != _FORMAT or not (256 <= page_bytes <= 65536 and power_of_two):
        raise _damaged(path, "its meta page isn't one")
    return page_bytes, last_page, transaction


def _enter(env: lmdb.Environment, data_dir: Path) -> tuple[dict[str, lmdb._Database], bytes, bytes]:
    """Read who the store is, and count ourselves as its newest owner."""
    with env.begin(write=True) as txn:
        present = {bytes(name).decode(errors="replace") for name, _ in txn.cursor()}
        missing = [name for name in layout.TABLES if name not in present]
        if len(missing) == len(layout.TABLES):
            raise _foreign(data_dir)
        if missing:
            raise _damaged(data_dir / directory.STORE, f"table {missing[0]} is missing")
        tables = {name: env.open_db(name.encode(), txn=txn, create=False) for name in layout.TABLES}
        values: dict[bytes, bytes] = {}
        for key in (b"schema", b"uuid", b"epoch"):
            value = txn.get(key, b"", db=tables[layout.META])
            values[key] = layout.unseal(layout.META, key, value)
        (schema,) = _NUMBER.unpack(values[b"schema"])
        if schema != layout.SCHEMA:
            raise CallerError(
                "invalid_options",
                f"{data_dir} was written by another version of Hayata: schema {schema}, this one knows {layout.SCHEMA}",
                details={"data_dir": str(data_dir), "schema": schema, "known": layout.SCHEMA},
                hint="use the version that wrote it, or name another directory",
            )
        (epoch,) = _NUMBER.unpack(values[b"epoch"])
        ours = layout.seal(b"epoch", _NUMBER.pack(epoch + 1))
        txn.put(b"epoch", ours, db=tables[layout.META])
    return tables, values[b"uuid"], ours


def _keep_from_children(path: Path) -> None:
    """LMDB opens the data file inheritable: a program that we start must not hold it."""
    data = (path / directory.DATA).stat()
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


def _refusal(data_dir: Path, problem: lmdb.Error) -> HayataError | Exception:
    code = getattr(problem, "code", 0)
    if code > 0:
        return directory.refusal(data_dir, OSError(code, os.strerror(code)))
    return _damaged(data_dir / directory.STORE / directory.DATA, str(problem))
