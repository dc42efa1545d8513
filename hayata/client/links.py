"""The async face's connections: one that all requests of an event loop share, and one for each stream."""

from __future__ import annotations

import asyncio
import os
import socket as sockets
from collections import deque
from collections.abc import Callable
from typing import Protocol

from hayata import messages as m
from hayata.client.core import Conversation, Frames, Lost, Open, Pause, Receive, not_ours
from hayata.client.transport import READ_BYTES
from hayata.errors import HayataError
from hayata.framing import frame


class Link:
    """The connection that all requests of one event loop share."""

    def __init__(self, sock: sockets.socket, cap_bytes: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._pid = os.getpid()
        self._sock = sock
        self._cap = cap_bytes
        self._talk = Conversation()
        self._waiting: dict[int, asyncio.Future[m.Answer | Lost | HayataError]] = {}
        self._sending = asyncio.Lock()
        self._unsent = frame(self._talk.hello(), cap_bytes)
        self._ended: Lost | HayataError = Lost("the client was closed")
        self._reader = self._loop.create_task(self._read(), name="hayata client")
        self._reader.add_done_callback(self._reader_ended)
        self.open = True

    def is_usable(self) -> bool:
        """Whether it lives, in this loop and process."""
        return self.open and self._pid == os.getpid() and self._loop is asyncio.get_running_loop()

    async def exchange(self, request: m.Request, greeting_s: float, timeout_s: float | None) -> m.Answer:
        """Ask and wait for the answer. Raises as `Exchange` says."""
        number, body = self._talk.ask(request)
        data = frame(body, self._cap)
        answer: asyncio.Future[m.Answer | Lost | HayataError] = self._loop.create_future()
        self._waiting[number] = answer
        try:
            async with asyncio.timeout(timeout_s):
                await self._send(data)
                if not self._talk.greeted:
                    await asyncio.wait([answer], timeout=greeting_s)
                    if not self._talk.greeted and not answer.done():
                        self._end(Lost("it took the connection and did not greet"))
                outcome = await answer
        finally:
            self._waiting.pop(number, None)
        if isinstance(outcome, Lost):
            # One loss is heard by many callers: each gets an exception of its own, with its own traceback.
            raise Lost(outcome.reason, greeted=outcome.greeted, refusal=outcome.refusal)
        if isinstance(outcome, HayataError):
            raise type(outcome)(outcome.code, outcome.message, details=outcome.details, hint=outcome.hint)
        return outcome

    async def _send(self, data: bytes) -> None:
        async with self._sending:
            if not self.open:
                return
            data, self._unsent = self._unsent + data, b""
            try:
                await self._loop.sock_sendall(self._sock, data)
            except OSError:
                return  # what the daemon said before is still to be read: the reader reports the end
            except BaseException:
                # Cut off in the middle of a frame, nobody can send on it any more.
                self._end(Lost("a call was cancelled while its request was on the way", greeted=True))
                raise

    async def _read(self) -> None:
        frames = Frames(self._cap)
        try:
            while data := await self._loop.sock_recv(self._sock, READ_BYTES):
                for body in frames.feed(data):
                    self._received(body)
            self._ended = Lost("the daemon has closed the connection")
        except OSError as error:
            self._ended = Lost(f"the connection was lost ({error.strerror})")
        except HayataError as error:
            self._ended = error

    def _reader_ended(self, reader: asyncio.Task[None]) -> None:
        # As a callback, for a task that is cancelled before its first step runs none of its own code.
        self._tell_all(self._ended)
        self._sock.close()

    def _received(self, body: bytes) -> None:
        tell = self._talk.receive(body)
        if tell is None:
            return
        waiting = self._waiting.get(tell.number)
        if waiting is not None and not waiting.done():
            waiting.set_result(tell.answer)

    def _tell_all(self, reason: Lost | HayataError) -> None:
        self.open = False
        if isinstance(reason, Lost):
            reason.greeted = self._talk.greeted
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_result(reason)

    def _end(self, reason: Lost) -> None:
        self._tell_all(reason)
        self._reader.cancel()

    async def close(self) -> None:
        """Close it, and return when the reader has ended."""
        if not self.is_usable():
            self.abandon()
            return
        self._end(Lost("the client was closed"))
        await asyncio.wait([self._reader])

    def abandon(self) -> None:
        """Let go of it from anywhere: another thread, another loop, a forked child, the garbage collector."""
        self.open = False
        if self._pid != os.getpid() or self._loop.is_closed():
            self._sock.close()
            return
        try:
            self._loop.call_soon_threadsafe(self._reader.cancel)
        except RuntimeError:  # the loop was closed meanwhile
            self._sock.close()


class AsyncStream(Protocol):
    """The connection that one reader of events has to himself."""

    async def do(self, effect: Open | Receive | Pause) -> m.Answer | None:
        """Perform an effect of `hayata.client.core.follow`."""

    def close(self) -> None:
        """Close the connection, if there is one."""


class SocketStream:
    """An `AsyncStream` over the daemon's socket."""

    def __init__(self, open_socket: Callable[[], sockets.socket], cap_bytes: int) -> None:
        self._open_socket = open_socket
        self._cap = cap_bytes
        self._sock: sockets.socket | None = None
        self._talk = Conversation()
        self._frames = Frames(cap_bytes)
        self._bodies: deque[bytes] = deque()
        self._greeting_s = 0.0

    async def do(self, effect: Open | Receive | Pause) -> m.Answer | None:
        """See `AsyncStream.do`."""
        if isinstance(effect, Pause):
            await asyncio.sleep(effect.seconds)
            return None
        if isinstance(effect, Open):
            await self._open(effect)
            return None
        if not self._talk.greeted:
            try:
                async with asyncio.timeout(self._greeting_s):
                    self._talk.receive(await self._body())
            except TimeoutError:
                raise Lost("it took the connection and did not greet") from None
        tell = self._talk.receive(await self._body())
        if tell is None:
            raise not_ours("it answered out of turn")
        return tell.answer

    async def _open(self, effect: Open) -> None:
        self.close()
        self._greeting_s = effect.greeting_s
        self._talk, self._frames = Conversation(), Frames(self._cap)
        self._bodies.clear()
        self._sock = sock = self._open_socket()
        data = frame(self._talk.hello(), self._cap) + frame(self._talk.ask(effect.request)[1], self._cap)
        try:
            await asyncio.get_running_loop().sock_sendall(sock, data)
        except OSError as error:
            raise Lost(f"the connection was lost ({error.strerror})") from None

    async def _body(self) -> bytes:
        while not self._bodies:
            if self._sock is None:
                raise Lost("the stream was closed", greeted=self._talk.greeted)
            try:
                data = await asyncio.get_running_loop().sock_recv(self._sock, READ_BYTES)
            except OSError as error:
                raise Lost(f"the connection was lost ({error.strerror})", greeted=self._talk.greeted) from None
            if not data:
                raise Lost("the daemon has closed the connection", greeted=self._talk.greeted)
            self._bodies.extend(self._frames.feed(data))
        return self._bodies.popleft()

    def close(self) -> None:
        """See `AsyncStream.close`."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None
