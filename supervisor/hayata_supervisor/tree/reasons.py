"""Why there is no worker, as clients are told."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hayata.messages import ErrorInfo, Strategy
from hayata_supervisor.tree.port import failure

if TYPE_CHECKING:
    from hayata_supervisor.tree.worker_link import WorkerLink


def given_up(worker: WorkerLink) -> ErrorInfo:
    """It does not stay up, and rests."""
    cause = worker.last_error or failure("node_crashed", f"{worker} ended with {worker.last_exit}")
    return failure(
        _code(worker),
        f"{worker} does not stay up: {cause.message}",
        hint=cause.hint or "it is tried again later; see the daemon's log for what ended it",
        agent=worker.agent,
        node=worker.node,
        last_exit=worker.last_exit,
        cause={"code": cause.code, "message": cause.message},
    )


def stopped(worker: WorkerLink) -> ErrorInfo:
    """It has ended, and its restart type says that it is not started again."""
    return failure(
        _code(worker),
        f"{worker} has ended with {worker.last_exit}, and is {worker.restart_type}: it is not started again",
        hint="stop the agent and start it again, or give the node restart='permanent'",
        agent=worker.agent,
        node=worker.node,
        last_exit=worker.last_exit,
    )


def agent_failed(worker: WorkerLink, strategy: Strategy, cause: ErrorInfo) -> ErrorInfo:
    """Its whole agent is given up, for ``cause``."""
    return failure(
        _code(worker),
        f"agent {worker.agent!r} has failed: {cause.message}",
        hint=cause.hint,
        agent=worker.agent,
        node=worker.node,
        strategy=strategy,
        cause={"code": cause.code, "message": cause.message},
    )


def _code(worker: WorkerLink) -> str:
    return "agent_crashed" if worker.node is None else "node_unavailable"
