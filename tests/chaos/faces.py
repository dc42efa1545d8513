"""The two faces of the client, as one: what the load asks of either."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from hayata import AsyncClient, Client
from hayata.client.records import AgentRecord, Event, InvocationRecord, Task


class Face(Protocol):
    """What the load asks for; see the methods of `hayata.Client` with these names."""

    async def run(self, agent: str, input: Any, **options: Any) -> InvocationRecord: ...
    async def result(self, id: str, timeout: float) -> Any: ...
    async def look(self, id: str) -> InvocationRecord: ...
    async def tasks(self, id: str) -> list[Task]: ...
    async def cancel(self, id: str) -> str: ...
    async def reconcile(self, id: str, task: str, **verdict: Any) -> Task: ...
    async def recover(self, agent: str) -> None: ...
    async def agents(self) -> list[AgentRecord]: ...
    def events(self, id: str, after: int) -> AsyncIterator[Event]: ...
    async def close(self) -> None: ...


class AsyncFace:
    """`hayata.AsyncClient`."""

    def __init__(self, socket: str) -> None:
        self._client = AsyncClient(socket)

    async def run(self, agent: str, input: Any, **options: Any) -> InvocationRecord:
        return (await self._client.run(agent, input, **options)).record

    async def result(self, id: str, timeout: float) -> Any:
        return await (await self._client.invocation(id)).result(timeout)

    async def look(self, id: str) -> InvocationRecord:
        return (await self._client.invocation(id)).record

    async def tasks(self, id: str) -> list[Task]:
        return await (await self._client.invocation(id)).tasks()

    async def cancel(self, id: str) -> str:
        return await self._client.cancel(id)

    async def reconcile(self, id: str, task: str, **verdict: Any) -> Task:
        return await self._client.reconcile(id, task, **verdict)

    async def recover(self, agent: str) -> None:
        await self._client.recover(agent)

    async def agents(self) -> list[AgentRecord]:
        return await self._client.agents()

    async def events(self, id: str, after: int) -> AsyncIterator[Event]:
        async for event in (await self._client.invocation(id)).events(after):
            yield event

    async def close(self) -> None:
        await self._client.close()


class BlockingFace:
    """`hayata.Client`, each call in a thread."""

    def __init__(self, socket: str, threads: int) -> None:
        self._client = Client(socket)
        self._threads = ThreadPoolExecutor(threads)

    async def _in_thread(self, call: Any, *args: Any, **options: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: call(*args, **options))

    async def run(self, agent: str, input: Any, **options: Any) -> InvocationRecord:
        return (await self._in_thread(self._client.run, agent, input, **options)).record

    async def result(self, id: str, timeout: float) -> Any:
        return await self._in_thread(lambda: self._client.invocation(id).result(timeout))

    async def look(self, id: str) -> InvocationRecord:
        return (await self._in_thread(self._client.invocation, id)).record

    async def tasks(self, id: str) -> list[Task]:
        return await self._in_thread(lambda: self._client.invocation(id).tasks())

    async def cancel(self, id: str) -> str:
        return await self._in_thread(self._client.cancel, id)

    async def reconcile(self, id: str, task: str, **verdict: Any) -> Task:
        return await self._in_thread(self._client.reconcile, id, task, **verdict)

    async def recover(self, agent: str) -> None:
        await self._in_thread(self._client.recover, agent)

    async def agents(self) -> list[AgentRecord]:
        return await self._in_thread(self._client.agents)

    async def events(self, id: str, after: int) -> AsyncIterator[Event]:
        events = await self._in_thread(lambda: self._client.invocation(id).events(after))
        while (event := await self._in_thread(next, events, None)) is not None:
            yield event

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._client.close()
