"""The async face: `AsyncClient` and `AsyncInvocation`.

Requests share one connection, whose answers a reader task hands out; each reader of events has a connection
to himself and reads it only when he is asked for the next event. A call that is cancelled leaves nothing
behind: its answer is dropped when it comes, and a stream goes on where it was. What is bound to an event loop
is made anew when the client is used in another one, or in a forked child.
"""

from __future__ import annotations

import asyncio
import os
import socket as sockets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from types import TracebackType
from typing import Any, Concatenate, Literal, ParamSpec, Self, TypeVar

from hayata import address
from hayata import messages as m
from hayata.client import operations, records, upkeep
from hayata.client.core import (
    Emit,
    Exchange,
    Lost,
    Open,
    Operation,
    Pause,
    Receive,
    after,
    drive,
    follow,
)
from hayata.client.links import AsyncStream, Link, SocketStream
from hayata.client.methods import dress
from hayata.client.transport import connect
from hayata.errors import HayataError, error_for
from hayata.framing import DEFAULT_CAP_BYTES

P = ParamSpec("P")
T = TypeVar("T")


class AsyncEvents:
    """The events of an invocation, in order, read as they are asked for. One reader at a time.

    A cancelled ``anext`` loses nothing: the next one goes on behind the last event that was handed out.
    """

    def __init__(
        self,
        request: m.FollowEvents,
        stream: AsyncStream,
        check: Callable[[], None],
        explain: Callable[[HayataError], HayataError],
    ) -> None:
        self._request = request
        self._stream = stream
        self._check = check
        self._explain = explain
        self._ready: deque[m.EventInfo] = deque()
        self._steps = follow(request, time.monotonic)
        self._effect: Open | Receive | Pause | Emit | None = None
        self._ended = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> records.Event:
        if not self._ready and not self._ended:
            await self._fill()
        if not self._ready:
            raise StopAsyncIteration
        return records.event(self._request.invocation_id, self._ready.popleft())

    async def _fill(self) -> None:
        """Get the next events, or come to the end."""
        try:
            self._check()
            effect = next(self._steps)
            while not isinstance(effect, Emit):
                failure: Exception | None = None
                outcome = None
                try:
                    outcome = await self._stream.do(effect)
                except (Lost, HayataError) as error:
                    failure = error
                effect = self._steps.send(outcome) if failure is None else self._steps.throw(failure)
        except StopIteration:
            self._end()
        except HayataError as error:
            self._end()
            raise self._explain(error) from None
        except BaseException:
            # Cancelled while bytes may have been under way to us: a new connection reads them again.
            self._stream.close()
            self._steps = follow(self._request, time.monotonic)
            raise
        else:
            self._ready.extend(effect.events)
            self._request = after(self._request, effect.events)

    def _end(self) -> None:
        self._ended = True
        self._stream.close()

    async def aclose(self) -> None:
        """Stop reading and close the connection."""
        self._end()
        self._ready.clear()

    def __del__(self) -> None:
        stream: AsyncStream | None = getattr(self, "_stream", None)
        if stream is not None:
            stream.close()


# ----------------------------------------------------------------------------------------------------------
# Methods from operations
# ----------------------------------------------------------------------------------------------------------


def _method(
    operation: Callable[P, Operation[T]],
) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    async def method(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._perform(operation(*args, **kwargs))

    return dress(method, operation)


def _one(
    operation: Callable[P, Operation[m.InvocationInfo]],
) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, AsyncInvocation]]:
    async def method(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> AsyncInvocation:
        return AsyncInvocation(self, await self._perform(operation(*args, **kwargs)))

    return dress(method, operation, "AsyncInvocation")


def _many(
    operation: Callable[P, Operation[list[m.InvocationInfo]]],
) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, list[AsyncInvocation]]]:
    async def method(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> list[AsyncInvocation]:
        return [AsyncInvocation(self, info) for info in await self._perform(operation(*args, **kwargs))]

    return dress(method, operation, "list[AsyncInvocation]")


def _of_invocation(
    operation: Callable[Concatenate[str, P], Operation[T]],
) -> Callable[Concatenate[AsyncInvocation, P], Coroutine[Any, Any, T]]:
    async def method(self: AsyncInvocation, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._client._perform(operation(self.id, *args, **kwargs))

    return dress(method, operation, bound=1)


# ----------------------------------------------------------------------------------------------------------
# Public
# ----------------------------------------------------------------------------------------------------------


class AsyncClient:
    """A daemon's client for asyncio: the methods of `hayata.Client`, awaitable.

    Args:
        socket: Path of the daemon's socket; None: ``$HAYATA_SOCKET`` or the default.
        frame_cap_bytes: Largest message, if the daemon's was changed.
    """

    def __init__(
        self, socket: str | os.PathLike[str] | None = None, *, frame_cap_bytes: int = DEFAULT_CAP_BYTES
    ) -> None:
        self._socket = address.default_socket() if socket is None else os.path.abspath(os.fspath(socket))
        self._cap = frame_cap_bytes
        self._link: Link | None = None
        self._closed = False

    @property
    def socket(self) -> str:
        """Path of the daemon's socket."""
        return self._socket

    run = _one(operations.run)
    call = _method(operations.call)
    get_result = _method(operations.get_result)
    invocation = _one(operations.invocation)
    invocations = _many(operations.invocations)
    cancel = _method(operations.cancel)
    recover = _many(operations.recover)
    reconcile = _method(operations.reconcile)
    reconcile_all = _method(operations.reconcile_all)
    agents = _method(operations.agents)
    start_agent = _method(operations.start_agent)
    stop_agent = _method(operations.stop_agent)
    reload = _method(operations.reload)
    tree = _method(operations.tree)
    stats = _method(operations.stats)
    verify = _method(upkeep.verify)
    backup = _method(upkeep.backup)
    prune = _method(upkeep.prune)
    export = _method(upkeep.export)
    stop = _method(operations.stop)

    async def close(self) -> None:
        """Close the connection. Invocations go on."""
        self._closed = True
        link, self._link = self._link, None
        if link is not None:
            await link.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    def __del__(self) -> None:
        link: Link | None = getattr(self, "_link", None)
        if link is not None:
            link.abandon()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} at {self._socket}>"

    # performing

    def _check_open(self) -> None:
        if self._closed:
            raise error_for("daemon_unavailable", "this client is closed")

    def _explain(self, error: HayataError) -> HayataError:
        """What to raise for an error; a runtime knows more about why its daemon is gone."""
        return error

    def _open_socket(self) -> sockets.socket:
        return connect(self._socket)

    def _open_stream(self) -> AsyncStream:
        return SocketStream(self._open_socket, self._cap)

    async def _perform(self, operation: Operation[T]) -> T:
        """Run an operation to its end."""
        self._check_open()
        steps = drive(operation, time.monotonic)
        try:
            effect = next(steps)
            while True:
                failure: Exception | None = None
                outcome = None
                try:
                    outcome = await self._do(effect)
                except (Lost, TimeoutError, HayataError) as error:
                    failure = error
                effect = steps.send(outcome) if failure is None else steps.throw(failure)
        except StopIteration as stop:
            result: T = stop.value
            return result
        except HayataError as error:
            raise self._explain(error) from None

    async def _do(self, effect: Exchange | Pause) -> m.Answer | None:
        if isinstance(effect, Pause):
            await asyncio.sleep(effect.seconds)
            return None
        link = self._link
        if link is None or not link.is_usable():
            if link is not None:
                link.abandon()
            link = self._link = Link(self._open_socket(), self._cap)
        return await link.exchange(effect.request, effect.greeting_s, effect.timeout_s)

    def _events(self, request: m.FollowEvents) -> AsyncEvents:
        return AsyncEvents(request, self._open_stream(), self._check_open, self._explain)


class AsyncInvocation:
    """An invocation: what `AsyncClient.run` started, or one that was looked up.

    Attributes:
        id: Its id.
    """

    def __init__(self, client: AsyncClient, info: m.InvocationInfo) -> None:
        self._client = client
        self._info = info
        self.id = info.id

    @property
    def record(self) -> records.InvocationRecord:
        """As it was when this object was made, or last refreshed; asks nobody."""
        return records.invocation_record(self._info)

    result = _of_invocation(operations.result)
    status = _of_invocation(operations.status)
    tasks = _of_invocation(operations.tasks)
    cancel = _of_invocation(operations.cancel)

    async def refresh(self) -> records.InvocationRecord:
        """Ask again, keep what is known now as `record`, and return it."""
        self._info = await self._client._perform(operations.invocation(self.id))
        return self.record

    def events(
        self, after: int = 0, *, until: Literal["now", "settled", "terminal"] = "settled"
    ) -> AsyncIterator[records.Event]:
        """Read the events in order, waiting for those to come.

        Args:
            after: Go on behind this sequence number; 0 from the first.
            until: End with what there is (``now``), when the invocation has ended or rests until somebody
                decides (``settled``), or only when it has ended (``terminal``).

        Returns:
            An async iterator. A reader that is slow is given a ``gap`` in place of partial results.
        """
        return self._client._events(operations.follow_request(self.id, after, until))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} of {self._info.agent}>"
