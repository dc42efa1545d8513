"""The agents of `bench.growth`; see there."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from bench.measure import stamp, write_value
from hayata import Agent, Context, Decision, Finish, Next, Node, PolicyContext, Rerun

APPENDED_BYTES = 1024
_WAIT_S = 0.01
_HOARDED_MB = 10


def append(state: dict[str, Any], ctx: Context[Any]) -> dict[str, Any]:
    """Append 1 KB; write down how large the store's file is, if the input has a place for it."""
    given, done = ctx.input, len(state.get("messages", []))
    if given["sizes"] is not None:
        write_value(given["sizes"], done, os.stat(given["data"]).st_size)
    return {"messages": "x" * APPENDED_BYTES}


def decide_append(context: PolicyContext[Any]) -> Decision:
    """Go on until ``steps`` are done."""
    return Next("append", context.input) if context.step < context.input["steps"] else Finish(context.step)


def appending(steps: int, sizes: str | None, data: str) -> dict[str, Any]:
    """Make an input of ``appender``."""
    return {"steps": steps, "sizes": sizes, "data": data}


def count(state: dict[str, Any], ctx: Context[Any]) -> dict[str, Any]:
    """Count, and write down when."""
    stamp(ctx.input["stamps"], state["count"])
    return {"count": state["count"] + 1}


def decide_count(context: PolicyContext[Any]) -> Decision:
    """Go on until ``steps`` are done."""
    done = context.state["count"]
    return Next("count", context.input) if done < context.input["steps"] else Finish(done)


def counting(steps: int, stamps: str) -> dict[str, Any]:
    """Make an input of ``counter``."""
    return {"steps": steps, "stamps": stamps}


def wait(state: dict[str, Any], ctx: Context[Any]) -> dict[str, Any]:
    """Wait for the gate; the first body behind it writes down when."""
    while not Path(ctx.input["gate"]).exists():
        time.sleep(_WAIT_S)
    stamp(ctx.input["began"], 0, only_once=True)
    return {}


def decide_wait(context: PolicyContext[Any]) -> Decision:
    """One step."""
    return Next("wait", context.input) if context.last is None else Finish(None)


def gated(gate: str, began: str) -> dict[str, Any]:
    """Make an input of ``waiter``."""
    return {"gate": gate, "began": began}


def hoard(state: dict[str, Any], ctx: Context[Any]) -> dict[str, Any]:
    """Make the state larger: all at once, or by 10 MB a step."""
    megabytes = ctx.input["megabytes"]
    size = megabytes if ctx.input["at_once"] else min(megabytes, _HOARDED_MB)
    return {"hoard": [bytes(1_000_000)] * size}


def read(state: dict[str, Any], ctx: Context[Any]) -> dict[str, Any]:
    """Say how large it is."""
    return {"size": sum(map(len, state["hoard"]))}


def decide_hoard(context: PolicyContext[Any]) -> Decision:
    """Hoard, then read."""
    given = context.input
    steps = 1 if given["at_once"] else max(1, given["megabytes"] // _HOARDED_MB)
    if context.step < steps:
        return Next("hoard", given)
    return Next("read") if context.last == "hoard" else Finish(context.state["size"])


def hoarding(megabytes: int, *, at_once: bool = True) -> dict[str, Any]:
    """Make an input of ``hoarder``."""
    return {"megabytes": megabytes, "at_once": at_once}


appender = Agent(
    "appender",
    nodes=[append],
    decision_policy=decide_append,
    merge={"messages": "append"},
    max_steps=1_000_000,
)
counter = Agent("counter", nodes=[count], decision_policy=decide_count, state={"count": 0}, max_steps=1_000_000)
waiter = Agent(
    "waiter",
    nodes=[Node(wait, interrupted=Rerun(max_attempts=9), concurrency=2)],
    decision_policy=decide_wait,
    max_concurrency=1_000_000,
)
hoarder = Agent("hoarder", nodes=[hoard, read], decision_policy=decide_hoard, merge={"hoard": "extend"})
