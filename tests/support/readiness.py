"""Waiting for what a daemon tells the service manager: READY=1, among the other things that it says."""

from __future__ import annotations

import select
import socket
import time


def wait_ready(manager: socket.socket, timeout_s: float, pidfd: int | None = None) -> bool:
    """Read the bound datagram socket until READY=1 has come; False when the time is over, or the process has ended."""
    deadline = time.monotonic() + timeout_s
    watched: list[socket.socket | int] = [manager] if pidfd is None else [manager, pidfd]
    while True:
        told, _, _ = select.select(watched, [], [], max(0.0, deadline - time.monotonic()))
        if manager not in told:
            return False
        if "READY=1" in manager.recv(4096).decode().split("\n"):
            return True
