"""What has changed between two definitions of an agent (`hayata.definition` makes them), in words."""

from __future__ import annotations

import msgspec

EMPTY = msgspec.Raw(b"\x80")
"""The definition of an invocation that was started before definitions were stored."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(dict[str, str]).decode
_WORDS = {"nodes": "node {}", "state": "state.{}", "merge": "the merge of state.{}", "types": "type {}"}


def encode_definition(definition: dict[str, str]) -> msgspec.Raw:
    """Encode a manifest's definition as it is stored."""
    return msgspec.Raw(_encode(definition))


def changes(before: msgspec.Raw, after: msgspec.Raw) -> list[str]:
    """Say what is gone, new or otherwise in ``after``; nothing when ``before`` is not known."""
    if bytes(before) in (bytes(EMPTY), bytes(after)):
        return []
    old, new = _decode(before), _decode(after)
    return [
        _change(path, old.get(path), new.get(path))
        for path in [*old, *(path for path in new if path not in old)]
        if old.get(path) != new.get(path)
    ]


def _change(path: str, old: str | None, new: str | None) -> str:
    section, _, name = path.partition(".")
    what = _WORDS.get(section, section + " {}").format(name)
    if new is None:
        return f"{what} is gone"
    if old is None:
        return f"{what} is new"
    return f"{what} has other fields" if section == "types" else f"{what} was {old}, is {new}"
