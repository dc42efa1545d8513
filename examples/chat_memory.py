"""Conversation memory: what was said in a session is there in its next invocation, also after a restart.

    python examples/chat_memory.py

The runtime is stopped between the two invocations and started again on the same data directory. A session is
named, so that two users never share a chat by accident.
"""

from __future__ import annotations

import tempfile
from typing import Annotated, TypedDict

import hayata
from hayata import Agent, Context, Decision, Extend, Finish, Next, PolicyContext

Message = dict[str, str]


class State(TypedDict, total=False):
    """The shared state."""

    messages: Annotated[list[Message], Extend]


def reply(state: State, ctx: Context) -> State:
    said = [message["content"] for message in state["messages"] if message["role"] == "user"]
    words = f"You said before: {', '.join(said)}." if said else "Nice to meet you."
    return {
        "messages": [
            {"role": "user", "content": ctx.input["text"]},
            {"role": "ai", "content": words},
        ]
    }


def policy(context: PolicyContext[State]) -> Decision:
    if context.last is None:
        return Next(reply, context.input)
    return Finish(context.state["messages"])


agent = Agent(
    id="chat_agent",
    nodes=[reply],
    decision_policy=policy,
    state={"messages": []},
    state_type=State,
    conversation_memory=True,
)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        data_dir = f"{folder}/data"
        with hayata.start(agent, data_dir=data_dir) as runtime:
            runtime.call("chat_agent", {"text": "I like tea"}, session="ada")
            print("stopped; starting again")
        with hayata.start(agent, data_dir=data_dir) as runtime:
            for message in runtime.call("chat_agent", {"text": "What do I like?"}, session="ada"):
                print(f"{message['role']:>5}: {message['content']}")


if __name__ == "__main__":
    main()
