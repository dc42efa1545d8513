"""The async face of a runtime of one's own: what ``async with hayata.start(…)`` gives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from types import TracebackType
from typing import Self, TypeVar

from hayata import messages as m
from hayata.client.asynchronous import AsyncClient
from hayata.client.core import Exchange, Open, Pause, Receive
from hayata.client.lines import Stream
from hayata.client.links import AsyncStream
from hayata.embedded import DRAIN_S, Runtime
from hayata.errors import HayataError

T = TypeVar("T")


class AsyncRuntime(AsyncClient):
    """A running runtime, with the methods of `hayata.AsyncClient`.

    Inline, what the runtime does is done in one thread beside the event loop's, a call at a time: another
    call waits while one waits for a result.

    Attributes:
        data_dir: Where its store lives, absolute.
        pid: Process id of its guard; inline, of this process.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._thread = ThreadPoolExecutor(1, "hayata inline") if runtime.inline else None
        self.data_dir = runtime.data_dir
        self.pid = runtime.pid
        super().__init__(runtime.socket, frame_cap_bytes=runtime._cap)

    async def close(self, drain: float = DRAIN_S) -> None:
        """End the runtime, and return when its processes have ended.

        Args:
            drain: Seconds that running executions are given to end.
        """
        await super().close()
        await _in(self._thread, lambda: self._runtime.close(drain))
        if self._thread is not None:
            self._thread.shutdown(wait=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close(DRAIN_S if kind is None else 0.0)

    def __repr__(self) -> str:
        return f"<AsyncRuntime in {self.data_dir}>"

    def _check_open(self) -> None:
        self._runtime._check_open()

    def _explain(self, error: HayataError) -> HayataError:
        return self._runtime._explain(error)

    async def _do(self, effect: Exchange | Pause) -> m.Answer | None:
        if self._thread is None:
            return await super()._do(effect)
        return await _in(self._thread, lambda: self._runtime._do(effect))

    def _open_stream(self) -> AsyncStream:
        if self._thread is None:
            return super()._open_stream()
        return _ThreadStream(Stream(self._runtime._connect), self._thread)


class _ThreadStream:
    """An `AsyncStream` whose connection is used in another thread."""

    def __init__(self, stream: Stream, thread: Executor) -> None:
        self._stream = stream
        self._thread = thread

    async def do(self, effect: Open | Receive | Pause) -> m.Answer | None:
        return await _in(self._thread, lambda: self._stream.do(effect))

    def close(self) -> None:
        self._stream.close()


async def _in(thread: Executor | None, call: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(thread, call)
