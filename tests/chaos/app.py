"""The agents under load. What their bodies do is written to a ledger outside the product, and synced.

It imports nothing from the tests: it runs in workers of the daemon. ``$CHAOS_HOME`` is a directory with

    ledger      one JSON object a line, see `note`; `tests.chaos.ledger` reads it
    locks       a byte of it is locked while a body of a task runs: two live attempts of one task meet there

Each sequential step adds `amount` to ``sum``, a number that anybody can compute, and a token that nobody can
guess to ``log``: so a state can be compared with the steps that are said to have made it.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import struct
import subprocess
import time
import zlib
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from hayata import Agent, Backoff, Fail, Finish, Next, Node, Rerun, Retry, Supervision

_FLOCK = "hhqqi"  # l_type, l_whence, l_start, l_len, l_pid


def home():
    return Path(os.environ["CHAOS_HOME"])


def note(what, **fields):
    """Append one line to the ledger; durable on return."""
    line = json.dumps({"what": what, "mono": time.monotonic(), **fields}) + "\n"
    fd = os.open(home() / "ledger", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(fd, line.encode())
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def alone(key):
    """Tell whether nobody else is in here with the same key. The kernel frees a dead process's place."""
    fd = os.open(home() / "locks", os.O_RDWR | os.O_CREAT)
    place = zlib.crc32(key.encode()) << 28 | zlib.adler32(key.encode()) >> 4
    try:
        try:
            wanted = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, place, 1, 0)
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, wanted)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(fd)


@contextmanager
def body(ctx):
    """The frame of every body: start and end in the ledger, and nobody else in here with the same task."""
    execution = {"execution": ctx.execution_id}
    with alone(ctx.execution_id.rpartition(".")[0]) as is_alone:
        note(
            "start",
            pid=os.getpid(),
            wall=time.time(),
            node=ctx.node,
            invocation=ctx.invocation_id,
            **execution,
        )
        if not is_alone:
            note("overlap", **execution)
        result = {}
        try:
            yield result
        except BaseException as error:
            note("raise", error=type(error).__name__, **execution)
            raise
        note("end", result=result, **execution)


def amount(base, step):
    """What the step adds to ``sum``."""
    return base + 7 * step


def add(ctx, result):
    """The update of a sequential step."""
    step = int(ctx.execution_id.split(".")[1])
    result.update(sum=amount(ctx.input["base"], step), log=uuid4().hex)


def pause_s(ctx, least, most):
    """A pause that is the same for each attempt of a task."""
    return least + (most - least) * zlib.crc32(ctx.idempotency_key.encode()) / 0xFFFFFFFF


# Bodies


def quick(state, ctx):
    """Only add."""
    with body(ctx) as result:
        add(ctx, result)
    return result


def slow(state, ctx):
    """Take 0.1 to 0.5 s."""
    with body(ctx) as result:
        time.sleep(pause_s(ctx, 0.1, 0.5))
        add(ctx, result)
    return result


def late(state, ctx):
    """Sometimes take longer than is allowed, in the first attempt."""
    with body(ctx) as result:
        time.sleep(pause_s(ctx, 0.0, 0.3) if ctx.attempt == 1 else 0.0)
        add(ctx, result)
    return result


async def call(state, ctx):
    """Wait, beside others in the same process."""
    with body(ctx) as result:
        await asyncio.sleep(pause_s(ctx, 0.005, 0.2))
        add(ctx, result)
    return result


def flaky(state, ctx):
    """Fail as often as the input says."""
    with body(ctx) as result:
        if ctx.attempt <= ctx.input["fails"]:
            raise ConnectionError(f"attempt {ctx.attempt} of {ctx.execution_id}")
        add(ctx, result)
    return result


def branch(state, ctx):
    """A branch of a parallel transition."""
    with body(ctx) as result:
        time.sleep(pause_s(ctx, 0.0, 0.05))
        result.update(branch=ctx.node, token=uuid4().hex)
    return result


async def wait_branch(state, ctx):
    """A branch that waits."""
    with body(ctx) as result:
        await asyncio.sleep(pause_s(ctx, 0.0, 0.1))
        result.update(branch=ctx.node, token=uuid4().hex)
    return result


def join(state, ctx):
    """Keep the results of the branches."""
    with body(ctx) as result:
        add(ctx, result)
        result["results"] = ctx.input["results"]
    return result


def pieces_of(given):
    """The edges: as many as the input says."""
    return [{"piece": number} for number in range(given.get("pieces", 3))]


def piece(state, ctx):
    """One edge."""
    with body(ctx) as result:
        time.sleep(pause_s(ctx, 0.0, 0.1))
        result.update(piece=ctx.input["piece"], token=uuid4().hex)
    return result


async def wait_piece(state, ctx):
    """One edge, beside others in the same process."""
    with body(ctx) as result:
        await asyncio.sleep(pause_s(ctx, 0.0, 0.1))
        result.update(piece=ctx.input["piece"], token=uuid4().hex)
    return result


def put_together(results, ctx):
    """The reduction: keep what the edges have returned, and add."""
    with body(ctx) as result:
        time.sleep(0.02)
        add(ctx, result)
        result["results"] = results
    return result


async def speak(state, ctx):
    """Go on with a conversation."""
    with body(ctx) as result:
        await asyncio.sleep(pause_s(ctx, 0.0, 0.02))
        add(ctx, result)
        result["messages"] = [*state.get("messages", []), {"role": "user", "content": ctx.invocation_id}]
    return result


async def pour(state, ctx):
    """Stream numbered chunks."""
    with body(ctx) as result:
        for number in range(ctx.input["chunks"]):
            await ctx.stream({"chunk": number})
        add(ctx, result)
    return result


def family(state, ctx):
    """Leave a child and a daemon behind; they must go when their worker goes."""
    with body(ctx) as result:
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.Popen(["sleep", "600"], **quiet).returncode = 0  # its destructor has nothing to say
        subprocess.run(["sh", "-c", "setsid sleep 600 &"], check=True, **quiet)
        time.sleep(pause_s(ctx, 0.0, 0.2))
        add(ctx, result)
    return result


# Policies


def in_line(*names):
    """Run these one after the other; one that ends with ``?`` if the input says so, else the first again."""

    def policy(context):
        if context.step == len(names):
            return Finish(context.state)
        name = names[context.step]
        if name.endswith("?"):
            name = name[:-1] if context.input.get("slow") else names[0]
        return Next(name, context.input)

    return policy


def fan_out(context):
    match context.step:
        case 0:
            return Next(["right", "wait", "left"], context.input)
        case 3:
            return Next("join", {**context.input, "results": context.parallel_results})
        case 4:
            return Next(["left"], context.input)
        case 5:
            return Next("join", {**context.input, "results": context.parallel_results})
    return Finish(context.state)


def forgiving(context):
    if context.failure is not None:
        return Fail({"because": context.failure.code})
    return Next("try", context.input) if context.step < 2 else Finish(context.state)


RERUN = Rerun(max_attempts=4)
_PATIENT = Supervision(intensity=1_000_000_000, backoff=Backoff(initial=0.01, maximum=0.1))
"""Their workers are killed more often than any supervisor would put up with."""


def _agent(id, nodes, policy, **options):
    return Agent(
        id=id,
        nodes=nodes,
        decision_policy=policy,
        state={"sum": 0, "log": []},
        merge={"sum": "add", "log": "append"},
        supervision=_PATIENT,
        max_concurrency=16,
        **options,
    )


agents = [
    _agent(
        "line",
        [Node(quick, concurrency=3), Node(slow, concurrency=3)],
        in_line("quick", "slow?", "quick", "quick", "quick"),
    ),
    _agent(
        "again",
        [
            Node(quick, name="work", concurrency=3, interrupted=RERUN),
            Node(late, concurrency=2, interrupted=RERUN, execution_timeout=0.25),
            Node(call, concurrency=16, interrupted=RERUN),
        ],
        in_line("work", "late?", "call", "work"),
    ),
    _agent(
        "fan",
        [
            Node(branch, name="left", concurrency=2),
            Node(branch, name="right", concurrency=2, interrupted=RERUN),
            Node(wait_branch, name="wait", concurrency=8, interrupted=RERUN),
            Node(join, concurrency=2, interrupted=RERUN),
        ],
        fan_out,
    ),
    _agent(
        "flaky",
        [Node(flaky, name="try", concurrency=2, interrupted=RERUN, retry=Retry(max_attempts=3, backoff=0.02))],
        forgiving,
        on_failure="policy",
    ),
    _agent(
        "pieces",
        [
            Node(piece, name="cut", concurrency=3, interrupted=RERUN, edges=pieces_of, reduce=put_together),
            Node(wait_piece, name="saw", concurrency=8, interrupted=RERUN, edges=pieces_of, reduce=put_together),
            Node(quick, concurrency=2),
        ],
        in_line("cut", "saw", "quick"),
    ),
    _agent("talk", [Node(speak, interrupted=RERUN)], in_line("speak"), conversation_memory=True),
    _agent("pour", [Node(pour, name="chunks", interrupted=RERUN)], in_line("chunks", "chunks")),
    _agent("family", [Node(family, name="beget", concurrency=2)], in_line("beget")),
    _agent("manual", [Node(slow, name="act", concurrency=2)], in_line("act", "act"), resume="manual"),
]
