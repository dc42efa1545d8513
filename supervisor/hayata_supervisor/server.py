"""The client socket: accepts connections, checks who calls, and speaks the protocol of `hayata.messages`.

Whatever arrives is data: it is decoded by type, never unpickled. Bytes that aren't our protocol, a header that
announces too much, an unknown option: each gets a typed answer, and at worst its own connection is closed.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable

import msgspec

from hayata import messages as m
from hayata.errors import HayataError
from hayata.framing import FrameTooLarge
from hayata_supervisor import failpoints
from hayata_supervisor.process.channel import Channel
from hayata_supervisor.process.reactor import Reactor, Timer
from hayata_supervisor.requests import Requests
from hayata_supervisor.tree.port import Log, failure

MOST_CONNECTIONS = 1_024
_MAX_ASKED = 10_000
_MAX_QUEUED_BYTES = 1024 * 1024
_ACCEPTS_A_TURN = 64
_PAUSE_S = 0.1
"""After an accept that failed: the connection is still there, and would wake us at once, again and again."""

_decode = m.decoder(m.ToServer).decode
_skim = m.decoder(msgspec.Raw).decode
_DEPTH_TO_SPARE = b"\x91" * 100
"""So many arrays around it, a message must still be readable. What can just be read here, and is stored, would be
too deep for a caller with a longer stack: each supervisor would end of it, one after the other."""


class Server:
    """Serves connections.

    Args:
        listener: Where to accept them; None: only those that are given to `adopt`.
        version: Of the package, told to clients.
        requests: Grants what clients ask.
        cap_bytes: Largest message.
        most_connections: More are refused.
    """

    def __init__(
        self,
        reactor: Reactor,
        listener: socket.socket | None,
        requests: Requests,
        log: Log,
        *,
        version: str,
        gone: Callable[[Connection], None],
        cap_bytes: int,
        most_connections: int = MOST_CONNECTIONS,
    ) -> None:
        self._reactor = reactor
        self._most = most_connections
        self._listener = listener
        self.requests = requests
        self.log = log
        self.version = version
        self._gone = gone
        self._cap = cap_bytes
        self._connections: set[Connection] = set()
        self._pause: Timer | None = None
        if listener is not None:
            listener.setblocking(False)
            self._listen()

    def _listen(self) -> None:
        assert self._listener is not None
        self._reactor.watch_read(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        assert self._listener is not None
        for _ in range(_ACCEPTS_A_TURN):
            try:
                failpoints.hit("server.before_accept")
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:  # no descriptors left: clients wait in the queue until some are
                self.log.warning("accept failed", error=str(error), again_in_s=_PAUSE_S)
                self._reactor.unwatch_read(self._listener.fileno())
                self._pause = self._reactor.call_later(_PAUSE_S, self._listen)
                return
            failpoints.hit("server.after_accept", sock)
            connection = self.adopt(sock)
            if not _is_ours(sock):
                connection.refuse("permission_denied", "this daemon belongs to another user")
            elif len(self._connections) > self._most:
                connection.refuse("overloaded", f"{self._most} connections are open", "close some")

    def adopt(self, sock: socket.socket) -> Connection:
        """Serve a connected socket."""
        connection = Connection(self, self._reactor, sock, self._cap)
        self._connections.add(connection)
        return connection

    def forget(self, connection: Connection) -> None:
        """A connection is closed."""
        self._connections.discard(connection)
        self._gone(connection)

    def close(self) -> None:
        """Write what can be written, close the connections and stop to listen; the guard keeps the socket."""
        if self._listener is not None:
            self._reactor.unwatch_read(self._listener.fileno())
        if self._pause is not None:
            self._pause.cancel()
        for connection in list(self._connections):
            connection.channel.flush()
            connection.channel.close()


class Connection:
    """One client."""

    def __init__(self, server: Server, reactor: Reactor, sock: socket.socket, cap_bytes: int) -> None:
        self._server = server
        self._reactor = reactor
        self._greeted = False
        self.asked: set[int] = set()
        self._writable: list[Callable[[], None]] = []
        self.channel = Channel(reactor, sock, self, cap_bytes=cap_bytes, drained=self._drained)
        cap = failure("frame_too_large", f"a message may have {cap_bytes:,} bytes at most")
        self.channel.farewell = m.encode(m.Tell(0, m.Refused(cap)))

    def received(self, body: bytes) -> None:
        """One message."""
        if self.channel.queued_bytes > _MAX_QUEUED_BYTES:
            self.channel.pause_reading()  # who does not read his answers may not ask more
        try:
            if len(body) > len(_DEPTH_TO_SPARE):  # else it can't be deep
                _skim(_DEPTH_TO_SPARE + body)
            message = _decode(body)
        except msgspec.DecodeError as error:
            self._bad(body, error)
            return
        except RecursionError:
            self.refuse("protocol_error", "a message is nested too deep to be read")
            return
        if isinstance(message, m.Hello):
            if message.protocol != m.PROTOCOL_VERSION:
                text = f"this daemon speaks protocol {m.PROTOCOL_VERSION}, the client {message.protocol}"
                self.refuse("protocol_error", text, "use the same version of hayata on both sides")
                return
            if self._greeted:
                self.refuse("protocol_error", "the hello was said already")
                return
            self._greeted = True
            self.channel.send(m.encode(m.Hello(package=self._server.version)))
        elif not self._greeted:
            self.refuse("protocol_error", "the first message must be a hello")
        elif message.number in self.asked or message.number < 1:
            self.refuse("protocol_error", f"request number {message.number} is in use or below 1")
        elif len(self.asked) >= _MAX_ASKED:
            overload = failure("overloaded", f"{_MAX_ASKED} requests of this connection are unanswered")
            self.channel.send(m.encode(m.Tell(message.number, m.Refused(overload))))
        else:
            self.asked.add(message.number)
            self._server.requests.handle(message.request, Pending(self, message.number))

    def _bad(self, body: bytes, error: msgspec.DecodeError) -> None:
        """A request that can be numbered is refused by itself; anything else ends the connection."""
        if self._greeted:
            try:
                number = _decode_number(body).number
            except msgspec.DecodeError:
                pass
            else:
                refused = m.Refused(failure("invalid_options", str(error), hint="see the client's documentation"))
                self.channel.send(m.encode(m.Tell(number, refused)))
                return
        self.refuse("protocol_error", f"this is not the protocol: {error}")

    def refuse(self, code: str, message: str, hint: str = "") -> None:
        """Say why and close."""
        self.channel.send(m.encode(m.Tell(0, m.Refused(failure(code, message, hint=hint)))))
        self.channel.flush()
        self.channel.close()

    def tell(self, number: int, answer: m.Answer) -> None:
        """Send one answer; one that is over the frame cap is told as an error."""
        if not isinstance(answer, m.EventBatch):
            self.asked.discard(number)
        try:
            self.channel.send(m.encode(m.Tell(number, answer)))
        except FrameTooLarge as error:
            self._too_large(number, answer, error)

    def _too_large(self, number: int, answer: m.Answer, error: HayataError) -> None:
        if isinstance(answer, m.EventBatch) and len(answer.events) > 1:
            middle = len(answer.events) // 2
            self.tell(number, m.EventBatch(answer.events[:middle]))
            self.tell(number, m.EventBatch(answer.events[middle:]))
            return
        self.asked.discard(number)
        self.channel.send(m.encode(m.Tell(number, m.Refused(m.ErrorInfo(error.code, error.message, error.hint)))))

    def when_writable(self, callback: Callable[[], None]) -> bool:
        """See `hub.Sink`."""
        if not self.channel.open:
            return False
        if self.channel.queued_bytes < _MAX_QUEUED_BYTES:
            return True
        self._writable.append(callback)
        return False

    def _drained(self) -> None:
        self.channel.resume_reading()
        waiting, self._writable = self._writable, []
        for callback in waiting:
            callback()

    def closed(self, reason: FrameTooLarge | OSError | None) -> None:
        """The client is gone."""
        self._writable.clear()
        self._server.forget(self)


class Pending:
    """One request that waits for its answers."""

    __slots__ = ("_number", "connection")

    def __init__(self, connection: Connection, number: int) -> None:
        self.connection = connection
        self._number = number

    def reply(self, answer: m.Answer) -> None:
        """Send one answer."""
        self.connection.tell(self._number, answer)

    def when_writable(self, callback: Callable[[], None]) -> bool:
        """See `hub.Sink`."""
        return self.connection.when_writable(callback)


class _Numbered(msgspec.Struct, tag_field="type", tag="ask"):
    number: int


_decode_number = msgspec.msgpack.Decoder(_Numbered).decode


def _is_ours(sock: socket.socket) -> bool:
    """Whether the peer is this user or root (SO_PEERCRED: pid, uid, gid)."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return uid in (os.getuid(), 0)
