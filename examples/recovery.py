"""Agents to try recovery on: their nodes take their time, and write what they do to a file of their own.

RECOVERY_TESTS.md goes through them, command by command. A node waits until a file exists if the input names
one for it: ``{"charge": "go"}``. Each body appends a line to the file ``ledger`` when it begins and ends::

    o1 charge attempt 1 start pid 4711
    o1 charge attempt 1 end

so that everybody can see what has really run, whatever the runtime says. Both files are in the directory in
which the daemon was started.
"""

from __future__ import annotations

import os
import time
from typing import Any

from hayata import Agent, Context, Decision, Finish, Next, Node, PolicyContext, Rerun

VERSION = "1"

State = dict[str, Any]


def note(ctx: Context, what: str) -> None:
    """Append one line to the ledger; it is on the disk when this returns."""
    with open("ledger", "a") as file:
        file.write(f"{ctx.invocation_id} {ctx.node} attempt {ctx.attempt} {what}\n")
        file.flush()
        os.fsync(file.fileno())


def work(state: State, ctx: Context) -> State:
    """Wait for the file that the input names for this node, if it does."""
    note(ctx, f"start pid {os.getpid()}")
    file = (ctx.input or {}).get(ctx.node)
    while file is not None and not os.path.exists(file):
        time.sleep(0.02)
    note(ctx, "end")
    return {ctx.node: f"done by attempt {ctx.attempt}"}


def one_by_one(*names: str) -> Any:
    """A policy that runs the nodes of these names in this order."""

    def policy(context: PolicyContext) -> Decision:
        if context.step < len(names):
            return Next(names[context.step], context.input)
        return Finish(context.state)

    return policy


def book(context: PolicyContext) -> Decision:
    """Flight and hotel at the same time, then a confirmation of both."""
    if context.step == 0:
        return Next(["flight", "hotel"], context.input)
    if context.parallel_results is not None:
        return Next("confirm", {"booked": context.parallel_results})
    return Finish(context.state)


def confirm(state: State, ctx: Context) -> State:
    note(ctx, f"start pid {os.getpid()}")
    note(ctx, "end")
    return {"trip": ctx.input["booked"]}


def charged(name: str) -> Node:
    """A node whose work must not be done twice by accident, as a payment."""
    return Node(work, name=name, concurrency=4)


# An order: when `charge` is cut off, nobody knows whether the customer has paid.
order = Agent(
    id="order",
    nodes=[Node(work, name="reserve"), charged("charge"), Node(work, name="ship")],
    decision_policy=one_by_one("reserve", "charge", "ship"),
    version=VERSION,
)

# The same for careful people: after a restart nothing goes on before somebody says so.
careful = Agent(
    id="careful",
    nodes=[Node(work, name="reserve"), charged("charge")],
    decision_policy=one_by_one("reserve", "charge"),
    resume="manual",
    version=VERSION,
)

# A report: `fetch` only reads, so it may run again by itself, three times at most.
report = Agent(
    id="report",
    nodes=[Node(work, name="fetch", interrupted=Rerun(max_attempts=3)), Node(work, name="render")],
    decision_policy=one_by_one("fetch", "render"),
    version=VERSION,
)

# A trip: two bookings side by side. There is one clerk for hotels: others wait for him.
trip = Agent(
    id="trip",
    nodes=[charged("flight"), Node(work, name="hotel", concurrency=1), Node(confirm)],
    decision_policy=book,
    version=VERSION,
)

agents = [order, careful, report, trip]
