"""Agents whose nodes say what happens when they run again: probes, sub-steps, retries, reruns.

Ledger and gates as in `crash`, beside it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time

from crash import HOME, body, note, once, wait_for_gate, wanted

from hayata import NOT_DONE, UNKNOWN, Agent, Backoff, Finish, Next, Node, Probe, Rerun, Retry

# A payment: what happened is known outside, under the idempotency key.

PAID = HOME / "paid"


def pay(state, ctx):
    with body(ctx) as result:
        if (gate := wanted(ctx, "gate")) and ctx.attempt == 1:
            wait_for_gate(gate)
        if wanted(ctx, "abort") == "before":
            os.abort()
        PAID.mkdir(exist_ok=True)
        (PAID / ctx.idempotency_key).write_text(ctx.execution_id)
        note("paid", key=ctx.idempotency_key)
        if gate := wanted(ctx, "late_gate"):
            wait_for_gate(gate)
        if wanted(ctx, "abort"):
            os.abort()
        result["paid"] = ctx.execution_id
    return result


def was_paid(ctx):
    note("probe", invocation=ctx.invocation_id, execution=ctx.execution_id, node=ctx.node, pid=os.getpid())
    match wanted(ctx, "probe"):
        case "unknown":
            return UNKNOWN
        case "raise":
            raise ConnectionError("the bank is closed")
        case "abort":
            os.abort()
        case "nonsense":
            return "yes"
        case str(gate):
            wait_for_gate(gate)
    receipt = PAID / ctx.idempotency_key
    return {"paid": receipt.read_text()} if receipt.exists() else NOT_DONE


async def pay_later(state, ctx):
    note("start", invocation=ctx.invocation_id, attempt=ctx.attempt, node=ctx.node, pid=os.getpid())
    while not (HOME / "gates" / "pay_later").exists():
        await asyncio.sleep(0.005)
    return {"paid": "late"}


async def was_paid_later(ctx):
    note("probe", invocation=ctx.invocation_id, execution=ctx.execution_id, node=ctx.node, pid=os.getpid())
    await asyncio.sleep(0)
    return {"paid": "asked"}


def paying(id, probe=was_paid, **options):
    nodes = [Node(pay, concurrency=8, interrupted=Probe(probe, max_attempts=2), **options)]
    return Agent(id=id, nodes=nodes, decision_policy=once("pay"))


# Sub-steps: each call is in the ledger, and tells which attempt has made its result.


def work(ctx, name):
    note("substep", invocation=ctx.invocation_id, attempt=ctx.attempt, name=name)
    if (gate := wanted(ctx, f"{name}_gate")) and ctx.attempt == 1:
        wait_for_gate(gate)
    return (name, ctx.attempt)


def in_steps(state, ctx):
    with body(ctx) as result:
        result["first"] = ctx.step(work, ctx, "first")
        if (gate := wanted(ctx, "gate")) and ctx.attempt == 1:
            wait_for_gate(gate)
        result["second"] = ctx.step(work, ctx, "second", key="second")
        if wanted(ctx, "fail") and ctx.attempt == 1:
            raise ConnectionError("try again")
        result["third"] = ctx.step(work, ctx, "third")
    return result


async def work_later(ctx, name):
    note("substep", invocation=ctx.invocation_id, attempt=ctx.attempt, name=name)
    await asyncio.sleep(0.01 if name == "first" else 0)
    return (name, ctx.attempt)


async def in_steps_later(state, ctx):
    first, second = await asyncio.gather(ctx.step(work_later, ctx, "first"), ctx.step(work_later, ctx, "second"))
    if ctx.attempt == 1:
        os.abort()
    return {"first": first, "second": second, "third": await ctx.step(work_later, ctx, "third")}


# Failures: with a pause before the next attempt, and for ever.


def fail(state, ctx):
    with body(ctx):
        note("failed", invocation=ctx.invocation_id, attempt=ctx.attempt, at=time.time())
        if ctx.attempt < (ctx.input or {}).get("good_attempt", 99):
            raise ConnectionError("try again")
    return {"attempt": ctx.attempt}


def long(state, ctx):
    with body(ctx) as result:
        wait_for_gate("long")
        result["attempt"] = ctx.attempt
    return result


def die(state, ctx):
    with body(ctx):
        if gate := wanted(ctx, "gate"):
            wait_for_gate(gate)
        os.kill(os.getpid(), signal.SIGKILL)


# Effects before an approval, and a failure that the policy handles.


def charge(ctx):
    note("charged", invocation=ctx.invocation_id, attempt=ctx.attempt, key=ctx.idempotency_key)
    return ctx.attempt


def approve(state, ctx):
    with body(ctx) as result:
        result["charged_by"] = ctx.step(charge, ctx)
        note("asked", invocation=ctx.invocation_id, attempt=ctx.attempt)
        wait_for_gate(f"approved-{ctx.attempt}")
        result["approved"] = ctx.attempt
    return result


def left(state, ctx):
    with body(ctx):
        raise ConnectionError("no left")


def right(state, ctx):
    with body(ctx) as result:
        result["right"] = ctx.attempt
    return result


def mend(state, ctx):
    with body(ctx) as result:
        if ctx.attempt == 1:
            wait_for_gate("never")
        result["mended"] = ctx.input
    return result


def mending(context):
    """Handle the failure of a branch, and write down that this was decided."""
    if context.failure is not None:
        note("handled", invocation=context.invocation_id, code=context.failure.code, step=context.step)
        return Next("mend", context.failure.message)
    return Next(["left", "right"]) if context.last is None else Finish(context.state)


PAUSE_S = 6.0

AGAIN = {"retry": Retry(max_attempts=2, backoff=0), "interrupted": Rerun(max_attempts=2)}

agents = [
    Agent(id="steps", nodes=[Node(in_steps, **AGAIN)], decision_policy=once("in_steps")),
    Agent(id="steps_later", nodes=[Node(in_steps_later, **AGAIN)], decision_policy=once("in_steps_later")),
    Agent(
        id="failing",
        nodes=[Node(fail, retry=Retry(max_attempts=3, backoff=Backoff(PAUSE_S, 1.0), jitter=0.0))],
        decision_policy=once("fail"),
    ),
    Agent(id="failing_fast", nodes=[Node(fail, retry=Retry(3, backoff=0.0))], decision_policy=once("fail")),
    Agent(id="dying", nodes=[Node(die, interrupted=Rerun(max_attempts=3))], decision_policy=once("die")),
    Agent(id="approval", nodes=[Node(approve)], decision_policy=once("approve")),
    Agent(
        id="mending",
        nodes=[left, right, Node(mend, interrupted=Rerun(max_attempts=2))],
        decision_policy=mending,
        on_failure="policy",
    ),
    Agent(id="long", nodes=[Node(long, interrupted=Rerun(max_attempts=9))], decision_policy=once("long")),
    paying("pay"),
    paying("pay_in_time", execution_timeout=0.5),
    Agent(
        id="pay_later",
        nodes=[Node(pay_later, interrupted=Probe(was_paid_later))],
        decision_policy=once("pay_later"),
    ),
]
