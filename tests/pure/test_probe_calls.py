"""`Probe` as authors write it, and the call of its function."""

from __future__ import annotations

import asyncio
from typing import Any, TypedDict

import pytest

from hayata import NOT_DONE, UNKNOWN, Agent, DefinitionError, Node, Probe, Rerun, node
from hayata import messages as m
from hayata.calls import TaskCall
from hayata.manifest import agent_manifest
from hayata.values import decode, decode_mapping, encode


class State(TypedDict, total=False):
    paid: int


def pay(state, ctx):
    raise AssertionError("the body is not what was asked for")


async def pay_later(state, ctx):
    raise AssertionError("the body is not what was asked for")


def asked(probe: Any, fn: Any = pay, *, parallel: bool = False, **options: Any) -> Any:
    """What a probe comes to in an edge worker."""
    agent = Agent("a", [Node(fn, name="n", interrupted=Probe(probe), **options)], state_type=State)
    run = m.RunTask(
        "inv.1.1",
        5.0,
        "inv",
        1,
        "key",
        None,
        False,
        {},
        m.Value(encode({"order": 7})),
        parallel=parallel,
        probe=True,
    )
    call = TaskCall(agent, "n", run, "edge-1", "deps", None, 99.0)
    return asyncio.run(call.run_async()) if agent.nodes["n"].is_async else call.run()


def test_probe_gets_the_context_of_the_attempt_and_gives_a_result():
    seen = []

    def probe(ctx):
        seen.append(ctx)
        ctx.stream({"nobody": "reads this"})
        return {"paid": 5}

    done = asked(probe)
    assert isinstance(done, m.TaskCompleted)
    assert decode_mapping(done.update) == {"paid": 5}
    (ctx,) = seen
    assert (ctx.input, ctx.deps, ctx.node, ctx.attempt) == ({"order": 7}, "deps", "n", 1)
    assert (ctx.execution_id, ctx.idempotency_key, ctx.deadline) == ("inv.1.1", "key", 99.0)


@pytest.mark.parametrize(("answer", "not_done"), [(NOT_DONE, True), (UNKNOWN, False)])
def test_probe_without_a_result_says_whether_it_knows(answer, not_done):
    assert asked(lambda ctx: answer) == m.TaskProbed("inv.1.1", "edge-1", not_done)


@pytest.mark.parametrize("answer", [None, "yes", {"paid": "yes"}, {"other": 1}, {1: 2}, {"paid": object()}])
def test_answer_that_can_not_be_a_result_is_a_failure(answer):
    assert isinstance(asked(lambda ctx: answer), m.TaskFailed)


def test_answer_of_a_branch_needs_not_fit_the_state():
    assert isinstance(asked(lambda ctx: {"other": 1}, parallel=True), m.TaskCompleted)


def test_probe_that_raises_is_a_failure_with_its_traceback():
    def probe(ctx):
        raise ConnectionError("closed")

    failed = asked(probe)
    assert failed.error.message == "ConnectionError: closed"
    assert "in probe" in decode(failed.error.details)["traceback"]


def test_coroutine_node_takes_either_kind_of_probe():
    async def probe(ctx):
        await asyncio.sleep(0)
        await ctx.stream({})
        return NOT_DONE

    assert asked(probe, pay_later).not_done
    assert asked(lambda ctx: NOT_DONE, pay_later).not_done


def test_node_that_has_no_probe_any_more_can_not_tell():
    run = m.RunTask("inv.1.1", None, "inv", 1, "key", None, False, {}, m.NIL, probe=True)
    agent = Agent("a", [Node(pay, name="n")])
    assert TaskCall(agent, "n", run, "e", None, None, None).run() == m.TaskProbed("inv.1.1", "e", False)


def test_manifest_says_how_often_a_probed_body_may_run():
    @node(interrupted=Probe(lambda ctx: UNKNOWN, max_attempts=5))
    def one(state):
        return {}

    @node(interrupted=Rerun(2))
    def two(state):
        return {}

    first, second = agent_manifest(Agent("a", [one, two])).nodes
    assert (first.probe_attempts, first.rerun_attempts) == (5, 0)
    assert (second.probe_attempts, second.rerun_attempts) == (0, 2)


def test_probe_may_be_named():
    assert Probe("hayata.ids:new_uuid7").fn.__name__ == "new_uuid7"


async def ask_later(ctx):
    return UNKNOWN


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda: Probe(3), "fn"),
        (lambda: Probe("no.such:thing"), "fn"),
        (lambda: Probe(lambda: UNKNOWN), "fn"),
        (lambda: Probe(lambda state, ctx: UNKNOWN), "fn"),
        (lambda: Probe(lambda ctx: UNKNOWN, max_attempts=0), "max_attempts"),
        (lambda: Node(pay, interrupted=Probe(ask_later)), "interrupted"),
        (lambda: Node(pay, interrupted=Probe), "interrupted"),
    ],
)
def test_probe_that_can_not_be_is_refused_with_its_path(make, path):
    with pytest.raises(DefinitionError) as refused:
        make()
    assert path in [problem["path"].split(".")[0] for problem in refused.value.details["problems"]]
