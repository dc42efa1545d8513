"""Merging a node's update into the shared state, on encoded values.

The supervisor never decodes what users store: `append` and `extend` join the bytes behind two array headers, `union`
splits mappings into keys and raw values, `add` reads two numbers. The cost follows the size in bytes, and no value can
be deep or odd enough to hurt.

Source: the reducers of LangGraph's state channels; the format is https://github.com/msgpack/msgpack/blob/master/spec.md
"""

from __future__ import annotations

from typing import Any

import msgspec

from hayata.messages import Update

OPERATIONS = frozenset({"replace", "append", "extend", "add", "union"})

_encode = msgspec.msgpack.Encoder().encode
_decode_number = msgspec.msgpack.Decoder(int | float).decode
_decode_mapping: Any = msgspec.msgpack.Decoder(dict[str | int | float | bool | None, msgspec.Raw]).decode


class MergeRefused(Exception):
    """The update doesn't fit the state; ``path`` names the key."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(f"{path}: {message}")
        self.path = path
        self.message = message


def merge(state: Update, update: Update, operations: dict[str, str]) -> Update:
    """Return the state after ``update``; neither argument is changed.

    Args:
        state: The shared state.
        update: What a node returned.
        operations: Key → one of `OPERATIONS`; a key that isn't named is replaced.

    Raises:
        MergeRefused: A value isn't of the kind that its operation needs.
    """
    if not operations:
        return {**state, **update}
    merged = dict(state)
    for key, value in update.items():
        operation = operations.get(key, "replace")
        old = state.get(key)
        if operation == "replace":
            merged[key] = value
        else:
            merged[key] = msgspec.Raw(_combine(operation, f"state.{key}", old, value))
    return merged


def relevant(update: Update, operations: dict[str, str]) -> dict[str, str]:
    """The part of ``operations`` that ``update`` uses: what a fact must remember."""
    if not operations:
        return {}
    return {key: operations[key] for key in update if operations.get(key, "replace") != "replace"}


def _combine(operation: str, path: str, old: msgspec.Raw | None, new: msgspec.Raw) -> bytes:
    match operation:
        case "append":
            if old is None:
                return b"\x91" + bytes(new)
            count, body = _array(old, path)
            return _array_header(count + 1) + body + bytes(new)
        case "extend":
            more, added = _array(new, path)
            if old is None:
                return bytes(new)
            count, body = _array(old, path)
            return _array_header(count + more) + body + added
        case "add":
            return _add(old, new, path)
        case "union":
            added_keys = _mapping(new, path)
            if old is None:
                return bytes(new)
            return _encode({**_mapping(old, path), **added_keys})
    raise MergeRefused(path, f"there is no merge operation {operation!r}")


def _array(raw: msgspec.Raw, path: str) -> tuple[int, bytes]:
    """Split an encoded array into its length and the bytes of its elements."""
    data = bytes(raw)
    first = data[0] if data else 0xC1
    if 0x90 <= first <= 0x9F:
        return first & 0x0F, data[1:]
    if first == 0xDC:
        return int.from_bytes(data[1:3], "big"), data[3:]
    if first == 0xDD:
        return int.from_bytes(data[1:5], "big"), data[5:]
    raise MergeRefused(path, f"append and extend need a list, this is {_kind(first)}")


def _array_header(count: int) -> bytes:
    if count < 16:
        return bytes((0x90 | count,))
    if count < 1 << 16:
        return b"\xdc" + count.to_bytes(2, "big")
    return b"\xdd" + count.to_bytes(4, "big")


def _add(old: msgspec.Raw | None, new: msgspec.Raw, path: str) -> bytes:
    addend = _number(new, path)
    if old is None:
        return bytes(new)
    total = _number(old, path) + addend
    try:
        return _encode(total)
    except OverflowError:
        raise MergeRefused(path, "the sum needs more than 64 bits") from None


def _number(raw: msgspec.Raw, path: str) -> int | float:
    try:
        number: int | float = _decode_number(raw)
    except msgspec.MsgspecError:
        raise MergeRefused(path, f"add needs a number, this is {_kind(bytes(raw)[0])}") from None
    return number


def _mapping(raw: msgspec.Raw, path: str) -> dict[Any, msgspec.Raw]:
    try:
        mapping: dict[Any, msgspec.Raw] = _decode_mapping(raw)
    except msgspec.MsgspecError:
        raise MergeRefused(
            path, f"union needs a mapping with keys of text or numbers, this is {_kind(bytes(raw)[0])}"
        ) from None
    return mapping


def _kind(first: int) -> str:
    """Name a value by the first byte of its encoding."""
    if first <= 0x7F or first >= 0xE0 or 0xCC <= first <= 0xD3:
        return "an int"
    if 0x80 <= first <= 0x8F or first in (0xDE, 0xDF):
        return "a mapping"
    if 0x90 <= first <= 0x9F or first in (0xDC, 0xDD):
        return "a list"
    if 0xA0 <= first <= 0xBF or first in (0xD9, 0xDA, 0xDB):
        return "a str"
    return {
        0xC0: "None",
        0xC2: "a bool",
        0xC3: "a bool",
        0xC4: "bytes",
        0xC5: "bytes",
        0xC6: "bytes",
        0xCA: "a float",
        0xCB: "a float",
    }.get(first, "another type")
