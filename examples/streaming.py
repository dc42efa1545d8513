"""Partial results: a node publishes chunks while it works, and a client reads them as they come.

    python examples/streaming.py

Chunks are notifications. They don't change the state, and only what the node returns is its result.
"""

from __future__ import annotations

import tempfile
import time
from typing import TypedDict

import hayata
from hayata import Agent, Context, Decision, Finish, Next, PolicyContext

ANSWER = "Every step runs in a process of its own."


class State(TypedDict, total=False):
    """The shared state."""

    answer: str


def speak(state: State, ctx: Context) -> State:
    for word in ANSWER.split():
        ctx.stream({"word": word})
        time.sleep(0.05)  # a model that thinks
    return {"answer": ANSWER}


def policy(context: PolicyContext[State]) -> Decision:
    if context.last is None:
        return Next(speak)
    return Finish(context.state.get("answer"))


agent = Agent(
    id="streaming_agent",
    nodes=[speak],
    decision_policy=policy,
    state_type=State,
    execution_timeout=30.0,
)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, hayata.start(agent, data_dir=f"{folder}/data") as runtime:
        invocation = runtime.run("streaming_agent", stream=True)
        for event in invocation.events():
            if event.type == "node_partial_result":
                print(event.data["result"]["word"], end=" ", flush=True)
        print()
        print("result:", invocation.result(timeout=30))


if __name__ == "__main__":
    main()
