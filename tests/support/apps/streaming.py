"""Agents that stream: in order, a lot, and when they may not. See `bad_input` for its surroundings."""

import asyncio
import threading
from contextlib import asynccontextmanager, contextmanager

from crash import note, once, wait_for_gate

from hayata import Agent, Finish, HayataError, Next, Node


def chunks(given):
    for number in range(given["chunks"]):
        yield {"number": number, "padding": bytes(given.get("bytes", 0))}


def paused(ctx, number):
    if number != ctx.input.get("pause_at"):
        return False
    note("paused", invocation=ctx.invocation_id)
    return True


def pour(state, ctx):
    for number, chunk in enumerate(chunks(ctx.input)):
        if paused(ctx, number):
            wait_for_gate(ctx.input["gate"])
        ctx.stream(chunk)
    return {"poured": ctx.input["chunks"]}


async def pour_async(state, ctx):
    for number, chunk in enumerate(chunks(ctx.input)):
        if paused(ctx, number):
            await asyncio.to_thread(wait_for_gate, ctx.input["gate"])
        await ctx.stream(chunk)
    return {"poured": ctx.input["chunks"]}


def both_pour(context):
    if context.step == 0:
        return Next(["pour", "pour_async"], context.input)
    return Finish(context.parallel_results)


def pour_twice(context):
    """The first time a little, so that the end of its node lies between many chunks."""
    if context.step < 2:
        return Next("pour", {"chunks": context.input["chunks"][context.step]})
    return Finish(context.state)


# What goes on to stream after the body has ended is waited for by the lifespan, so that it can be heard.


@contextmanager
def threads():
    started = []
    yield started
    for thread in started:
        thread.join()


def linger(state, ctx):
    def go_on():
        try:
            while True:
                ctx.stream({"late": "perhaps"})
        except HayataError as error:
            note("refused", invocation=ctx.invocation_id, code=error.code)

    ctx.deps.append(threading.Thread(target=go_on))
    ctx.deps[-1].start()
    return {"ended": True}


@asynccontextmanager
async def tasks():
    started = []
    yield started
    await asyncio.gather(*started)


async def linger_async(state, ctx):
    async def go_on():
        try:
            while True:
                await ctx.stream({"late": "perhaps"})
        except HayataError as error:
            note("refused", invocation=ctx.invocation_id, code=error.code)

    ctx.deps.append(asyncio.create_task(go_on()))
    await asyncio.sleep(0)
    return {"ended": True}


async def complain(state, ctx):
    """Cancelled, it still wants to say something."""
    note("running", invocation=ctx.invocation_id)
    try:
        await asyncio.sleep(600)
    except asyncio.CancelledError:
        try:
            await ctx.stream({"last": "word"})
        except HayataError as error:
            note("refused", invocation=ctx.invocation_id, code=error.code)
        raise


def echo(state, ctx):
    return {"echo": ctx.input}


agents = [
    Agent(id="echo", nodes=[echo], decision_policy=once("echo")),
    Agent(id="pour", nodes=[pour], decision_policy=once("pour")),
    Agent(id="pour_async", nodes=[pour_async], decision_policy=once("pour_async")),
    Agent(id="twice", nodes=[pour], decision_policy=pour_twice),
    Agent(id="both", nodes=[pour, pour_async], decision_policy=both_pour),
    Agent(id="linger", nodes=[Node(linger, max_tasks=1)], decision_policy=once("linger"), lifespan=threads),
    Agent(
        id="linger_async",
        nodes=[Node(linger_async, max_tasks=1)],
        decision_policy=once("linger_async"),
        lifespan=tasks,
    ),
    Agent(id="complain", nodes=[complain], decision_policy=once("complain")),
]
