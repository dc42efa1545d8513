"""How commits become keys and values.

Keys are big-endian, so that a range scan is in the order of ids, numbers or times. Every value is
``version (1) | crc32 of key and body (4) | body``: LMDB has no checksums, a flipped bit in a value passes its
structural checks, and a value under the wrong key is as bad as a damaged one.

| table | key → body |
|---|---|
| meta | ``schema``, ``uuid``, ``epoch`` → number, 16 bytes, number |
| inv | id → msgpack of `Header` |
| open | id → nothing; recovery scans only this |
| name | name → id |
| key | agent NUL key → id |
| journal | id · number → record |
| snap | id → number · snapshot |
| session | agent NUL session → messages |
| gc | end time in ms · id → nothing; the time is 0 once its removal has begun, and the entry goes last |
"""

from __future__ import annotations

import hashlib
import struct
from typing import Final
from zlib import crc32

import msgspec

from hayata.errors import Unavailable
from hayata_supervisor.store.interface import Header

SCHEMA: Final = 1
META, INV, OPEN, NAME, KEY, JOURNAL, SNAP, SESSION, GC = TABLES = (
    "meta", "inv", "open", "name", "key", "journal", "snap", "session", "gc",
)  # fmt: skip

ID_BYTES: Final = 16
NUMBER_BYTES: Final = 4
META_NUMBER_BYTES: Final = 8
MAX_NUMBER: Final = 2**32 - 1
MAX_KEY_BYTES: Final = 511
"""LMDB's limit."""

_VERSION = 1
_head = struct.Struct(">BI").pack
_HEAD_BYTES = 5
_LONGEST_PLAIN_KEY_BYTES = 255
_TIME_BYTES = 8
GC_BYTES: Final = _TIME_BYTES + ID_BYTES

encode_header = msgspec.msgpack.Encoder().encode
_header_decoder = msgspec.msgpack.Decoder(Header)


def seal(key: bytes, body: bytes) -> bytes:
    """Make the value that stores ``body`` under ``key``."""
    return _head(_VERSION, crc32(body, crc32(key))) + body


def unseal(table: str, key: bytes, value: bytes) -> bytes:
    """Give the body of a value.

    Raises:
        Unavailable: ``store_corrupt``; the details name the record.
    """
    body = value[_HEAD_BYTES:]
    if value[:_HEAD_BYTES] != _head(_VERSION, crc32(body, crc32(key))):
        raise corrupt(table, key, "its checksum is wrong")
    return body


def unseal_header(invocation: bytes, value: bytes) -> Header:
    """Give the header that a value of ``inv`` holds; errors as `unseal`."""
    try:
        return _header_decoder.decode(unseal(INV, invocation, value))
    except msgspec.DecodeError as problem:
        raise corrupt(INV, invocation, f"it isn't a header: {problem}") from problem


def journal_key(invocation: bytes, number: int) -> bytes:
    """Key of a record.

    Raises:
        ValueError: The id isn't 16 bytes long.
        OverflowError: The number doesn't fit into 32 bits.
    """
    key = invocation + number.to_bytes(NUMBER_BYTES, "big")
    if len(key) != ID_BYTES + NUMBER_BYTES:
        raise ValueError(f"an invocation's id has {ID_BYTES} bytes, not {len(invocation)}")
    return key


def number_of(journal_key: bytes) -> int:
    """The commit number in the key of a record."""
    return int.from_bytes(journal_key[ID_BYTES:], "big")


def key_key(agent: str, key: str) -> bytes:
    """Key of an idempotency key.

    A long one, which LMDB could not take, is stood for by its hash; ``ff`` begins no UTF-8, so that no short
    key can meet it.
    """
    text = key.encode()
    if len(text) > _LONGEST_PLAIN_KEY_BYTES:
        text = b"\xff" + hashlib.blake2b(text, digest_size=32).digest()
    return agent.encode() + b"\0" + text


def session_key(agent: str, session: str) -> bytes:
    """Key of a session's messages."""
    return f"{agent}\0{session}".encode()


def gc_key(ended_at: float | None, invocation: bytes) -> bytes:
    """Key of the entry that retention walks; ``ended_at`` in seconds.

    Raises:
        ValueError: There is no end time.
    """
    if ended_at is None:
        raise ValueError("an invocation that leaves the open set needs ended_at in its header")
    return int(ended_at * 1000).to_bytes(_TIME_BYTES, "big") + invocation


def removal_key(invocation: bytes) -> bytes:
    """Key of the entry in ``gc`` of an invocation whose removal has begun: before all others."""
    return bytes(_TIME_BYTES) + invocation


def invocation_of(gc_key: bytes) -> bytes:
    """The invocation in a key of ``gc``."""
    return gc_key[_TIME_BYTES:]


def snapshot_body(number: int, snapshot: bytes) -> bytes:
    """Body of a snapshot taken after commit ``number``."""
    return number.to_bytes(NUMBER_BYTES, "big") + snapshot


def unseal_snapshot(invocation: bytes, value: bytes) -> tuple[int, bytes]:
    """Number and bytes of a stored snapshot; errors as `unseal`."""
    return split_snapshot(unseal(SNAP, invocation, value))


def split_snapshot(body: bytes) -> tuple[int, bytes]:
    """Take apart what `snapshot_body` has made."""
    return int.from_bytes(body[:NUMBER_BYTES], "big"), body[NUMBER_BYTES:]


def corrupt(table: str, key: bytes, why: str) -> Unavailable:
    """Say that a record can't be trusted, and which one."""
    record = describe(table, key)
    return Unavailable(
        "store_corrupt",
        f"the store has a record that can't be trusted: {record}: {why}",
        details={"table": table, "key": key.hex(), "record": record},
        hint="nothing was changed; restore a backup, or copy the data directory away before anything else",
    )


def describe(table: str, key: bytes) -> str:
    """Name a record for a person."""
    if table == JOURNAL and len(key) == ID_BYTES + NUMBER_BYTES:
        return f"journal of invocation {key[:ID_BYTES].hex()}, number {number_of(key)}"
    if table in (INV, OPEN, SNAP):
        return f"{table} of invocation {key.hex()}"
    if table == GC and len(key) == GC_BYTES:
        return f"gc of invocation {invocation_of(key).hex()}"
    return f"{table} of {key.decode(errors='backslashreplace')!r}"
