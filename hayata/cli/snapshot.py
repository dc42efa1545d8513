"""What ``hayata top`` shows of one moment: everything that the daemon tells, and what follows from two of them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, NamedTuple

from hayata.cli import processes
from hayata.cli.output import jsonable, size, took
from hayata.client import Client
from hayata.client.records import AgentRecord, Process

AGENT_HEADS = ["AGENT", "STATUS", "RUNNING", "QUEUED", "BUSY", "NODES"]
TASK_HEADS = ["TASK", "AGE", "RUNS IN", "PID"]
PROCESS_HEADS = ["PROCESS", "PID", "STATUS", "RESTARTS", "MEMORY", "CPU", "UP", "LAST EXIT"]


class RunningTask(NamedTuple):
    """An execution, and the process that has it: an edge, or a node whose edge is not there yet."""

    execution_id: str
    age_s: float
    where: str
    pid: int


@dataclass(frozen=True)
class Snapshot:
    """One moment. Times are the client's: wall clock and monotonic seconds."""

    at: float
    mono_s: float
    agents: list[AgentRecord]
    root: Process
    stats: dict[str, float]

    @property
    def tasks(self) -> list[RunningTask]:
        """What runs, the oldest first."""
        found = [
            RunningTask(execution, age_s, processes.name(process), process.pid)
            for _, process in processes.lines(self.root)
            for execution, age_s in process.tasks.items()
        ]
        return sorted(found, key=lambda task: -task.age_s)


def take(client: Client) -> Snapshot:
    """Ask the daemon.

    Raises:
        HayataError: ``daemon_unavailable``, or why it refuses.
    """
    return Snapshot(time.time(), time.monotonic(), client.agents(), client.tree(), client.stats())


class Rates:
    """Per second, between two moments of one supervisor; without an earlier one, since its start."""

    def __init__(self, before: Snapshot | None, now: Snapshot) -> None:
        if before is None or before.stats["uptime_s"] > now.stats["uptime_s"]:
            self._before, self._seconds = None, now.stats["uptime_s"]
        else:
            self._before, self._seconds = before, now.mono_s - before.mono_s
        self._now = now
        self._cpu_s = {process.pid: process.cpu_s for _, process in processes.lines(before.root)} if before else {}

    def of(self, *names: str) -> float:
        """Of the sum of these counters."""
        old = self._before.stats if self._before else {}
        return sum(self._now.stats[name] - old.get(name, 0.0) for name in names) / max(self._seconds, 1e-9)

    @property
    def steps(self) -> float:
        """Bodies that ended, well or not."""
        return self.of("completed_tasks", "failed_tasks")

    @property
    def commits(self) -> float:
        """Transactions."""
        return self.of("transactions")

    def cpu(self, process: Process) -> float | None:
        """Part of one CPU that the process used; None when it was not there before."""
        before = self._cpu_s.get(process.pid) if self._before else None
        if before is None or process.cpu_s is None:
            return None
        return max(0.0, process.cpu_s - before) / max(self._seconds, 1e-9)


def document(now: Snapshot, rates: Rates) -> dict[str, Any]:
    """All of it, for JSON."""
    return {
        "time": now.at,
        "rates": {"steps_per_s": rates.steps, "commits_per_s": rates.commits},
        "agents": jsonable(now.agents),
        "tasks": [task._asdict() for task in now.tasks],
        "stats": now.stats,
        "tree": jsonable(now.root),
    }


def headline(now: Snapshot, rates: Rates) -> str:
    """The whole in one line."""
    stats = now.stats
    parts = [
        f"up {took(0.0, stats['uptime_s'])}",
        f"{stats['running_invocations']:.0f} running, {stats['queued_invocations']:.0f} queued",
        f"{rates.steps:,.1f} steps/s",
        f"{rates.commits:,.1f} commits/s ({stats['commit_p50_ms']:.1f} ms, p99 {stats['commit_p99_ms']:.1f})",
        f"store {size(int(stats['store_bytes']))}",
        f"restarts: supervisor {stats['supervisor_restarts']:.0f}, workers {stats['worker_restarts']:.0f}",
    ]
    resting = stats["uncertain_invocations"], stats["recovery_required_invocations"]
    if any(resting):
        parts.append(f"{resting[0]:.0f} uncertain, {resting[1]:.0f} to recover")
    if stats["store_full"]:
        parts.append("THE DISK IS FULL")
    return " · ".join(parts)


def agent_rows(now: Snapshot) -> list[list[str]]:
    """A line for each agent."""
    return [
        [
            agent.id,
            agent.status,
            str(agent.running),
            str(agent.queued),
            str(sum(node.busy for node in agent.nodes)),
            ", ".join(f"{node.name} {node.busy}/{node.concurrency}" for node in agent.nodes),
        ]
        for agent in now.agents
    ]


def task_rows(now: Snapshot) -> list[list[str]]:
    """A line for each running task."""
    return [[task.execution_id, took(0.0, task.age_s), task.where, str(task.pid)] for task in now.tasks]


def process_rows(now: Snapshot, rates: Rates) -> list[list[str]]:
    """A line for each process."""
    return [
        [
            line,
            str(process.pid),
            process.status,
            str(process.restarts),
            "-" if process.memory_bytes is None else size(process.memory_bytes),
            "-" if (part := rates.cpu(process)) is None else f"{100 * part:.0f} %",
            "-" if process.started_at is None else took(process.started_at, now.at),
            process.last_exit or "-",
        ]
        for line, process in processes.lines(now.root)
    ]
