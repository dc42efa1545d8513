"""Agents for the tests of clients, the command line and embedding: quick, slow, failing, streaming, dying."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hayata import Agent, AsyncContext, Context, Decision, Finish, Next, PolicyContext


def once(name: str) -> Callable[[PolicyContext[Any]], Decision]:
    def policy(context: PolicyContext[Any]) -> Decision:
        return Next(name, context.input) if context.last is None else Finish(context.state)

    return policy


def echo(state: Mapping[str, Any]) -> dict[str, Any]:
    return {"echo": state["input"]}


def wait(state: Mapping[str, Any]) -> dict[str, Any]:
    """Say that it runs in the file ``started``, and return when the file ``go`` is there."""
    given = state["input"]
    Path(given["started"]).write_text(str(os.getpid()))
    while not os.path.exists(given["go"]):
        time.sleep(0.01)
    return {"waited": True}


def fail(state: Mapping[str, Any]) -> dict[str, Any]:
    raise ValueError("no such luck")


def stream(state: Mapping[str, Any], ctx: Context[None]) -> dict[str, Any]:
    for number in range(3):
        ctx.stream({"number": number})
    return {"streamed": 3}


async def gather(state: Mapping[str, Any], ctx: AsyncContext[None]) -> dict[str, Any]:
    await asyncio.sleep(0)
    return {"gathered": ctx.input}


def die(state: Mapping[str, Any]) -> dict[str, Any]:
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def shout(state: Mapping[str, Any]) -> dict[str, Any]:
    print("a word from the node", flush=True)
    return {}


agents = [
    Agent("echo", nodes=[echo], decision_policy=once("echo")),
    Agent("wait", nodes=[wait], decision_policy=once("wait")),
    Agent("fail", nodes=[fail], decision_policy=once("fail")),
    Agent("stream", nodes=[stream], decision_policy=once("stream")),
    Agent("gather", nodes=[gather], decision_policy=once("gather")),
    Agent("die", nodes=[die], decision_policy=once("die")),
    Agent("shout", nodes=[shout], decision_policy=once("shout")),
]
