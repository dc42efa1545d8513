"""The edges of one incarnation of a node, as its node tells of them, and their burial when it dies."""

from __future__ import annotations

import itertools
import os
from typing import NamedTuple

import msgspec

from hayata.messages import EdgeEnded, EdgeStarted, EdgeStopped, ProcessInfo, decoder
from hayata_supervisor import failpoints
from hayata_supervisor.process import clock
from hayata_supervisor.process.descriptors import Packet, receive_packet
from hayata_supervisor.process.pidfd import send_signal
from hayata_supervisor.process.reactor import Callback, Reactor
from hayata_supervisor.process.watcher import EdgeWatcher
from hayata_supervisor.tree.incarnation import Incarnation

_keys = itertools.count(1)
_decode = decoder(EdgeStarted).decode


class _Edge(NamedTuple):
    role: str
    pid: int
    started_at: float
    stopped: bool = False


class EdgeBook:
    """See the module.

    Args:
        reactor: The loop.
        watcher: Holds the edges' pidfds and kills them when the node dies.
        incarnation: The node's process. The book reads its descriptor channel.

    Attributes:
        tasks: What each edge has, as the node has said last.
    """

    def __init__(self, reactor: Reactor, watcher: EdgeWatcher, incarnation: Incarnation) -> None:
        self._reactor = reactor
        self._watcher = watcher
        self._incarnation = incarnation
        self._key: int | None = None  # under which the watcher knows the node, once it has an edge
        self._edges: dict[str, _Edge] = {}
        self._last_end = ""
        self.tasks: dict[str, list[str]] = {}
        self._dying: set[int] = set()
        self._buried: Callback | None = None
        reactor.watch_read(incarnation.fds.fileno(), self._readable)

    def _readable(self) -> None:
        self._read()

    def _read(self) -> bool:
        """Take one packet; say whether there may be more."""
        try:
            packet = receive_packet(self._incarnation.fds, 1)
        except BlockingIOError:
            return False
        except OSError as error:
            self._incarnation.refuse(str(error))
            packet = None
        if packet is None:
            self._reactor.unwatch_read(self._incarnation.fds.fileno())
            return False
        self._started(packet)
        failpoints.message("after_receive", packet.body, self._incarnation.fds)
        return True

    def _started(self, packet: Packet) -> None:
        try:
            edge = _decode(packet.body)
        except msgspec.DecodeError:
            for fd in packet.fds:
                os.close(fd)
            self._incarnation.refuse("a packet that can't be read")
            return
        self._edges[edge.edge] = _Edge(edge.role, edge.pid, clock.wall())
        if not packet.fds:
            return  # we had no descriptor for it: when the node dies, the kernel and the sweep have to do
        (pidfd,) = packet.fds
        if self._incarnation.pid is None or self._incarnation.exit is not None:
            send_signal(pidfd)
            self._await(pidfd)
        elif self._watched():
            assert self._key is not None
            self._watcher.watch_edge(self._key, edge.edge, pidfd)
        else:
            os.close(pidfd)

    def _watched(self) -> bool:
        """See that the watcher knows the node, which takes a descriptor; False when none is left."""
        if self._key is None:
            key = next(_keys)
            try:
                self._watcher.watch_node(key, self._incarnation.pidfd)
            except OSError:
                return False
            self._key = key
        return True

    def stopped(self, message: EdgeStopped) -> None:
        """Somebody has stopped this edge, or it goes on."""
        self._find(message.edge)
        edge = self._edges.get(message.edge)
        if edge is not None:
            self._edges[message.edge] = edge._replace(stopped=message.stopped)

    def _find(self, edge: str) -> None:
        """Its start came over the other channel, and may not have been read."""
        if edge not in self._edges:
            while self._read():
                pass

    def ended(self, message: EdgeEnded) -> None:
        """The node has buried this edge."""
        self._last_end = message.reason
        self._find(message.edge)
        if self._edges.pop(message.edge, None) is not None and self._key is not None:
            self._watcher.forget_edge(self._key, message.edge)

    def bury(self, buried: Callback) -> None:
        """The node is dead: kill its edges and call ``buried`` when the last one is dead. They are not reaped
        here: they are our children now, and those that nobody knows are swept.
        """
        while self._read():
            pass
        self._edges.clear()
        if self._key is None:
            self._all_dead_then(buried)
        else:
            self._watcher.release_node(self._key, lambda pidfds: self._released(pidfds, buried))

    def _released(self, pidfds: dict[str, int], buried: Callback) -> None:
        for pidfd in pidfds.values():
            self._await(pidfd)
        self._all_dead_then(buried)

    def _await(self, pidfd: int) -> None:
        self._dying.add(pidfd)
        self._reactor.watch_read(pidfd, lambda: self._dead(pidfd))

    def _dead(self, pidfd: int) -> None:
        self._reactor.unwatch_read(pidfd)
        os.close(pidfd)
        self._dying.discard(pidfd)
        if not self._dying and self._buried is not None:
            self._buried()

    def _all_dead_then(self, buried: Callback) -> None:
        self._buried = buried
        if not self._dying:
            buried()

    def infos(self) -> list[ProcessInfo]:
        """Describe the edges, oldest first; the youngest stands where the last one ended."""
        youngest = next(reversed(self._edges), None)
        return [
            ProcessInfo(
                edge.role,
                name,
                edge.pid,
                "stopped" if edge.stopped else "serving",
                started_at=edge.started_at,
                last_exit=self._last_end if name == youngest else "",
                tasks=dict.fromkeys(self.tasks.get(name, ()), 0.0),
            )
            for name, edge in self._edges.items()
        ]
