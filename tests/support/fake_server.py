"""A daemon's stand-in for tests of clients: a real Unix socket that speaks `hayata.messages`, and what a test
adds.

A test gives a function from (connection, ask) to what is to be done: it answers with `Connection.tell`, or
says nothing, or writes bytes that are no message, or closes.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from hayata import messages as m
from hayata.framing import FrameReader, frame

DEADLINE_S = 10.0


class Connection:
    """One client's connection, on the server's side."""

    def __init__(self, server: FakeServer, sock: socket.socket, index: int) -> None:
        self.server = server
        self.sock = sock
        self.index = index
        self.closed = threading.Event()

    def tell(self, number: int, answer: m.Answer) -> None:
        self.write(frame(m.encode(m.Tell(number, answer))))

    def write(self, data: bytes) -> None:
        try:
            self.sock.sendall(data)
        except OSError:
            self.close()

    def close(self) -> None:
        self.closed.set()
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass


Handler = Callable[[Connection, m.Ask], None]


class FakeServer:
    """Serves until `stop`, each connection in a thread of its own.

    Args:
        path: Where to listen.
        handler: Called for each request, in its connection's thread.
        greeting: The server's first bytes on a connection; None: say nothing until the client has greeted,
            and nothing then.
        reads: Whether it reads at all; else it closes a connection as soon as it has greeted.
    """

    GREETING = frame(m.encode(m.Hello(package="fake")))

    def __init__(self, path: str, handler: Handler, *, greeting: bytes | None = GREETING, reads: bool = True) -> None:
        self.path = path
        self.handler = handler
        self.greeting = greeting
        self.reads = reads
        self.asked: list[m.Ask] = []
        self.hellos: list[m.Hello] = []
        self.connections: list[Connection] = []
        self.problems: list[BaseException] = []
        self._threads: list[threading.Thread] = []
        self._stopped = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        self._listener.listen(16)
        self._start(self._accept)

    def _start(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=self._guarded, args=(target, *args), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _guarded(self, target: Callable[..., None], *args: object) -> None:
        try:
            target(*args)
        except BaseException as error:
            self.problems.append(error)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            if self._stopped:
                sock.close()
                return
            connection = Connection(self, sock, len(self.connections))
            self.connections.append(connection)
            self._start(self._serve, connection)

    def _serve(self, connection: Connection) -> None:
        reader = FrameReader()
        decode = m.decoder(m.ToServer).decode
        try:
            if self.greeting is not None:
                connection.write(self.greeting)
            while self.reads and not connection.closed.is_set():
                data = connection.sock.recv(65536)
                if not data:
                    return
                for body in reader.feed(data):
                    message = decode(body)
                    if isinstance(message, m.Hello):
                        self.hellos.append(message)
                    else:
                        self.asked.append(message)
                        self.handler(connection, message)
        except OSError:
            return
        finally:
            connection.closed.set()
            connection.sock.close()

    @property
    def requests(self) -> list[m.Request]:
        return [ask.request for ask in self.asked]

    def drop_all(self) -> None:
        """Close every connection, as a killed supervisor does; go on listening, as its guard does."""
        for connection in list(self.connections):
            connection.close()

    def stop(self) -> None:
        """End, with the socket's path removed and every thread joined."""
        if self._stopped:
            return
        self._stopped = True
        self.drop_all()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        os.unlink(self.path)
        for thread in self._threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive(), "a thread of the fake server does not end"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()
        if error is None and self.problems:
            raise self.problems[0]


def info(name: str, status: str = "running", **fields: object) -> m.InvocationInfo:
    """An invocation's answer."""
    values: dict[str, object] = {"agent": "a", "version": "1", "created_at": 1.0, **fields}
    return m.InvocationInfo(id=name, status=status, **values)  # type: ignore[arg-type]
