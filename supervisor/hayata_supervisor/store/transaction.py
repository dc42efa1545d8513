"""What one write transaction does with a batch of commits: decide about each, then put what was accepted.

Every call into LMDB gives the interpreter lock away, so what is put is gathered first, and put by table and
in the order of keys; headers and snapshots that a later commit of the batch replaces are not put at all. No
key is put twice in a transaction: LMDB leaks pages when a large value is overwritten in the transaction that
wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import lmdb

from hayata_supervisor.store.interface import Commit, Header, OutOfOrder, Refusal, Taken
from hayata_supervisor.store.layout import (
    GC,
    INV,
    JOURNAL,
    KEY,
    MAX_NUMBER,
    NAME,
    OPEN,
    SESSION,
    SNAP,
    encode_header,
    gc_key,
    journal_key,
    key_key,
    number_of,
    seal,
    session_key,
    snapshot_body,
    unseal,
    unseal_header,
)

Tables = Mapping[str, lmdb._Database]


class Batch:
    """Commits on their way into one transaction.

    Attributes:
        numbers: Newest number of each invocation that this batch has added to.
        closed: Invocations that this batch takes out of the open set.
    """

    def __init__(self, txn: lmdb.Transaction[bytes], tables: Tables, last: Mapping[bytes, int]) -> None:
        """Begin a batch.

        Args:
            txn: The transaction; the caller ends it.
            tables: Handles by name.
            last: Newest committed numbers, as far as they are known.
        """
        self._txn = txn
        self._tables = tables
        self._last = last
        self.numbers: dict[bytes, int] = {}
        self.closed: set[bytes] = set()
        self._journal: list[tuple[bytes, bytes]] = []
        self._headers: dict[bytes, Header] = {}
        self._snapshots: dict[bytes, bytes] = {}
        self._memories: dict[bytes, bytes] = {}

    def add(self, commits: Sequence[Commit]) -> list[Refusal | None]:
        """Decide about each commit, in order.

        Raises:
            ValueError, TypeError, OverflowError, lmdb.BadValsizeError: One of them can't be stored at all.
                The transaction must be aborted.
        """
        refusals: list[Refusal | None] = []
        numbers, last, journal = self.numbers, self._last, self._journal
        for commit in commits:
            invocation, number = commit.invocation, commit.number
            newest = numbers.get(invocation)
            if newest is None:
                newest = last.get(invocation)
                if newest is None:
                    newest = self._newest(invocation)
            if number != newest + 1:
                refusals.append(OutOfOrder(newest + 1))
                continue
            if number == 1:
                taken = self._claim(commit)
                if taken is not None:
                    refusals.append(taken)
                    continue
            key = journal_key(invocation, number)
            journal.append((key, seal(key, commit.record)))
            if commit.header is not None:
                self._headers[invocation] = commit.header
            if commit.snapshot is not None:
                self._snapshots[invocation] = seal(invocation, snapshot_body(number, commit.snapshot))
            if commit.memory is not None:
                self._remember(commit, *commit.memory)
            if commit.open is not None:
                self._open(commit)
            numbers[invocation] = number
            refusals.append(None)
        return refusals

    def put(self) -> None:
        """Put what `add` has accepted. Errors as those of `add`, and LMDB's own."""
        self._put(JOURNAL, self._journal)
        if self._headers:
            self._put(INV, [(key, seal(key, encode_header(header))) for key, header in self._headers.items()])
        if self._snapshots:
            self._put(SNAP, list(self._snapshots.items()))
        if self._memories:
            self._put(SESSION, list(self._memories.items()))
        for invocation in self.closed:
            self._txn.delete(invocation, db=self._tables[OPEN])

    def _put(self, table: str, items: list[tuple[bytes, bytes]]) -> None:
        if len(items) == 1:
            self._txn.put(*items[0], db=self._tables[table])
        else:
            items.sort()
            self._txn.cursor(self._tables[table]).putmulti(items)

    def _newest(self, invocation: bytes) -> int:
        """The newest number in the journal; 0 for an invocation that doesn't exist."""
        cursor = self._txn.cursor(self._tables[JOURNAL])
        found = cursor.prev() if cursor.set_range(journal_key(invocation, MAX_NUMBER)) else cursor.last()
        key = cursor.key() if found else b""
        return number_of(key) if key.startswith(invocation) else 0

    def _claim(self, commit: Commit) -> Taken | None:
        """Take name and key for a new invocation, both or neither."""
        header, txn, tables = commit.header, self._txn, self._tables
        if header is None or header.id != commit.invocation:
            raise ValueError("the first commit of an invocation needs its header")
        name = header.name.encode()
        if not txn.put(name, seal(name, header.id), overwrite=False, db=tables[NAME]):
            return Taken(self._holder(NAME, name))
        if header.key is not None:
            key = key_key(header.agent, header.key)
            if not txn.put(key, seal(key, header.id), overwrite=False, db=tables[KEY]):
                txn.delete(name, db=tables[NAME])
                return Taken(self._holder(KEY, key))
        return None

    def _holder(self, table: str, key: bytes) -> Header:
        value = self._txn.get(key, b"", db=self._tables[table])
        return self._header(unseal(table, key, value))

    def _header(self, invocation: bytes) -> Header:
        header = self._headers.get(invocation)
        if header is None:
            header = unseal_header(invocation, self._txn.get(invocation, b"", db=self._tables[INV]))
        return header

    def _remember(self, commit: Commit, session: str, messages: bytes) -> None:
        key = session_key(self._header(commit.invocation).agent, session)
        self._memories[key] = seal(key, messages)

    def _open(self, commit: Commit) -> None:
        invocation = commit.invocation
        if commit.open:
            self._txn.put(invocation, seal(invocation, b""), db=self._tables[OPEN])
            return
        ended = gc_key(self._header(invocation).ended_at, invocation)
        self._txn.put(ended, seal(ended, b""), db=self._tables[GC])
        self.closed.add(invocation)
