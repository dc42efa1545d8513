"""What one read transaction can tell. Values are copied and their checksums verified; nothing outlives it."""

from __future__ import annotations

from collections.abc import Mapping

import lmdb

from hayata_supervisor.store import layout
from hayata_supervisor.store.interface import Ended, Header, Loaded
from hayata_supervisor.store.layout import GC, ID_BYTES, INV, JOURNAL, OPEN, SESSION, SNAP


class Reader:
    """Look-ups in one snapshot of the store.

    Raises (any method): `hayata.errors.Unavailable` with ``store_corrupt``, naming the record.
    """

    def __init__(self, txn: lmdb.Transaction[bytes], tables: Mapping[str, lmdb._Database]) -> None:
        """Look into ``txn``."""
        self._txn = txn
        self._tables = tables

    def header(self, invocation: bytes) -> Header | None:
        """One header."""
        if len(invocation) != ID_BYTES:
            return None
        value = self._txn.get(invocation, db=self._tables[INV])
        return None if value is None else layout.unseal_header(invocation, value)

    def holder(self, table: str, key: bytes) -> Header | None:
        """The header of the invocation that holds a name or a key."""
        invocation = self._body(table, key)
        if invocation is None:
            return None
        return self._header_of(invocation, table, key)

    def memory(self, agent: str, session: str) -> bytes | None:
        """A session's messages."""
        return self._body(SESSION, layout.session_key(agent, session))

    def load(self, header: Header) -> Loaded:
        """Everything that recovery needs of one invocation."""
        number, snapshot = 0, None
        value = self._txn.get(header.id, db=self._tables[SNAP])
        if value is not None:
            number, snapshot = layout.unseal_snapshot(header.id, value)
        records = self.records(header.id, number + 1)
        return Loaded(header, number, snapshot, records, self.memory(header.agent, header.session))

    def load_open(self, after: bytes, most: int) -> list[Loaded]:
        """The open invocations that follow the id ``after``."""
        cursor = self._txn.cursor(self._tables[OPEN])
        loaded: list[Loaded] = []
        found = cursor.set_range(after + b"\0")
        while found and len(loaded) < most:
            invocation, value = cursor.item()
            layout.unseal(OPEN, invocation, value)
            loaded.append(self.load(self._header_of(invocation, OPEN, invocation)))
            found = cursor.next()
        return loaded

    def records(self, invocation: bytes, first: int, most: int | None = None) -> list[tuple[int, bytes]]:
        """At most ``most`` records from number ``first`` on; a gap is damage."""
        records: list[tuple[int, bytes]] = []
        if len(invocation) != ID_BYTES or first > layout.MAX_NUMBER:
            return records
        number = max(first, 1)
        cursor = self._txn.cursor(self._tables[JOURNAL])
        if not cursor.set_range(layout.journal_key(invocation, number)):
            return records
        for key, value in cursor:
            if key[:ID_BYTES] != invocation or len(records) == most:
                break
            if layout.number_of(key) != number:
                missing = layout.journal_key(invocation, number)
                raise layout.corrupt(JOURNAL, missing, "it is missing, and later ones are there")
            records.append((number, layout.unseal(JOURNAL, key, value)))
            number += 1
        return records

    def headers(self, before: bytes | None, most: int, wanted: Mapping[str, str]) -> tuple[list[Header], bytes | None]:
        """Look at the ``most`` headers before the id ``before``, newest first (None: from the newest on).

        Returns:
            Those whose fields are as ``wanted``, and the id to go on from, None at the end.
        """
        cursor = self._txn.cursor(self._tables[INV])
        if before is None:
            found = cursor.last()
        else:
            found = cursor.prev() if cursor.set_range(before) else cursor.last()
        # Strings lie in msgpack as they are, so that most of what doesn't match needn't be decoded.
        needles = [text.encode() for text in wanted.values()]
        matching: list[Header] = []
        while found:
            key, value = cursor.item()
            if all(needle in value for needle in needles):
                header = layout.unseal_header(key, value)
                if all(getattr(header, field) == text for field, text in wanted.items()):
                    matching.append(header)
            most -= 1
            if most == 0:
                return matching, key
            found = cursor.prev()
        return matching, None

    def ended(self, after: bytes, before_s: float, most: int) -> list[Ended]:
        """The ``most`` ended invocations behind the key ``after``, as `Store.ended` says."""
        end = layout.gc_key(max(before_s, 0.0), b"")
        ended: list[Ended] = []
        cursor = self._txn.cursor(self._tables[GC])
        found = cursor.set_range(after + b"\0") if after else cursor.first()
        while found and len(ended) < most:
            key, value = cursor.item()
            invocation = layout.invocation_of(key)
            if key >= end and key != layout.removal_key(invocation):
                break
            layout.unseal(GC, key, value)
            ended.append(Ended(key, self.header(invocation)))
            found = cursor.next()
        return ended

    def _body(self, table: str, key: bytes) -> bytes | None:
        if not key or len(key) > layout.MAX_KEY_BYTES:
            return None
        value = self._txn.get(key, db=self._tables[table])
        return None if value is None else layout.unseal(table, key, value)

    def _header_of(self, invocation: bytes, table: str, key: bytes) -> Header:
        header = self.header(invocation)
        if header is None:
            raise layout.corrupt(table, key, f"it names invocation {invocation.hex()}, which isn't there")
        return header
