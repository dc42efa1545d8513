"""Agents that wait at gates, in sessions and without. See `bad_input` for its surroundings."""

from uuid import uuid4

from crash import note, once, wait_for_gate

from hayata import Agent, Finish, Next, Node

BRANCHES = [f"branch-{number}" for number in range(32)]


def pass_gate(ctx):
    """Wait where the input says so; the ledger knows from when to when."""
    gate = ctx.input.get("gate") if isinstance(ctx.input, dict) else None
    note("began", invocation=ctx.invocation_id, node=ctx.node)
    if gate is not None:
        wait_for_gate(gate)
    note("ended", invocation=ctx.invocation_id, node=ctx.node)


def work(state, ctx):
    pass_gate(ctx)
    return {"token": uuid4().hex}


def say(state, ctx):
    """Add the input's text to the conversation, and say what was there before."""
    pass_gate(ctx)
    heard = [message["content"] for message in state.get("messages", [])]
    return {"messages": [{"role": "user", "content": ctx.input["text"]}], "heard": heard}


def stumble(state, ctx):
    pass_gate(ctx)
    if ctx.input.get("stumble"):
        raise ValueError("lost the thread")
    return {}


def talk(context):
    """Say it, stumble or not, and end with what had been heard."""
    if context.step < 2:
        return Next(["say", "stumble"][context.step], context.input)
    return Finish(context.state["heard"])


def chat(id, **options):
    return Agent(
        id=id,
        nodes=[say, stumble],
        decision_policy=talk,
        conversation_memory=True,
        merge={"messages": "extend"},
        **options,
    )


def branch(state, ctx):
    pass_gate(ctx)
    return {"branch": ctx.node, "given": ctx.input}


def fan_out(context):
    if context.step == 0:
        return Next(context.input["order"], context.input)
    return Finish(context.parallel_results)


chats = [chat("chat"), chat("lobby", default_session="lobby")]

agents = [
    *chats,
    Agent(id="work", nodes=[work], decision_policy=once("work")),
    Agent(id="other", nodes=[work], decision_policy=once("work")),
    Agent(id="narrow", nodes=[Node(work, concurrency=8)], decision_policy=once("work"), max_concurrency=2),
    Agent(
        id="fan",
        nodes=[Node(branch, name=name, concurrency=1) for name in BRANCHES],
        decision_policy=fan_out,
    ),
]
