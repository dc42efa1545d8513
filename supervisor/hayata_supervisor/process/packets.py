"""A SEQPACKET socket on a reactor: one small message a packet. How the guard talks, down and up."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import msgspec

from hayata import messages
from hayata_supervisor import failpoints
from hayata_supervisor.process.reactor import Reactor

PACKET_BYTES = 192 * 1024
"""Largest packet: what the kernel's default send buffer surely takes."""


class Packets:
    """Owns ``sock``.

    Args:
        reactor: Where the socket is watched.
        sock: One end of an AF_UNIX SOCK_SEQPACKET pair.
        kind: Union of the messages that may come; others are dropped, since both ends are ours and of one
            version.
        received: Called with each message.
        closed: Called once when the other end is closed. That says nothing about the life of a process.
    """

    def __init__(
        self,
        reactor: Reactor,
        sock: socket.socket,
        kind: Any,
        received: Callable[[Any], None],
        closed: Callable[[], None],
    ) -> None:
        sock.setblocking(False)
        self._reactor = reactor
        self._sock = sock
        self._decode = messages.decoder(kind).decode
        self._received = received
        self._closed = closed
        self._fd = sock.fileno()
        reactor.watch_read(self._fd, self.drain)

    def send(self, message: msgspec.Struct) -> bool:
        """Send one message; False when the other end is gone or doesn't read."""
        body = messages.encode(message)
        failpoints.message("before_send", body, self._sock)
        try:
            self._sock.send(body)
        except OSError:
            return False
        failpoints.message("after_send", body, self._sock)
        return True

    def drain(self) -> None:
        """Hand out all that has come."""
        while self._fd >= 0:
            try:
                packet = self._sock.recv(PACKET_BYTES)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            if not packet:
                self.close()
                self._closed()
                return
            try:
                message = self._decode(packet)
            except msgspec.DecodeError:
                continue
            failpoints.message("before_receive", packet, self._sock)
            self._received(message)
            failpoints.message("after_receive", packet, self._sock)

    def close(self) -> None:
        """Give the socket back; nothing is called any more."""
        if self._fd >= 0:
            self._reactor.unwatch_read(self._fd)
            self._fd = -1
            self._sock.close()
