"""Commits for tests of the store."""

from __future__ import annotations

from typing import Any

from hayata.ids import new_uuid7
from hayata_supervisor.store.interface import Commit, Header


def new_id(ms: int) -> bytes:
    """An id that sorts by ``ms``."""
    return new_uuid7(ms)


def header(invocation: bytes, name: str, **fields: Any) -> Header:
    """A header with plausible fields."""
    values: dict[str, Any] = {
        "id": invocation,
        "name": name,
        "agent": "agent",
        "version": "1",
        "session": f"session-{name}",
        "status": "running",
        "stream": False,
        "created_at": 1.5,
        "key": None,
        "digest": b"digest",
    }
    return Header(**(values | fields))


def first(invocation: bytes, name: str, record: bytes = b"first", **fields: Any) -> Commit:
    """The commit that creates an invocation."""
    return Commit(invocation, 1, record, header=header(invocation, name, **fields), open=True)


def last(invocation: bytes, name: str, number: int, record: bytes = b"last", **fields: Any) -> Commit:
    """The commit that ends an invocation."""
    ended = header(invocation, name, **({"status": "completed", "ended_at": 9.25} | fields))
    return Commit(invocation, number, record, header=ended, open=False)
