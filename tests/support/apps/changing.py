"""An agent whose definition is another one when ``$CHANGED`` is set; ledger and gates as in `crash`."""

from __future__ import annotations

import os
from typing import TypedDict

from crash import RERUN, body, wait_for_gate, wanted

from hayata import Agent, Finish, Next, Node

CHANGED = bool(os.environ.get("CHANGED"))


class Before(TypedDict, total=False):
    count: int


class After(TypedDict, total=False):
    count: str


def act(state, ctx):
    with body(ctx) as result:
        if gate := wanted(ctx, "gate"):
            wait_for_gate(gate)
        result["count"] = state.get("count", 0) + 1
    return result


async def more(state):
    return {}


def policy(context):
    return Next("act", context.input) if context.step < 2 else Finish(context.state)


nodes = [Node(act, interrupted=RERUN), more]
if CHANGED:
    agent = Agent("changing", nodes[:1], policy, state_type=After)
else:
    agent = Agent("changing", nodes, policy, state={"count": 0}, state_type=Before)
