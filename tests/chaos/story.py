"""All that is known in the end: what bodies and clients have written down, and what the product says."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from hayata import AsyncClient
from hayata.client.records import Event, InvocationRecord, Task
from hayata.errors import HayataError
from tests.chaos.ledger import Line, read

_AT_ONCE = 16


@dataclass
class Told:
    """What the product says of one invocation in the end."""

    record: InvocationRecord
    tasks: list[Task]
    events: list[Event]


@dataclass
class Story:
    """See the module.

    Attributes:
        bodies: The lines of the bodies.
        heard: The lines of the clients.
        faults: The lines of who made the faults.
        told: Invocation → what the product says of it.
        bounds: (agent, node) → most attempts of one of its tasks that nobody has settled.
        ours: Whether the agents are those of `tests.chaos.app`, of which more is known.
        other: What was found elsewhere, in words.
    """

    bodies: list[Line]
    heard: list[Line]
    faults: list[Line]
    told: dict[str, Told]
    bounds: Mapping[tuple[str, str], int]
    ours: bool = True
    other: list[str] = field(default_factory=list)

    def heard_of(self, what: str) -> list[Line]:
        """The clients' lines of that kind."""
        return [line for line in self.heard if line["what"] == what]

    @cached_property
    def bodies_of(self) -> Mapping[str, list[Line]]:
        """The bodies' lines of each execution, in order."""
        found: dict[str, list[Line]] = defaultdict(list)
        for line in self.bodies:
            found[line["execution"]].append(line)
        return found


def describe(event: Event) -> dict[str, Any]:
    """What of an event is written down: its number (and the first that a gap stands for), type, and whose."""
    if event.type == "gap":
        return {"n": event.sequence, "first": event.data["from"], "type": "gap", "about": None}
    about = event.data.get("execution_id")
    if event.type == "node_partial_result":
        about = f"{about} {event.data['result']}"
    return {"n": event.sequence, "first": event.sequence, "type": event.type, "about": about}


def heard_lines(home: Path) -> list[Line]:
    """What all clients have written down, by time."""
    lines = [line for path in sorted(home.glob("told-*")) for line in read(path)]
    return sorted(lines, key=lambda line: line["mono"])


def known_ids(heard: Iterable[Line]) -> tuple[set[str], set[str]]:
    """Ids of the invocations that were asked for, and of those that were acknowledged."""
    lines = list(heard)
    asked = {line["id"] for line in lines if line["what"] == "asked"}
    return asked, {line["id"] for line in lines if line["what"] == "acknowledged"}


async def ask_all(socket: str, ids: Iterable[str]) -> dict[str, Told]:
    """Ask the product of all these invocations; those that it doesn't know are left out."""
    found: dict[str, Told] = {}
    waiting = iter(list(ids))

    async def lane(client: AsyncClient) -> None:
        for id in waiting:
            try:
                invocation = await client.invocation(id)
            except HayataError as error:
                if error.code != "unknown_invocation":
                    raise
                continue
            events = [event async for event in invocation.events(until="now")]
            found[id] = Told(invocation.record, await invocation.tasks(), events)

    async with AsyncClient(socket) as client, asyncio.TaskGroup() as group:
        for _ in range(_AT_ONCE):
            group.create_task(lane(client))
    return found
