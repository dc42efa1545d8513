"""Agents that do wrong on demand: which wrong thing, the invocation's input says.

Like `crash`, whose ledger and gates it uses, it runs in workers of the daemon and imports nothing from the
tests.
"""

import os
import time

from crash import note, once, wait_for_gate
from pydantic import SecretStr

from hayata import Agent, Fail, Finish, Next


class Anything:
    """A value that nothing knows how to store."""

    def __repr__(self):
        raise RuntimeError("not even to be looked at")


class Picky(Exception):
    """P12, D13: it can be neither pickled nor made again from its arguments."""

    def __init__(self, *, order, reason):
        super().__init__()
        self.order, self.reason = order, reason

    def __str__(self):
        return f"order {self.order}: {self.reason}"


def nested(levels, make=list):
    value = make()
    for _ in range(levels - 1):
        value = {"in": value} if make is dict else [value]
    return value


def circle():
    value = []
    value.append(value)
    return value


VALUES = {
    "object": lambda: Anything(),
    "secret": lambda: SecretStr("hunter2"),
    "function": lambda: once,
    "open file": lambda: open(os.devnull),  # noqa: SIM115
    "int of 65 bits": lambda: 2**64,
    "negative int of 65 bits": lambda: -(2**63) - 1,
    "complex": lambda: 1 + 2j,
    "lone surrogate": lambda: "\ud800",
    "circle": circle,
    "lists too deep": lambda: nested(100_000),
    "maps too deep": lambda: nested(201, dict),
    "tuple key": lambda: {(1, 2): 3},
    "generator": lambda: (number for number in range(3)),
    "fine": lambda: 2**64 - 1,
}


def echo(state, ctx):
    return {"echo": ctx.input}


def hold(state, ctx):
    note("holding", invocation=ctx.invocation_id)
    wait_for_gate(ctx.input)
    return {"held": True}


def hold_once(context):
    return Next("hold", context.input["gate"]) if context.step == 0 else Finish(context.state)


# ---- what a policy can do wrong ----------------------------------------------------------------------------


def for_ever():
    while True:
        time.sleep(1)


def picky():
    raise Picky(order=7, reason="no stock")


async def coroutine():
    return Finish(1)


POLICIES = {
    "nothing": lambda: None,
    "a word": lambda: "echo",
    "a list": lambda: [Next("echo")],
    "the class": lambda: Finish,
    "no node": lambda: Next([]),
    "a node twice": lambda: Next(["echo", "echo"]),
    "not a node": lambda: Next(42),
    "not a name": lambda: Next(Anything()),
    "unknown node": lambda: Next("ehco"),
    "unknown branch": lambda: Next(["echo", "ehco"]),
    "unknown function": lambda: Next(for_ever),
    "a coroutine": coroutine,
    "raises": lambda: 1 // 0,
    "raises what is picky": picky,
    "exits": lambda: exit(3),
    "never returns": for_ever,
    "dies": os.abort,
    "loops": lambda: Next("echo"),
}


def wrong_policy(context):
    return POLICIES[context.input]()


def wrong_value_of_policy(context):
    value = {"here": [VALUES[context.input["value"]]()]}
    match context.input["as"]:
        case "input":
            return Next("echo", value)
        case "result":
            return Finish(value)
    return Fail(value)


# ---- what a node can do wrong ------------------------------------------------------------------------------


def updates(number):
    yield {"number": number}


RESULTS = {
    "list": lambda: [1],
    "None": lambda: None,
    "text": lambda: "done",
    "pairs": lambda: [("a", 1)],
    "generator": lambda: updates(1),
    "class": lambda: dict,
    "Finish": lambda: Finish({}),
    "coroutine": coroutine,
    "int key": lambda: {1: 2},
}


def wrong_result(state, ctx):
    return RESULTS[ctx.input]()


async def wrong_result_async(state, ctx):
    return RESULTS[ctx.input]()


def wrong_value(state, ctx):
    value = {"here": [VALUES[ctx.input["value"]]()]}
    if ctx.input["as"] == "chunk":
        ctx.stream({"number": 1, **value})
    return {"fine": 1, **value}


def wrong_raise(state, ctx):
    raise Picky(order=ctx.input, reason="no stock")


async def wrong_raise_async(state, ctx):
    raise Picky(order=ctx.input, reason="no stock")


def wrong_chunk(state, ctx):
    ctx.stream(ctx.input)
    return {}


agents = [
    Agent(id="echo", nodes=[echo], decision_policy=once("echo")),
    Agent(id="hold", nodes=[hold], decision_policy=hold_once),
    Agent(id="policy", nodes=[echo], decision_policy=wrong_policy, max_steps=3),
    Agent(id="value_of_policy", nodes=[echo], decision_policy=wrong_value_of_policy),
    *(
        Agent(id=node.__name__.removeprefix("wrong_"), nodes=[node], decision_policy=once(node.__name__))
        for node in (
            wrong_result,
            wrong_result_async,
            wrong_value,
            wrong_raise,
            wrong_raise_async,
            wrong_chunk,
        )
    ),
]
