"""Agents whose workers are killed: what becomes of invocations under each strategy."""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from pathlib import Path

from hayata import Agent, Finish, Next, Node, Rerun, Supervision

HOME = Path(os.environ["SUPERVISED_HOME"])


def held(state, ctx):
    """Wait for the test, in the first attempt."""
    if ctx.attempt == 1:
        (HOME / "began").touch()
        while not (HOME / "gate").exists():
            time.sleep(0.01)
    return {"attempt": ctx.attempt}


def quick(state, ctx):
    return {"attempt": ctx.attempt}


def policy(context):
    return Next(context.input, None) if context.last is None else Finish(context.state)


@contextmanager
def broken():
    """A lifespan that never comes up, and notes each try."""
    with (HOME / "tries").open("a") as tries:
        tries.write("x")
    raise RuntimeError("there is no database")
    yield


def nodes(**options):
    return [
        Node(held, shutdown=0.2),
        Node(held, name="again", interrupted=Rerun(3), shutdown=0.2),
        Node(quick),
        Node(quick, name="odd", **options),
    ]


def agent(id, supervision, **options):
    return Agent(id=id, nodes=nodes(**options), decision_policy=policy, supervision=supervision)


agents = [
    agent("all", Supervision("one_for_all", intensity=100, backoff=0.0)),
    agent("fragile", Supervision("one_for_all", intensity=1, backoff=0.0)),
    agent("kinds", Supervision(), restart="temporary"),
    agent("storm", Supervision(intensity=3, period=60.0, backoff=0.01), lifespan=broken),
    Agent(id="patient", nodes=[Node(held, shutdown="infinity")], decision_policy=policy),
]
