"""A client that sends what it likes: bytes, frames and maps that no real client would, one at a time."""

from __future__ import annotations

import socket
import time
from types import TracebackType
from typing import Any, Self

import msgspec

from hayata.framing import DEFAULT_CAP_BYTES, FrameReader, frame
from hayata.messages import PROTOCOL_VERSION

DEADLINE_S = 20.0


class RawClient:
    """One connection, without any check of what goes out; what comes in is plain decoded msgpack.

    Args:
        path: The daemon's socket.
        greet: Whether to exchange the hellos first, as the protocol demands.
    """

    def __init__(self, path: str, *, greet: bool = True) -> None:
        self._reader = FrameReader(DEFAULT_CAP_BYTES)
        self._messages: list[dict[str, Any]] = []
        self.number = 0
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(DEADLINE_S)
        try:
            self.sock.connect(path)
            if greet:
                self.send({"type": "hello", "protocol": PROTOCOL_VERSION})
                assert self.receive()["type"] == "hello"
        except BaseException:
            self.sock.close()
            raise

    def write(self, data: bytes) -> None:
        """Send bytes as they are. A peer that has closed is no error: what it said can still be read."""
        try:
            self.sock.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            pass

    def send(self, message: object) -> None:
        """Send one message, framed."""
        self.write(frame(message if isinstance(message, bytes) else msgspec.msgpack.encode(message)))

    def ask(self, request: dict[str, Any], number: int | None = None) -> int:
        """Send a request, and return its number: the next one, or the one that is given."""
        if number is None:
            self.number += 1
            number = self.number
        self.send({"type": "ask", "number": number, "request": request})
        return number

    def receive(self) -> dict[str, Any]:
        """Wait for one message.

        Raises:
            EOFError: The daemon has closed the connection.
        """
        due = time.monotonic() + DEADLINE_S
        while not self._messages:
            self.sock.settimeout(max(0.01, due - time.monotonic()))
            try:
                data = self.sock.recv(65536)
            except ConnectionResetError:
                data = b""
            if not data:
                raise EOFError
            self._messages += [msgspec.msgpack.decode(body) for body in self._reader.feed(data)]
        return self._messages.pop(0)

    def answer(self, request: dict[str, Any], number: int | None = None) -> dict[str, Any]:
        """Ask, and wait for the first answer."""
        number = self.ask(request, number)
        told = self.receive()
        assert told["number"] == number, told
        answer: dict[str, Any] = told["answer"]
        return answer

    def farewell(self) -> dict[str, Any]:
        """What the daemon says of the connection before it closes it: an error."""
        told = self.receive()
        assert told["number"] == 0, told
        assert told["answer"]["type"] == "refused", told
        self.wait_closed()
        error: dict[str, Any] = told["answer"]["error"]
        return error

    def wait_closed(self) -> None:
        """Wait until the daemon has closed the connection, and has said nothing more."""
        try:
            more = self.receive()
        except EOFError:
            return
        raise AssertionError(f"still open, and said: {more}")

    def close(self) -> None:
        """Hang up."""
        self.sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
