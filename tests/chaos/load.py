"""The clients: run, await, follow, cancel, settle, recover; and write down all that they are told.

    python -m tests.chaos.load blocking|async SEED LANES [INPUT]

A program of its own, started by `tests.chaos.run` with ``$CHAOS_HOME`` and ``$HAYATA_SOCKET``. It works until SIGTERM,
brings what it has begun to an end, or leaves it, and exits with 0. INPUT is for the agents of an app that isn't ours.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar
from uuid import uuid4

from hayata.client.records import RESTING, TERMINAL
from hayata.errors import HayataError, InvocationCancelled, InvocationFailed, RecoveryNeeded
from tests.chaos.faces import AsyncFace, BlockingFace, Face
from tests.chaos.jobs import Job, make_job, other_job, settlement
from tests.chaos.ledger import Ledger
from tests.chaos.story import describe

P = ParamSpec("P")
T = TypeVar("T")

TERMINAL_EVENTS = {
    "invocation_completed": "completed",
    "invocation_failed": "failed",
    "invocation_cancelled": "cancelled",
}
_THINK_S = 0.05
_LAST_S = 3.0
_RESULT_S = 20.0
_UNAVAILABLE_S = 120.0
_WAYS = {"await": 10, "follow": 6, "cancel": 2, "leave": 3, "twice": 1}
_REFUSALS = {"session_busy", "recovery_required"}
_SETTLED_BY_ANOTHER = {"already_reconciled", "not_uncertain", "invocation_terminal"}


class Reader:
    """Reads one invocation's events, now and then on a new connection, and writes each one down."""

    def __init__(self, face: Face, ledger: Ledger, id: str) -> None:
        self._face = face
        self._ledger = ledger
        self._id = id
        self._readings = 0
        self._after = 0
        self.last = ""

    async def read(self, most: int) -> int:
        """Read ``most`` events, or all until it rests or ends; return how many."""
        self._readings += 1
        count, about = 0, {"id": self._id, "reading": self._readings, "after": self._after}
        async for event in self._face.events(self._id, self._after):
            self._ledger.note("event", **about, **describe(event))
            self._after, self.last = event.sequence, event.type
            count += 1
            if count == most:
                break
        return count


class Load:
    """Many lanes, each with one invocation at a time."""

    def __init__(self, face: Face, ledger: Ledger, seed: str, input: str | None) -> None:
        self._face = face
        self._ledger = ledger
        self._seed = seed
        self._input = input
        self._stopping = asyncio.Event()

    async def run(self, lanes: int) -> None:
        """Work until SIGTERM."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._stopping.set)
        self._agents = await self._ask(self._face.agents)
        async with asyncio.TaskGroup() as group:
            dice = [random.Random(f"{self._seed}:{lane}") for lane in range(lanes)]
            tasks = [group.create_task(self._lane(each)) for each in dice]
            await self._stopping.wait()
            # What waits for longer, waits for an end that will come when somebody has decided.
            _, late = await asyncio.wait(tasks, timeout=_LAST_S)
            for task in late:
                task.cancel()
        await self._face.close()

    async def _lane(self, dice: random.Random) -> None:
        while not self._stopping.is_set():
            await self._one(dice)
            try:
                await asyncio.wait_for(self._stopping.wait(), dice.expovariate(1 / _THINK_S))
            except TimeoutError:
                continue

    async def _ask(self, call: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Ask, and ask again while there is no daemon: its guard may have been killed."""
        due = time.monotonic() + _UNAVAILABLE_S
        while True:
            try:
                return await call(*args, **kwargs)
            except HayataError as error:
                if error.code != "daemon_unavailable" or time.monotonic() > due:
                    raise
            await asyncio.sleep(0.05)

    # One invocation

    async def _one(self, dice: random.Random) -> None:
        ours = self._input is None
        job = make_job(dice) if ours else other_job(dice, self._agents, json.loads(self._input or "null"))
        id = uuid4().hex
        way = dice.choices(list(_WAYS), list(_WAYS.values()))[0]
        options = {**job.options, "invocation_id": id, **({"key": f"k{id}"} if way == "twice" else {})}
        self._ledger.note("asked", id=id, agent=job.agent, input=job.input)
        try:
            record = await self._ask(self._face.run, job.agent, job.input, **options)
        except HayataError as error:
            if ours and (error.code not in _REFUSALS or "session" not in options):
                raise
            self._ledger.note("refused", id=id, code=error.code)
            return
        self._ledger.note("acknowledged", id=record.id, status=record.status)
        match way:
            case "await":
                await self._await(dice, job, id)
            case "follow":
                await self._follow(dice, job, id)
            case "cancel":
                await asyncio.sleep(dice.uniform(0.0, 0.3))
                status = await self._ask(self._face.cancel, id)
                self._ledger.note("cancel", id=id, status=status)
            case "twice":
                options["invocation_id"] = uuid4().hex
                again = await self._ask(self._face.run, job.agent, job.input, **options)
                self._ledger.note("again", id=id, got=again.id)

    async def _await(self, dice: random.Random, job: Job, id: str) -> None:
        while True:
            status, result = await self._outcome(id)
            if status in TERMINAL:
                self._ledger.note("ended", id=id, status=status, result=result)
            if status not in RESTING or dice.random() < 0.3:
                return
            await self._decide(dice, job, id)

    async def _outcome(self, id: str) -> tuple[str, Any]:
        try:
            return "completed", await self._ask(self._face.result, id, _RESULT_S)
        except InvocationFailed as error:
            return "failed", error.code
        except InvocationCancelled:
            return "cancelled", None
        except RecoveryNeeded as error:
            return ("uncertain" if error.code == "task_execution_uncertain" else "recovery_required"), None
        except TimeoutError:
            return "late", None

    # Events

    async def _follow(self, dice: random.Random, job: Job, id: str) -> None:
        """Read the events, over several connections, and decide where it rests."""
        reader = Reader(self._face, self._ledger, id)
        while reader.last not in TERMINAL_EVENTS:
            most = dice.choice([1, 3, 10, 1000])
            try:
                count = await asyncio.wait_for(reader.read(most), _RESULT_S)
            except HayataError as error:
                if error.code != "daemon_unavailable":
                    raise
                await asyncio.sleep(0.05)
                continue
            except TimeoutError:
                return
            if count < most and reader.last not in TERMINAL_EVENTS:  # it rests
                if dice.random() < 0.3:
                    return
                await self._decide(dice, job, id)
        self._ledger.note("ended_by_event", id=id, status=TERMINAL_EVENTS[reader.last])

    # Decisions

    async def _decide(self, dice: random.Random, job: Job, id: str) -> None:
        record = await self._ask(self._face.look, id)
        if record.status == "recovery_required":
            await self._ask(self._face.recover, record.agent)
            self._ledger.note("recover", agent=record.agent)
            return
        for task in await self._ask(self._face.tasks, id):
            if task.status == "uncertain":
                verdict = settlement(dice, task, job.input["base"] if self._input is None else None)
                self._ledger.note("settling", id=id, task=task.id, verdict=verdict)
                try:
                    await self._ask(self._face.reconcile, id, task.id, by="load", **verdict)
                except HayataError as error:
                    # Ourselves, perhaps: an answer that was lost with its daemon.
                    if error.code not in _SETTLED_BY_ANOTHER:
                        raise
                else:
                    self._ledger.note("settled", id=id, task=task.id, verdict=verdict)


async def main(kind: str, seed: str, lanes: int, input: str | None) -> None:
    """Be one of the clients."""
    socket = os.environ["HAYATA_SOCKET"]
    face = AsyncFace(socket) if kind == "async" else BlockingFace(socket, 4 * lanes)
    ledger = Ledger(Path(os.environ["CHAOS_HOME"]) / f"told-{kind}")
    await Load(face, ledger, f"{seed}:{kind}", input).run(lanes)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4] if len(sys.argv) > 4 else None))
    os._exit(0)  # threads may wait for events that never come
