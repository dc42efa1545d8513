"""Carries the plan out: picks victims, kills, stops, squeezes, gives back, starts a guard that was killed."""

from __future__ import annotations

import heapq
import itertools
import math
import os
import resource
import signal
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress

from tests.chaos.ledger import Ledger
from tests.chaos.plan import Fault
from tests.chaos.processes import Family, Process, Snapshot, list_descriptors, stat
from tests.chaos.runtime import Runtime
from tests.chaos.watch import Watch

_LOOK_S = 0.1
_AGAIN_S = 0.02
_PATIENCE_S = 10.0
"""How long a fault waits for a victim."""

_BURIERS = frozenset({"guard", "supervisor", "node", "forkserver"})


class Faults:
    """See the module.

    Attributes:
        counts: (kind, role) → how many; kind ``skipped`` where there was no victim.
        surprises: What happened to the guard that nobody had planned.
    """

    def __init__(
        self, runtime: Runtime, plan: Iterable[Fault], ledger: Ledger, watch: Watch, agents: Collection[str]
    ) -> None:
        self._runtime = runtime
        self._ledger = ledger
        self._watch = watch
        self._agents = agents
        self._family = Family(runtime.data_dir)
        self._began = time.monotonic()
        self._looked = self._began
        self._order = itertools.count()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._stopped: dict[int, str] = {}
        self._guard_killed = False
        self._guard_due = math.inf
        self.counts: Counter[tuple[str, str]] = Counter()
        self.surprises: list[str] = []
        self._plan = list(plan)

    def begin(self) -> None:
        """The load begins: the plan's time runs from now on."""
        self._began = time.monotonic()
        for fault in self._plan:
            self._at(self._began + fault.at_s, lambda fault=fault: self._inflict(fault, self._began + fault.at_s))

    def run(self, until_s: float) -> None:
        """Work until the plan is carried out and given back, and ``until_s`` seconds are over."""
        until = self._began + until_s
        while self._due or self._guard_killed or time.monotonic() < until:
            next_due = min(self._due[0][0] if self._due else until, self._guard_due)
            time.sleep(max(0.0, min(next_due, self._looked + _LOOK_S) - time.monotonic()))
            while self._due and self._due[0][0] <= time.monotonic():
                self._look_at_guard()
                heapq.heappop(self._due)[2]()
            self._look_at_guard()
            if time.monotonic() >= self._looked + _LOOK_S:
                self.look()

    def look(self) -> Snapshot:
        """See who is there, and whether the guard still is."""
        guard = self._runtime.guard
        assert guard is not None
        snapshot = self._family.read(guard.pid)
        now = time.monotonic()
        held = any(role in _BURIERS for role in self._stopped.values())
        self._watch.look(snapshot, now - self._looked, held=held)
        self._looked = now
        if guard.poll() is not None and not self._guard_killed:
            self.surprises.append(f"the guard ended by itself with exit code {guard.returncode}")
            self._ledger.note("guard_exit", code=guard.returncode)
            self._guard_killed = True
            self._start_guard()
        return snapshot

    def _at(self, due: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._due, (due, next(self._order), action))

    # One fault

    def _inflict(self, fault: Fault, planned: float) -> None:
        now = time.monotonic()
        if self._guard_killed:  # nobody is there: not even a look, which takes its time on a busy machine
            self._at(now + _AGAIN_S, lambda: self._inflict(fault, max(planned, now)))
            return
        victims = self.look().of_role(fault.role, self._agents)
        victims = [victim for victim in victims if fault.kind == "kill" or victim.pid not in self._stopped]
        if not victims:
            if now < planned + _PATIENCE_S:
                self._at(now + _AGAIN_S, lambda: self._inflict(fault, planned))
            else:
                self._ledger.note("skipped", kind=fault.kind, role=fault.role)
                self.counts["skipped", fault.role] += 1
            return
        victim = victims[min(int(fault.pick * len(victims)), len(victims) - 1)]
        # It lived when it was looked up. By now it may have died of something else, and another attempt have begun.
        self._ledger.note(fault.kind, role=fault.role, pid=victim.pid, name=victim.name, alive=now)
        self.counts[fault.kind, fault.role] += 1
        with suppress(ProcessLookupError):
            getattr(self, f"_{fault.kind}")(fault, victim)

    def _kill(self, fault: Fault, victim: Process) -> None:
        os.kill(victim.pid, signal.SIGKILL)
        self._stopped.pop(victim.pid, None)
        if fault.role == "guard":
            assert self._runtime.guard is not None
            self._guard_killed = True
            self._runtime.guard.wait()
            self._guard_due = time.monotonic() + fault.for_s

    def _look_at_guard(self) -> None:
        """Start the next guard when it is due, however many faults are late."""
        if time.monotonic() >= self._guard_due:
            self._start_guard()

    def _start_guard(self) -> None:
        self._guard_killed, self._guard_due = False, math.inf
        self._ledger.note("guard_start", pid=self._runtime.start().pid)

    def _stop(self, fault: Fault, victim: Process) -> None:
        os.kill(victim.pid, signal.SIGSTOP)
        self._stopped[victim.pid] = fault.role
        self._at(time.monotonic() + fault.for_s, lambda: self._continue(victim))

    def _continue(self, victim: Process) -> None:
        self._stopped.pop(victim.pid, None)
        if _lives(victim):
            with suppress(ProcessLookupError):
                os.kill(victim.pid, signal.SIGCONT)

    def _squeeze(self, fault: Fault, victim: Process) -> None:
        greatest = max(map(int, list_descriptors(victim.pid)), default=2)
        before = resource.prlimit(victim.pid, resource.RLIMIT_NOFILE)
        # Not below a number that is in use: poll(2) refuses more descriptors than there may be.
        few = greatest + 1 + fault.spare
        resource.prlimit(victim.pid, resource.RLIMIT_NOFILE, (few, before[1]))
        self._at(time.monotonic() + fault.for_s, lambda: self._release(victim, few, before))

    def _release(self, victim: Process, few: int, before: tuple[int, int]) -> None:
        """Give back what was taken, also from those that were forked meanwhile, wherever they are in the tree."""
        self._give_back(victim, few, before)
        for process in self.look().members.values():
            self._give_back(process, few, before)

    def _give_back(self, process: Process, few: int, before: tuple[int, int]) -> None:
        with suppress(ProcessLookupError):
            if _lives(process) and resource.prlimit(process.pid, resource.RLIMIT_NOFILE)[0] == few:
                resource.prlimit(process.pid, resource.RLIMIT_NOFILE, before)


def _lives(process: Process) -> bool:
    now = stat(process.pid)
    return now is not None and now.started == process.started
