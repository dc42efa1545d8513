"""What is asked of the agents, and what a person knows of an uncertain task who settles it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple
from uuid import uuid4

from hayata.client.records import AgentRecord, Task
from tests.chaos.app import amount

_WEIGHTS = {"line": 8, "again": 6, "fan": 4, "flaky": 3, "talk": 4, "pour": 3, "family": 1, "manual": 1, "pieces": 3}
_SESSIONS = 24
_BRANCHES = frozenset({"left", "right", "wait"})


class Job(NamedTuple):
    """One invocation to ask for."""

    agent: str
    input: Any
    options: dict[str, Any]


def other_job(dice: random.Random, agents: Sequence[AgentRecord], input: Any) -> Job:
    """Choose an agent of another app, of which nothing is known."""
    session = f"s{dice.randrange(_SESSIONS)}"
    return Job(dice.choice(agents).id, input, {"session": session, "on_busy": "queue"})


def make_job(dice: random.Random) -> Job:
    """Choose what to ask of our own agents."""
    agent = dice.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
    input: dict[str, Any] = {"base": dice.randrange(1000), "slow": dice.random() < 0.25}
    options: dict[str, Any] = {}
    if agent == "flaky":
        input["fails"] = dice.choices([0, 1, 2, 3], [4, 4, 2, 1])[0]
    elif agent == "pieces":
        input["pieces"] = dice.randrange(6)
    elif agent == "pour":
        input["chunks"] = dice.randrange(1, 30)
        options["stream"] = True
    elif agent == "talk":
        options["session"] = f"s{dice.randrange(_SESSIONS)}"
        options["on_busy"] = dice.choice(["queue", "queue", "reject"])
    elif dice.random() < 0.1:
        options["session"] = f"t{dice.randrange(_SESSIONS)}"
        options["on_busy"] = "queue"
    return Job(agent, input, options)


def settlement(dice: random.Random, task: Task, base: int | None) -> dict[str, Any]:
    """How an uncertain task is settled: an argument of ``reconcile``.

    Args:
        dice: Decides.
        task: The task.
        base: Of the invocation's input; None where nobody knows what the node would have returned.
    """
    how = dice.choice(["result", "retry", "retry", "error"])
    if how == "result" and base is not None:
        if task.edge is not None:
            return {"result": {"piece": task.edge, "token": uuid4().hex}}
        if task.node in _BRANCHES:
            return {"result": {"branch": task.node, "token": uuid4().hex}}
        return {"result": {"sum": amount(base, task.step), "log": uuid4().hex}}
    return {"error": "a person says so"} if how == "error" else {"retry": True}
