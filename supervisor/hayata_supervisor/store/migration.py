"""From an older schema to this one.

A store says in ``meta`` which schema it has. A version of Hayata that knows a newer one brings it there when
it opens it, in the very transaction in which it counts itself as the newest owner: a crash on the way leaves
the store as it was, for the old version and the new one alike. Afterwards the old version refuses it.

A change to what is stored raises `layout.SCHEMA` and adds its step here, with a test that opens a store which
the version before has written. A step is never changed once it was released.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

import lmdb

from hayata_supervisor.store import layout

OpenTable: TypeAlias = "Callable[[str], lmdb._Database]"
"""Gives the handle of a table; a table that is not there is made."""

Migration: TypeAlias = "Callable[[lmdb.Transaction[bytes], OpenTable], None]"
"""Changes everything from one schema to the next, in the transaction it is given. It may be called again with
another transaction, when the first one had no room in the map."""

MIGRATIONS: Final[dict[int, Migration]] = {}
"""Schema → what makes the next one of it."""


def is_known(schema: int) -> bool:
    """Whether a store of this schema can be used, migrated if need be."""
    return schema <= layout.SCHEMA and all(step in MIGRATIONS for step in range(schema, layout.SCHEMA))


def migrate(txn: lmdb.Transaction[bytes], open_table: OpenTable, schema: int) -> None:
    """Bring a store of a known ``schema`` to `layout.SCHEMA`."""
    if schema == layout.SCHEMA:
        return
    for step in range(schema, layout.SCHEMA):
        MIGRATIONS[step](txn, open_table)
    key = b"schema"
    body = layout.SCHEMA.to_bytes(layout.META_NUMBER_BYTES, "big")
    txn.put(key, layout.seal(key, body), db=open_table(layout.META))
