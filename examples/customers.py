"""Parallel execution: a customer and its orders are looked up at the same time, then brought together.

    python examples/customers.py

Each look-up runs in a process of its own. Branches don't write to the shared state: their updates are handed
to the policy as ``parallel_results``, in the order in which they were asked for, whichever ended first.
"""

from __future__ import annotations

import tempfile
import time
from typing import Any, TypedDict

import hayata
from hayata import Agent, Context, Decision, Finish, Next, PolicyContext, Rerun, node

CUSTOMERS = {"c-1": {"name": "Ada", "city": "London"}}
ORDERS = {"c-1": [{"item": "tea", "price": 4}, {"item": "paper", "price": 12}]}


class State(TypedDict, total=False):
    """The shared state."""

    summary: dict[str, Any]


@node(interrupted=Rerun(max_attempts=3))  # it only reads: when it is cut off, it may run again
def customer(state: State, ctx: Context) -> dict[str, Any]:
    time.sleep(0.2)  # a slow service
    return {"customer": CUSTOMERS[ctx.input["customer_id"]]}


@node(interrupted=Rerun(max_attempts=3))
def orders(state: State, ctx: Context) -> dict[str, Any]:
    time.sleep(0.1)
    return {"orders": ORDERS[ctx.input["customer_id"]]}


def aggregate(state: State, ctx: Context) -> State:
    found, bought = ctx.input["customer"], ctx.input["orders"]
    return {
        "summary": {
            "name": found["name"],
            "orders": len(bought),
            "total": sum(order["price"] for order in bought),
        }
    }


def policy(context: PolicyContext[State]) -> Decision:
    if context.step == 0:
        return Next([customer, orders], context.input)
    if context.parallel_results is not None:
        first, second = context.parallel_results
        return Next(aggregate, {**first, **second})
    return Finish(context.state)


agent = Agent(
    id="customers_agent",
    nodes=[customer, orders, aggregate],
    decision_policy=policy,
    state_type=State,
    max_steps=3,
)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, hayata.start(agent, data_dir=f"{folder}/data") as runtime:
        invocation = runtime.run("customers_agent", {"customer_id": "c-1"})
        print(invocation.result(timeout=30))
        for task in invocation.tasks():
            print(task.step, task.node, task.status)


if __name__ == "__main__":
    main()
