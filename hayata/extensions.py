"""The msgpack extension types: what keeps a tuple, a set or a moment from coming back as something else.

Each payload is itself msgpack and needs nothing from outside, so that the supervisor can move values around
without reading them. The codes are part of the stored format: never reuse one.

| code | type | payload |
|---|---|---|
| 1, 2, 3 | tuple, set, frozenset | array of the elements; a set's are sorted by their bytes |
| 4 | naive datetime | year, month, day, hour, minute, second, microsecond, fold |
| 5 | aware datetime | the same, then offset in µs, name of a fixed offset, key of a `zoneinfo.ZoneInfo` |
| 6 | date | year, month, day |
| 7 | time | hour, minute, second, microsecond, fold; if aware then as for 5 |
| 8 | timedelta | days, seconds, microseconds |
| 9, 10 | Decimal, UUID | its text; its 16 bytes |
| 11 | Enum member | module, qualified name, value |
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from enum import Enum, EnumMeta
from types import ModuleType
from typing import Any
from uuid import UUID

import msgspec
from msgspec.msgpack import Ext

from hayata.scripts import imported_module, portable_module_name

TUPLE, SET, FROZENSET = 1, 2, 3
NAIVE, AWARE, DATE, TIME, TIMEDELTA = 4, 5, 6, 7, 8
DECIMAL, UUID_CODE, ENUM = 9, 10, 11

_MICROSECOND = timedelta(microseconds=1)
_encode = msgspec.msgpack.Encoder().encode


# ---------------------------------------------------------------------------------------------------- writing


def pack_tuple(elements: list[Any]) -> Ext:
    """``elements`` are lowered."""
    return Ext(TUPLE, _encode(elements))


def pack_set(elements: Iterable[Any], code: int) -> Ext:
    """``elements`` are lowered. Equal sets give equal bytes, whatever the hash seed: inputs are compared by
    digest.
    """
    encoded = sorted(map(_encode, elements))
    return Ext(code, _encode([msgspec.Raw(element) for element in encoded]))


def pack_enum(member: Enum, value: Any) -> Ext:
    """``value`` is the member's value, lowered."""
    kind = type(member)
    module_name = kind.__module__
    if _lookup(sys.modules.get(module_name), kind.__qualname__) is kind:  # else it came here by value
        module_name = portable_module_name(module_name)
    return Ext(ENUM, _encode([module_name, kind.__qualname__, value]))


def pack_datetime(value: datetime) -> Ext:
    """Keep the wall time, the fold and the zone, not only the instant.

    Raises:
        ValueError: A subclass that holds more than a datetime does.
    """
    zone = value.tzinfo
    base = datetime(
        value.year,
        value.month,
        value.day,
        value.hour,
        value.minute,
        value.second,
        value.microsecond,
        zone,
        fold=value.fold,
    )
    if type(value) is not datetime and not bool(base == value):
        raise ValueError(f"a {type(value).__name__} that is more precise than a datetime")
    parts = [*base.timetuple()[:6], base.microsecond, base.fold]
    if zone is None:
        return Ext(NAIVE, _encode(parts))
    return Ext(AWARE, _encode([*parts, *_zone_parts(zone, base.utcoffset())]))


def pack_time(value: time) -> Ext:
    """Keep the fold and the zone."""
    parts: list[Any] = [value.hour, value.minute, value.second, value.microsecond, value.fold]
    if value.tzinfo is not None:
        parts += _zone_parts(value.tzinfo, value.utcoffset())
    return Ext(TIME, _encode(parts))


def pack_date(value: date) -> Ext:
    """A calendar day."""
    return Ext(DATE, _encode([value.year, value.month, value.day]))


def pack_timedelta(value: timedelta) -> Ext:
    """A duration.

    Raises:
        ValueError: A subclass that holds more than a timedelta does.
    """
    if type(value) is not timedelta and timedelta(value.days, value.seconds, value.microseconds) != value:
        raise ValueError(f"a {type(value).__name__} that is more precise than a timedelta")
    return Ext(TIMEDELTA, _encode([value.days, value.seconds, value.microseconds]))


def pack_decimal(value: Decimal) -> Ext:
    """Keep exponent, sign of zero and signalling NaN."""
    return Ext(DECIMAL, _encode(Decimal.__str__(value)))


def pack_uuid(value: UUID) -> Ext:
    """Sixteen bytes."""
    return Ext(UUID_CODE, value.bytes)


def _zone_parts(zone: tzinfo, offset: timedelta | None) -> list[Any]:
    """Describe a zone: a fixed offset with its name, a ZoneInfo by its key, any other zone by its offset of
    the moment.

    Raises:
        ValueError: The zone can't be described.
    """
    if isinstance(zone, timezone):
        name = zone.tzname(None) if len(_init_args(zone)) == 2 else None
        return [zone.utcoffset(None) // _MICROSECOND, name, None]
    zoneinfo = sys.modules.get("zoneinfo")
    key = zone.key if zoneinfo is not None and isinstance(zone, zoneinfo.ZoneInfo) else None
    if offset is None and key is None:
        raise ValueError(f"a time zone of type {type(zone).__name__} that gives no offset")
    return [None if offset is None else offset // _MICROSECOND, None, key]


def _init_args(zone: timezone) -> tuple[Any, ...]:
    """What the zone was made with: the only public-ish way to tell a given name from a derived one
    (pickle's).
    """
    args: tuple[Any, ...] = zone.__getinitargs__()  # type: ignore[attr-defined]
    return args


# ---------------------------------------------------------------------------------------------------- reading


def unpacker(decode: Callable[[Any], Any]) -> Callable[[int, memoryview], Any]:
    """Make the ``ext_hook`` of a decoder.

    Args:
        decode: Reads nested values; the decoder's own ``decode``.
    """

    def unpack(code: int, payload: memoryview) -> Any:
        if code == UUID_CODE:
            return UUID(bytes=bytes(payload))
        reader = _READERS.get(code)
        if reader is None:
            raise ValueError(f"there is no extension type {code}")
        return reader(decode(payload))

    return unpack


def _read_naive(parts: list[Any]) -> datetime:
    year, month, day, hour, minute, second, microsecond, fold = parts[:8]
    return datetime(year, month, day, hour, minute, second, microsecond, fold=fold)


def _read_aware(parts: list[Any]) -> datetime:
    return _read_naive(parts).replace(tzinfo=_read_zone(*parts[8:]))


def _read_time(parts: list[Any]) -> time:
    zone = _read_zone(*parts[5:]) if len(parts) > 5 else None
    hour, minute, second, microsecond, fold = parts[:5]
    return time(hour, minute, second, microsecond, zone, fold=fold)


def _read_zone(offset: int | None, name: str | None, key: str | None) -> tzinfo:
    if key is not None:
        from zoneinfo import ZoneInfo

        try:
            return ZoneInfo(key)
        except (
            KeyError,
            OSError,
            ValueError,
        ):  # this machine's zone data lacks it: the offset still gives the instant
            if offset is None:
                raise
    if offset is None:
        raise ValueError("a zone without an offset")
    return timezone(timedelta(microseconds=offset)) if name is None else timezone(timedelta(microseconds=offset), name)


def _read_enum(parts: list[Any]) -> Any:
    """The member; its plain value when this process has not imported its class. Never imports, calls Enums
    only.
    """
    module_name, qualified_name, value = parts
    found = _lookup(imported_module(module_name), qualified_name)
    if not isinstance(found, EnumMeta):
        return value
    try:
        return found(value)
    except ValueError:  # the class has lost this member
        return value


def _lookup(module: ModuleType | None, qualified_name: str) -> Any:
    found: Any = module
    for name in qualified_name.split("."):
        found = getattr(found, "__dict__", {}).get(name)  # not getattr: a module's __getattr__ may import
    return found


_READERS: dict[int, Callable[[Any], Any]] = {
    TUPLE: tuple,
    SET: set,
    FROZENSET: frozenset,
    NAIVE: _read_naive,
    AWARE: _read_aware,
    DATE: lambda parts: date(*parts),
    TIME: _read_time,
    TIMEDELTA: lambda parts: timedelta(*parts),
    DECIMAL: Decimal,
    ENUM: _read_enum,
}
