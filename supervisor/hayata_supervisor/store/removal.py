"""What one write transaction removes of invocations that have ended.

Header, name and key of an invocation go in one transaction: from then on it does not exist, and its name can
be used again by another one, whose internal id is another. What may be left, records and snapshot, is under
the old internal id and can't be met by the new one. Its entry in ``gc`` is moved to the front and goes last,
so that a removal that was cut off is found and finished by whoever removes next.

Journals are removed from their end: a reader who is in the midst of one sees it end early, not with a hole.
"""

from __future__ import annotations

from collections.abc import Sequence

import lmdb

from hayata_supervisor.store import layout
from hayata_supervisor.store.interface import Header, Removal
from hayata_supervisor.store.layout import GC, ID_BYTES, INV, JOURNAL, KEY, MAX_NUMBER, NAME, OPEN, SNAP
from hayata_supervisor.store.transaction import Tables

_OF_ONE_NAME = 4  # header, name, key, and the place in gc
_REST = 2  # snapshot, and the place in gc


class Eraser:
    """Deletes in one transaction, which its caller begins and ends.

    Attributes:
        gone: Internal ids of those whose name has gone.
    """

    def __init__(self, txn: lmdb.Transaction[bytes], tables: Tables, most: int) -> None:
        """Begin.

        Args:
            txn: The transaction.
            tables: Handles by name.
            most: About so many deletes.
        """
        self._txn = txn
        self._tables = tables
        self._room = most
        self._records = 0
        self.gone: list[bytes] = []

    def remove(self, keys: Sequence[bytes]) -> Removal:
        """Remove as many as there is room for.

        Raises:
            Unavailable: ``store_corrupt``: a header can't be read.
        """
        left: list[bytes] = []
        for index, key in enumerate(keys):
            if self._room < _OF_ONE_NAME:
                left += keys[index:]
                break
            rest = self._remove(key)
            if rest is not None:
                left.append(rest)
        return Removal(len(self.gone), self._records, left)

    def _remove(self, key: bytes) -> bytes | None:
        """Remove one; when there is no room for all of it, return its new key."""
        invocation = layout.invocation_of(key)
        txn, tables = self._txn, self._tables
        if txn.get(key, db=tables[GC]) is None or txn.get(invocation, db=tables[OPEN]) is not None:
            return None
        value = txn.get(invocation, db=tables[INV])
        if value is not None:
            self._erase_name(layout.unseal_header(invocation, value))
        self._erase_records(invocation)
        if self._room >= _REST:
            self._delete(SNAP, invocation)
            self._delete(GC, key)
            return None
        begun = layout.removal_key(invocation)
        if key != begun:
            self._delete(GC, key)
            txn.put(begun, layout.seal(begun, b""), db=tables[GC])
        return begun

    def _erase_name(self, header: Header) -> None:
        """Remove header, name and key; not those that belong to another one by now."""
        held = [(NAME, header.name.encode())]
        if header.key is not None:
            held.append((KEY, layout.key_key(header.agent, header.key)))
        for table, key in held:
            if self._txn.get(key, db=self._tables[table]) == layout.seal(key, header.id):
                self._delete(table, key)
        self._delete(INV, header.id)
        self.gone.append(header.id)

    def _erase_records(self, invocation: bytes) -> None:
        cursor = self._txn.cursor(self._tables[JOURNAL])
        found = cursor.set_range(layout.journal_key(invocation, MAX_NUMBER))
        found = cursor.prev() if found else cursor.last()
        keys: list[bytes] = []
        while found and len(keys) < self._room and cursor.key()[:ID_BYTES] == invocation:
            keys.append(cursor.key())
            found = cursor.prev()
        for key in keys:
            self._delete(JOURNAL, key)
        self._records += len(keys)

    def _delete(self, table: str, key: bytes) -> None:
        if self._txn.delete(key, db=self._tables[table]):
            self._room -= 1
