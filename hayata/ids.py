"""Identifiers: names that people choose, and ids that sort by time.

An invocation has an internal id (UUIDv7, 16 bytes, the store's key) and a name: what the client sent, or the
internal id in hexadecimal. An execution id is ``<internal id in hex>.<step>.<attempt>``, that of one of its edges
``<internal id in hex>.<step>-<edge>.<attempt>``: it can be taken apart without a look-up, and is never used twice.
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from hayata.errors import HayataError, error_for

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@/+=~-]{0,127}\Z", re.ASCII)


class Execution(NamedTuple):
    """What an execution id says: which invocation, which step, which attempt; which edge, -1 for none."""

    invocation: bytes
    step: int
    attempt: int
    edge: int = -1


def check_name(what: str, name: object, *, code: str = "invalid_options") -> str:
    """Return ``name`` if it can name an agent, node, session or invocation.

    Args:
        what: What is named, for the message.
        name: 1 to 128 ASCII characters: letters, digits and ``_.:@/+=~-``, the first a letter, digit or ``_``.
        code: Code of the error.

    Raises:
        HayataError: It can't be a name.
    """
    if isinstance(name, str) and _NAME.match(name):
        return name
    raise name_error(what, name, code)


def name_error(what: str, name: object, code: str) -> HayataError:
    """Say why ``name`` can't be a name."""
    shown = repr(name) if len(repr(name)) <= 60 else repr(name)[:57] + "..."
    return error_for(
        code,
        f"{what} can't be {shown}",
        details={"field": what},
        hint="1 to 128 ASCII characters: letters, digits and _.:@/+=~- ; the first a letter, a digit or _",
    )


def new_uuid7(unix_ms: int) -> bytes:
    """Make a UUIDv7 (RFC 9562): 48 bits of milliseconds, then random bits."""
    value = bytearray(unix_ms.to_bytes(6, "big") + os.urandom(10))
    value[6] = 0x70 | (value[6] & 0x0F)
    value[8] = 0x80 | (value[8] & 0x3F)
    return bytes(value)


class RisingIds:
    """UUIDv7s of one process that rise also within a millisecond, and when the clock steps back: the twelve bits
    after the time count (RFC 9562, 6.2, method 1).
    """

    def __init__(self) -> None:
        self._last = (0, 0)

    def new(self, unix_ms: int) -> bytes:
        """The next one."""
        milliseconds, count = self._last
        if unix_ms > milliseconds:
            milliseconds, count = unix_ms, 0
        elif count == 0xFFF:
            milliseconds, count = milliseconds + 1, 0
        else:
            count += 1
        self._last = (milliseconds, count)
        value = bytearray(new_uuid7(milliseconds))
        value[6] = 0x70 | count >> 8
        value[7] = count & 0xFF
        return bytes(value)


def execution_id(invocation: bytes, step: int, attempt: int, edge: int = -1) -> str:
    """Name one attempt of one step, or of one of its edges."""
    return f"{invocation.hex()}.{step}.{attempt}" if edge < 0 else f"{invocation.hex()}.{step}-{edge}.{attempt}"


def parse_execution_id(text: str) -> Execution | None:
    """Take an execution id apart; None when it isn't one."""
    parts = text.split(".")
    if len(parts) != 3 or len(parts[0]) != 32:
        return None
    step, dash, edge = parts[1].partition("-")
    if dash and not edge.isdecimal():
        return None
    try:
        return Execution(bytes.fromhex(parts[0]), int(step), int(parts[2]), int(edge) if dash else -1)
    except ValueError:
        return None
