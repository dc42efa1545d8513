"""A store of schema 1, written as the first version wrote it, by code that nothing of today's changes.

Never edit what is written here: stores like this one exist. A newer schema gets a file of its own.
"""

from __future__ import annotations

import struct
from pathlib import Path
from zlib import crc32

import lmdb
import msgspec

TABLES = ("meta", "inv", "open", "name", "key", "journal", "snap", "session", "gc")
UUID = bytes(range(16))
DONE = bytes.fromhex("018f0000000070008000000000000001")
OPEN = bytes.fromhex("018f0000000070008000000000000002")
LONG = "k" * 300
_LONG_HASH = "68cf043c83e28ba5e9f3c825fc3c3fd21024ffb7ca3772e937488784f5fe36d1"
"""BLAKE2b of it, 32 bytes."""


def write(data_dir: Path) -> None:
    """Write a data directory with one invocation that has ended and one that is open."""
    path = data_dir / "store"
    path.mkdir(parents=True, mode=0o700)
    env = lmdb.open(str(path), map_size=1 << 26, max_dbs=32)
    with env.begin(write=True) as txn:
        tables = {name: env.open_db(name.encode(), txn=txn) for name in TABLES}

        def put(table: str, key: bytes, body: bytes) -> None:
            sealed = struct.pack(">BI", 1, crc32(body, crc32(key))) + body
            txn.put(key, sealed, db=tables[table])

        put("meta", b"schema", (1).to_bytes(8, "big"))
        put("meta", b"uuid", UUID)
        put("meta", b"epoch", (7).to_bytes(8, "big"))
        for id, name, session, key, ended_at in (
            (DONE, "done", "chat", "key", 1700000002.5),
            (OPEN, "open", "~open", LONG, None),
        ):
            put("inv", id, _header(id, name, session, key, ended_at))
            put("name", name.encode(), id)
            for number, record in enumerate(_journal(ended_at), 1):
                put("journal", id + number.to_bytes(4, "big"), record)
        put("key", b"agent\0key", DONE)
        put("key", b"agent\0\xff" + bytes.fromhex(_LONG_HASH), OPEN)
        put("open", OPEN, b"")
        put("gc", int(1700000002.5 * 1000).to_bytes(8, "big") + DONE, b"")
        put("session", b"agent\0chat", msgspec.msgpack.encode([{"role": "user", "content": "hi"}]))
        put("snap", OPEN, (3).to_bytes(4, "big") + _snapshot())
    env.close()
    (data_dir / "store.lock").touch()


def _header(id: bytes, name: str, session: str, key: str, ended_at: float | None) -> bytes:
    status = "running" if ended_at is None else "completed"
    own = session.startswith("~")
    return msgspec.msgpack.encode(
        [id, name, "agent", "1", session, status, False, 1700000000.0, key, b"digest", own, 0,
         1700000001.0, ended_at, None, None]
    )  # fmt: skip


def _journal(ended_at: float | None) -> list[bytes]:
    state = {"log": ["first"], "text": "é"}
    records: list[list[object]] = [
        [1700000001.0, 1, 1, [["accepted", {"go": True}], ["started", {}]]],
        [1700000001.5, 2, 2, [["decided", 0, ["node"], False, None], ["marked", 0, 1, "node", 5]]],
        [1700000002.0, 3, 3, [["completed", 0, 1, "node", state, {}]]],
    ]
    if ended_at is not None:
        records.append([ended_at, 4, 4, [["finished", "result"]]])
    return [msgspec.msgpack.encode(record) for record in records]


def _snapshot() -> bytes:
    task = [0, "node", 1, "completed", None, 0.0, 5]
    return msgspec.msgpack.encode(
        [OPEN, "open", "agent", "1", "~open", True, False, LONG, b"digest", 1700000000.0, None, "running",
         {"go": True}, {"log": ["first"], "text": "é"}, 1, [task], False, None, None, "node", None, None, None,
         1700000001.0, None, 0.0, None, 3, 3, 3]
    )  # fmt: skip
