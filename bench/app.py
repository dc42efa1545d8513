"""The agent that the benchmarks run on Hayata: trivial steps, one decision after each.

Programs import this module and not the agent out of it: then the forkserver imports this module, and not them.
"""

from __future__ import annotations

from typing import Any, TypedDict

from bench.measure import CONCURRENT, stamp
from hayata import Agent, Context, Decision, Finish, Next, Node, PolicyContext, Rerun


class State(TypedDict):
    """How many steps are done."""

    count: int


def step(state: State, ctx: Context[Any]) -> State:
    """Count; write down when, if the invocation's input has a place for it."""
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


agent = Agent(
    id="bench",
    # Rerun, since `bench.recovery` kills the node under its tasks; it costs other tasks nothing.
    nodes={"step": Node(step, interrupted=Rerun(max_attempts=10))},
    decision_policy=decide,
    state={"count": 0},
    state_type=State,
    max_steps=1_000_000,
    max_concurrency=CONCURRENT,
)
