"""Round-trip encoding of users' values: what goes into the store comes out equal and of the same type.

Stored: None, bool, int (64 bits: -2**63 … 2**64-1), float (NaN and infinities too), str, bytes, list, dict
with keys of these scalar types, tuple, set, frozenset, datetime, date, time, timedelta, Decimal, UUID and
Enum members. Anything else is refused at the moment of writing, with the path of the culprit:
`state.customer.tags[3]`.

Deliberately not kept: an instance of a *subclass* comes back as the plain type it equals (defaultdict → dict,
namedtuple → tuple, numpy.float64 → float), a bytearray as bytes, a read-only view of a mapping as dict. A
zone that is neither a fixed offset nor a `zoneinfo.ZoneInfo` becomes the offset of the moment. An Enum member
comes back as its value where its class is not imported.

The supervisor merges encoded values without decoding them, so that every value is self-contained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from itertools import repeat
from types import MappingProxyType
from typing import Any, NoReturn
from uuid import UUID

import msgspec

from hayata import extensions as ext
from hayata.errors import HayataError, error_for
from hayata.messages import Update

MAX_DEPTH = 200
"""Containers within containers. Far below what interpreters' stacks allow: every process can read it."""

Declared = Mapping[type, Callable[[Any], Any]]
"""Class → what turns its instances into builtins, one level deep (`hayata.state_types`)."""

_ATOMS: frozenset[type] = frozenset({str, int, float, bool, type(None), bytes})
_NONE_DECLARED: Declared = {}

_encode = msgspec.msgpack.Encoder().encode


def encode(value: Any, path: str = "value", declared: Declared = _NONE_DECLARED) -> bytes:
    """Encode one value.

    Args:
        value: See the module's text.
        path: What the value is, for errors.
        declared: Classes whose instances are allowed, as the builtins they are made of. A dump function that
            raises ValueError refuses the instance.

    Raises:
        HayataError: ``unserializable_value``; details ``path`` and ``type``.
    """
    try:
        if _is_plain(value, MAX_DEPTH - 1):
            return _encode(value)
        return _encode(_Lowering(path, declared, strict=False).lower(value))
    except HayataError:
        raise
    except RecursionError:
        raise _refusal(path, value, "it is nested too deep") from None
    except Exception as error:
        if isinstance(error, OverflowError | UnicodeEncodeError):  # some int or str: look for its path
            _Lowering(path, declared, strict=True).lower(value)
        raise _refusal(path, value, f"reading it raised {type(error).__name__}") from error


def decode(raw: bytes | bytearray | memoryview | msgspec.Raw) -> Any:
    """Decode what `encode` made. Safe for bytes from anywhere: it runs no code but that of Enums already
    imported.

    Raises:
        HayataError: ``unserializable_value``: these bytes are not a value.
    """
    try:
        return _decode(raw)
    except Exception as error:  # noqa: BLE001 - hostile bytes make constructors raise anything
        reason = "it is nested too deep" if isinstance(error, RecursionError) else str(error)
        raise error_for(
            "unserializable_value",
            f"these bytes are not a value: {reason}",
            details={"path": "value", "type": "bytes"},
        ) from None


_decode: Callable[[Any], Any] = msgspec.msgpack.Decoder(ext_hook=ext.unpacker(lambda payload: _decode(payload))).decode


def encode_mapping(mapping: Mapping[str, Any], path: str, declared: Declared = _NONE_DECLARED) -> Update:
    """Encode each value of a mapping with str keys.

    Raises:
        HayataError: ``unserializable_value``; the path of a value is ``path`` and its key.
    """
    update: Update = {}
    for key, value in mapping.items():
        if not isinstance(key, str):
            raise _refusal(path, key, f"its key {_shown(key)} is a {type(key).__name__}, not a str")
        name = str.__str__(key)
        if not _is_unicode(name):
            raise _refusal(path, key, f"its key {_shown(key)} holds a lone surrogate")
        update[name] = msgspec.Raw(encode(value, path + _step(name), declared))
    return update


def decode_mapping(update: Update) -> dict[str, Any]:
    """Decode each value; the inverse of `encode_mapping`."""
    return {key: decode(raw) for key, raw in update.items()}


def _is_plain(value: Any, room: int) -> bool:
    """Whether msgspec encodes ``value`` as it is without loss. Each container's elements are checked at C
    speed.
    """
    kind = type(value)
    if kind is dict:
        if not _ATOMS.issuperset(map(type, value)):
            return False
        elements = value.values()
    elif kind is list:
        elements = value
    else:
        return kind in _ATOMS
    if _ATOMS.issuperset(map(type, elements)):
        return True
    return room > 0 and all(map(_is_plain, elements, repeat(room - 1)))


class _Lowering:
    """One walk over a value: makes of it what msgspec encodes without loss; knows the path when it can't."""

    def __init__(self, root: str, declared: Declared, *, strict: bool) -> None:
        self._root = root
        self._declared = declared
        self._strict = strict
        self._steps: list[Any] = []
        self._above: list[int] = []

    def lower(self, value: Any) -> Any:
        kind = type(value)
        if kind in _ATOMS:
            if self._strict:
                self._check_atom(value)
            return value
        lowering = _LOWERINGS.get(kind) or self._declared_lowering(kind)
        if lowering is None:
            lowering = next((made for base, made in _LOWERINGS.items() if isinstance(value, base)), None)
            if lowering is None:
                self._refuse(value, *_why_not(value))
        try:
            return lowering(self, value)
        except ValueError as error:
            if isinstance(error, UnicodeEncodeError):
                raise
            self._refuse(value, str(error))

    def _declared_lowering(self, kind: type) -> Callable[[_Lowering, Any], Any] | None:
        if self._declared:
            for base in kind.__mro__:
                dump = self._declared.get(base)
                if dump is not None:
                    return lambda walk, value: walk.dumped(value, dump)
        return None

    def dumped(self, value: Any, dump: Callable[[Any], Any]) -> Any:
        with self._entered(value):
            return self.lower(dump(value))

    def mapping(self, value: Mapping[Any, Any]) -> dict[Any, Any]:
        lowered = {}
        with self._entered(value):
            for key, item in value.items():
                self._steps.append(key)
                lowered[self._key(value, key)] = self.lower(item)
                self._steps.pop()
        return lowered

    def elements(self, value: Any) -> list[Any]:
        lowered = []
        with self._entered(value):
            for index, item in enumerate(value):
                self._steps.append(index)
                lowered.append(self.lower(item))
                self._steps.pop()
        return lowered

    def member(self, value: Enum) -> Any:
        with self._entered(value):
            return ext.pack_enum(value, self.lower(value.value))

    def _key(self, mapping: Any, key: Any) -> Any:
        if type(key) not in _ATOMS:
            if isinstance(key, Enum) or not isinstance(key, str | int | float | bytes):
                self._steps.pop()
                self._refuse(
                    mapping,
                    f"its key {_shown(key)} is a {type(key).__name__}",
                    "keys are str, int, float, bool, None or bytes",
                )
            key = self.lower(key)
        if self._strict:
            self._check_atom(key)
        return key

    @contextmanager
    def _entered(self, value: Any) -> Iterator[None]:
        if len(self._above) >= MAX_DEPTH:
            circular = id(value) in self._above
            why = "it refers to itself" if circular else f"it is nested more than {MAX_DEPTH} deep"
            del self._steps[8:]
            self._refuse(value, why)
        self._above.append(id(value))
        yield
        self._above.pop()

    def _check_atom(self, value: Any) -> None:
        if type(value) is int and not -(1 << 63) <= value < 1 << 64:
            self._refuse(value, "it needs more than 64 bits", "store it as a str or as bytes")
        if type(value) is str and not _is_unicode(value):
            self._refuse(
                value,
                "it is text with a lone surrogate",
                "encode it with errors='surrogateescape' and store bytes",
            )

    def _refuse(self, value: Any, why: str, hint: str = "") -> NoReturn:
        path = self._root + "".join(map(_step, self._steps))
        raise _refusal(path, value, why, hint)


_LOWERINGS: dict[type, Callable[[_Lowering, Any], Any]] = {
    # An Enum comes first: an IntEnum is an int too. A datetime is a date.
    Enum: _Lowering.member,
    dict: _Lowering.mapping,
    MappingProxyType: _Lowering.mapping,
    list: _Lowering.elements,
    tuple: lambda walk, value: ext.pack_tuple(walk.elements(value)),
    set: lambda walk, value: ext.pack_set(walk.elements(value), ext.SET),
    frozenset: lambda walk, value: ext.pack_set(walk.elements(value), ext.FROZENSET),
    datetime: lambda _, value: ext.pack_datetime(value),
    date: lambda _, value: ext.pack_date(value),
    time: lambda _, value: ext.pack_time(value),
    timedelta: lambda _, value: ext.pack_timedelta(value),
    Decimal: lambda _, value: ext.pack_decimal(value),
    UUID: lambda _, value: ext.pack_uuid(value),
    bytearray: lambda _, value: bytes(value),
    # Subclasses only, as these types themselves are atoms. The base's own method can't be overridden.
    str: lambda walk, value: walk.lower(str.__str__(value)),
    int: lambda walk, value: walk.lower(int.__int__(value)),
    float: lambda _, value: float.__float__(value),
    bytes: lambda _, value: bytes(memoryview(value)),
}

STORED_TYPES: tuple[type, ...] = (*_ATOMS, *_LOWERINGS)
"""What may be stored as it is; instances of their subclasses too."""


def _why_not(value: Any) -> tuple[str, str]:
    """Say why ``value`` can't be stored and what to do: reason, hint."""
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    what = f"it is of type {name}"
    if hasattr(kind, "get_secret_value"):
        return what, "a secret must not land in the store: read it in the node, or make it part of ctx.deps"
    if hasattr(kind, "__struct_fields__") or hasattr(kind, "__dataclass_fields__") or hasattr(kind, "model_fields"):
        return what, "declare it in the agent's state_type, or return a dict"
    if kind.__module__.partition(".")[0] == "numpy":
        return what, "convert it with .tolist()"
    if hasattr(kind, "tolist") or hasattr(kind, "to_dict"):
        return what, "convert it with .tolist() or .to_dict()"
    if callable(value):
        return what, "functions and classes are not values: store a name and look it up in the node"
    if hasattr(kind, "__iter__"):
        return what, "convert it to a list or a dict"
    return what, "convert it to a str, a number, a list or a dict"


def _refusal(path: str, value: Any, why: str, hint: str = "") -> HayataError:
    return error_for(
        "unserializable_value",
        f"{path} can't be stored: {why}",
        details={"path": path, "type": type(value).__qualname__},
        hint=hint,
    )


def _step(key: Any) -> str:
    """One step of a path: ``.name`` or ``[3]`` or ``['two words']``."""
    if isinstance(key, str) and key.isidentifier():
        return f".{key}"
    return f"[{_shown(key)}]"


def _shown(key: Any) -> str:
    try:
        shown = ascii(key)
    except Exception:  # noqa: BLE001 - a user's __repr__
        shown = f"<{type(key).__name__}>"
    return shown if len(shown) <= 60 else shown[:57] + "..."


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
