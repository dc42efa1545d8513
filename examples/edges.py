"""A node with edges: it runs once for each text, side by side, and a reducer makes one result of what comes back.

    python examples/edges.py

Kill any process of it while it runs: an edge that is done is never run again, and the reduction begins when all are.
"""

from __future__ import annotations

import tempfile
from typing import Any, TypedDict

import hayata
from hayata import Agent, Context, Decision, Finish, Next, Node, PolicyContext, Reduce, ReduceContext, Rerun

TEXTS = ["Let it crash", "Nothing is lost", "", "Nothing runs twice"]


class State(TypedDict, total=False):
    """The shared state."""

    words: int
    unread: list[int]


def count(state: State, ctx: Context) -> dict[str, int]:
    """One edge: count the words of a text; an empty one can't be read, say."""
    if not ctx.input:
        raise ValueError("there is nothing to read")
    return {"words": len(ctx.input.split())}


def add_up(results: list[dict[str, Any] | None], ctx: ReduceContext) -> State:
    """All edges at once, in their order. With ``partial=True`` those that have failed are None."""
    return {"words": sum(each["words"] for each in results if each), "unread": sorted(ctx.errors)}


def texts_of(given: dict[str, Any]) -> list[str]:
    """The edges: one for each text. It is asked once, with the decision, and what it says is stored."""
    return list(given["texts"])


def policy(context: PolicyContext[State]) -> Decision:
    return Next("count", context.input) if context.last is None else Finish(context.state)


agent = Agent(
    id="counter",
    nodes=[
        Node(
            count,
            edges=texts_of,
            reduce=Reduce(add_up, timeout=30, partial=True),
            interrupted=Rerun(max_attempts=3),
        )
    ],
    decision_policy=policy,
    state_type=State,
)

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as data_dir, hayata.start(agent, data_dir=data_dir) as runtime:
        invocation = runtime.run("counter", {"texts": TEXTS})
        print(invocation.result(timeout=60))
        for task in invocation.tasks():
            print("reduction" if task.edge is None else f"edge {task.edge}", task.status)
