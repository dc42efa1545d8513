"""The job: count the words of real text files, batch after batch, and publish the sum so far.

``find`` makes the batches. Three nodes count a share of a batch each, in parallel, while ``publish`` sends
out the sum of the batches before; ``add_up`` merges what they found. Counting may be run again when it is cut
off (`Rerun`). Publishing may not: what is out is out.

The bodies are paced like calls of a model or a service, which is what nodes usually wait for; counting alone
would be over before a kill could hit it.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated, Any, TypedDict

from hayata import Add, Agent, Context, Decision, Extend, Finish, Next, Node, PolicyContext, Rerun

from . import corpus
from .ledger import append, note

BATCHES = 14
BATCH_BYTES = 300_000
BYTES_PER_S = 250_000
PUBLISHING_S = 0.9
COUNTERS = ["count_0", "count_1", "count_2"]


class State(TypedDict, total=False):
    """The shared state."""

    batches: list[list[str]]
    counted: Annotated[int, Add]
    words: Annotated[int, Add]
    receipts: Annotated[list[str], Extend]


def find(state: State, ctx: Context) -> State:
    began(ctx)
    found = corpus.batches(ctx.input["folders"], BATCHES, BATCH_BYTES)
    ended(ctx, 0)
    return {"batches": found}


def count(state: State, ctx: Context) -> dict[str, int]:
    """Count one share of a batch: all branches get the same input, and take every third file of it."""
    began(ctx)
    words = 0
    for path in ctx.input["files"][COUNTERS.index(ctx.node) :: len(COUNTERS)]:
        words += len(Path(path).read_bytes().split())
        time.sleep(os.path.getsize(path) / BYTES_PER_S)
    ended(ctx, words)
    return {"words": words}


def publish(state: State, ctx: Context) -> State:
    """Send the sum so far out, and wait for the receipt. The outside is a file here."""
    began(ctx)
    receipt = published(ctx.input["batch"], ctx.input["words"])
    append(ctx.input["outbox"], receipt)
    time.sleep(PUBLISHING_S)
    ended(ctx, ctx.input["words"])
    return {"receipts": [receipt]}


def add_up(state: State, ctx: Context) -> State:
    began(ctx)
    words = sum(result["words"] for result in ctx.input["results"] if "words" in result)
    ended(ctx, state["words"] + words)
    return {
        "counted": 1,
        "words": words,
        "receipts": [receipt for result in ctx.input["results"] for receipt in result.get("receipts", [])],
    }


def policy(context: PolicyContext[State]) -> Decision:
    state, given = context.state, context.input
    if context.last is None:
        return Next("find", given)
    if context.parallel_results is not None:
        return Next("add_up", {**given, "batch": state["counted"], "results": context.parallel_results})
    if context.last == "publish":
        files = [path for batch in state["batches"] for path in batch]
        return Finish({"files": files, "words": state["words"], "receipts": state["receipts"]})
    number = state["counted"]
    now = {**given, "batch": number, "words": state["words"]}
    if number == len(state["batches"]):
        return Next("publish", now)
    now["files"] = state["batches"][number]
    return Next([*COUNTERS, "publish"] if number else COUNTERS, now)


def published(batches: int, words: int) -> str:
    """The line that is sent out."""
    return f"{words} words in {batches} batches"


def began(ctx: Context) -> None:
    """Note in the outside ledger that the body begins, before it does anything else."""
    note(
        ctx.input["ledger"],
        "start",
        execution=ctx.execution_id,
        key=ctx.idempotency_key,
        node=ctx.node,
        attempt=ctx.attempt,
        batch=ctx.input.get("batch", -1),
        pid=os.getpid(),
        parent=os.getppid(),
    )


def ended(ctx: Context, words: int) -> None:
    """Note that it has done everything."""
    note(ctx.input["ledger"], "end", execution=ctx.execution_id, words=words)


def input_for(ledger: str, outbox: str) -> dict[str, Any]:
    """Make the input of an invocation."""
    return {"folders": corpus.folders(), "ledger": ledger, "outbox": outbox}


agent = Agent(
    id="word_count",
    nodes={
        "find": Node(find, interrupted=Rerun(max_attempts=5)),
        **{name: Node(count, interrupted=Rerun(max_attempts=5)) for name in COUNTERS},
        "publish": publish,
        "add_up": Node(add_up, interrupted=Rerun(max_attempts=5)),
    },
    decision_policy=policy,
    state={"batches": [], "counted": 0, "words": 0, "receipts": []},
    state_type=State,
    max_steps=10_000,
)
