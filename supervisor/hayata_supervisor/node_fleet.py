"""A node's edge workers as a whole: how many there are, which one is free, when one is started or let go."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from hayata_supervisor.node_edge import Edge, EdgeSetting, Role, spawn
from hayata_supervisor.process import clock
from hayata_supervisor.process.reactor import Timer

IDLE_S = 10.0
FIRST_BACKOFF_S = 0.05
MAX_BACKOFF_S = 1.0


class Fleet:
    """Edges are forked when tasks wait for one, and reused, the warmest first.

    A sync edge holds one task; an async one holds all of the node's, unless each task must have a fresh
    process.

    Args:
        setting: What the edges are made of.
        incarnation: The node's; edge ids begin with it.
        started: Called for each edge that was forked.
        refused: Called when the system refused a fork.
        again: Called when edges may be started again, after a pause: see whether any are wanted.
    """

    def __init__(
        self,
        setting: EdgeSetting,
        incarnation: str,
        started: Callable[[Edge], None],
        refused: Callable[[str, OSError], None],
        again: Callable[[], None],
    ) -> None:
        node = setting.job.node
        self._setting = setting
        self._reactor = setting.reactor
        self._incarnation = incarnation
        self._started = started
        self._refused = refused
        self._again = again
        self.slots = node.concurrency if node.is_async and not node.fresh else 1
        self._most = 1 if self.slots > 1 else node.concurrency
        self._count = 0
        self._edges: dict[str, Edge] = {}
        self._pids: set[int] = set()
        self._free: list[Edge] = []
        self._backoff_s = 0.0
        self._not_before = 0.0
        self._start_timer: Timer | None = None
        self._idle_timer: Timer | None = None
        self.stopping = False

    @property
    def edges(self) -> Iterable[Edge]:
        """All edges that are not buried."""
        return self._edges.values()

    def is_known(self, pid: int) -> bool:
        """Whether ``pid`` is an edge that isn't reaped."""
        return pid in self._pids

    # hand out

    def take(self) -> Edge | None:
        """A slot of a free edge, if there is one."""
        if not self._free:
            return None
        edge = self._free[-1]
        if len(edge.tasks) + 1 >= self.slots:
            self._free.pop()
        return edge

    def give_back(self, edge: Edge) -> None:
        """A task of ``edge`` has ended and is no longer among its tasks."""
        if edge.killed:
            return  # what it had said before it dies
        if edge.retiring or edge.exit is not None:
            if not edge.tasks and edge.exit is None:
                edge.retire(edge.retiring)
            return
        self._backoff_s = 0.0
        if not edge.tasks:
            edge.idle_since = clock.monotonic()
        if len(edge.tasks) == self.slots - 1 and not edge.pulse.is_stopped:
            self._free.append(edge)
            if len(self._free) > 1 and self._idle_timer is None:
                self._idle_timer = self._reactor.call_later(IDLE_S, self._let_go)

    # grow

    def grow(self, wanted: int) -> None:
        """Have ``wanted`` edges getting ready, as far as there may be so many."""
        now = clock.monotonic()
        if now < self._not_before:
            self._grow_later(self._not_before)
            return
        staying = self._staying()
        starting = sum(not edge.ready for edge in staying)
        count = min(wanted - starting, self._most - len(staying))
        for _ in range(0 if self.stopping else count):
            if self._start("edge") is None:
                return

    def reducer(self) -> Edge | None:
        """A process for one reduction, besides the edges; None if there can be none now: ``again`` is called later."""
        if clock.monotonic() < self._not_before:
            self._grow_later(self._not_before)
            return None
        return self._start("reducer")

    def keep_one(self) -> None:
        """Have one edge, so that the next task need not wait for a fork. It is replaced, never the first."""
        if not self._staying():
            self.grow(1)

    def _staying(self) -> list[Edge]:
        return [
            edge for edge in self._edges.values() if not edge.retiring and edge.exit is None and edge.role == "edge"
        ]

    def _grow_later(self, due: float) -> None:
        if self._start_timer is None and not self.stopping:
            self._start_timer = self._reactor.call_at(due, self._grow_now)

    def _grow_now(self) -> None:
        self._start_timer = None
        self._again()

    def _start(self, role: Role) -> Edge | None:
        self._count += 1
        name = f"{self._incarnation}.{self._count}"
        try:
            edge = spawn(self._setting, name, role)
        except OSError as error:
            self.start_failed()
            self._refused(name, error)
            self._grow_later(self._not_before)
            return None
        self._edges[edge.id] = edge
        self._pids.add(edge.pid)
        self._started(edge)
        return edge

    def start_failed(self) -> None:
        """An edge did not start, or died idle: wait before the next one, longer each time."""
        self._backoff_s = min(MAX_BACKOFF_S, max(FIRST_BACKOFF_S, 2 * self._backoff_s))
        self._not_before = clock.monotonic() + self._backoff_s

    def became_ready(self, edge: Edge) -> None:
        """``edge`` can take tasks."""
        edge.idle_since = clock.monotonic()
        if self.stopping:
            edge.retire("stop")
        else:
            self.put_back(edge)

    def put_back(self, edge: Edge) -> None:
        """``edge`` may take tasks again, if it can: one that is stopped would let them wait."""
        fit = edge.ready and edge.exit is None and not (edge.retiring or edge.killed or edge.pulse.is_stopped)
        if fit and edge.role == "edge" and len(edge.tasks) < self.slots and edge not in self._free:
            self._free.append(edge)

    # shrink

    def withdraw(self, edge: Edge) -> None:
        """``edge`` gets no more tasks."""
        if edge in self._free:
            self._free.remove(edge)

    def _let_go(self) -> None:
        """Retire edges that have been idle for long, but the one that was used last."""
        self._idle_timer = None
        now = clock.monotonic()
        idle = sorted((edge for edge in self._free if not edge.tasks), key=lambda edge: edge.idle_since)[:-1]
        for edge in idle:
            if now - edge.idle_since < IDLE_S:
                self._idle_timer = self._reactor.call_at(edge.idle_since + IDLE_S, self._let_go)
                return
            self.withdraw(edge)
            edge.retire("idle")

    def reaped(self, edge: Edge) -> None:
        """The pid of ``edge`` may be another's from now on."""
        self._pids.discard(edge.pid)
        self.withdraw(edge)

    def remove(self, edge: Edge) -> None:
        """``edge`` is buried."""
        del self._edges[edge.id]
        self.keep_one()

    def stop(self) -> None:
        """Let all edges end what they have and then themselves; those that don't are killed."""
        self.stopping = True
        for edge in self._edges.values():
            self.withdraw(edge)
            if edge.exit is None:
                edge.retire("stop")

    def kill_all(self, why: str) -> None:
        """Kill every edge at once."""
        self.stopping = True
        for edge in self._edges.values():
            if edge.exit is None:
                edge.kill(why)
