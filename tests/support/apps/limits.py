"""Agents that run into limits, die and are tried again. See `bad_input` for its surroundings."""

import asyncio
import contextlib
import mmap
import os
import signal
import struct
import subprocess
import time
from contextlib import asynccontextmanager, contextmanager

from crash import HOME, note, once

from hayata import Agent, Backoff, Fail, Finish, Next, Node, Rerun, Retry, Supervision

LIMIT_S = 0.5
MEMORY = 64 << 20
CPU_S = 0.5


def echo(state, ctx):
    return {"echo": ctx.input, "pid": os.getpid()}


# ---- sizes -------------------------------------------------------------------------------------------------


def large(state, ctx):
    value = bytes(ctx.input["bytes"])
    if ctx.input["as"] == "chunk":
        ctx.stream({"value": value})
    return {"value": value if ctx.input["as"] == "update" else b"", "pid": os.getpid()}


def large_policy(context):
    if context.step == 0:
        return Next("large", context.input)
    value = bytes(context.input["bytes"])
    match context.input["as"]:
        case "result":
            return Finish(value)
        case "reason":
            return Fail(value)
        case "input" if context.step == 1:
            return Next("large", {**context.input, "padding": value})
    return Finish(context.state["pid"])


def grow(state, ctx):
    return {"grown": [bytes(ctx.input)]}


# ---- time --------------------------------------------------------------------------------------------------


def spin(state, ctx):
    """Never give the interpreter up, and write down the pid, the first moment, and the last one alive."""
    # Memory alone: on a disk that is busy, the first write to the page can take longer than the deadline.
    with open(f"/dev/shm/spin-{ctx.invocation_id}", "w+b") as file:
        file.truncate(32)
        memory = mmap.mmap(file.fileno(), 32)
    now = time.monotonic
    struct.pack_into("=qd", memory, 0, os.getpid(), now())
    pack = struct.Struct("=d").pack_into
    while True:  # by turns in two places: one that is cut off while it is written is zero
        pack(memory, 16, now())
        pack(memory, 24, now())


async def spin_async(state, ctx):
    spin(state, ctx)


def watched(ctx):
    """Begin: where the body runs is in the ledger."""
    note("began", invocation=ctx.invocation_id, node=ctx.node, attempt=ctx.attempt, pid=os.getpid())


def sleep(state, ctx):
    child = subprocess.Popen(["sleep", "600"])
    note("child", invocation=ctx.invocation_id, pid=child.pid)
    watched(ctx)
    time.sleep(600)
    return {}


async def sleep_async(state, ctx):
    watched(ctx)
    try:
        await asyncio.sleep(600)
    finally:
        note("cancelled", invocation=ctx.invocation_id)
    return {}


async def stubborn(state, ctx):
    watched(ctx)
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(600)


async def gated(name):
    while not (HOME / "gates" / name).exists():
        await asyncio.sleep(0.005)


async def neighbour(state, ctx):
    """One node, several ways to pass the time: patient, idle beyond the deadline, busy from a moment on."""
    watched(ctx)
    if ctx.input["how"] == "idle":
        await asyncio.sleep(600)
    await gated(ctx.input["gate"])
    while ctx.input["how"] == "busy" and ctx.attempt == 1:
        pass
    return {"pid": os.getpid(), "attempt": ctx.attempt}


def overlap(state, ctx):
    """P18: say whether the process of the attempt before still lives."""
    last = HOME / f"overlap-{ctx.invocation_id}"
    alive = last.exists() and os.path.exists(f"/proc/{last.read_text()}")
    note("attempt", invocation=ctx.invocation_id, number=ctx.attempt, alive=alive, at=time.monotonic())
    last.write_text(str(os.getpid()))
    if ctx.attempt < 3:
        time.sleep(600)
    return {"attempt": ctx.attempt}


# ---- death -------------------------------------------------------------------------------------------------

DEATHS = {
    "abort": os.abort,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exit": lambda: os._exit(7),
    "segfault": lambda: os.kill(os.getpid(), signal.SIGSEGV),
}


def die(state, ctx):
    note("attempt", invocation=ctx.invocation_id, number=ctx.attempt, key=ctx.idempotency_key)
    if ctx.attempt < ctx.input.get("until", 99):
        DEATHS[ctx.input["how"]]()
    return {"attempt": ctx.attempt}


async def die_async(state, ctx):
    return die(state, ctx)


def greedy(state, ctx):
    """Take more memory, or CPU time, than it may."""
    note("attempt", invocation=ctx.invocation_id, number=ctx.attempt, key=ctx.idempotency_key)
    if ctx.attempt >= ctx.input.get("until", 99):
        return {"attempt": ctx.attempt}
    if ctx.input["of"] == "memory":
        held = bytearray(b"x") * (2 * MEMORY)
        time.sleep(600)
        del held
    while True:
        pass


# ---- failure -----------------------------------------------------------------------------------------------


class Busy(Exception):
    pass


class VeryBusy(Busy):
    pass


RAISES = {"Busy": Busy, "VeryBusy": VeryBusy, "KeyError": KeyError, "SystemExit": SystemExit}


def flaky(state, ctx):
    note(
        "attempt",
        invocation=ctx.invocation_id,
        number=ctx.attempt,
        key=ctx.idempotency_key,
        at=time.monotonic(),
    )
    if ctx.attempt < ctx.input["until"]:
        raise RAISES[ctx.input["raise"]](ctx.input.get("say", "not yet"))
    return {"attempt": ctx.attempt}


async def flaky_async(state, ctx):
    return flaky(state, ctx)


def says_busy(error):
    if not isinstance(error, Busy):
        raise RuntimeError("a predicate that fails has not said yes")
    return True


def retry(max_attempts, on, backoff=0.01):
    return Retry(max_attempts=max_attempts, backoff=backoff, jitter=0, on=on)


def fail(state, ctx):
    raise ValueError(ctx.input)


def repair(state, ctx):
    return {"repaired": ctx.input}


def handle(context):
    """``on_failure="policy"``: what fails is repaired, by another node or by the result."""
    if context.step == 0:
        return Next(context.input["nodes"], context.input)
    if context.failure is None:
        return Finish(context.state)
    failure = context.failure
    told = {"code": failure.code, "type": failure.details.get("type"), "last": context.last}
    if context.input["then"] == "repair":
        return Next("repair", told)
    return Fail(told)


# ---- lifespans ---------------------------------------------------------------------------------------------


@contextmanager
def lifespan():
    note("entered", pid=os.getpid())
    yield {"connection": os.getpid()}
    note("left", pid=os.getpid())


@asynccontextmanager
async def lifespan_async():
    await asyncio.sleep(0)
    yield {"connection": os.getpid()}


def use(state, ctx):
    return {"deps": ctx.deps, "pid": os.getpid()}


async def use_async(state, ctx):
    return use(state, ctx)


@contextmanager
def closed_until_it_opens():
    note("tried")
    if not (HOME / "gates" / "database").exists():
        raise ConnectionError("the database is down")
    yield "database"


# ---- agents ------------------------------------------------------------------------------------------------


def agent(id, *nodes, **options):
    first = nodes[0] if isinstance(nodes[0], Node) else Node(nodes[0])
    options.setdefault("decision_policy", once(first.name))
    return Agent(id=id, nodes=list(nodes), **options)


def growing(context):
    return Next("grow", context.input)


def loop(context):
    return Next("echo", context.step)


def by_twos(context):
    return Next(["echo", "repair"], context.step)


agents = [
    agent("echo", echo),
    agent("large", Node(large, concurrency=1), decision_policy=large_policy),
    agent("grow", grow, decision_policy=growing, merge={"grown": "extend"}),
    agent("loop", echo, decision_policy=loop, max_steps=5),
    agent("by_twos", echo, repair, decision_policy=by_twos, max_steps=5),
    agent("spin", Node(spin, execution_timeout=LIMIT_S)),
    agent("spin_async", Node(spin_async, execution_timeout=LIMIT_S)),
    agent("sleep_limited", sleep, execution_timeout=LIMIT_S),
    agent("sleep_late", sleep, invocation_timeout=LIMIT_S),
    agent("sleep_late_async", sleep_async, invocation_timeout=LIMIT_S),
    agent("sleep", sleep),
    agent("sleep_async", sleep_async),
    agent("stubborn", stubborn),
    agent("neighbour", Node(neighbour, execution_timeout=0.7)),
    agent("neighbour_again", Node(neighbour, execution_timeout=2.0, interrupted=Rerun(max_attempts=2))),
    agent("overlap", Node(overlap, execution_timeout=0.2, interrupted=Rerun(max_attempts=3))),
    agent("die", Node(die, concurrency=3)),
    agent("die_async", die_async),
    agent("die_again", Node(die, interrupted=Rerun(max_attempts=3))),
    agent("die_again_async", Node(die_async, interrupted=Rerun(max_attempts=3))),
    agent("greedy", Node(greedy, memory_limit=MEMORY, cpu_limit=CPU_S)),
    agent("greedy_again", Node(greedy, memory_limit=MEMORY, cpu_limit=CPU_S, interrupted=Rerun(max_attempts=2))),
    agent("flaky", Node(flaky, retry=retry(3, Busy))),
    agent("flaky_async", Node(flaky_async, retry=retry(3, (Busy, KeyError)))),
    agent("flaky_asked", Node(flaky, retry=retry(3, says_busy))),
    agent("flaky_slowly", Node(flaky, retry=retry(4, Busy, Backoff(initial=0.05, factor=3, maximum=0.1)))),
    agent("flaky_not_again", flaky),
    agent("handled", fail, repair, echo, Node(die), decision_policy=handle, on_failure="policy"),
    agent("with_deps", use, lifespan=lifespan),
    agent("with_deps_async", use_async, lifespan=lifespan_async),
    agent(
        "without_database",
        use,
        lifespan=closed_until_it_opens,
        supervision=Supervision(intensity=2, period=10, backoff=Backoff(initial=0.01, maximum=0.05)),
    ),
]
