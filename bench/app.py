"""The agents that the benchmarks run on Hayata: trivial steps, one decision after each.

Programs import this module, not the agents out of it: then the forkserver imports this module, not them.
"""

from __future__ import annotations

from typing import Any, TypedDict

from bench.measure import CONCURRENT, stamp
from hayata import (
    Agent,
    AsyncContext,
    Backoff,
    Context,
    Decision,
    Finish,
    Next,
    Node,
    PolicyContext,
    Rerun,
    Supervision,
)


class State(TypedDict):
    """How many steps are done."""

    count: int


def step(state: State, ctx: Context[Any]) -> State:
    """Count; write down when, if the invocation's input has a place for it."""
    if ctx.input["stamps"] is not None:
        stamp(ctx.input["stamps"], ctx.input["first"] + state["count"])
    return {"count": state["count"] + 1}


async def async_step(state: State, ctx: AsyncContext[Any]) -> State:
    """Do the same as a coroutine: 64 at once in one edge worker, instead of one in each of a few."""
    if ctx.input["stamps"] is not None:
        stamp(ctx.input["stamps"], ctx.input["first"] + state["count"])
    return {"count": state["count"] + 1}


def decide(context: PolicyContext) -> Decision:
    """Go on until ``steps`` are done."""
    if context.state["count"] < context.input["steps"]:
        return Next("step", context.input)
    return Finish(context.state["count"])


def work(steps: int, *, stamps: str | None = None, first: int = 0) -> dict[str, Any]:
    """Make the input of one invocation.

    Args:
        steps: How many.
        stamps: Path of `bench.measure.Stamps`, or None.
        first: Number of the invocation's first stamp.
    """
    return {"steps": steps, "stamps": stamps, "first": first}


def _agent(name: str, node: Node, supervision: Supervision | None = None) -> Agent:
    return Agent(
        id=name,
        nodes={"step": node},
        decision_policy=decide,
        state={"count": 0},
        state_type=State,
        max_steps=1_000_000,
        max_concurrency=CONCURRENT,
        supervision=supervision or Supervision(),
    )


# Rerun, since `bench.recovery` kills the node under its tasks; it costs other tasks nothing.
agent = _agent("bench", Node(step, interrupted=Rerun(max_attempts=10)))
async_agent = _agent("bench_async", Node(async_step))
patient_agent = _agent(
    "restarts",
    Node(step, interrupted=Rerun(max_attempts=10)),
    Supervision(intensity=1_000_000, backoff=Backoff(initial=0.001, maximum=0.01)),
)
"""For `bench.restarts`: it is never given up."""
