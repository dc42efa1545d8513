"""The process that embeds a runtime, as the guard sees it: its life, its word, its ear."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

from hayata.messages import FromGuard, Launch, StopRuntime, ToGuard
from hayata_supervisor.process.packets import Packets
from hayata_supervisor.process.pidfd import open_pidfd
from hayata_supervisor.process.reactor import Reactor


class Embedder:
    """Calls ``stop`` with seconds to drain and a reason: when the process says so, leaves, or dies.

    It may call at once: a parent that died before we could watch it, and whose number may be another's by
    now, is found out by `os.getppid`. For a daemon, which nobody embeds, nothing is ever called.
    """

    def __init__(self, reactor: Reactor, launch: Launch, stop: Callable[[float, str], None]) -> None:
        self._reactor = reactor
        self._stop = stop
        self._packets: Packets | None = None
        if launch.control_fd is not None:
            sock = socket.socket(fileno=launch.control_fd)
            self._packets = Packets(reactor, sock, ToGuard, self._said, lambda: stop(0.0, "parent left"))
        if launch.parent_pid is not None:
            self._watch(launch.parent_pid)

    def _watch(self, pid: int) -> None:
        try:
            pidfd = open_pidfd(pid)
        except ProcessLookupError:
            pidfd = -1
        if pidfd < 0 or os.getppid() != pid:
            self._stop(0.0, "parent died")
        else:
            self._reactor.watch_read(pidfd, lambda: self._died(pidfd))

    def _died(self, pidfd: int) -> None:
        self._reactor.unwatch_read(pidfd)
        self._stop(0.0, "parent died")

    def _said(self, message: StopRuntime) -> None:
        self._stop(message.drain_s, "asked by parent")

    def tell(self, message: FromGuard) -> bool:
        """Send a message; whether there is somebody to hear it."""
        return self._packets is not None and self._packets.send(message)
