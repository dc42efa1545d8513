"""A user's file: everything of the public API that authors and clients write, as they would write it.

Not a test itself: `test_typing` gives it to mypy and pyright. Lines with ``# wrong`` must be refused by both.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, TypedDict

import hayata
from hayata import (
    NOT_DONE,
    UNKNOWN,
    Agent,
    AsyncContext,
    Backoff,
    Context,
    Decision,
    Extend,
    Fail,
    Finish,
    HayataError,
    InvocationFailed,
    Next,
    Node,
    PolicyContext,
    Probe,
    Reduce,
    ReduceContext,
    Rerun,
    Retry,
    Supervision,
    node,
)


class State(TypedDict, total=False):
    messages: Annotated[list[dict[str, str]], Extend]


@dataclass
class Pool:
    size: int


def greet(state: State, ctx: Context) -> State:
    ctx.stream({"chunk": 1})
    ctx.log.info("greeting", attempt=ctx.attempt)
    key: str = ctx.idempotency_key
    return {"messages": [{"role": "ai", "content": key}]}


def pooled(state: State, ctx: Context[Pool]) -> State:
    size: int = ctx.deps.size
    wrong: str = ctx.deps.size  # wrong
    return {"messages": [{"role": "ai", "content": f"{size} {wrong}"}]}


async def fetch(state: State, ctx: AsyncContext[Pool]) -> Mapping[str, Any]:
    await ctx.stream({"size": ctx.deps.size})
    await asyncio.sleep(0)
    return {}


def seeds_form(state: Mapping[str, Any]) -> dict[str, Any]:
    return {"answer": state["input"]}


@node(
    concurrency=2,
    retry=Retry(max_attempts=3, backoff=Backoff(initial=0.1), on=(OSError,)),
    interrupted=Rerun(2),
    restart="transient",
    shutdown="infinity",
)
def decorated(state: State, ctx: Context) -> State:
    return {}


def charge(order: str, cents: int) -> int:
    return cents + len(order)


async def ask_bank(order: str) -> bool | None:
    return order != ""


def in_steps(state: State, ctx: Context) -> State:
    cents: int = ctx.step(charge, "o1", 5)
    wrong: str = ctx.step(charge, "o1", 5, key="again")  # wrong
    return {"messages": [{"role": "ai", "content": f"{cents} {wrong}"}]}


async def in_steps_later(state: State, ctx: AsyncContext) -> State:
    cents: int = await ctx.step(charge, "o1", 5)
    paid: bool | None = await ctx.step(ask_bank, "o1", key="bank")
    return {"messages": [{"role": "ai", "content": f"{cents} {paid}"}]}


def was_charged(ctx: Context) -> Any:
    return {"messages": []} if ctx.attempt == 1 else UNKNOWN


async def was_charged_later(ctx: AsyncContext) -> Any:
    return NOT_DONE if await ask_bank(ctx.idempotency_key) is None else UNKNOWN


probed = Node(in_steps, interrupted=Probe(was_charged, max_attempts=5))
probed_later = Node(in_steps_later, interrupted=Probe(was_charged_later))
brutal = Node(in_steps, restart="transient", shutdown="brutal_kill")
patient = Node(in_steps, restart="temporary", shutdown="infinity")
bad_restart = Node(in_steps, restart="sometimes")  # wrong
bad_shutdown = Node(in_steps, shutdown="soon")  # wrong
bad_strategy = Supervision(strategy="one_for_some")  # wrong
bad_probe = Node(in_steps, interrupted=Probe(was_charged, attempts=5))  # wrong


def letters_of(given: dict[str, str]) -> list[str]:
    return list(given["name"])


def together(results: list[dict[str, Any] | None], ctx: ReduceContext) -> State:
    late: int = ctx.pending_edges
    return {"messages": [{"role": "ai", "content": f"{len(results)} {late}"}]}


many = Node(greet, edges=letters_of, reduce=together)
some = Node(greet, edges=["a", "b"], reduce=Reduce(together, timeout=5, partial=True))
bad_edges = Node(greet, edges=5, reduce=together)  # wrong
bad_reduce = Node(greet, edges=[], reduce=Reduce(together, partially=True))  # wrong


@node
def bare(state: State) -> State:
    return {}


@contextmanager
def pool() -> Generator[Pool]:
    yield Pool(3)


@asynccontextmanager
async def awaited_pool() -> AsyncGenerator[Pool]:
    yield Pool(3)


def policy(context: PolicyContext) -> Decision:
    if context.last is None:
        return Next(greet, context.input)
    if context.step == 1:
        return Next([pooled, "fetch", decorated], {"n": 1})
    if context.failure is not None:
        return Fail(context.failure.code)
    return Finish(context.state)


def typed_policy(context: PolicyContext[State]) -> Decision:
    messages: list[dict[str, str]] = context.state.get("messages", [])
    return Finish(messages[0])


agent = Agent(
    id="hello_agent",
    nodes=[greet, pooled, fetch, decorated, "json:dumps", Node(seeds_form, name="seed", isolation="fresh")],
    decision_policy=policy,
    state={"messages": []},
    state_type=State,
    merge={"messages": "extend"},
    max_steps=3,
    execution_timeout=5.0,
    lifespan=pool,
    supervision=Supervision(strategy="rest_for_one", intensity=3, period=5),
)
mapped = Agent("mapped", {"seed": seeds_form, "bare": bare}, typed_policy, lifespan=awaited_pool)
misspelt = Agent("a", [greet], policy, max_step=3)  # wrong
bad_merge = Agent("a", [greet], policy, merge={"messages": "concat"})  # wrong
bad_node = Node(greet, concurency=3)  # wrong
bad_resume = Agent("a", [greet], policy, resume="later")  # wrong
bad_policy = Agent("a", [greet], seeds_form)  # wrong


def embedded() -> None:
    with hayata.start(agent, data_dir=".hayata") as runtime:
        invocation = runtime.run("hello_agent", {"input": "Hello"}, stream=True)
        for event in invocation.events():
            number: int = event.sequence
            print(number, event.type, event.data)
        print(invocation.result(timeout=5))


def daemon() -> None:
    client = hayata.Client()
    invocation = client.run("hello_agent", {"n": 1}, session="s", key="k", on_busy="queue")
    identity: str = invocation.id
    for task in invocation.tasks():
        print(identity, task.node, task.attempt, task.status)
    try:
        print(client.call("hello_agent"))
    except InvocationFailed as error:
        print(error.code, error.details)
    except HayataError as error:
        print(error.hint)
    client.run("hello_agent", on_bsy="queue")  # wrong


async def awaited() -> None:
    async with hayata.AsyncClient() as client:
        invocation = await client.run("hello_agent", {"input": "Hello"})
        async for event in invocation.events(after=3):
            print(event.sequence)
        print(await invocation.result())
