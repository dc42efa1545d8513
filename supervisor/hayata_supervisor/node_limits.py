"""A node's limits on memory and CPU: a look at its edges, four times a second while tasks run in them.

Only where a limit is set, and never so that the node's other work waits for long: a look costs tens of
microseconds for each process of an edge. Where that can't tell whether an edge is over its limit, the kernel
counts its pages. Looks and counts take a twentieth of the node's time at most: the next one waits for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from hayata.messages import ErrorInfo, NodeManifest
from hayata_supervisor.node_tasks import Task, interruption
from hayata_supervisor.process import clock, usage
from hayata_supervisor.process.reactor import Reactor, Timer

if TYPE_CHECKING:
    from hayata_supervisor.node_edge import Edge

LOOK_S = 0.25
_REST = 20
"""A look or a count that took so long is not repeated before that many times as long has passed."""


class MemoryLimit(NamedTuple):
    """Bytes, and whether the node names them or its container implies them."""

    limit_bytes: int
    of_container: bool


class Owner(Protocol):
    """Who hears of an excess: the node worker."""

    def edge_over(self, edge: Edge, why: str, verdict: ErrorInfo) -> None:
        """``edge``, or the task in it, has had more than it may have."""


class Limits:
    """See the module.

    Args:
        reactor: The loop.
        node: Whose limits.
        memory: The limit of memory, if there is one.
        edges: All edges of the node that are not buried.
        owner: Hears of each excess.
    """

    def __init__(
        self,
        reactor: Reactor,
        node: NodeManifest,
        memory: MemoryLimit | None,
        edges: Callable[[], Iterable[Edge]],
        owner: Owner,
    ) -> None:
        self._reactor = reactor
        self._node = node
        self._memory = memory
        self._cpu_limit_s = node.cpu_limit_s
        self._edges = edges
        self._owner = owner
        self._timer: Timer | None = None
        self._used: set[Edge] = set()
        self._no_count_before = 0.0
        self._counted_s = 0.0
        self.active = memory is not None or node.cpu_limit_s is not None

    def began(self, task: Task, edge: Edge) -> None:
        """``task`` is handed to ``edge``: look at it from now on."""
        self._used.add(edge)
        if self._cpu_limit_s is not None:
            try:
                task.cpu_before_s = _cpu_s(usage.with_descendants(edge.pid))
            except OSError:
                task.cpu_before_s = None  # no descriptors are left: this task's CPU time isn't counted
        if self._timer is None:
            self._timer = self._reactor.call_later(LOOK_S, self._look)

    def _look(self) -> None:
        """Also at edges whose tasks have ended since the last look: what these have left there may be too much."""
        self._timer = None
        start, self._counted_s = clock.monotonic(), 0.0
        living = [edge for edge in self._edges() if edge.exit is None and not edge.killed]
        for edge in living:
            if edge in self._used or edge.tasks:
                try:
                    self._look_at(edge)
                except OSError:
                    break  # no descriptors are left to look with
        self._used = {edge for edge in living if edge.tasks}
        if self._used:
            took_s = clock.monotonic() - start - self._counted_s
            self._timer = self._reactor.call_later(max(LOOK_S, _REST * took_s), self._look)

    def _look_at(self, edge: Edge) -> None:
        pids = usage.with_descendants(edge.pid)
        if self._memory is not None:
            held = self._over(pids, self._memory.limit_bytes)
            if held is not None:
                self._owner.edge_over(edge, "memory_limit", self._too_much(self._memory, held, len(edge.tasks)))
                return
        if self._cpu_limit_s is not None:
            spent_s = _cpu_s(pids)
            for task in edge.tasks.values():
                if task.cpu_before_s is not None and spent_s - task.cpu_before_s > self._cpu_limit_s:
                    verdict = self._too_long(self._cpu_limit_s, spent_s - task.cpu_before_s)
                    self._owner.edge_over(edge, "cpu_limit", verdict)
                    return

    def _over(self, pids: list[int], limit_bytes: int) -> int | None:
        """How much these processes have, if it is more than ``limit_bytes``; None if it isn't."""
        each = [(memory, pid) for pid in pids if (memory := usage.memory_of(pid)).most]
        total = sum(memory.most for memory, _ in each)
        if total <= limit_bytes:
            return None
        # What is shared with the node is no more than the node has; the rest is these processes' alone.
        ours = usage.memory_of(os.getpid()).anonymous
        least = max(memory.anonymous for memory, _ in each) - ours
        if least > limit_bytes:
            return least
        start = clock.monotonic()
        if start < self._no_count_before:
            return None
        for memory, pid in sorted(each, reverse=True):
            share = usage.share_of(pid)
            total -= 0 if share is None else memory.most - share
            if total <= limit_bytes:
                break
        end = clock.monotonic()
        self._counted_s += end - start
        self._no_count_before = end + _REST * (end - start)
        return total if total > limit_bytes else None

    def _too_much(self, limit: MemoryLimit, held_bytes: int, executions: int) -> ErrorInfo:
        hint = f"have node {self._node.name!r} hold less at once, or give it a higher memory_limit"
        if limit.of_container:
            hint = f"the container's limit is near: raise it, or give node {self._node.name!r} a memory_limit"
        elif not self._node.fresh:
            hint += "; what earlier tasks left in a warm worker counts, too: isolation='fresh' or max_tasks"
        beside = f" with {executions} executions in it" if executions > 1 else ""
        return interruption(
            "edge_crashed",
            f"its edge worker{beside} held {_mib(held_bytes)} of memory, over its limit of "
            f"{_mib(limit.limit_bytes)}, and was killed",
            "memory_limit",
            hint=hint,
            limit_bytes=limit.limit_bytes,
            measured_bytes=held_bytes,
            executions=executions,
        )

    def _too_long(self, limit_s: float, spent_s: float) -> ErrorInfo:
        return interruption(
            "edge_crashed",
            f"the execution used {spent_s:.1f} s of CPU time, over its limit of {limit_s:g} s, and was ended",
            "cpu_limit",
            hint=f"have node {self._node.name!r} do less at once, or give it a higher cpu_limit",
            limit_s=limit_s,
            measured_s=round(spent_s, 2),
        )


def _cpu_s(pids: list[int]) -> float:
    return sum(map(usage.cpu_s, pids))


def _mib(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"
