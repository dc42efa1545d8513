"""The quick start: one node, a policy, one invocation.

    python examples/hello.py

or as a daemon and its client, in two terminals:

    hayata-supervisor examples/hello.py --data-dir ./h1
    hayata run hello_agent '{"input": "Hello"}' --stream
"""

from __future__ import annotations

import tempfile
from typing import TypedDict

import hayata
from hayata import Agent, Context, Decision, Finish, Next, PolicyContext


class State(TypedDict, total=False):
    """The shared state."""

    messages: list[dict[str, str]]


def greet(state: State, ctx: Context) -> State:
    return {
        "messages": [
            {"role": "ai", "content": "Hello, world!"},
            {"role": "user", "content": ctx.input["input"]},
        ]
    }


def policy(context: PolicyContext[State]) -> Decision:
    if context.last is None:
        return Next(greet, context.input)
    return Finish(context.state)


agent = Agent(
    id="hello_agent",
    nodes=[greet],
    decision_policy=policy,
    state_type=State,
    max_steps=3,
    execution_timeout=5.0,
)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, hayata.start(agent, data_dir=f"{folder}/data") as runtime:
        invocation = runtime.run("hello_agent", {"input": "Hello"}, stream=True)
        for event in invocation.events():
            print(event.sequence, event.type)
        print(invocation.result(timeout=30))


if __name__ == "__main__":
    main()
