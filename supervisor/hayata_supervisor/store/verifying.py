"""Whether a store can be trusted: its structure, every checksum, and what its records say of each other.

It works on a data file that nobody writes: a stopped store's, a backup's, or a snapshot of a running one. A
damaged file can end a process that gives it to LMDB, so it is done in a process of its own
(`hayata_supervisor.maintenance`), and each problem is told when it is found.

| checked | must be |
|---|---|
| pages | what LMDB would have written, each one in use or free |
| values | whole: their checksums are right |
| inv | its name and key lead back to it; open if it has not ended, in ``gc`` with its time if it has |
| journal | from 1 without a hole, of an invocation that is there or leaving; folds to what the header says |
| snap | of a record that is there; what the journal folds to at that number |
| name, key, open, gc | of an invocation that is there; in ``gc`` also one whose removal has begun |
| session | messages that can be read |
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import lmdb

from hayata.errors import HayataError
from hayata_supervisor.store import layout, opening, structure
from hayata_supervisor.store.directory import DATA
from hayata_supervisor.store.interface import Header
from hayata_supervisor.store.layout import (
    GC,
    ID_BYTES,
    INV,
    JOURNAL,
    KEY,
    META,
    NAME,
    OPEN,
    SESSION,
    SNAP,
)
from hayata_supervisor.store.transaction import Tables

Tell: TypeAlias = Callable[[str, str], None]
"""Hears of a problem: the record, and what is wrong with it."""

Fold: TypeAlias = Callable[[Header, int, bytes | None, Iterator[tuple[int, bytes]]], list[str]]
"""Checks one invocation by its header, number and bytes of its snapshot (0 and None without one), and its
whole journal. Returns what is wrong, in words."""

Decode: TypeAlias = Callable[[bytes], object]
"""Decodes messages of a session, or raises."""


def verify_file(path: Path, *, fold: Fold, decode: Decode, tell: Tell) -> dict[str, int]:
    """Verify a data file.

    Args:
        path: Of the file; nobody may be writing it.
        fold: What makes an invocation of its journal: the store knows nothing of that.
        decode: Decodes the messages of a session.
        tell: Called with each problem.

    Returns:
        How many of what was looked at. Without a problem, all of it is whole.

    Raises:
        OSError: The file can't be read.
    """
    counts = {"bytes": os.stat(path).st_size}
    found = structure.examine(path)
    for problem in found.problems:
        tell(DATA, problem)
    if found.leaks:
        counts["leaks"] = len(found.leaks)
    if not found.readable:
        return counts
    try:
        opening.check_file(path)
    except HayataError as error:
        if not structure.lacks_only_free_pages(path):
            tell(DATA, error.message)
            return counts  # LMDB would die of it
    env = opening.open_to_read(path)
    try:
        with env.begin() as txn:
            counts |= _Walk(env, txn, fold, decode, tell).run()
    except (lmdb.Error, HayataError) as error:
        tell(DATA, str(error))
    finally:
        env.close()
    return counts


_KINDS = ("invocations", "open", "records", "snapshots", "names", "keys", "sessions", "ended", "leaving")


class _Walk:
    """One pass over all tables, in one read transaction."""

    def __init__(
        self,
        env: lmdb.Environment,
        txn: lmdb.Transaction[bytes],
        fold: Fold,
        decode: Decode,
        tell: Tell,
    ) -> None:
        self._txn = txn
        self._fold = fold
        self._decode = decode
        self._tell_of = tell
        self._counts: Counter[str] = Counter()
        self._leaving: set[bytes] = set()
        self._tables: Tables = {name: env.open_db(name.encode(), txn=txn, create=False) for name in layout.TABLES}

    def run(self) -> dict[str, int]:
        """Look at everything; returns the counts."""
        self._meta()
        self._ended()
        self._invocations()
        self._orphans()
        self._names()
        self._open()
        self._sessions()
        return {kind: self._counts[kind] for kind in _KINDS}

    # values

    def _tell(self, table: str, key: bytes, problem: str) -> None:
        self._tell_of(layout.describe(table, key), problem)

    def _items(self, table: str, prefix: bytes = b"") -> Iterator[tuple[bytes, bytes | None]]:
        """Keys that begin so, and bodies; None for a body whose checksum is wrong, which is told."""
        cursor = self._txn.cursor(self._tables[table])
        found = cursor.set_range(prefix) if prefix else cursor.first()
        while found:
            key, value = cursor.item()
            if not key.startswith(prefix):
                return
            yield key, self._unsealed(table, key, value)
            found = cursor.next()

    def _unsealed(self, table: str, key: bytes, value: bytes) -> bytes | None:
        try:
            return layout.unseal(table, key, value)
        except HayataError as error:
            self._tell(table, key, error.message.rpartition(": ")[2])
            return None

    def _get(self, table: str, key: bytes) -> bytes | None:
        """A body, if there is one that is whole; told elsewhere when it isn't."""
        value = self._txn.get(key, db=self._tables[table]) if key else None
        try:
            return None if value is None else layout.unseal(table, key, value)
        except HayataError:
            return None

    def _has(self, table: str, key: bytes) -> bool:
        return self._txn.get(key, db=self._tables[table]) is not None

    def _header(self, invocation: bytes) -> Header | None:
        value = self._txn.get(invocation, db=self._tables[INV]) if invocation else None
        try:
            return None if value is None else layout.unseal_header(invocation, value)
        except HayataError:
            return None

    # tables

    def _meta(self) -> None:
        found = dict(self._items(META))
        for key in (b"schema", b"uuid", b"epoch"):
            if key not in found:
                self._tell(META, key, "it is missing")
        schema = found.get(b"schema")
        if schema is not None and int.from_bytes(schema, "big") != layout.SCHEMA:
            self._tell(META, b"schema", f"it is {int.from_bytes(schema, 'big')}, not {layout.SCHEMA}")

    def _ended(self) -> None:
        for key, _ in self._items(GC):
            if len(key) != layout.GC_BYTES:
                self._tell(GC, key, "its key isn't a time and an id")
                continue
            invocation = layout.invocation_of(key)
            if not self._has(INV, invocation):
                if key == layout.removal_key(invocation):
                    self._leaving.add(invocation)
                    self._counts["leaving"] += 1
                else:
                    self._tell(GC, key, "its invocation is missing")
                continue
            self._counts["ended"] += 1
            header = self._header(invocation)
            if header is not None and (header.ended_at is None or layout.gc_key(header.ended_at, invocation) != key):
                self._tell(GC, key, f"its invocation says that it ended at {header.ended_at}")

    def _invocations(self) -> None:
        for invocation, body in self._items(INV):
            if len(invocation) != ID_BYTES:
                self._tell(INV, invocation, "its key isn't an id")
                continue
            self._counts["invocations"] += 1
            header = None if body is None else self._header(invocation)
            if body is not None and header is None:
                self._tell(INV, invocation, "it isn't a header")
            if header is not None:
                self._references(invocation, header)
            self._family(invocation, header)

    def _references(self, invocation: bytes, header: Header) -> None:
        """What the header must be found by."""
        if header.id != invocation:
            self._tell(INV, invocation, f"it says that its id is {header.id.hex()}")
        if self._get(NAME, header.name.encode()) != invocation:
            self._tell(INV, invocation, f"its name {header.name!r} doesn't lead to it")
        if header.key is not None and self._get(KEY, layout.key_key(header.agent, header.key)) != invocation:
            self._tell(INV, invocation, f"its key {header.key!r} doesn't lead to it")
        ended = header.ended_at is not None
        if self._has(OPEN, invocation) is ended:
            no = "" if ended else " not"
            self._tell(INV, invocation, f"it has{no} ended, and is{no} open")
        if ended and not self._has(GC, layout.gc_key(header.ended_at, invocation)):
            self._tell(INV, invocation, "it has ended, and is not in gc")

    def _family(self, invocation: bytes, header: Header | None) -> None:
        """Journal and snapshot of one invocation."""
        body = self._get(SNAP, invocation)
        number, snapshot = (0, None) if body is None else layout.split_snapshot(body)
        journal = _Journal(self._items(JOURNAL, invocation))
        if header is not None:
            for problem in self._fold(header, number, snapshot, iter(journal)):
                if not journal.broken:  # else that was told, and the rest follows from it
                    self._tell(INV, invocation, problem)
        for _ in journal:
            continue  # what the fold has left, or all of it
        if journal.hole is not None:
            missing = layout.journal_key(invocation, journal.hole)
            self._tell(JOURNAL, missing, "it is missing, and later ones are there")
        elif not journal.count and not journal.broken:
            self._tell(INV, invocation, "it has no journal")
        if number > journal.newest:
            self._tell(SNAP, invocation, f"it is of record {number}, and the newest is {journal.newest}")
        self._counts["records"] += journal.count

    def _orphans(self) -> None:
        """Records and snapshots of invocations that aren't there."""
        for key, _ in self._items(SNAP):
            self._counts["snapshots"] += 1
            if not self._has(INV, key) and key not in self._leaving:
                self._tell(SNAP, key, "its invocation is missing")
        cursor = self._txn.cursor(self._tables[JOURNAL])
        found = cursor.first()
        while found:
            key = cursor.key()
            invocation = key[:ID_BYTES]
            if len(key) != ID_BYTES + layout.NUMBER_BYTES:
                self._tell(JOURNAL, key, "its key isn't an id and a number")
                found = cursor.next()
                continue
            if not self._has(INV, invocation) and invocation not in self._leaving:
                self._tell(JOURNAL, key, "its invocation is missing")
            found = cursor.set_range(layout.journal_key(invocation, layout.MAX_NUMBER)) and (
                cursor.key()[:ID_BYTES] != invocation or cursor.next()
            )

    def _names(self) -> None:
        for key, body in self._items(NAME):
            self._counts["names"] += 1
            header = None if body is None else self._header(body)
            if body is not None and not self._has(INV, body or b"\0"):
                self._tell(NAME, key, f"it leads to invocation {body.hex()}, which is missing")
            elif header is not None and header.name.encode() != key:
                self._tell(NAME, key, f"it leads to invocation {header.name!r}")
        for key, body in self._items(KEY):
            self._counts["keys"] += 1
            header = None if body is None else self._header(body)
            if body is not None and not self._has(INV, body or b"\0"):
                self._tell(KEY, key, f"it leads to invocation {body.hex()}, which is missing")
            elif header is not None and (header.key is None or layout.key_key(header.agent, header.key) != key):
                self._tell(KEY, key, f"it leads to invocation {header.name!r}, whose key is {header.key!r}")

    def _open(self) -> None:
        for invocation, _ in self._items(OPEN):
            self._counts["open"] += 1
            if not self._has(INV, invocation):
                self._tell(OPEN, invocation, "its invocation is missing")

    def _sessions(self) -> None:
        for key, body in self._items(SESSION):
            self._counts["sessions"] += 1
            if body is None:
                continue
            try:
                self._decode(body)
            except Exception as error:  # noqa: BLE001 - whatever damaged bytes do to a decoder
                self._tell(SESSION, key, f"its messages can't be read: {error}")


class _Journal:
    """The records of one invocation, in order, up to a hole.

    Attributes:
        count: Records so far.
        newest: Number of the last one.
        hole: A number that is missing.
        broken: A record can't be read, or is missing.
    """

    def __init__(self, items: Iterator[tuple[bytes, bytes | None]]) -> None:
        self.count = self.newest = 0
        self.hole: int | None = None
        self.broken = False
        self._records = self._walk(items)

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        return self._records

    def _walk(self, items: Iterator[tuple[bytes, bytes | None]]) -> Iterator[tuple[int, bytes]]:
        for key, body in items:
            number = layout.number_of(key)
            if number != self.newest + 1 and self.hole is None:
                self.hole = self.newest + 1
            self.count += 1
            self.newest = number
            self.broken = self.broken or body is None or self.hole is not None
            if body is not None and not self.broken:
                yield number, body
