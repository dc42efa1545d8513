"""``edges=`` and ``reduce=``: what a definition allows, the edges of a decision, and a reduction in its worker."""

from __future__ import annotations

import functools
from typing import Any, TypedDict

import msgspec
import pytest

from hayata import Agent, DefinitionError, Finish, Next, Node, Reduce
from hayata import messages as m
from hayata.calls import TaskCall, evaluate
from hayata.definition import definition_of
from hayata.manifest import agent_manifest
from hayata.reducers import MOST_EDGES
from hayata.reductions import reduce
from hayata.updates import check_update
from hayata.values import decode, decode_mapping, encode


class Total(TypedDict):
    total: int


def square(state, ctx):
    return {"n": ctx.input**2, "edge": ctx.edge}


def add_up(results):
    return {"total": sum(each["n"] for each in results)}


def made(edges: Any = (1, 2), reduce: Any = add_up, **options: Any) -> Agent:
    node = Node(square, name="many", edges=edges, reduce=reduce, **options)
    return Agent("a", [node], decision_policy=lambda ctx: Next("many", ctx.input) if ctx.step == 0 else Finish(None))


def raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(encode(value))


def decided(agent: Agent, given: object = None) -> Any:
    """What the agent worker says to the first question."""
    return evaluate(agent, m.Evaluate(1, "i", {}, raw(given), 0, None, None, None, None, 0.0))


def reduced(agent: Agent, results: list[Any], errors: dict[int, m.ErrorInfo] | None = None, **changes: Any) -> Any:
    updates = [None if each is None else {key: raw(value) for key, value in each.items()} for each in results]
    task = m.ReduceTask("e", None, "i", 1, None, raw("given"), updates, errors or {})
    return reduce(agent, "many", msgspec.structs.replace(task, **changes), "r", 9.0)


def problems(**options: Any) -> dict[str, str]:
    with pytest.raises(DefinitionError) as caught:
        Node(square, **options)
    return {each["path"]: each["message"] for each in caught.value.details["problems"]}


# definitions


def test_edges_and_reduce_need_each_other():
    assert "need each other" in problems(edges=[1])["reduce"]
    assert "need each other" in problems(reduce=add_up)["edges"]


def generator(given):
    yield given


async def coroutine(given):
    return [given]


@pytest.mark.parametrize(
    ("edges", "why"),
    [
        (5, "neither a list"),
        ("abc", "neither a list"),
        (lambda: [], "positional arguments"),
        (generator, "plain function"),
        (coroutine, "plain function"),
        ([0] * (MOST_EDGES + 1), "at most 1000"),
    ],
)
def test_edges_that_can_not_be(edges: Any, why: str):
    assert why in problems(edges=edges, reduce=add_up)["edges"]


@pytest.mark.parametrize(
    ("reduce", "why"),
    [
        (5, "not a function"),
        (lambda: {}, "positional arguments"),
        (generator, "plain function"),
        (coroutine, "plain function"),
        ("no.such:thing", "can't be imported"),
    ],
)
def test_reduce_that_can_not_be(reduce: Any, why: str):
    assert why in problems(edges=[], reduce=reduce)["reduce"]


@pytest.mark.parametrize("options", [{"timeout": 0}, {"timeout": "1"}, {"partial": 1}])
def test_reduce_checks_its_options(options: dict[str, Any]):
    with pytest.raises(DefinitionError):
        Reduce(add_up, **options)


def test_manifest_and_definition_tell_of_edges():
    agent = made(reduce=Reduce("tests.pure.test_reductions:add_up", timeout=2, partial=True))
    assert agent_manifest(agent).nodes[0].reduce == m.ReduceManifest(2, True)
    assert definition_of(agent)["nodes.many"] == "function of edges, reduced"


# the edges of a decision


@pytest.mark.parametrize(
    ("edges", "values"),
    [([1, "two"], [1, "two"]), ((), []), (lambda given: [given, given + 1], [7, 8]), (lambda given: (given,), [7])],
)
def test_decision_holds_the_values_of_the_edges(edges: Any, values: list[Any]):
    answer = decided(made(edges=edges), 7)
    assert [decode(each) for each in answer.edges["many"]] == values


def test_decision_without_edges_holds_none():
    agent = Agent("a", [Node(square, name="one")])
    assert decided(agent).edges == {}


@pytest.mark.parametrize(
    ("edges", "code", "path"),
    [
        (lambda given: 1 / 0, "invalid_edges", None),
        (lambda given: exec("raise SystemExit"), "invalid_edges", None),
        (lambda given: {"a": 1}, "invalid_edges", "many.edges"),
        (lambda given: [0] * (MOST_EDGES + 1), "invalid_edges", "many.edges"),
        (lambda given: [1, object()], "unserializable_value", "many.edges[1]"),
    ],
)
def test_bad_edges_fail_the_decision(edges: Any, code: str, path: str | None):
    answer = decided(made(edges=edges))
    assert isinstance(answer, m.PolicyFailed)
    details = decode(answer.error.details)
    assert answer.error.code == code
    assert details.get("path") == path
    assert path is not None or "traceback" in details


# an edge


def edge_outcome(agent: Agent, number: int, given: object) -> Any:
    run = m.RunTask("i.0-1.1", None, "i", 1, "k", None, False, {}, raw(given), edge=number)
    return TaskCall(agent, "many", run, "e", None, lambda chunk: None, None).run()


def test_edge_knows_its_number_and_is_not_held_to_the_output():
    outcome = edge_outcome(made(output=Total), 1, 3)
    assert decode_mapping(outcome.update) == {"n": 9, "edge": 1}


def test_input_type_is_that_of_an_edge():
    agent = made(input=int)
    assert edge_outcome(agent, 0, "x").error.code == "invalid_node_input"


@pytest.mark.parametrize(("edge", "ok"), [(True, True), (False, False)])
def test_result_of_a_person_for_an_edge_is_held_to_the_rules_of_one(edge: bool, ok: bool):
    answer = check_update(made(output=Total), m.CheckUpdate(1, "many", raw({"n": 1}), False, edge))
    assert (answer.error is None) is ok


# a reduction


def test_reduction_returns_the_update():
    outcome = reduced(made(), [{"n": 1}, {"n": 4}])
    assert decode_mapping(outcome.update) == {"total": 5}


def test_reduction_is_told_what_there_is():
    seen = {}

    def look(results, ctx):
        names = (
            "input",
            "expected_edges",
            "result_count",
            "error_count",
            "pending_edges",
            "node",
            "attempt",
            "deadline",
        )
        seen.update({name: getattr(ctx, name) for name in names}, errors={k: v.code for k, v in ctx.errors.items()})
        return {"results": results}

    outcome = reduced(made(reduce=Reduce(look, partial=True)), [{"n": 1}, None, None], {2: m.ErrorInfo("x", "no")})
    assert decode_mapping(outcome.update) == {"results": [{"n": 1}, None, None]}
    assert seen == {
        "input": "given", "expected_edges": 3, "result_count": 1, "error_count": 1, "pending_edges": 1, "node": "many",
        "attempt": 1, "deadline": 9.0, "errors": {2: "x"},
    }  # fmt: skip


def test_reduction_that_raises_says_so_with_counts():
    outcome = reduced(made(), [{"n": 1}, {}])
    details = decode(outcome.error.details)
    assert (outcome.error.code, details["type"], details["expected_edges"]) == ("reducer_failed", "KeyError", 2)
    assert "add_up" in details["traceback"]
    assert not outcome.retryable


@pytest.mark.parametrize("exits", [SystemExit, KeyboardInterrupt])
def test_reduction_that_wants_to_exit_has_failed(exits: type[BaseException]):
    def leave(results):
        raise exits

    assert reduced(made(reduce=leave), []).error.code == "reducer_failed"


@pytest.mark.parametrize("result", [None, [1], {"other": 1}])
def test_reduction_is_held_to_the_rules_of_the_node(result: Any):
    outcome = reduced(made(reduce=lambda results: result, output=Total), [])
    assert outcome.error.code == "invalid_node_result"


def test_reduction_of_a_node_that_has_none_any_more():
    agent = Agent("a", [Node(square, name="many")])
    assert reduced(agent, [{"n": 1}]).error.code == "reducer_failed"


def test_reduce_takes_a_context_or_not():
    class Reducer:
        def __call__(self, results, ctx):
            return {"counts": ctx.expected_edges}

    def scaled(factor, results):
        return {"total": factor * len(results)}

    assert decode_mapping(reduced(made(reduce=Reducer()), [{}]).update) == {"counts": 1}
    assert decode_mapping(reduced(made(reduce=functools.partial(scaled, 3)), [{}]).update) == {"total": 3}
