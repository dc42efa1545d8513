"""Clients of a daemon: one core without I/O, a blocking face and an async face on it.

For everybody: users get `Client`, `AsyncClient` and what they return; the command line and `hayata.embedded`
build on the same. The async face is imported when it is first asked for: asyncio costs a command more time
than its answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hayata.client.blocking import Client, Invocation
from hayata.client.records import (
    AgentRecord,
    Event,
    InvocationRecord,
    NodeRecord,
    Process,
    Pruned,
    Reconciliation,
    ReloadedAgent,
    ReloadReport,
    StoreProblem,
    StoreReport,
    Task,
)

if TYPE_CHECKING:
    from hayata.client.asynchronous import AsyncClient, AsyncInvocation

__all__ = [
    "AgentRecord",
    "AsyncClient",
    "AsyncInvocation",
    "Client",
    "Event",
    "Invocation",
    "InvocationRecord",
    "NodeRecord",
    "Process",
    "Pruned",
    "Reconciliation",
    "ReloadReport",
    "ReloadedAgent",
    "StoreProblem",
    "StoreReport",
    "Task",
]


def __getattr__(name: str) -> Any:
    if name in ("AsyncClient", "AsyncInvocation"):
        from hayata.client import asynchronous

        return getattr(asynchronous, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
