"""Counters since the supervisor's start, and gauges, by name: what ``hayata stats`` shows and ``top`` reckons with.

A name says its unit; docs/operations.md says what each one means. Everything is counted where it happens, by an
addition, and put together here when somebody asks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from hayata.messages import TaskCompleted, TaskFailed, TaskInterrupted
from hayata_supervisor.engine import Engine
from hayata_supervisor.process import clock


class Statistics:
    """Puts them together.

    Args:
        engine: Whose they are.
        worker_restarts: How often the tree has started a worker again.
        supervisor_restarts: How often the guard has started a supervisor again.
        store_file: What grows on the disk; None: nothing does.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        worker_restarts: Callable[[], int] = lambda: 0,
        supervisor_restarts: int = 0,
        store_file: Path | None = None,
    ) -> None:
        self._engine = engine
        self._worker_restarts = worker_restarts
        self._supervisor_restarts = supervisor_restarts
        self._store_file = store_file
        self._started_s = clock.monotonic()

    def values(self) -> dict[str, float]:
        """All of them, now."""
        engine = self._engine
        agents = [agent.coordinator for agent in engine.agents.values()]
        uncertain = sum(each.status == "uncertain" for agent in agents for each in agent.invocations.values())
        resting = sum(len(agent.resting) for agent in agents) + sum(map(len, engine.unclaimed.values()))
        return {
            "uptime_s": clock.monotonic() - self._started_s,
            "open_invocations": len(engine.open),
            "running_invocations": sum(each.admission.running for each in agents),
            "queued_invocations": sum(len(each.admission.queue) for each in agents),
            "uncertain_invocations": uncertain,
            "recovery_required_invocations": resting,
            "ended_invocations": engine.invocations_ended,
            "running_tasks": sum(slots.active for each in agents for slots in each.executions.slots.values()),
            "completed_tasks": engine.reports[TaskCompleted],
            "failed_tasks": engine.reports[TaskFailed],
            "interrupted_tasks": engine.reports[TaskInterrupted],
            "late_messages": sum(each.late_messages for each in agents),
            "worker_restarts": self._worker_restarts(),
            "supervisor_restarts": self._supervisor_restarts,
            **self._of_the_store(),
        }

    def _of_the_store(self) -> dict[str, float]:
        committer = self._engine.committer
        times_s = sorted(committer.recent_s)
        return {
            "records": committer.commits,
            "transactions": committer.transactions,
            "queued_records": committer.waiting,
            "commit_p50_ms": 1000 * _quantile(times_s, 0.5),
            "commit_p99_ms": 1000 * _quantile(times_s, 0.99),
            "store_bytes": _size(self._store_file),
            "store_full": float(committer.full is not None),
        }


def _quantile(ordered: list[float], part: float) -> float:
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else 0.0


def _size(file: Path | None) -> float:
    try:
        return float(os.stat(file).st_size) if file is not None else 0.0
    except OSError:
        return 0.0


def ages(engine: Engine, now_s: float) -> dict[str, float]:
    """Execution id → seconds since it was handed to its node, of all whose end is not confirmed."""
    agents: Iterable[dict[str, float]] = (
        agent.coordinator.executions.handed(now_s) for agent in engine.agents.values()
    )
    return {name: age_s for each in agents for name, age_s in each.items()}
