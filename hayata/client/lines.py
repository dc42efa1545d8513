"""The blocking face's connections: one question at a time on each, in a pool, or one for each stream."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hayata import messages as m
from hayata.client.core import Conversation, Lost, Open, Pause, Receive, not_ours
from hayata.client.transport import Transport
from hayata.errors import HayataError

_MOST_IDLE = 8


class Line:
    """A connection and its conversation: one question at a time."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._talk = Conversation()
        self._number = 0
        self._transport.send(self._talk.hello())

    def ask(self, request: m.Request) -> None:
        """Send a request."""
        self._number, body = self._talk.ask(request)
        self._transport.send(body)

    def answer(self, greeting_s: float, timeout_s: float | None) -> m.Answer:
        """Wait for the next answer to the last request."""
        try:
            if not self._talk.greeted:
                timeout_s = self._greeting(greeting_s, timeout_s)
            tell = self._talk.receive(self._transport.receive(timeout_s))
        except Lost as loss:
            loss.greeted = self._talk.greeted
            raise
        if tell is None or tell.number != self._number:
            raise not_ours("it answered out of turn")
        return tell.answer

    def _greeting(self, greeting_s: float, timeout_s: float | None) -> float | None:
        """Wait for the daemon's hello; return what is left of ``timeout_s``."""
        began = time.monotonic()
        patient = timeout_s is not None and timeout_s <= greeting_s
        try:
            body = self._transport.receive(timeout_s if patient else greeting_s)
        except TimeoutError:
            if patient:
                raise
            raise Lost("it took the connection and did not greet") from None
        self._talk.receive(body)
        return None if timeout_s is None else max(0.0, timeout_s - (time.monotonic() - began))

    def is_quiet(self) -> bool:
        """Whether it can be used again: nothing has come that nobody asked for, not its end either."""
        try:
            self._transport.receive(0.0)
        except TimeoutError:
            return True
        except (Lost, HayataError):
            return False
        return False

    def close(self) -> None:
        """Close the connection."""
        self._transport.close()


class Pool:
    """Connections that wait for their next use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[Line] = []
        self._pid = os.getpid()
        self.closed = False

    @contextmanager
    def lease(self, connect: Callable[[], Transport]) -> Iterator[Line]:
        """A line for one exchange. It goes back to the pool only if all went well."""
        line = self._take() or Line(connect())
        try:
            yield line
        except BaseException:
            line.close()
            raise
        self._give_back(line)

    def _take(self) -> Line | None:
        self._check_process()
        while True:
            with self._lock:
                if not self._idle:
                    return None
                line = self._idle.pop()
            if line.is_quiet():
                return line
            line.close()

    def _give_back(self, line: Line) -> None:
        with self._lock:
            if not self.closed and len(self._idle) < _MOST_IDLE and self._pid == os.getpid():
                self._idle.append(line)
                return
        line.close()

    def _check_process(self) -> None:
        """In a forked child: let go of the parent's connections.

        Its lock may be held for ever, by a thread that isn't here.
        """
        if self._pid != os.getpid():
            inherited, self._idle = self._idle, []
            self._lock = threading.Lock()
            self._pid = os.getpid()
            for line in inherited:
                line.close()

    def close(self) -> None:
        """Close the connections that wait, and those in use when they come back."""
        self._check_process()
        with self._lock:
            self.closed = True
            idle, self._idle = self._idle, []
        for line in idle:
            line.close()


class Stream:
    """The connection that one reader of events has to himself."""

    def __init__(self, connect: Callable[[], Transport]) -> None:
        self._connect = connect
        self._line: Line | None = None
        self._greeting_s = 0.0
        self._pid = os.getpid()

    def do(self, effect: Open | Receive | Pause) -> m.Answer | None:
        """Perform an effect of `follow`."""
        if isinstance(effect, Pause):
            time.sleep(effect.seconds)
        elif isinstance(effect, Open):
            self.close()
            self._pid = os.getpid()
            self._greeting_s = effect.greeting_s
            self._line = Line(self._connect())
            self._line.ask(effect.request)
        elif self._line is None or self._pid != os.getpid():
            raise Lost("the connection is another process's")
        else:
            return self._line.answer(self._greeting_s, None)
        return None

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self._line is not None:
            self._line.close()
            self._line = None
