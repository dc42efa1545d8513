"""The processes of one runtime, read from ``/proc``: also when nobody answers, also what must be dead."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from hayata_supervisor.process.sweep import COOKIE, cookie_prefix

SUPERVISOR = "hayata-super"
FORKSERVER = "h:forkserver"
EDGES = ("*", "+")
"""Ends of the names of what a node has forked: edges and reducers, unless the name is too long to show it."""


class Process(NamedTuple):
    """One process. ``started`` (clock ticks since boot) tells it from others that had its pid."""

    pid: int
    started: int
    parent: int
    session: int
    state: str
    name: str

    @property
    def is_zombie(self) -> bool:
        """Whether it is dead and not reaped."""
        return self.state in "ZX"

    @property
    def is_worker(self) -> bool:
        """Whether it is one of the runtime's below the supervisor, and not what a task has started."""
        return self.name.startswith("h:")

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid}, parent {self.parent}, state {self.state})"


def stat(pid: int | str) -> Process | None:
    """Look at one process; None when there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    head, _, tail = text.rpartition(")")
    fields = tail.split()
    name = head.partition("(")[2]
    return Process(int(pid), int(fields[19]), int(fields[1]), int(fields[3]), fields[0], name)


class Family:
    """Who belongs to the runtime on one data directory: who bears its cookie, its guard, and their zombies.

    Args:
        data_dir: The directory; the runtime may not have made it yet.
    """

    def __init__(self, data_dir: Path) -> None:
        self._lock = data_dir / "guard.lock"
        self._prefix: bytes | None = None
        self._ours: dict[tuple[int, int], bool] = {}

    def read(self, guard: int) -> Snapshot:
        """Take a snapshot. ``guard``: pid of the guard that was started last."""
        found = [process for name in os.listdir("/proc") if name.isdigit() and (process := stat(name)) is not None]
        seen = {(process.pid, process.started) for process in found}
        self._ours = {key: ours for key, ours in self._ours.items() if key in seen}
        members = {process.pid: process for process in found if self._is_ours(process, guard)}
        for process in found:
            if process.is_zombie and process.parent in members:
                members[process.pid] = process
        return Snapshot(members, guard)

    def _is_ours(self, process: Process, guard: int) -> bool:
        if process.pid == guard:
            return True
        key = (process.pid, process.started)
        if not self._ours.get(key) and not process.is_zombie:
            # Asked again where it was no: between fork and exec a process has its parent's environment.
            self._ours[key] = self._bears_cookie(process.pid)
        return self._ours.get(key, False)

    def _bears_cookie(self, pid: int) -> bool:
        if self._prefix is None:
            try:
                status = self._lock.stat()
            except FileNotFoundError:
                return False
            self._prefix = f"{COOKIE}={cookie_prefix((status.st_dev, status.st_ino))}".encode()
        try:
            environ = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            return False
        return any(entry.startswith(self._prefix) for entry in environ.split(b"\0"))


class Snapshot:
    """Who was there at one moment."""

    def __init__(self, members: dict[int, Process], guard: int) -> None:
        self.members = members
        self.guard = guard
        self._children: dict[int, list[Process]] = {}
        for process in members.values():
            self._children.setdefault(process.parent, []).append(process)

    def children(self, pid: int) -> list[Process]:
        """Living children."""
        return [process for process in self._children.get(pid, ()) if not process.is_zombie]

    def of_role(self, role: str, agents: Collection[str]) -> list[Process]:
        """Living processes of the role in the tree, by age.

        Args:
            role: One of `plan.ROLES`.
            agents: Ids of the agents, which tell agent workers from nodes.
        """
        return sorted(self._of_role(role, agents), key=lambda process: (process.started, process.pid))

    def _of_role(self, role: str, agents: Collection[str]) -> Iterator[Process]:
        guard = self.members.get(self.guard)
        if guard is None or guard.is_zombie:
            return
        if role == "guard":
            yield guard
            return
        for supervisor in self.children(self.guard):
            if supervisor.name != SUPERVISOR:
                continue
            if role == "supervisor":
                yield supervisor
                continue
            for worker in self.children(supervisor.pid):
                yield from self._below(role, worker, {f"h:{name}"[:15] for name in agents})

    def _below(self, role: str, worker: Process, agents: Collection[str]) -> Iterator[Process]:
        if not worker.is_worker or worker.name.endswith(EDGES):
            return
        if worker.name == FORKSERVER:
            # A fork has this name, too, until it has its own; the forkserver leads a session.
            if role == "forkserver" and worker.session == worker.pid:
                yield worker
        elif worker.name in agents:
            if role == "agent":
                yield worker
        elif role == "node":
            yield worker
        elif role in ("edge", "reducer"):
            below = (each for each in self.children(worker.pid) if each.is_worker)
            yield from (each for each in below if each.name.endswith("+") is (role == "reducer"))

    def misplaced(self) -> Iterator[tuple[Process, str]]:
        """Those that should not be there for long, with what they are."""
        reached = self._reached()
        for process in self.members.values():
            parent = self.members.get(process.parent)
            if process.is_zombie:
                if parent is not None:
                    yield process, f"zombie of {parent.name}"
            elif process.pid not in reached:
                yield process, "left behind by a dead incarnation"
            elif parent is not None and parent.name == SUPERVISOR and not _may_be_child_of_supervisor(process):
                yield process, "orphan at the supervisor"
            elif parent is not None and _is_node(parent, self.members) and not process.is_worker:
                yield process, f"orphan at node {parent.name}"

    def _reached(self) -> set[int]:
        guard = self.members.get(self.guard)
        found: set[int] = set()
        front = [] if guard is None or guard.is_zombie else [self.guard]
        while front:
            pid = front.pop()
            found.add(pid)
            front += [child.pid for child in self.children(pid)]
        return found


def _may_be_child_of_supervisor(process: Process) -> bool:
    # A forkserver is called after its interpreter at first.
    return process.name.startswith("python") or (process.is_worker and not process.name.endswith(EDGES))


def _is_node(process: Process, members: dict[int, Process]) -> bool:
    parent = members.get(process.parent)
    is_named = process.is_worker and process.name != FORKSERVER and not process.name.endswith(EDGES)
    return is_named and parent is not None and parent.name == SUPERVISOR


def list_descriptors(pid: int) -> list[str]:
    """The numbers of the descriptors that the process has open; none when it is gone."""
    try:
        return os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return []
