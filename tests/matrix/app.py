"""The agents of the matrix: those of `tests.chaos.app`, and what they leave out."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import time
from contextlib import contextmanager
from uuid import uuid4

from hayata import NOT_DONE, Agent, Backoff, Finish, Next, Node, Probe, Supervision
from tests.chaos import app as chaos
from tests.chaos.ledger import read

LARGE_BYTES = 300_000
_SUM = {"state": {"sum": 0, "log": []}, "merge": {"sum": "add", "log": "append"}}


def drip(state, ctx):
    """Stream chunks without a loop, print and log."""
    with chaos.body(ctx) as result:
        for number in range(ctx.input["chunks"]):
            ctx.stream({"chunk": number})
        print(f"{ctx.execution_id} has dripped")
        logging.getLogger("drip").warning("dripped")
        chaos.add(ctx, result)
    return result


def swell(state, ctx):
    """Make the state larger than a socket's buffer."""
    with chaos.body(ctx) as result:
        chaos.add(ctx, result)
        result["large"] = "x" * LARGE_BYTES
    return result


def make_token():
    """What nobody can guess."""
    return uuid4().hex


def stepped(ctx, key, token):
    """Write down what a sub-step has given to the body."""
    chaos.note("stepped", execution=ctx.execution_id, task=ctx.idempotency_key, key=key, token=token)


def walk(state, ctx):
    """Take sub-steps."""
    with chaos.body(ctx) as result:
        for key in ("one", "two", "three"):
            stepped(ctx, key, ctx.step(make_token, key=key))
            time.sleep(0.03)
        chaos.add(ctx, result)
    return result


async def stroll(state, ctx):
    """Take sub-steps, beside others in the same process."""
    with chaos.body(ctx) as result:
        for key in ("one", "two", "three"):
            stepped(ctx, key, await ctx.step(make_token, key=key))
            await asyncio.sleep(0.03)
        chaos.add(ctx, result)
    return result


def pay(state, ctx):
    """Do what can be asked about: its end is in the ledger."""
    with chaos.body(ctx) as result:
        time.sleep(0.1)
        chaos.add(ctx, result)
    return result


def was_paid(ctx):
    """Look for the end of the attempt that was cut off."""
    for line in read(chaos.home() / "ledger"):
        if line["what"] == "end" and line["execution"] == ctx.execution_id:
            return line["result"]
    return NOT_DONE


async def nap(state, ctx):
    """Sleep for long; somebody cancels it."""
    with chaos.body(ctx) as result:
        await asyncio.sleep(30)
        chaos.add(ctx, result)
    return result


def halt(state, ctx):
    """Be stopped, and go on."""
    with chaos.body(ctx) as result:
        subprocess.run(["sh", "-c", "kill -STOP $PPID; sleep 0.1; kill -CONT $PPID"], check=True)
        chaos.add(ctx, result)
    return result


def silent(state, ctx):
    """Write nothing: the checks know nothing of this one's invocations."""
    return {"sum": 1}


def confused(context):
    """Raise, at the second decision."""
    if context.step:
        raise ValueError("a policy that does not know what to do")
    return Next("silent", context.input)


@contextmanager
def refuse():
    """A lifespan that does not begin."""
    raise ConnectionRefusedError("no connection")
    yield


def never(state, ctx):
    """Never called."""
    with chaos.body(ctx) as result:
        return result


agents = [
    *chaos.agents,
    Agent(
        id="drip",
        nodes=[Node(drip, name="drops", interrupted=chaos.RERUN)],
        decision_policy=chaos.in_line("drops", "drops"),
        **_SUM,
    ),
    Agent(id="large", nodes=[Node(swell, name="mass")], decision_policy=chaos.in_line("mass", "mass"), **_SUM),
    Agent(
        id="walker",
        nodes=[Node(walk, interrupted=chaos.RERUN), Node(stroll, interrupted=chaos.RERUN)],
        decision_policy=chaos.in_line("walk", "stroll"),
        **_SUM,
    ),
    Agent(
        id="payer",
        nodes=[Node(pay, interrupted=Probe(was_paid))],
        decision_policy=chaos.in_line("pay", "pay"),
        **_SUM,
    ),
    Agent(
        id="halting",
        nodes=[Node(halt, interrupted=chaos.RERUN)],
        decision_policy=chaos.in_line("halt", "halt"),
        **_SUM,
    ),
    Agent(id="sleeper", nodes=[Node(nap)], decision_policy=chaos.in_line("nap"), **_SUM),
    Agent(id="confused", nodes=[Node(silent)], decision_policy=confused, **_SUM),
    Agent(
        id="refused",
        nodes=[Node(never, lifespan=refuse)],
        decision_policy=lambda context: Next("never") if context.step == 0 else Finish(None),
        supervision=Supervision(intensity=1, backoff=Backoff(initial=0.01, maximum=0.01)),
    ),
]
