"""Agents for tests of hangs: bodies and policies that hold the interpreter, a node with many edges."""

import ctypes
import os
import time
from pathlib import Path

from hayata import Agent, Finish, Node, Supervision
from tests.support.tree_app import act, policy, tell

_holding = ctypes.PyDLL(None)  # what it calls is called with the GIL held


def hold(seconds):
    """Hold the interpreter: no other thread of this process, and no signal handler, runs meanwhile."""
    due = time.monotonic() + seconds
    while (left := due - time.monotonic()) > 0:
        _holding.usleep(int(left * 1e6))


broken = Path(os.environ["TREE_RIG_BROKEN"])
if broken.exists():
    hold(float(broken.read_text()))


def holding(state, ctx):
    """Hold the interpreter, or be an ordinary body."""
    if "hold_s" in (ctx.input or {}):
        tell("body", execution=ctx.execution_id)
        hold(ctx.input["hold_s"])
        return {"value": "held"}
    return act(state, ctx)


async def blocking(state, ctx):
    """Block the loop that all coroutines of the node share."""
    tell("body", execution=ctx.execution_id)
    time.sleep(ctx.input["hold_s"])
    return {"value": "blocked"}


def holding_policy(context):
    """Hold the interpreter, or decide like another."""
    if "hold_s" in (context.input or {}):
        tell("policy", step=context.step)
        hold(context.input["hold_s"])
        return Finish("held")
    return policy(context)


hang = Agent(
    id="hang",
    nodes=[
        Node(holding, concurrency=2, shutdown=1.0),
        Node(blocking, shutdown=1.0),
        Node(act, name="many", concurrency=50, shutdown=1.0),
    ],
    decision_policy=holding_policy,
    supervision=Supervision(intensity=1000, period=60.0, backoff=0.0),
)
