"""Messages → calls of users' code → messages: whatever that code does, a message comes out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Annotated, Any, TypedDict

import msgspec
import pydantic
import pytest

from hayata import (
    Agent,
    AsyncContext,
    Context,
    Extend,
    Fail,
    Finish,
    HayataError,
    Next,
    Node,
    PolicyContext,
    Retry,
)
from hayata import messages as m
from hayata.calls import TaskCall, evaluate, node_lifespan
from hayata.error_info import error_from
from hayata.errors import error_for
from hayata.updates import check_update
from hayata.values import decode, decode_mapping, encode, encode_mapping


def one(state):
    return {}


def two(state):
    return {}


def finish(context):
    return Finish(None)


class Item(pydantic.BaseModel):
    name: str


class State(TypedDict, total=False):
    items: Annotated[list[Item], Extend]
    count: int


def raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(encode(value))


def asked(agent: Agent, **changes: Any) -> Any:
    message = m.Evaluate(7, "inv", agent.initial_state, raw("in"), 0, None, None, None, None, 12.5)
    return evaluate(agent, msgspec.structs.replace(message, **changes))


def decided(answer: Any, **options: Any) -> Any:
    """What a policy that returns, or raises, ``answer`` comes to."""

    def policy(context: Any) -> Any:
        if isinstance(answer, BaseException):
            raise answer
        return answer

    return asked(Agent("a", [one, two], policy, **options))


# ---------------------------------------------------------------------------------------------------- policy


def test_a_policy_sees_everything_decoded():
    seen: list[PolicyContext[Any]] = []

    def policy(context):
        seen.append(context)
        return Finish(None)

    agent = Agent("a", [one], policy, state={"n": (1,)}, max_steps=9)
    failure = m.ErrorInfo("edge_crashed", "gone", details=raw({"signal": "SIGKILL"}))
    asked(
        agent,
        state=encode_mapping({"n": (2,)}, "state"),
        step=2,
        parallel_results=[raw({"x": {1}}), raw({})],
        last=["one", "two"],
        failure=failure,
        session="s",
    )
    (context,) = seen
    assert (context.agent_id, context.invocation_id, context.state, context.input) == (
        "a",
        "inv",
        {"n": (2,)},
        "in",
    )
    assert (context.step, context.max_steps, context.session, context.now) == (2, 9, "s", 12.5)
    assert context.parallel_results == [{"x": {1}}, {}]
    assert context.last == ("one", "two")
    assert context.failure.code == "edge_crashed"
    assert context.failure.details == {"signal": "SIGKILL"}
    with pytest.raises(AttributeError):
        context.step = 3
    assert "step=2" in repr(context)


def test_a_policy_gets_state_and_results_in_their_declared_types():
    seen = []

    def policy(context):
        seen.extend([context.state, context.parallel_results])
        return Next(one, context.state["items"][0])

    agent = Agent("a", [one], policy, state_type=State, state={"items": [Item(name="x")]})
    answer = asked(agent, parallel_results=[raw({"items": [{"name": "y"}]})])
    assert seen == [{"items": [Item(name="x")]}, [{"items": [Item(name="y")]}]]
    assert decode(answer.input) == {"name": "x"}


@pytest.mark.parametrize(
    ("decision", "nodes", "parallel"),
    [
        (Next("one", (1,)), ["one"], False),
        (Next(one, (1,)), ["one"], False),
        (Next([one], (1,)), ["one"], True),
        (Next(("two", one), (1,)), ["two", "one"], True),
    ],
)
def test_next_names_nodes_by_name_or_function(decision, nodes, parallel):
    answer = decided(decision)
    assert answer == m.DecidedNext(7, nodes, parallel, answer.input)
    assert decode(answer.input) == (1,)


def test_finish_and_fail_carry_any_storable_value():
    assert decode(decided(Finish({"a": (1,)})).result) == {"a": (1,)}
    answer = decided(Fail({"why": (1,)}))
    assert isinstance(answer, m.DecidedFail)
    assert answer.error.code == "policy_failed"
    assert decode(answer.error.details) == {"reason": {"why": (1,)}}
    assert decided(Fail("no stock")).error.message == "no stock"


class Nonsense:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


async def coroutine():
    """Never awaited."""


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (lambda: None, "invalid_policy_decision"),
        (lambda: "one", "invalid_policy_decision"),
        (lambda: Finish, "invalid_policy_decision"),
        (lambda: Nonsense(), "invalid_policy_decision"),
        (lambda: coroutine(), "invalid_policy_decision"),
        (lambda: Next([]), "invalid_policy_decision"),
        (lambda: Next(()), "invalid_policy_decision"),
        (lambda: Next([one, "one"]), "invalid_policy_decision"),
        (lambda: Next(3), "invalid_policy_decision"),
        (lambda: Next(None), "invalid_policy_decision"),
        (lambda: Next({"one", "two"}), "invalid_policy_decision"),
        (lambda: Next([one, None]), "invalid_policy_decision"),
        (lambda: Next(Nonsense()), "invalid_policy_decision"),
        (lambda: Next("three"), "unknown_node"),
        (lambda: Next(finish), "unknown_node"),
        (lambda: Next([one, "three"]), "unknown_node"),
        (lambda: Next(one, object()), "unserializable_value"),
        (lambda: Finish({"x": [1j]}), "unserializable_value"),
        (lambda: Fail(object()), "unserializable_value"),
        (lambda: ValueError("boom"), "policy_exception"),
        (lambda: SystemExit(3), "policy_exception"),
        (lambda: KeyboardInterrupt(), "policy_exception"),
    ],
)
def test_a_policy_that_fails_is_a_typed_answer(make, code):
    answer = decided(make())
    assert isinstance(answer, m.PolicyFailed)
    assert answer.evaluation == 7
    assert answer.error.code == code


def test_a_function_that_two_nodes_run_must_be_named():
    agent = Agent("a", {"first": one, "second": one}, lambda context: Next(one))
    assert asked(agent).error.code == "invalid_policy_decision"


def test_unknown_node_says_which_there_are():
    assert "one, two" in decided(Next("three")).error.hint


def test_an_exception_of_a_policy_arrives_as_type_message_and_traceback():
    details = decode(decided(ValueError("boom")).error.details)
    assert details["type"] == "ValueError"
    assert details["message"] == "boom"
    assert "raise answer" in details["traceback"]
    assert "hayata/calls.py" not in details["traceback"]


def test_hostile_bytes_as_input_are_a_typed_answer():
    answer = asked(Agent("a", [one], finish), input=msgspec.Raw(b"\x91" * 100_000))
    assert answer.error.code == "unserializable_value"


def test_a_state_that_does_not_fit_any_more_is_a_typed_answer():
    agent = Agent("a", [one], finish, state_type=State)
    assert asked(agent, state=encode_mapping({"count": "x"}, "state")).error.code == "invalid_state"


# ----------------------------------------------------------------------------------------------------- tasks


def run_task(
    agent: Agent, state: dict[str, Any] | None = None, given: Any = "in", *, stream: bool = False
) -> m.RunTask:
    encoded = agent.initial_state if state is None else encode_mapping(state, "state")
    return m.RunTask("inv.1.1", 5.0, "inv", 2, "key", "session", stream, encoded, raw(given))


def call(fn: Any, *, sent: list[Any] | None = None, refuse: str = "", deps: Any = None, **options: Any) -> Any:
    """Run ``fn`` as the only node of an agent; chunks go to ``sent``."""
    state, given = options.pop("now", None), options.pop("given", "in")
    node_options = {name: options.pop(name) for name in ("retry", "input", "output") if name in options}
    node = Node(fn, name="n", **node_options)
    agent = Agent("a", [node], finish, **options)

    def send(chunk: msgspec.Raw) -> None:
        if refuse:
            raise error_for(refuse, "refused")
        assert sent is not None
        sent.append(decode(chunk))

    async def send_async(chunk: msgspec.Raw) -> None:
        await asyncio.sleep(0)
        send(chunk)

    run = run_task(agent, state, given, stream=sent is not None or bool(refuse))
    task = TaskCall(agent, "n", run, "edge-1", deps, send_async if node.is_async else send, 99.0)
    return asyncio.run(task.run_async()) if node.is_async else task.run()


def test_a_node_gets_state_and_context():
    seen: list[Any] = []

    def body(state, ctx):
        seen.extend([state, ctx])
        return {"out": (1, 2)}

    outcome = call(body, state={"n": {1}}, given={"q": (1,)}, deps="pool")
    assert (outcome.execution_id, outcome.edge) == ("inv.1.1", "edge-1")
    assert decode_mapping(outcome.update) == {"out": (1, 2)}
    state, ctx = seen
    assert state == {"n": {1}}
    assert isinstance(ctx, Context)
    assert (ctx.input, ctx.deps, ctx.agent_id, ctx.node) == ({"q": (1,)}, "pool", "a", "n")
    assert (ctx.invocation_id, ctx.execution_id, ctx.session) == ("inv", "inv.1.1", "session")
    assert (ctx.attempt, ctx.idempotency_key, ctx.deadline) == (2, "key", 99.0)
    with pytest.raises(AttributeError):
        ctx.attempt = 3
    with pytest.raises(AttributeError):
        del ctx.input


def test_the_form_with_one_parameter_gets_one_read_only_mapping():
    seen: list[Any] = []

    def body(state):
        seen.append(state)
        return {}

    call(body, state={"n": 1}, given=5)
    (state,) = seen
    assert dict(state) == {"n": 1, "input": 5}
    with pytest.raises(TypeError):
        state["n"] = 2


def test_the_streamer_is_there_only_when_somebody_listens():
    def body(state):
        state["hayata_streamer"]({"chunk": 1})
        return {"keys": sorted(state)}

    sent: list[Any] = []
    assert decode_mapping(call(body, sent=sent).update) == {"keys": ["hayata_streamer", "input"]}
    assert sent == [{"chunk": 1}]
    assert "KeyError" in call(body).error.message


def test_a_coroutine_node_awaits_its_stream():
    async def body(state, ctx):
        assert isinstance(ctx, AsyncContext)
        await ctx.stream({"chunk": (1,)})
        await ctx.stream({"chunk": 2})
        return {}

    async def seeds_form(state):
        await state["hayata_streamer"]({"chunk": 3})
        return {}

    sent: list[Any] = []
    assert isinstance(call(body, sent=sent), m.TaskCompleted)
    assert isinstance(call(seeds_form, sent=sent), m.TaskCompleted)
    assert sent == [{"chunk": (1,)}, {"chunk": 2}, {"chunk": 3}]
    assert isinstance(call(body), m.TaskCompleted)


def test_stream_does_nothing_without_a_reader():
    def body(state, ctx):
        assert ctx.stream({"never": object()}) is None
        return {}

    assert isinstance(call(body), m.TaskCompleted)


@pytest.mark.parametrize("chunk", [1, "text", ["list"], None])
@pytest.mark.parametrize("sent", [None, []])
def test_a_chunk_that_is_no_mapping_fails_the_task_by_its_own_code(chunk, sent):
    assert call(lambda state, ctx: ctx.stream(chunk), sent=sent).error.code == "invalid_partial_result"


def test_a_refused_chunk_can_be_handled_or_else_is_the_reason():
    def lets_it_pass(state, ctx):
        ctx.stream({"a": 1})
        return {}

    def handles_it(state, ctx):
        try:
            ctx.stream({"a": object()})
        except HayataError as error:
            return {"code": error.code}
        return {}

    assert call(lets_it_pass, refuse="execution_not_active").error.code == "execution_not_active"
    assert decode_mapping(call(handles_it, sent=[]).update) == {"code": "unserializable_value"}


def test_a_chunk_may_hold_declared_models():
    sent: list[Any] = []
    call(lambda state, ctx: ctx.stream({"item": Item(name="x")}) or {}, sent=sent, state_type=State)
    assert sent == [{"item": {"name": "x"}}]


@pytest.mark.parametrize(
    "result", [None, 3, "text", [1], (), coroutine, Nonsense(), {1: 2}, {"input": 1}, {"hayata": 1}]
)
def test_what_is_no_mapping_of_updates_is_an_invalid_result(result):
    outcome = call(lambda state: result)
    assert isinstance(outcome, m.TaskFailed)
    assert outcome.error.code == "invalid_node_result"
    assert not outcome.retryable


def test_a_coroutine_that_a_plain_node_returns_is_an_invalid_result_and_no_warning():
    assert call(lambda state: coroutine()).error.code == "invalid_node_result"


def test_an_update_that_cannot_be_stored_names_its_path():
    outcome = call(lambda state: {"customer": {"tags": [1, 2, 3, object()]}})
    assert outcome.error.code == "unserializable_value"
    assert decode(outcome.error.details)["path"] == "state.customer.tags[3]"


def test_an_update_is_checked_against_the_states_type():
    assert call(lambda state: {"count": "x"}, state_type=State).error.code == "invalid_state"
    assert call(lambda state: {"cuont": 1}, state_type=State).error.code == "invalid_state"
    outcome = call(lambda state: {"items": [Item(name="x")]}, state_type=State)
    assert decode_mapping(outcome.update) == {"items": [{"name": "x"}]}


def test_the_update_of_a_parallel_branch_is_not_checked_against_the_states_type():
    agent = Agent("a", {"n": lambda state: {"cuont": "x", "items": [Item(name="x")]}}, finish, state_type=State)
    run = msgspec.structs.replace(run_task(agent), parallel=True)
    outcome = TaskCall(agent, "n", run, "e", None, print, None).run()
    assert isinstance(outcome, m.TaskCompleted)
    assert decode_mapping(outcome.update) == {"cuont": "x", "items": [{"name": "x"}]}
    branch = m.CheckUpdate(1, "n", raw({"cuont": "x"}), parallel=True)
    assert check_update(agent, branch).error is None
    assert check_update(agent, msgspec.structs.replace(branch, parallel=False)).error is not None


def test_a_node_gets_the_state_in_its_declared_type():
    seen: list[Any] = []

    def body(state, ctx):
        seen.append(state)
        return {}

    def seeds_form(state):
        seen.append(state)
        return {}

    call(body, state_type=State, state={"items": [{"name": "x"}]})
    call(seeds_form, state_type=State, state={"items": [{"name": "x"}]})
    assert seen[0] == {"items": [Item(name="x")]}
    assert seen[1] == {"items": [Item(name="x")], "input": "in"}


def test_input_and_output_types_of_a_node_are_checked():
    class Out(TypedDict):
        n: int

    seen: list[Any] = []

    def body(state, ctx):
        seen.append(ctx.input)
        return {"n": ctx.input.name, "more": 1}

    assert call(body, input=Item, given={"nome": 1}).error.code == "invalid_node_input"
    assert seen == []
    outcome = call(body, input=Item, output=Out, given={"name": "x"})
    assert seen == [Item(name="x")]
    assert outcome.error.code == "invalid_node_result"
    assert decode(outcome.error.details)["path"] == "result.n"
    assert isinstance(call(lambda state: {"n": 1, "more": 2}, output=Out), m.TaskCompleted)


def test_hostile_input_is_a_typed_failure():
    agent = Agent("a", [one], finish)
    run = msgspec.structs.replace(run_task(agent), input=msgspec.Raw(b"\xc1"))
    outcome = TaskCall(agent, "one", run, "e", None, print, None).run()
    assert isinstance(outcome, m.TaskFailed)
    assert outcome.error.code == "unserializable_value"


# ------------------------------------------------------------------------------------------------ exceptions


class KeywordOnly(Exception):
    def __init__(self, *, reason: str) -> None:
        super().__init__(reason)


class BrokenStr(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Surrogate(Exception):
    def __str__(self) -> str:
        return "half a \ud83d pair"


EXCEPTIONS = [
    ValueError("boom"),
    KeywordOnly(reason="why"),
    BrokenStr(),
    Surrogate(),
    ExceptionGroup("several", [ValueError("a"), KeyError("b")]),
    BaseExceptionGroup("several", [SystemExit(1)]),
    SystemExit(3),
    KeyboardInterrupt(),
    GeneratorExit(),
    asyncio.CancelledError(),
    StopIteration(),
    RecursionError(),
    type("Local", (Exception,), {"__reduce__": lambda self: 1 / 0})("x" * 100_000),
    error_for("session_busy", "of another client"),
]


def raiser(error: BaseException, *, is_async: bool) -> Any:
    def plain(state):
        raise error

    async def awaited(state):
        raise error

    return awaited if is_async else plain


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("error", EXCEPTIONS, ids=lambda error: type(error).__name__)
def test_p12_d13_any_exception_class_arrives_as_type_message_and_traceback(error, is_async):
    """P12, cpython 103061; D13, dbos 371."""
    outcome = call(raiser(error, is_async=is_async))
    assert isinstance(outcome, m.TaskFailed)
    assert outcome.error.code == "node_exception"
    msgspec.msgpack.encode(outcome)
    details = error_from(outcome.error).details
    expected = "RuntimeError" if is_async and isinstance(error, StopIteration) else type(error).__name__
    assert details["type"] == expected
    assert expected in details["traceback"]
    assert len(outcome.error.message) <= 4_000


def test_an_endless_recursion_is_a_short_traceback():
    def body(state):
        return body(state)

    outcome = call(body)
    assert decode(outcome.error.details)["type"] == "RecursionError"
    assert len(bytes(outcome.error.details)) < 10_000


def test_the_cancellation_by_its_worker_passes_through():
    started = []

    async def body(state):
        started.append(True)
        await asyncio.Event().wait()

    async def cancelled() -> None:
        agent = Agent("a", {"n": body}, finish)
        task = asyncio.create_task(TaskCall(agent, "n", run_task(agent), "e", None, print, None).run_async())
        while not started:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())


def test_what_retry_matches_is_retryable():
    def fails(state):
        raise ConnectionError("busy")

    def predicate(error: BaseException) -> bool:
        return 1 / 0 > 0

    assert not call(fails).retryable
    assert call(fails, retry=Retry(2)).retryable
    assert call(fails, retry=Retry(2, on=OSError)).retryable
    assert call(fails, retry=Retry(2, on=(KeyError, OSError))).retryable
    assert not call(fails, retry=Retry(2, on=KeyError)).retryable
    assert call(fails, retry=Retry(2, on=lambda error: "busy" in str(error))).retryable
    assert not call(fails, retry=Retry(2, on=predicate)).retryable
    assert not call(raiser(SystemExit(1), is_async=False), retry=Retry(2)).retryable


def test_a_result_that_cannot_be_stored_is_a_failure_that_retry_may_match():
    assert call(lambda state: {"x": object()}, retry=Retry(2)).retryable
    assert call(lambda state: None, retry=Retry(2, on=HayataError)).retryable
    assert not call(lambda state: None, retry=Retry(2, on=OSError)).retryable


# ---------------------------------------------------------------------------------------------------- others


def test_check_update_holds_a_persons_result_to_the_same_rules():
    agent = Agent("a", [one], finish, state_type=State)

    def check(node: str, value: Any) -> m.UpdateChecked:
        return check_update(agent, m.CheckUpdate(4, node, raw(value)))

    good = check("one", {"items": [{"name": "x"}]})
    assert (good.check, good.error) == (4, None)
    assert good.update is not None
    assert decode_mapping(good.update) == {"items": [{"name": "x"}]}
    codes = []
    for node, value in [("one", [1]), ("one", {"count": "x"}), ("nobody", {})]:
        bad = check(node, value)
        assert bad.update is None
        assert bad.error is not None
        codes.append(bad.error.code)
    assert codes == ["invalid_node_result", "invalid_state", "unknown_node"]


def test_the_log_is_bound_to_the_ids_and_goes_through_logging(caplog):
    def body(state, ctx):
        ctx.log.info("counted %s", "words", name="taken by logging", words=3)
        try:
            raise ZeroDivisionError
        except ZeroDivisionError:
            ctx.log.exception("failed")
        return {}

    with caplog.at_level(logging.INFO, logger="hayata.task"):
        assert isinstance(call(body), m.TaskCompleted)
    first, second = caplog.records
    assert (first.name, first.levelname, first.getMessage()) == ("hayata.task", "INFO", "counted words")
    assert first.hayata_fields == {
        "agent_id": "a",
        "invocation_id": "inv",
        "execution_id": "inv.1.1",
        "node_id": "n",
        "attempt": 2,
        "name": "taken by logging",
        "words": 3,
    }
    assert second.exc_info is not None


def test_a_lifespan_suits_its_node_whatever_its_kind():
    steps: list[str] = []

    @contextlib.contextmanager
    def plain():
        steps.append("enter")
        yield "pool"
        steps.append("leave")

    @contextlib.asynccontextmanager
    async def awaited():
        await asyncio.sleep(0)
        steps.append("enter")
        yield "pool"
        steps.append("leave")

    async def coroutine_node(state):
        return {}

    async def entered(manager: Any) -> Any:
        async with manager as deps:
            return deps

    for lifespan in (plain, awaited):
        agent = Agent("a", [one, coroutine_node], finish, lifespan=lifespan)
        manager = node_lifespan(agent, "one")
        assert isinstance(manager, contextlib.AbstractContextManager)
        with manager as deps:
            assert deps == "pool"
        assert asyncio.run(entered(node_lifespan(agent, "coroutine_node"))) == "pool"
    assert steps == ["enter", "leave"] * 4
    assert node_lifespan(Agent("a", [one], finish), "one") is None
    with pytest.raises(HayataError):
        node_lifespan(Agent("a", [one], finish, lifespan=lambda: 3), "one")


def test_a_lifespan_that_fails_raises_what_it_raised():
    @contextlib.asynccontextmanager
    async def failing():
        raise OSError("no database")
        yield

    manager = node_lifespan(Agent("a", [one], finish, lifespan=failing), "one")
    assert isinstance(manager, contextlib.AbstractContextManager)
    with pytest.raises(OSError, match="no database"):
        manager.__enter__()


def test_a_nodes_own_lifespan_comes_before_the_agents():
    own = Node(one, lifespan=lambda: contextlib.nullcontext("own"))
    agent = Agent("a", [own, two], finish, lifespan=lambda: contextlib.nullcontext("agent's"))
    for name, deps in (("one", "own"), ("two", "agent's")):
        manager = node_lifespan(agent, name)
        assert isinstance(manager, contextlib.AbstractContextManager)
        with manager as entered:
            assert entered == deps


def test_a_call_costs_little():
    agent = Agent("a", [one], finish)
    run = run_task(agent)
    began = time.perf_counter()
    for _ in range(200):
        TaskCall(agent, "one", run, "e", None, print, None).run()
    assert time.perf_counter() - began < 1.0
