"""What an agent can be; and that all that is wrong with one is said at once, each with its path."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pickle
from typing import Annotated, Any, TypedDict

import msgspec
import pydantic
import pytest
from typing_extensions import TypedDict as LaterTypedDict

from hayata import (
    Add,
    Agent,
    Append,
    AsyncContext,
    Backoff,
    Context,
    DefinitionError,
    Extend,
    Finish,
    Next,
    Node,
    PolicyContext,
    Rerun,
    Retry,
    Supervision,
    Union,
    node,
)
from hayata.manifest import agent_manifest
from hayata.values import decode_mapping


def greet(state, ctx):
    return {"greeted": True}


def other(state):
    return {}


async def fetch(state, ctx):
    return {}


def policy(context):
    return Finish(context.state)


def problems(make) -> dict[str, str]:
    """Path → message of everything that is wrong."""
    with pytest.raises(DefinitionError) as caught:
        make()
    found = {each["path"]: each["message"] for each in caught.value.details["problems"]}
    assert all(path in str(caught.value) for path in found)
    return {"code": caught.value.code, **found}


# ----------------------------------------------------------------------------------------------------- valid


def test_a_list_of_functions_is_named_by_them():
    agent = Agent(id="a", nodes=[greet, fetch], decision_policy=policy)
    assert list(agent.nodes) == ["greet", "fetch"]
    assert not agent.nodes["greet"].is_async
    assert agent.nodes["fetch"].is_async


def test_a_mapping_names_what_has_no_name():
    nodes = {
        "first": lambda state: {},
        "second": functools.partial(greet),
        "third": "json:dumps",
        "fourth": Node(greet),
    }
    agent = Agent("a", nodes, policy)
    assert list(agent.nodes) == ["first", "second", "third", "fourth"]
    assert agent.nodes["fourth"].name == "fourth"


def test_the_decorator_makes_a_node_that_can_still_be_called():
    @node(concurrency=2, interrupted=Rerun(max_attempts=4))
    def work(state, ctx):
        return {"n": 1}

    assert isinstance(work, Node)
    assert work({}, None) == {"n": 1}
    assert isinstance(node(greet), Node)
    assert Agent("a", [work], policy).names_of(work) == ["work"]


def test_a_node_is_found_by_its_name_its_function_and_its_node():
    wrapped = Node(other)
    agent = Agent("a", {"one": greet, "two": wrapped, "three": greet}, policy)
    assert agent.names_of("one") == ["one"]
    assert agent.names_of(greet) == ["one", "three"]
    assert agent.names_of(other) == agent.names_of(wrapped) == ["two"]
    assert agent.names_of(policy) == agent.names_of("four") == []


def test_a_bound_method_is_found_though_each_access_makes_a_new_one():
    class Worker:
        def work(self, state):
            return {}

    worker = Worker()
    assert Agent("a", [worker.work], policy).names_of(worker.work) == ["work"]


def test_without_a_policy_the_nodes_run_once_each_in_order():
    agent = Agent("a", [greet, other])
    seen = []
    for step in range(3):
        context: PolicyContext[Any] = PolicyContext()
        context._fill(step=step, input="in", state={"s": 1})
        seen.append(agent.decision_policy(context))
    assert seen == [Next("greet", "in"), Next("other", "in"), Finish({"s": 1})]


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda state: {}, False),
        (lambda state, ctx: {}, True),
        (lambda state, context: {}, True),
        (lambda state, i=3: {}, False),
        (lambda state, ctx=None: {}, True),
        (lambda *args: {}, True),
        (lambda state, *, option=1: {}, False),
        (lambda state, ctx, extra=1: {}, True),
        (functools.partial(greet, ctx=None), False),
    ],
)
def test_the_form_of_a_node_function_is_told_by_its_parameters(fn, expected):
    assert Node(fn, name="n").takes_context is expected


def test_a_second_parameter_annotated_as_context_is_one_whatever_its_name():
    def annotated(state: dict[str, Any], c: Context[int] | None = None) -> dict[str, Any]:
        return {}

    def awaited(state: dict[str, Any], c: AsyncContext[int] | None = None) -> dict[str, Any]:
        return {}

    assert Node(annotated).takes_context
    assert Node(awaited).takes_context


def test_objects_with_a_call_method_are_nodes():
    class Callable:
        async def __call__(self, state, ctx):
            return {}

    assert Node(Callable(), name="n").is_async


def test_the_manifest_has_every_default_filled_in():
    retry = Retry(max_attempts=5, backoff=Backoff(initial=1, factor=1, maximum=9), jitter=0)
    nodes = [Node(greet, retry=retry, interrupted=Rerun(3), isolation="fresh", execution_timeout=2), fetch]
    manifest = agent_manifest(
        Agent("a", nodes, policy, execution_timeout=7.0, state={"n": (1,)}, merge={"n": "replace"})
    )
    first, second = manifest.nodes
    assert (first.execution_timeout_s, second.execution_timeout_s) == (2, 7.0)
    assert 1 <= first.concurrency <= 4
    assert second.concurrency == 64
    assert (first.rerun_attempts, second.rerun_attempts) == (3, 0)
    assert first.fresh
    assert first.retry is not None
    assert (first.retry.backoff_s, first.retry.backoff_factor, first.retry.max_backoff_s) == (1, 1, 9)
    assert decode_mapping(manifest.state) == {"n": (1,)}
    assert manifest.merge == {}
    assert (manifest.supervision.intensity, manifest.supervision.period_s) == (10, 60.0)


def test_a_number_of_seconds_is_a_backoff_that_doubles():
    manifest = agent_manifest(Agent("a", [Node(greet, retry=Retry(2, backoff=90))], policy))
    retry = manifest.nodes[0].retry
    assert retry is not None
    assert (retry.backoff_s, retry.backoff_factor, retry.max_backoff_s) == (90, 2.0, 90)


def test_an_agent_survives_pickle_and_still_checks_its_state():
    agent = Agent("a", [greet], policy, state_type=Typed)
    copy = pickle.loads(pickle.dumps(agent))
    assert list(copy.types.check_update({"count": 3})) == ["count"]


# ---------------------------------------------------------------------------------------------- state types


class Typed(TypedDict, total=False):
    count: Annotated[int, Add]
    words: Annotated[list[str], Extend]
    log: Annotated[list[tuple[int, str]], Append]
    index: Annotated[dict[str, int], Union]


class TypedLater(LaterTypedDict, total=False):
    count: Annotated[int, Add]


class Foreign:
    pass


class WithForeign(TypedDict):
    thing: Foreign


class Model(pydantic.BaseModel):
    name: str = "nobody"
    count: int = pydantic.Field(default=3, ge=0)
    words: Annotated[list[str], Extend] = pydantic.Field(default_factory=list)


@dataclasses.dataclass
class Data:
    name: str = "nobody"
    count: int = 3
    words: Annotated[list[str], Extend] = dataclasses.field(default_factory=list)


class Struct(msgspec.Struct):
    name: str = "nobody"
    count: int = 3
    words: Annotated[list[str], Extend] = []


def test_markers_in_the_type_declare_the_merge():
    agent = Agent("a", [greet], policy, state_type=Typed)
    assert agent.merge == {"count": "add", "words": "extend", "log": "append", "index": "union"}
    assert Agent("a", [greet], policy, state_type=TypedLater).merge == {"count": "add"}


@pytest.mark.parametrize("kind", [Model, Data, Struct])
def test_a_model_as_state_is_stored_in_full_with_its_defaults(kind):
    agent = Agent("a", [greet], policy, state_type=kind, state={"name": "x"})
    assert agent.state == {"name": "x", "count": 3, "words": []}
    assert agent.merge == {"words": "extend"}
    assert Agent("a", [greet], policy, state_type=kind, state=kind(name="y")).state["name"] == "y"


def test_a_typed_dict_needs_no_keys_at_the_start():
    assert Agent("a", [greet], policy, state_type=Typed).state == {}


@pytest.mark.parametrize(
    ("kind", "state"),
    [
        (Model, {"count": -1}),
        (Model, {"count": "many"}),
        (Data, {"count": "3"}),
        (Struct, {"count": "3"}),
        (Typed, {"count": "3"}),
    ],
)
def test_an_initial_state_that_does_not_fit_is_refused(kind, state):
    assert "state.count" in problems(lambda: Agent("a", [greet], policy, state_type=kind, state=state))


def test_a_model_that_needs_more_than_the_initial_state_is_refused():
    class Needs(pydantic.BaseModel):
        who: str

    @dataclasses.dataclass
    class AlsoNeeds:
        who: str

    class StructNeeds(msgspec.Struct):
        who: str

    assert "state.who" in problems(lambda: Agent("a", [greet], policy, state_type=Needs))
    assert "state" in problems(lambda: Agent("a", [greet], policy, state_type=AlsoNeeds))
    assert "state" in problems(lambda: Agent("a", [greet], policy, state_type=StructNeeds))
    assert Agent("a", [greet], policy, state_type=Needs, state={"who": "me"}).state == {"who": "me"}


def test_a_type_that_nothing_can_check_is_refused_with_its_key():
    found = problems(lambda: Agent("a", [greet], policy, state_type=WithForeign))
    assert "Foreign" in found["state_type.thing"]


def test_annotations_that_name_nothing_are_refused():
    class Local(TypedDict):
        n: int

    class State(TypedDict):
        local: Local  # a local name in a module with text annotations: nobody can look it up

    assert "Local" in problems(lambda: Agent("a", [greet], policy, state_type=State))["state_type"]


@pytest.mark.parametrize("kind", [dict, int, "State", dict[str, int], list])
def test_what_is_no_state_type_is_refused(kind):
    assert "state_type" in problems(lambda: Agent("a", [greet], policy, state_type=kind))


@pytest.mark.parametrize(
    ("state", "merge", "path"),
    [
        ({"n": "text"}, {"n": "add"}, "state.n"),
        ({"n": True}, {"n": "add"}, "state.n"),
        ({"n": {}}, {"n": "append"}, "state.n"),
        ({"n": (1,)}, {"n": "extend"}, "state.n"),
        ({"n": []}, {"n": "union"}, "state.n"),
        ({"n": 1}, {"n": "concat"}, "merge.n"),
        ({"n": 1}, ["n"], "merge"),
    ],
)
def test_a_merge_that_can_not_be_is_refused(state, merge, path):
    assert path in problems(lambda: Agent("a", [greet], policy, state=state, merge=merge))


def test_a_merge_that_the_type_does_not_allow_is_refused():
    class State(TypedDict, total=False):
        text: str
        twice: Annotated[list[int], Append]

    merge = {"text": "extend", "twice": "extend", "missing": "add"}
    found = problems(lambda: Agent("a", [greet], policy, state_type=State, merge=merge))
    assert set(found) == {"code", "merge.text", "merge.twice", "merge.missing"}


# --------------------------------------------------------------------------------------------------- problems


def test_all_problems_are_reported_at_once_each_with_its_path():
    found = problems(
        lambda: Agent(
            id="not a name",
            nodes=[greet, greet, lambda state: {}, 5, "no_such_module:f", "json:nothing", "plain"],
            decision_policy=lambda: None,
            state={"input": 1, "hayata_x": 2, "bad": object(), 3: 4},
            merge={"x": "zap"},
            max_steps=0,
            execution_timeout=-1,
            invocation_timeout=float("nan"),
            conversation_memory=1,
            default_session="",
            resume="later",
            max_concurrency=0,
            version="",
            lifespan=3,
            on_failure="ignore",
            supervision="strict",
            colour="red",
        )
    )
    assert set(found) == {
        "code", "id", "nodes[1]", "nodes[2]", "nodes[3].fn", "nodes[4].fn", "nodes[5].fn", "nodes[6].fn",
        "decision_policy", "state.input", "state.hayata_x", "state.bad", "state.3", "merge.x", "max_steps",
        "execution_timeout", "invocation_timeout", "conversation_memory", "default_session", "resume",
        "max_concurrency", "version", "lifespan", "on_failure", "supervision", "colour",
    }  # fmt: skip
    assert found["code"] == "invalid_definition"


def test_nodes_with_one_name_are_a_kind_of_their_own():
    assert problems(lambda: Agent("a", [greet, Node(other, name="greet")], policy))["code"] == "duplicate_nodes"
    assert problems(lambda: Agent("a", [greet, greet], policy, max_steps=0))["code"] == "invalid_definition"


@pytest.mark.parametrize("nodes", [None, 3, "greet", [], {}, greet])
def test_nodes_must_be_a_list_or_a_mapping_with_something_in_it(nodes):
    assert "nodes" in problems(lambda: Agent("a", nodes, policy))


@pytest.mark.parametrize("name", ["", "a b", "é", "x" * 129, "hayata_x", "-x"])
def test_a_node_cannot_have_such_a_name(name):
    assert f"nodes.{name}" in {
        path.removesuffix(".name") for path in problems(lambda: Agent("a", {name: greet}, policy))
    }


def test_a_node_in_a_mapping_cannot_have_another_name():
    assert "nodes.a" in problems(lambda: Agent("a", {"a": Node(greet, name="b")}, policy))


@pytest.mark.parametrize("id", ["", "a b", "x" * 129, None, 3, "a\n"])
def test_an_agent_cannot_have_such_an_id(id):
    assert "id" in problems(lambda: Agent(id, [greet], policy))
    assert Agent("x" * 128, [greet], policy)


def generator(state):
    yield {}


async def async_generator(state):
    yield {}


@pytest.mark.parametrize(
    "fn",
    [
        Node(greet),
        lambda: {},
        lambda a, b, c: {},
        lambda state, *, needed: {},
        dict,
        generator,
        async_generator,
        None,
        3,
    ],
)
def test_what_is_no_node_function_is_refused(fn):
    assert "fn" in problems(lambda: Node(fn, name="n"))


@pytest.mark.parametrize(
    "bad", [lambda: None, lambda a, b: None, fetch, generator, Finish, 3, "json:nothing", "nothing"]
)
def test_what_is_no_policy_is_refused(bad):
    assert "decision_policy" in problems(lambda: Agent("a", [greet], bad))


def test_a_policy_can_be_named_by_a_string():
    agent = Agent("a", [greet], f"{__name__}:policy")
    assert agent.decision_policy is policy


@pytest.mark.parametrize(
    ("options", "path"),
    [
        ({"concurrency": 0}, "concurrency"),
        ({"concurrency": True}, "concurrency"),
        ({"execution_timeout": 0}, "execution_timeout"),
        ({"execution_timeout": "5"}, "execution_timeout"),
        ({"retry": 3}, "retry"),
        ({"interrupted": "rerun"}, "interrupted.literal['uncertain']"),
        ({"isolation": "cold"}, "isolation"),
        ({"max_tasks": 0}, "max_tasks"),
        ({"memory_limit": -1}, "memory_limit"),
        ({"memory_limit": 512}, "memory_limit"),
        ({"memory_limit": 1e9}, "memory_limit"),
        ({"address_space_limit": "2G"}, "address_space_limit"),
        ({"cpu_limit": 0}, "cpu_limit"),
        ({"cpu_limit": "1m"}, "cpu_limit"),
        ({"open_files": 3}, "open_files"),
        ({"restart": "sometimes"}, "restart"),
        ({"shutdown": -1}, "shutdown"),
        ({"shutdown": float("inf")}, "shutdown"),
        ({"shutdown": "later"}, "shutdown"),
        ({"shutdown": True}, "shutdown"),
        ({"lifespan": 3}, "lifespan"),
        ({"lifespan": lambda needed: None}, "lifespan"),
        ({"lifespan": generator}, "lifespan"),
        ({"input": type("Foreign", (), {})}, "input"),
        ({"concurency": 3}, "concurency"),
        ({"name": "hayata"}, "name"),
    ],
)
def test_a_node_with_such_an_option_is_refused(options, path):
    assert path in problems(lambda: Node(greet, **options))


def test_a_coroutine_node_can_not_be_fresh():
    assert "isolation" in problems(lambda: Node(fetch, isolation="fresh"))


def test_a_lifespan_is_a_function_that_makes_a_context_manager():
    @contextlib.contextmanager
    def plain():
        yield 1

    @contextlib.asynccontextmanager
    async def awaited():
        yield 1

    assert Agent("a", [Node(greet, lifespan=plain)], policy, lifespan=awaited)


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda: Retry(0), "max_attempts"),
        (lambda: Retry(True), "max_attempts"),
        (lambda: Retry(2, backoff=-1), "backoff"),
        (lambda: Retry(2, backoff="1"), "backoff"),
        (lambda: Retry(2, jitter=2), "jitter"),
        (lambda: Retry(2, on=ValueError("x")), "on"),
        (lambda: Retry(2, on=int), "on"),
        (lambda: Retry(2, on=(ValueError, 3)), "on"),
        (lambda: Backoff(initial=-1), "initial"),
        (lambda: Backoff(maximum=float("inf")), "maximum"),
        (lambda: Rerun(0), "max_attempts"),
        (lambda: Supervision(strategy="simple_one_for_one"), "strategy"),
        (lambda: Supervision(intensity=-1), "intensity"),
        (lambda: Supervision(period=0), "period"),
        (lambda: Supervision(backoff=Backoff(factor=3)), "backoff.factor"),
    ],
)
def test_bounds_of_retries_and_restarts_are_checked(make, path):
    assert path in problems(make)


def test_what_to_retry_is_a_class_some_classes_or_a_function():
    assert Retry().matches(ValueError())
    assert not Retry().matches(SystemExit())
    assert Retry(on=(OSError, KeyError)).matches(KeyError())
    assert not Retry(on=OSError).matches(ValueError())
    assert Retry(on=lambda error: "busy" in str(error)).matches(OSError("busy"))


def test_conversation_memory_needs_the_key_messages():
    assert "conversation_memory" in problems(
        lambda: Agent("a", [greet], policy, state_type=Typed, conversation_memory=True)
    )
    assert Agent("a", [greet], policy, conversation_memory=True)


def test_the_default_policy_needs_as_many_steps_as_nodes():
    assert "max_steps" in problems(lambda: Agent("a", [greet, other], max_steps=1))
