"""What is stored comes back equal and of the same type, or is refused with its path when it is written."""

from __future__ import annotations

import collections
import contextlib
import enum
import fractions
import math
import random
import sys
from datetime import UTC, datetime, time, timedelta, timezone
from decimal import Decimal
from types import MappingProxyType
from typing import Any
from uuid import UUID, uuid4
from zoneinfo import ZoneInfo

import msgspec
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hayata.errors import HayataError
from hayata.values import MAX_DEPTH, decode, decode_mapping, encode, encode_mapping


class Color(enum.Enum):
    RED = "red"
    PAIR = (1, 2)


class Level(enum.IntEnum):
    LOW = 1


class Word(enum.StrEnum):
    YES = "yes"


class Flags(enum.Flag):
    A = 1
    B = 2


class Outer:
    class Inner(enum.Enum):
        ONE = 1


class Text(str):
    __slots__ = ()


Point = collections.namedtuple("Point", "x y")

TEXTS = st.text(max_size=20)
BYTES = st.binary(max_size=20)
KEYS = st.one_of(
    TEXTS,
    st.integers(-(2**63), 2**64 - 1),
    st.floats(allow_nan=False),
    st.booleans(),
    st.none(),
    BYTES,
)
ZONES = st.one_of(
    st.none(),
    st.sampled_from(["UTC", "Europe/Paris", "America/New_York", "Asia/Kolkata"]).map(ZoneInfo),
    st.integers(-86399, 86399).map(lambda seconds: timezone(timedelta(seconds=seconds))),
    st.just(timezone(timedelta(hours=2), "named")),
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(allow_nan=False),
    TEXTS,
    BYTES,
    st.datetimes(timezones=ZONES, allow_imaginary=True),
    st.dates(),
    st.times(timezones=ZONES),
    st.timedeltas(),
    st.decimals(allow_nan=False),
    st.uuids(),
    st.sampled_from([Color.RED, Color.PAIR, Level.LOW, Word.YES, Flags.A, Flags.A | Flags.B, Outer.Inner.ONE]),
)
HASHABLE = st.recursive(SCALARS, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=4)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
        st.sets(HASHABLE, max_size=3),
        st.frozensets(HASHABLE, max_size=3),
    ),
    max_leaves=12,
)


def same(left: Any, right: Any) -> bool:
    """Equal, and of one type all the way down; for moments also zone and fold."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return list(map(type, left)) == list(map(type, right)) and all(
            key in right and same(value, right[key]) for key, value in left.items()
        )
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, datetime | time):
        return repr(left) == repr(right) and left.fold == right.fold
    return bool(left == right)


@given(VALUES)
@settings(max_examples=400, deadline=None)
def test_any_storable_value_comes_back_the_same(value):
    assert same(decode(encode(value)), value)


@given(VALUES)
@settings(max_examples=100, deadline=None)
def test_encoding_again_what_was_decoded_gives_the_same_bytes(value):
    raw = encode(value)
    assert encode(decode(raw)) == raw


@pytest.mark.parametrize(
    "value",
    [
        2**64 - 1,
        -(2**63),
        -0.0,
        math.inf,
        "",
        b"\x00\xff",
        (),
        ((),),
        frozenset({()}),
        [(), [], {}, set()],
        {None: 1, b"k": 2, "k": 3, 1.5: 4, 7: 5, False: 6},
        datetime(2020, 10, 25, 2, 30, fold=1, tzinfo=ZoneInfo("Europe/Paris")),
        datetime(2020, 1, 1, tzinfo=UTC),
        datetime.max,
        time(1, 2, 3, 4, tzinfo=ZoneInfo("Europe/Paris")),
        timedelta(days=-1, microseconds=1),
        Decimal("-0E+3"),
        Decimal("1.10"),
        UUID(int=0),
        Color.PAIR,
        Level.LOW,
        Word.YES,
        Flags.A | Flags.B,
        Outer.Inner.ONE,
    ],
    ids=repr,
)
def test_round_trip_of_a_corner(value):
    assert same(decode(encode(value)), value)


def test_not_a_number_comes_back_as_not_a_number():
    floats = decode(encode([math.nan, -math.inf]))
    assert math.isnan(floats[0])
    assert floats[1] == -math.inf
    assert str(decode(encode(Decimal("sNaN")))) == "sNaN"


def test_a_bool_key_and_an_int_key_stay_what_they_are():
    assert [type(key) for key in decode(encode({True: 1, 0: 2}))] == [bool, int]


def test_the_name_of_a_fixed_offset_is_kept_and_utc_stays_utc():
    assert repr(decode(encode(datetime.now(timezone(timedelta(0), "GMT")))).tzinfo).endswith("'GMT')")
    assert decode(encode(datetime.now(UTC))).tzinfo is UTC


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (collections.defaultdict(list, a=[1]), {"a": [1]}),
        (collections.OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
        (collections.Counter("aab"), {"a": 2, "b": 1}),
        (Point(1, 2), (1, 2)),
        (Text("t"), "t"),
        ({Text("k"): Text("v")}, {"k": "v"}),
        (type("I", (int,), {})(5), 5),
        (type("F", (float,), {})(0.5), 0.5),
        (type("B", (bytes,), {})(b"x"), b"x"),
        (type("L", (list,), {})([1, (2,)]), [1, (2,)]),
        (bytearray(b"x"), b"x"),
        (MappingProxyType({"a": (1,)}), {"a": (1,)}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_subclass_comes_back_as_the_plain_type_it_equals(value, plain):
    assert same(decode(encode(value)), plain)


def test_an_int_subclass_beyond_64_bits_is_refused_like_an_int():
    big = type("I", (int,), {})(2**70)
    assert refusal([big]).details["path"] == "state[0]"


def test_a_datetime_subclass_with_more_precision_is_refused():
    class Fine(datetime):
        def __eq__(self, other):
            return False

        __hash__ = datetime.__hash__

    assert "more precise" in refusal(Fine(2020, 1, 1)).message


def refusal(value: Any, path: str = "state") -> HayataError:
    with pytest.raises(HayataError) as caught:
        encode(value, path)
    assert caught.value.code == "unserializable_value"
    return caught.value


class Secret(pydantic.BaseModel):
    key: pydantic.SecretStr


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"customer": {"tags": [1, 2, 3, 2**64]}}, "state.customer.tags[3]"),
        ({"n": -(2**63) - 1}, "state.n"),
        ({"a b": 1j}, "state['a b']"),
        ({"f": [fractions.Fraction(1, 3)]}, "state.f[0]"),
        ({"key": pydantic.SecretStr("s")}, "state.key"),
        ({"key": pydantic.SecretBytes(b"s")}, "state.key"),
        ({"fn": print}, "state.fn"),
        ({"fn": lambda: None}, "state.fn"),
        ({"o": object()}, "state.o"),
        ({"t": (1, [object()])}, "state.t[1][0]"),
        ({"s": ["ok", "\ud800"]}, "state.s[1]"),
        ({"s": {"\udfff": 1}}, "state.s['\\udfff']"),
        ({"m": Secret(key="s")}, "state.m"),
        ({3: {"x": range(3)}}, "state[3].x"),
        ({"m": {(1, 2): 3}}, "state.m"),
        ({"m": {Color.RED: 3}}, "state.m"),
        ({"m": {2**65: 3}}, "state.m[36893488147419103232]"),
        ({"g": (n for n in ())}, "state.g"),
        ({"d": collections.deque()}, "state.d"),
        ({"v": memoryview(b"x")}, "state.v"),
        ({"c": int}, "state.c"),
        ({"e": ValueError("x")}, "state.e"),
        ({"mod": sys}, "state.mod"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_stored_is_refused_with_its_path(value, path):
    error = refusal(value)
    assert error.details["path"] == path
    assert path in error.message


def test_numpy_like_scalars_are_refused_with_what_to_do():
    scalar = type("int64", (), {"__module__": "numpy", "tolist": lambda self: 1})()
    assert "tolist" in refusal([scalar]).hint


def test_a_model_without_a_declared_type_is_refused_with_what_to_do():
    assert "state_type" in refusal(Secret(key="s")).hint


def test_a_secret_says_where_it_belongs():
    error = refusal(pydantic.SecretStr("hunter2"))
    assert "ctx.deps" in error.hint
    assert "hunter2" not in str(error)


def test_circular_and_deep_values_are_typed_errors():
    circle: list[Any] = []
    circle.append({"again": circle})
    assert "itself" in refusal(circle).message
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert "deep" in refusal(deep).message
    mapping: dict[str, Any] = {}
    mapping["m"] = (mapping,)
    assert "itself" in refusal(mapping).message


@pytest.mark.parametrize("wrap", [lambda v: [v], lambda v: (v,), lambda v: {"k": v}, lambda v: frozenset({v})])
def test_the_deepest_value_that_is_accepted_can_be_read(wrap):
    value: Any = wrap(1) if wrap(()) == frozenset({()}) else wrap([])
    for _ in range(MAX_DEPTH - 2):
        value = wrap(value)
    assert decode(encode(value)) == value
    for _ in range(2):
        value = wrap(value)
    assert "deep" in refusal(value).message


def test_an_object_that_raises_when_it_is_read_is_a_typed_error():
    class Trap(dict):
        def items(self):
            raise RuntimeError("no")

    assert "RuntimeError" in refusal(Trap(a=object)).message


def test_equal_sets_have_equal_bytes_whatever_their_order():
    words = [f"w{n}" for n in range(50)]
    shuffled = random.Random(1).sample(words, 50)
    assert encode(set(words)) == encode(set(shuffled))


def test_an_enum_whose_class_is_not_imported_comes_back_as_its_value():
    raw = encode(Color.RED)
    assert decode(raw.replace(b"test_values", b"never_there")) == "red"


def test_decoding_an_enum_never_calls_anything_but_an_enum():
    forged = encode(Color.RED).replace(b"red", b"rmd")
    assert decode(forged) == "rmd"  # a value that the class has lost
    payload = msgspec.msgpack.encode(["os", "system", "true"])
    assert decode(msgspec.msgpack.encode(msgspec.msgpack.Ext(11, payload))) == "true"


def test_decoding_an_enum_never_imports():
    sys.modules.pop("this", None)
    payload = msgspec.msgpack.encode(["this", "s", 1])
    assert decode(msgspec.msgpack.encode(msgspec.msgpack.Ext(11, payload))) == 1
    assert "this" not in sys.modules


HOSTILE = [
    b"",
    b"\xc1",
    b"\x91" * 1_000_000,
    b"\x81\xa1a" * 100_000,
    b"\xdf\xff\xff\xff\xff",
    b"\xdd\xff\xff\xff\xff",
    b"\xa2\xff\xfe",
    b"\xd4\x63\x00",
    b"\xd4\x04\x01",
    b"\xd4\x0b\xc0",
    b"\xc7\x01\x05\xc0",
    b"\xc7\x02\x07\x91\x01",
    b"\xd6\x0a\x00\x00\x00\x00",
    b"\x81\x81\x01\x01\x01",
    b"\xc0\xc0",
]


@pytest.mark.parametrize("raw", HOSTILE, ids=lambda raw: raw[:8].hex())
def test_hostile_bytes_are_a_typed_error(raw):
    with pytest.raises(HayataError) as caught:
        decode(raw)
    assert caught.value.code == "unserializable_value"


def test_extensions_nested_without_end_are_a_typed_error():
    raw = b"\xc0"
    for _ in range(5_000):
        raw = msgspec.msgpack.encode(msgspec.msgpack.Ext(1, b"\x91" + raw))
    with pytest.raises(HayataError):
        decode(raw)


@given(st.binary(max_size=60))
@settings(max_examples=500, deadline=None)
def test_random_bytes_decode_or_are_a_typed_error(raw):
    with contextlib.suppress(HayataError):
        decode(raw)


def test_a_mapping_is_encoded_key_by_key():
    update = encode_mapping({"a": (1,), "b": None}, "state")
    assert {key: bytes(raw) for key, raw in update.items()} == {"a": encode((1,)), "b": b"\xc0"}
    assert decode_mapping(update) == {"a": (1,), "b": None}


@pytest.mark.parametrize("key", [1, b"x", None, "\ud800"])
def test_a_mapping_with_a_key_that_is_no_text_is_refused(key):
    with pytest.raises(HayataError) as caught:
        encode_mapping({key: 1}, "state")
    assert caught.value.code == "unserializable_value"


def test_a_mapping_names_the_path_of_what_it_refuses():
    with pytest.raises(HayataError) as caught:
        encode_mapping({"deep": {"list": [object()]}}, "state")
    assert caught.value.details == {"path": "state.deep.list[0]", "type": "object"}


def test_many_uuids_and_tuples_are_not_confused():
    values = [(uuid4(), {"n": n}) for n in range(200)]
    assert decode(encode(values)) == values
