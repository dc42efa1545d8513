"""The agent of `bench.watchers`: as many nodes as the environment says, whose bodies wait until they are killed."""

from __future__ import annotations

import os
import signal
from typing import Any

from hayata import Agent, Context, Decision, Finish, Next, Node, PolicyContext, Supervision

NODES, EDGES = "BENCH_WATCHERS_NODES", "BENCH_WATCHERS_EDGES"


def wait(state: dict[str, Any], ctx: Context[Any]) -> dict[str, Any]:
    """Hold an edge worker."""
    while True:
        signal.pause()


def decide(context: PolicyContext[Any]) -> Decision:
    """Run the node that is wanted."""
    return Next(context.input, None) if context.last is None else Finish(None)


def node_names() -> list[str]:
    """Names of the nodes."""
    return [f"node{number}" for number in range(int(os.environ.get(NODES, "1")))]


agent = Agent(
    id="crowd",
    nodes=[Node(wait, name=name, concurrency=int(os.environ.get(EDGES, "1"))) for name in node_names()],
    decision_policy=decide,
    max_concurrency=100_000,
    supervision=Supervision(intensity=1000, period=60.0, backoff=0.0),
)
