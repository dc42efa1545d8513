"""What the clients of a trial do: a bit of everything, all at once, while something goes wrong."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar
from uuid import uuid4

from hayata import AsyncClient
from hayata.client.records import RESTING, TERMINAL
from hayata.errors import HayataError, InvocationCancelled, InvocationFailed, RecoveryNeeded
from tests.chaos.jobs import settlement
from tests.chaos.ledger import Ledger, read
from tests.chaos.story import describe
from tests.matrix.host import ODD_APP, Host

P = ParamSpec("P")
T = TypeVar("T")

UNAVAILABLE_S = 30.0
_RESULT_S = 30.0
_OPEN = ("queued", "running", "waiting", "uncertain", "recovery_required")
_PASSING = {"daemon_unavailable", "store_corrupt"}
_LOOK_S = 0.02
_BODY_S = 3.0
_SETTLED_BY_ANOTHER = {"already_reconciled", "not_uncertain", "invocation_terminal"}
_ENDS = {"invocation_completed": "completed", "invocation_failed": "failed", "invocation_cancelled": "cancelled"}


class Clients:
    """Asks, and writes down what it was told, as `tests.chaos.checks` wants to read it."""

    def __init__(self, host: Host, ledger: Ledger, seed: str) -> None:
        self._client = AsyncClient(host.socket)
        self._ledger_of_bodies = host.home / "ledger"
        self._ledger = ledger
        self._dice = random.Random(seed)
        self._inputs: dict[str, dict[str, Any]] = {}

    async def unfinished(self) -> None:
        """Begin what shall be cut off: the template of the trials."""
        for agent, input, options in (
            ("line", {"slow": True}, {}),
            ("again", {"slow": True}, {}),
            ("manual", {}, {}),
            ("walker", {}, {}),
            ("payer", {}, {}),
            ("payer", {}, {}),
            ("fan", {}, {}),
            ("pieces", {"pieces": 5}, {}),
            ("flaky", {"fails": 2}, {}),
            ("talk", {}, {"session": "t", "on_busy": "queue"}),
            ("talk", {}, {"session": "t", "on_busy": "queue"}),
            ("pour", {"chunks": 100}, {"stream": True}),
            ("drip", {"chunks": 100}, {"stream": True}),
        ):
            await self._run(agent, input, **options)

    async def everything(self) -> None:
        """All that a client can ask for."""
        async with asyncio.TaskGroup() as group:
            for doing in (
                self._awaited("line"),
                self._followed("line", {"slow": True}),
                self._awaited("again", {"slow": True}),
                self._awaited("fan"),
                self._followed("pieces", {"pieces": 4}),
                self._awaited("pieces", {"pieces": 0}),
                self._followed("flaky", {"fails": 2}),
                self._awaited("flaky", {"fails": 3}),
                self._followed("pour", {"chunks": 4}, stream=True),
                self._followed("drip", {"chunks": 4}, stream=True),
                self._awaited("walker"),
                self._awaited("payer"),
                self._awaited("halting"),
                self._awaited("large"),
                self._awaited("family"),
                self._awaited("manual"),
                self._awaited("refused"),
                self._conversation(),
                self._cancelled("line", {"slow": True}, "slow"),
                self._cancelled("sleeper", {}, "nap"),
                self._cancelled("fan", {}, "wait"),
                self._twice(),
                self._confused(),
                self._odd(),
                self._reloaded(),
                self._looked_at(),
            ):
                group.create_task(doing)

    async def close(self) -> None:
        """Hang up."""
        await self._client.close()

    # One thing each

    async def _run(self, agent: str, input: dict[str, Any] | None = None, **options: Any) -> str:
        id = uuid4().hex
        self._inputs[id] = {"base": self._dice.randrange(1000), **(input or {})}
        self._ledger.note("asked", id=id, agent=agent, input=self._inputs[id])
        invocation = await patiently(self._client.run, agent, self._inputs[id], invocation_id=id, **options)
        self._ledger.note("acknowledged", id=invocation.id, status=invocation.record.status)
        return id

    async def _awaited(self, agent: str, input: dict[str, Any] | None = None, **options: Any) -> None:
        await self._to_its_end(await self._run(agent, input, **options))

    async def _to_its_end(self, id: str) -> None:
        while True:
            status, result = await self._outcome(id)
            if status in TERMINAL:
                self._ledger.note("ended", id=id, status=status, result=result)
            if status not in RESTING:
                return
            await self.decide(id, status)

    async def _outcome(self, id: str) -> tuple[str, Any]:
        try:
            return "completed", await patiently(self._result, id)
        except InvocationFailed as error:
            return "failed", error.code
        except InvocationCancelled:
            return "cancelled", None
        except RecoveryNeeded as error:
            return ("uncertain" if error.code == "task_execution_uncertain" else "recovery_required"), None
        except TimeoutError:
            return "late", None

    async def _result(self, id: str) -> Any:
        return await (await self._client.invocation(id)).result(_RESULT_S)

    async def _tasks(self, id: str) -> list[Any]:
        return await (await self._client.invocation(id)).tasks()

    async def _followed(self, agent: str, input: dict[str, Any], **options: Any) -> None:
        """Read its events to the last one, a few at a time."""
        id = await self._run(agent, input, **options)
        after, last = 0, ""
        while last not in _ENDS:
            reading = uuid4().hex
            count = 0
            async for event in self._events(id, after):
                self._ledger.note("event", id=id, reading=reading, after=after, **describe(event))
                last, count, behind = event.type, count + 1, event.sequence
                if count == 7:
                    break
            after = behind if count else after
            if count < 7 and last not in _ENDS:  # it rests
                await self.decide(id, (await patiently(self._client.invocation, id)).record.status)
        self._ledger.note("ended_by_event", id=id, status=_ENDS[last])

    async def _events(self, id: str, after: int) -> AsyncIterator[Any]:
        """The events; a daemon that is gone for long is none."""
        with suppress(HayataError):
            invocation = await patiently(self._client.invocation, id)
            async with asyncio.timeout(_RESULT_S):
                async for event in invocation.events(after):
                    yield event

    async def _conversation(self) -> None:
        ids = [await self._run("talk", session="s", on_busy="queue") for _ in range(3)]
        for id in ids:
            await self._to_its_end(id)

    async def _cancelled(self, agent: str, input: dict[str, Any], node: str) -> None:
        """Cancel it in the midst of a body; or at last, when there is none."""
        id = await self._run(agent, input)
        due = time.monotonic() + _BODY_S
        while not self._has_begun(id, node) and time.monotonic() < due:
            await asyncio.sleep(_LOOK_S)
        status = await patiently(self._client.cancel, id)
        self._ledger.note("cancel", id=id, status=status)

    def _has_begun(self, id: str, node: str) -> bool:
        lines = read(self._ledger_of_bodies)
        return any(line.get("invocation") == id and line.get("node") == node for line in lines)

    async def _twice(self) -> None:
        key = uuid4().hex
        id = await self._run("line", key=key)
        other = {"invocation_id": uuid4().hex, "key": key}
        again = await patiently(self._client.run, "line", self._inputs[id], **other)
        self._ledger.note("again", id=id, got=again.id)
        await self._to_its_end(id)

    async def _confused(self) -> None:
        """Its failure is none that the checks expect, so they are not told of it."""
        invocation = await patiently(self._client.run, "confused", {"base": 1})
        ends = {("failed", "policy_exception"), ("failed", "reconciled")}  # the latter when it was cut off before
        while await self._outcome(invocation.id) not in ends:
            await patiently(invocation.refresh)
            assert invocation.record.status in RESTING | {"running"}, invocation.record
            await self.decide(invocation.id, invocation.record.status)

    async def _odd(self) -> None:
        """Load one more app, and stop its agent. Another supervisor knows nothing of it."""
        with suppress(HayataError):
            await patiently(self._client.start_agent, ODD_APP)
            await patiently(self._client.stop_agent, "odd")

    async def _reloaded(self) -> None:
        """Load the apps anew, though nothing of them has changed. One that fails has been disturbed."""
        with suppress(HayataError):
            await patiently(self._client.reload)

    async def _looked_at(self) -> None:
        """Ask what changes nothing."""
        for ask in (self._client.agents, self._client.tree, self._client.stats, self._client.invocations):
            await patiently(ask)

    # What a person decides

    async def decide(self, id: str, status: str) -> None:
        """Settle what rests."""
        if status == "recovery_required":
            agent = (await patiently(self._client.invocation, id)).record.agent
            await patiently(self._client.recover, agent)
            self._ledger.note("recover", agent=agent)
        elif status == "uncertain":
            for task in await patiently(self._tasks, id):
                if task.status == "uncertain":
                    await self._reconcile(id, task)

    async def _reconcile(self, id: str, task: Any) -> None:
        verdict = settlement(self._dice, task, self._inputs.get(id, {}).get("base"))
        self._ledger.note("settling", id=id, task=task.id, verdict=verdict)
        try:
            await patiently(self._client.reconcile, id, task.id, by="matrix", **verdict)
        except HayataError as error:
            if error.code not in _SETTLED_BY_ANOTHER:  # by ourselves: the answer was lost with its daemon
                raise
        else:
            self._ledger.note("settled", id=id, task=task.id, verdict=verdict)

    async def settle(self, within_s: float) -> list[str]:
        """Decide until nothing is open. Returns what stays open, in words."""
        due = time.monotonic() + within_s
        while still := await self._still_open():
            if time.monotonic() > due:
                return [f"{each.agent} {each.id} stays {each.status}: {each}" for each in still]
            for each in still:
                await self.decide(each.id, each.status)
            await asyncio.sleep(_LOOK_S)
        return []

    async def _still_open(self) -> list[Any]:
        found = await patiently(self._client.invocations, limit=1000)
        return [each.record for each in found if each.record.status in _OPEN]

    def knows(self, inputs: dict[str, dict[str, Any]]) -> None:
        """Take over the inputs of invocations that an earlier run has asked for."""
        self._inputs.update(inputs)


async def patiently(call: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
    """Ask, and ask again while there is no daemon, or one that can't read its store."""
    due = time.monotonic() + UNAVAILABLE_S
    while True:
        try:
            return await call(*args, **kwargs)
        except HayataError as error:
            if error.code not in _PASSING or time.monotonic() > due:
                raise
        await asyncio.sleep(_LOOK_S)
