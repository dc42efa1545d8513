"""Agents that print: whole lines and parts, what is no text, far too much, and after they have ended. See `crash` for
their surroundings.
"""

import asyncio
import os
import subprocess
import sys
import time

from crash import node, note, once

from hayata import Agent, Finish, Next, Node

MIB = 1024 * 1024


def say(state, ctx):
    match ctx.input["what"]:
        case "long":
            print("x" * 200_000 + "end")
        case "unended":
            sys.stdout.write("no end of line")
            sys.stdout.flush()
        case "invalid":
            os.write(1, b"caf\xe9 \xff\n")
        case "child":
            subprocess.run(["sh", "-c", "echo from a child; echo and its stderr >&2"], check=True)
        case "gone":
            sys.stdout.close()
            os.close(1)
    return {"said": ctx.input["what"]}


def pour(state, ctx):
    """Write as many MiB as wanted, of lines or of noise; say how long that took."""
    piece = os.urandom(64 * 1024) if ctx.input.get("noise") else (b"y" * 1023 + b"\n") * 64
    note("pouring", invocation=ctx.invocation_id, pid=os.getpid())
    began = time.monotonic()
    for _ in range(int(ctx.input["mib"] * MIB) // len(piece)):
        left = memoryview(piece)
        while left:
            left = left[os.write(1, left) :]
    return {"took": time.monotonic() - began}


async def linger(state, ctx):
    """Leave a coroutine behind that prints when this task has ended."""

    async def later():
        await asyncio.sleep(0.3)
        print("said too late", flush=True)

    linger.task = asyncio.ensure_future(later())
    return {}


def grumble(context):
    if context.step == 0:
        print("a policy prints")
        print("a policy complains", file=sys.stderr)
        return Next("say", context.input)
    return Finish(context.state)


agents = [
    Agent("say", nodes=[Node(say, concurrency=1)], decision_policy=grumble),
    Agent("pour", nodes=[Node(pour, concurrency=2)], decision_policy=once("pour")),
    Agent("endless", nodes=[Node(pour, execution_timeout=1.0)], decision_policy=once("pour")),
    Agent("linger", nodes=[linger], decision_policy=once("linger")),
    Agent("echo", nodes=[node("echo")], decision_policy=once("echo")),
]
