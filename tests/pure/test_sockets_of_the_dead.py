"""What a socket says when its peer has died, and what comes of descriptors that it carried."""

from __future__ import annotations

import os
import socket

from hayata.framing import frame
from hayata_supervisor.process.channel import Channel
from hayata_supervisor.process.descriptors import receive_packet
from hayata_supervisor.process.reactor import Reactor


class Peer:
    def __init__(self) -> None:
        self.heard: list[object] = []

    def received(self, body: bytes) -> None:
        self.heard.append(body)

    def closed(self, reason: object) -> None:
        self.heard.append(reason)


def test_peer_that_ends_with_unread_bytes_has_ended_and_broken_nothing():
    reactor = Reactor(forks=True)
    ours, theirs = socket.socketpair()
    peer = Peer()
    channel = Channel(reactor, ours, peer)
    try:
        channel.send(b"never read")
        channel.flush()
        theirs.sendall(frame(b"last words"))
        theirs.close()
        channel.drain()
        assert peer.heard == [b"last words", None]
    finally:
        channel.close()
        reactor.close()


def test_received_descriptors_are_not_inherited_by_programs():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        read_end, write_end = os.pipe()
        try:
            socket.send_fds(theirs, [b"two"], [read_end, write_end])
            packet = receive_packet(ours, 2)
        finally:
            os.close(read_end)
            os.close(write_end)
    assert packet is not None
    try:
        assert packet.body == b"two"
        assert [os.get_inheritable(fd) for fd in packet.fds] == [False, False]
    finally:
        for fd in packet.fds:
            os.close(fd)
