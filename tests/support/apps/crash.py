"""The agents of the crash tests. What their bodies do goes to a ledger outside the product, and is fsynced.

It imports nothing from the tests: it runs in workers of the daemon. ``$CRASH_HOME`` is a directory with

    ledger          one JSON object a line, see `note`; `tests.support.ledger` reads it
    gates/NAME      a body or policy that waits for a gate goes on when the file exists
    locks/KEY       locked while a body of the task runs: two live attempts of one task meet here
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TypedDict
from uuid import uuid4

from hayata import Agent, Finish, Next, Node, Rerun

HOME = Path(os.environ["CRASH_HOME"])
VERSION = os.environ.get("CRASH_VERSION", "1")


def note(what, **fields):
    """Append one line to the ledger; durable on return."""
    line = json.dumps({"what": what, **fields}) + "\n"
    fd = os.open(HOME / "ledger", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(fd, line.encode())
        os.fsync(fd)
    finally:
        os.close(fd)


def wait_for_gate(name):
    gate = HOME / "gates" / name
    while not gate.exists():
        time.sleep(0.005)


@contextmanager
def body(ctx):
    """The frame of every body: start and end in the ledger, and nobody else in here with the same task."""
    who = {
        "invocation": ctx.invocation_id,
        "execution": ctx.execution_id,
        "node": ctx.node,
        "attempt": ctx.attempt,
        "key": ctx.idempotency_key,
        "pid": os.getpid(),
    }
    fd = os.open(HOME / "locks" / ctx.idempotency_key, os.O_WRONLY | os.O_CREAT)
    try:
        note("start", **who)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            note("overlap", **who)
        result = {}
        yield result
        note("end", result=result, **who)
    finally:
        os.close(fd)


def wanted(ctx, name):
    """What the invocation's input says for this node."""
    return (ctx.input or {}).get(f"{ctx.node}_{name}")


def work(state, ctx):
    """Wait for ``<node>_gate``, with a child and a daemon beside it if ``<node>_family``; return a new token.

    The token tells which body has made a result: a second run would make another one.
    """
    with body(ctx) as result:
        if wanted(ctx, "family"):
            subprocess.Popen(["sleep", "600"])
            subprocess.run(["sh", "-c", "setsid sleep 600 &"], check=True)
            note("family", execution=ctx.execution_id)
        if gate := wanted(ctx, "gate"):
            wait_for_gate(gate)
        if seconds := wanted(ctx, "seconds"):
            time.sleep(seconds)
        token = f"{ctx.node}-{uuid4().hex}"
        result.update({ctx.node: token, "log": token})
    return result


def node(name, concurrency=4, **options):
    return Node(work, name=name, concurrency=concurrency, **options)


RERUN = Rerun(max_attempts=3)


# One after the other: `act` is what is cut off.


class Acted(TypedDict):
    act: str
    log: str


def act(**options):
    return node("act", output=Acted, **options)


def in_line(context):
    names = ["prepare", "act", "report"]
    return Next(names[context.step], context.input) if context.step < 3 else Finish(context.state)


def line(id, act, **options):
    return Agent(
        id=id,
        nodes=[node("prepare"), act, node("report")],
        decision_policy=in_line,
        merge={"log": "append"},
        version=VERSION,
        **options,
    )


# Two side by side, then one that joins them.


def side_by_side(context):
    if context.step == 0:
        return Next(["left", "right"], context.input)
    if context.step == 2:
        return Next("join", {"results": context.parallel_results})
    return Finish(context.state)


def join(state, ctx):
    with body(ctx) as result:
        result["results"] = ctx.input["results"]
    return result


def pair(id, **options):
    nodes = [node("left", **options), node("right", concurrency=1, **options), Node(join)]
    return Agent(id=id, nodes=nodes, decision_policy=side_by_side)


# A conversation.


def speak(state, ctx):
    with body(ctx) as result:
        if gate := wanted(ctx, "gate"):
            wait_for_gate(gate)
        result["messages"] = [*state.get("messages", []), {"role": "user", "content": ctx.input["text"]}]
    return result


def once(name):
    def policy(context):
        return Next(name, context.input) if context.step == 0 else Finish(context.state)

    return policy


# A stream with a gate in its middle.


def pour(state, ctx):
    with body(ctx) as result:
        for number in range(5):
            ctx.stream({"attempt": ctx.attempt, "chunk": number})
        if gate := wanted(ctx, "gate"):
            wait_for_gate(gate)
        for number in range(5, 10):
            ctx.stream({"attempt": ctx.attempt, "chunk": number})
        result["poured"] = 10
    return result


# A policy that takes its time.


def ponder(context):
    note("policy", invocation=context.invocation_id, step=context.step, pid=os.getpid())
    if context.step == 0:
        return Next("prepare", context.input)
    wait_for_gate(context.input["policy_gate"])
    return Finish(context.state)


# Short and without a wait: what is killed at random.


def briefly(context):
    match context.step:
        case 0:
            return Next("first", context.input)
        case 1:
            return Next(["left", "right"], context.input)
        case 3:
            return Next("again", {"results": context.parallel_results, **context.input})
        case 4:
            return Next("first", context.input)
    return Finish({"state": context.state})


def keep_results(state, ctx):
    with body(ctx) as result:
        result.update(results=ctx.input["results"], log=f"again-{uuid4().hex}")
    return result


def short():
    plain = [node(name) for name in ("first", "left", "right")]
    again = Node(keep_results, name="again", interrupted=RERUN)
    return Agent(id="short", nodes=[*plain, again], decision_policy=briefly, merge={"log": "append"})


all_agents = [
    line("line", act()),
    line("manual", act(), resume="manual"),
    line("again", act(interrupted=RERUN)),
    pair("pair"),
    pair("pair_again", interrupted=RERUN),
    Agent(id="chat", nodes=[speak], decision_policy=once("speak"), conversation_memory=True),
    Agent(id="streamer", nodes=[Node(pour, interrupted=RERUN)], decision_policy=once("pour")),
    Agent(id="thinker", nodes=[node("prepare")], decision_policy=ponder),
    short(),
]

wanted_agents = os.environ.get("CRASH_AGENTS", "").split()
agents = [agent for agent in all_agents if agent.id in wanted_agents] or all_agents
