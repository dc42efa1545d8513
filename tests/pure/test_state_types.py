"""Updates are checked key by key, stored as builtins, and come back in their declared types."""

from __future__ import annotations

import dataclasses
import enum
import pathlib
from datetime import date
from decimal import Decimal
from typing import Annotated, Any, Literal, NamedTuple, NotRequired, TypedDict

import msgspec
import pydantic
import pytest

from hayata.errors import HayataError
from hayata.merging import Add, Append, Extend, Union
from hayata.problems import Problems
from hayata.state_types import StateType
from hayata.values import decode, decode_mapping


class Color(enum.Enum):
    RED = "red"


class Spot(NamedTuple):
    x: int
    y: int = 0


class Customer(pydantic.BaseModel):
    name: str
    since: date | None = None
    tags: set[str] = set()
    nickname: str = pydantic.Field(default="", alias="nick")


class Company(pydantic.BaseModel):
    vat: str


@dataclasses.dataclass
class Order:
    total: Decimal
    items: list[tuple[str, int]] = dataclasses.field(default_factory=list)
    tax: Decimal = dataclasses.field(init=False, default=Decimal(0))

    def __post_init__(self) -> None:
        self.tax = self.total / 5


class Cat(msgspec.Struct, tag=True):
    lives: int


class Dog(msgspec.Struct, tag=True, rename={"good": "isGood"}):
    good: bool = True


class Message(TypedDict):
    role: Literal["user", "ai"]
    content: str
    note: NotRequired[str]


class State(TypedDict, total=False):
    customer: Customer
    party: Customer | Company
    order: Order | None
    pet: Cat | Dog
    color: Color
    spot: Spot
    path: pathlib.Path
    count: Annotated[int, Add]
    ratio: float
    limited: Annotated[int, pydantic.Field(gt=0)]
    messages: Annotated[list[Message], Extend]
    customers: Annotated[list[Customer], Append]
    index: Annotated[dict[str, Customer], Union]
    seen: frozenset[tuple[int, ...]]
    anything: Any


def types(kind: Any, **merge: str) -> StateType:
    problems = Problems()
    made = StateType(kind, merge, problems)
    problems.raise_any("state")
    return made


STATE = types(State)


def there_and_back(update: dict[str, Any], made: StateType = STATE) -> dict[str, Any]:
    """What is stored, and what a node receives of it."""
    return made.read_branch(decode_mapping(made.check_update(update)))


@pytest.mark.parametrize(
    "update",
    [
        {"customer": Customer(name="Ada", since=date(1843, 1, 1), tags={"a"}, nick="A")},
        {"party": Company(vat="1")},
        {"party": Customer(name="Ada")},
        {"order": Order(Decimal("1.10"), [("tea", 2)])},
        {"order": None},
        {"pet": Cat(9)},
        {"pet": Dog(good=False)},
        {"color": Color.RED},
        {"spot": Spot(1)},
        {"path": pathlib.Path("/tmp/x")},
        {"count": 3},
        {"ratio": 0.5},
        {"limited": 1},
        {"messages": [{"role": "user", "content": "hi"}]},
        {"customers": Customer(name="Ada")},
        {"index": {"ada": Customer(name="Ada")}},
        {"seen": frozenset({(1, 2), ()})},
        {"anything": {"t": (1, {2})}},
        {},
    ],
    ids=lambda update: next(iter(update), "nothing"),
)
def test_a_value_of_its_declared_type_comes_back_equal(update):
    back = there_and_back(update)
    assert back == update
    assert [type(value) for value in back.values()] == [type(value) for value in update.values()]


@pytest.mark.parametrize(
    ("update", "received"),
    [
        (
            {"customer": {"name": "Ada", "since": "1843-01-01"}},
            {"customer": Customer(name="Ada", since=date(1843, 1, 1))},
        ),
        ({"order": {"total": Decimal(1)}}, {"order": Order(Decimal(1))}),
        ({"ratio": 1}, {"ratio": 1.0}),
        ({"color": "red"}, {"color": Color.RED}),
        ({"messages": ({"role": "ai", "content": ""},)}, {"messages": [{"role": "ai", "content": ""}]}),
        ({"seen": [[1, 2]]}, {"seen": frozenset({(1, 2)})}),
        ({"spot": (1, 2)}, {"spot": Spot(1, 2)}),
    ],
)
def test_builtins_in_the_place_of_a_declared_type_come_back_as_that_type(update, received):
    assert there_and_back(update) == received


def test_models_are_stored_as_builtins_that_nobody_needs_to_import():
    stored = decode(STATE.check_update({"customers": Customer(name="Ada", nick="A")})["customers"])
    assert stored == {"name": "Ada", "since": None, "tags": set(), "nick": "A"}


@pytest.mark.parametrize(
    ("update", "path"),
    [
        ({"count": "3"}, "state.count"),
        ({"count": True}, "state.count"),
        ({"count": 1.5}, "state.count"),
        ({"ratio": "x"}, "state.ratio"),
        ({"limited": 0}, "state.limited"),
        ({"color": "blue"}, "state.color"),
        ({"unknown": 1}, "state.unknown"),
        ({"customer": {"since": None}}, "state.customer"),
        ({"party": {"neither": 1}}, "state.party"),
        ({"order": {"total": []}}, "state.order.total"),
        (
            {"messages": [{"role": "user", "content": "ok"}, {"role": "user", "content": 3}]},
            "state.messages[1].content",
        ),
        ({"messages": {"role": "user", "content": "x"}}, "state.messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "state.messages[0].role"),
        ({"customers": [{"name": "Ada"}]}, "state.customers"),
        ({"index": [("a", {"name": "Ada"})]}, "state.index"),
        ({"index": {"a": {"nobody": 1}}}, "state.index"),
        ({"pet": {"type": "Cow"}}, "state.pet.type"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_with_its_path(update, path):
    with pytest.raises(HayataError) as caught:
        STATE.check_update(update)
    assert caught.value.code == "invalid_state"
    assert caught.value.details["path"].startswith(path)
    assert path in caught.value.message


@pytest.mark.parametrize("key", ["input", "hayata_streamer", "hayata", 3, None, "\ud800"])
@pytest.mark.parametrize("made", [STATE, types(None)], ids=["typed", "untyped"])
def test_a_key_that_the_state_cannot_have_is_refused(made, key):
    with pytest.raises(HayataError) as caught:
        made.check_update({key: 1})
    assert caught.value.code == "invalid_node_result"


def test_a_subclass_of_a_declared_model_is_refused_as_it_would_come_back_as_less():
    class Vip(Customer):
        level: int = 1

    with pytest.raises(HayataError) as caught:
        STATE.check_update({"customer": Vip(name="Ada")})
    assert caught.value.code == "unserializable_value"
    assert "Customer" in caught.value.message


def test_a_model_that_is_not_declared_is_refused():
    with pytest.raises(HayataError) as caught:
        STATE.check_update({"customer": Company(vat="1")})
    assert caught.value.code in ("invalid_state", "unserializable_value")
    with pytest.raises(HayataError) as caught:
        types(None).check_update({"customer": Customer(name="Ada")})
    assert caught.value.code == "unserializable_value"


@pytest.mark.parametrize(
    ("merge", "value"),
    [
        ("extend", 3),
        ("extend", "text"),
        ("extend", {"a": 1}),
        ("extend", {1, 2}),
        ("add", "1"),
        ("add", True),
        ("add", None),
        ("add", Decimal(1)),
        ("union", [1]),
        ("union", {b"bytes": 1}),
    ],
)
def test_without_a_type_the_operation_says_what_fits(merge, value):
    with pytest.raises(HayataError) as caught:
        types(None, key=merge).check_update({"key": value})
    assert caught.value.code == "invalid_state"
    assert caught.value.details["path"] == "state.key"


def test_a_tuple_that_extends_a_list_is_stored_as_a_list():
    assert decode(types(None, key="extend").check_update({"key": (1, (2,))})["key"]) == [1, (2,)]
    assert decode(types(None, key="append").check_update({"key": (1, 2)})["key"]) == (1, 2)


class Model(pydantic.BaseModel):
    name: str
    customer: Customer | None = None
    count: int = pydantic.Field(default=0, ge=0)
    words: Annotated[list[str], Extend] = []

    @pydantic.field_validator("name")
    @classmethod
    def no_spaces(cls, value: str) -> str:
        if " " in value:
            raise ValueError("no spaces")
        return value


class OpenModel(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")
    name: str


class StrictModel(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True)
    count: int
    customer: Customer | None = None


@dataclasses.dataclass
class Data:
    name: str
    order: Order | None = None


class Struct(msgspec.Struct, rename="camel"):
    full_name: str
    pet: Cat | Dog | None = None


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (Model, Model(name="x", customer=Customer(name="Ada"), words=["a"])),
        (OpenModel, OpenModel.model_validate({"name": "x", "more": [1]})),
        (StrictModel, StrictModel(count=1, customer=Customer(name="Ada"))),
        (Data, Data("x", Order(Decimal(5)))),
        (Struct, Struct("x", Dog())),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_nodes_receive_the_state_as_its_type(kind, given):
    made = types(kind)
    problems = Problems()
    stored = made.initial(given, problems)
    problems.raise_any("state")
    assert made.build(decode_mapping(stored)) == given
    assert made.as_mapping(made.build(decode_mapping(stored))).keys() == stored.keys()


def test_pydantic_models_convert_by_their_own_rules():
    assert there_and_back({"count": "3"}, types(Model)) == {"count": 3}
    with pytest.raises(HayataError) as caught:
        types(StrictModel).check_update({"count": "3"})
    assert caught.value.details["path"] == "state.count"
    assert there_and_back({"customer": Customer(name="A")}, types(StrictModel)) == {"customer": Customer(name="A")}


def test_a_models_own_validators_speak_when_the_state_is_built():
    with pytest.raises(HayataError) as caught:
        types(Model).build({"name": "a b"})
    assert caught.value.code == "invalid_state"
    assert "no spaces" in caught.value.message
    assert caught.value.details["path"] == "state.name"


def test_an_open_model_takes_keys_that_it_does_not_name():
    assert decode_mapping(types(OpenModel).check_update({"more": (1,)})) == {"more": (1,)}
    with pytest.raises(HayataError):
        types(Model).check_update({"more": 1})


def test_a_state_that_does_not_fit_its_type_any_more_is_a_typed_error():
    for kind in (Model, Data, Struct):
        with pytest.raises(HayataError) as caught:
            types(kind).build({})
        assert caught.value.code == "invalid_state"


def test_values_of_another_version_are_a_typed_error_with_their_path():
    with pytest.raises(HayataError) as caught:
        STATE.build({"messages": [{"role": "user"}]})
    assert caught.value.details["path"] == "state.messages[0]"


def test_a_secret_inside_a_declared_model_does_not_reach_the_store():
    class Login(pydantic.BaseModel):
        password: pydantic.SecretStr

    made = types(None)
    made.declared = {Login: lambda value: {"password": value.password}}
    with pytest.raises(HayataError) as caught:
        made.check_update({"login": Login(password="hunter2")})
    assert caught.value.details["path"] == "state.login.password"
    assert "hunter2" not in str(caught.value)


def test_a_parallel_branch_need_not_fit_but_must_be_storable():
    update = STATE.encode_branch({"count": "many", "unknown": (1,), "customer": Customer(name="Ada")})
    assert STATE.read_branch(decode_mapping(update)) == {
        "count": "many",
        "unknown": (1,),
        "customer": Customer(name="Ada"),
    }
    for bad, code in [({"input": 1}, "invalid_node_result"), ({"x": object()}, "unserializable_value")]:
        with pytest.raises(HayataError) as caught:
            STATE.encode_branch(bad)
        assert caught.value.code == code
