"""Agents whose nodes have edges: each edge may wait at a gate, and so may the reduction.

Ledger and gates as in `crash`, beside it.
"""

from __future__ import annotations

import asyncio
import os
import time
from uuid import uuid4

from crash import HOME, RERUN, body, note, wait_for_gate

from hayata import Agent, Finish, Next, Node, Reduce


def edges_of(given):
    note("edges", pid=os.getpid(), count=len(given["edges"]))
    return given["edges"]


def work(state, ctx):
    """Do what the value says: wait for a gate, fail, or just make a token."""
    with body(ctx) as result:
        if gate := ctx.input.get("gate"):
            wait_for_gate(gate)
        if ctx.input.get("fail"):
            raise ValueError(f"edge {ctx.edge} fails")
        result.update(token=f"{ctx.edge}-{uuid4().hex}")
    return result


async def work_later(state, ctx):
    with body(ctx) as result:
        while (gate := ctx.input.get("gate")) and not (HOME / "gates" / gate).exists():
            await asyncio.sleep(0.005)
        result.update(token=f"{ctx.edge}-{uuid4().hex}")
    return result


def put_together(results, ctx):
    note(
        "reduce",
        invocation=ctx.invocation_id,
        execution=ctx.execution_id,
        attempt=ctx.attempt,
        pid=os.getpid(),
        results=results,
    )
    if gate := ctx.input.get("reduce_gate"):
        wait_for_gate(gate)
    if seconds := ctx.input.get("reduce_seconds"):
        time.sleep(seconds)
    if ctx.input.get("reduce_fails"):
        raise ValueError("they don't fit together")
    return {
        "tokens": [each and each["token"] for each in results],
        "counts": [ctx.expected_edges, ctx.result_count, ctx.error_count, ctx.pending_edges],
        "errors": {str(edge): error.code for edge, error in ctx.errors.items()},
    }


def plain(state, ctx):
    with body(ctx) as result:
        result["plain"] = True
    return result


def once(context):
    if context.step == 0:
        return Next(context.input.get("nodes", "many"), context.input)
    return Finish(
        {
            "state": context.state,
            "parallel": context.parallel_results,
            "failure": context.failure and context.failure.code,
        }
    )


def agent(id, fn=work, reduce=put_together, on_failure="fail", **options):
    many = Node(fn, name="many", edges=edges_of, reduce=reduce, **{"concurrency": 4, **options})
    return Agent(id=id, nodes=[many, Node(plain)], decision_policy=once, on_failure=on_failure)


agents = [
    agent("edges"),
    agent("again", interrupted=RERUN),
    agent("async", fn=work_later, interrupted=RERUN),
    agent("partial", reduce=Reduce(put_together, partial=True)),
    agent("timed", reduce=Reduce(put_together, timeout=2.0, partial=True)),
    agent("strict", reduce=Reduce(put_together, timeout=2.0), on_failure="policy"),
    agent("short", execution_timeout=1.0),
]
