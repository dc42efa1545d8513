"""Hayata: a durable, crash-isolated supervision runtime for AI-agent graphs.

    import hayata
    from hayata import Agent, Context, Finish, Next, PolicyContext

Names are imported when they are first used: a process that only needs `hayata.messages` never pays for
pydantic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hayata.agent import Agent as Agent
    from hayata.agent import DecisionPolicy as DecisionPolicy
    from hayata.client import AsyncClient as AsyncClient
    from hayata.client import AsyncInvocation as AsyncInvocation
    from hayata.client import Client as Client
    from hayata.client import Event as Event
    from hayata.client import Invocation as Invocation
    from hayata.client import Task as Task
    from hayata.context import AsyncContext as AsyncContext
    from hayata.context import Context as Context
    from hayata.context import PolicyContext as PolicyContext
    from hayata.context import ReduceContext as ReduceContext
    from hayata.decisions import Decision as Decision
    from hayata.decisions import Fail as Fail
    from hayata.decisions import Finish as Finish
    from hayata.decisions import Next as Next
    from hayata.embedded import Runtime as Runtime
    from hayata.embedded import start as start
    from hayata.embedded_async import AsyncRuntime as AsyncRuntime
    from hayata.errors import CallerError as CallerError
    from hayata.errors import DefinitionError as DefinitionError
    from hayata.errors import HayataError as HayataError
    from hayata.errors import InvocationCancelled as InvocationCancelled
    from hayata.errors import InvocationFailed as InvocationFailed
    from hayata.errors import NodeError as NodeError
    from hayata.errors import RecoveryNeeded as RecoveryNeeded
    from hayata.errors import Unavailable as Unavailable
    from hayata.errors import WorkerLost as WorkerLost
    from hayata.merging import Add as Add
    from hayata.merging import Append as Append
    from hayata.merging import Extend as Extend
    from hayata.merging import Replace as Replace
    from hayata.merging import Union as Union
    from hayata.nodes import Node as Node
    from hayata.nodes import node as node
    from hayata.reducers import Reduce as Reduce
    from hayata.supervision import NOT_DONE as NOT_DONE
    from hayata.supervision import UNKNOWN as UNKNOWN
    from hayata.supervision import Backoff as Backoff
    from hayata.supervision import Probe as Probe
    from hayata.supervision import Rerun as Rerun
    from hayata.supervision import Retry as Retry
    from hayata.supervision import Supervision as Supervision

    __version__: str

_HOMES = {
    "agent": "Agent DecisionPolicy",
    "client": "AsyncClient AsyncInvocation Client Event Invocation Task",
    "context": "AsyncContext Context PolicyContext ReduceContext",
    "decisions": "Decision Fail Finish Next",
    "embedded": "Runtime start",
    "embedded_async": "AsyncRuntime",
    "errors": "CallerError DefinitionError HayataError InvocationCancelled InvocationFailed NodeError "
    "RecoveryNeeded Unavailable WorkerLost",
    "merging": "Add Append Extend Replace Union",
    "nodes": "Node node",
    "reducers": "Reduce",
    "supervision": "Backoff NOT_DONE Probe Rerun Retry Supervision UNKNOWN",
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}

__all__ = [  # spelled out for static tools; a test compares it with _HOMES
    "NOT_DONE",
    "UNKNOWN",
    "Add",
    "Agent",
    "Append",
    "AsyncClient",
    "AsyncContext",
    "AsyncInvocation",
    "AsyncRuntime",
    "Backoff",
    "CallerError",
    "Client",
    "Context",
    "Decision",
    "DecisionPolicy",
    "DefinitionError",
    "Event",
    "Extend",
    "Fail",
    "Finish",
    "HayataError",
    "Invocation",
    "InvocationCancelled",
    "InvocationFailed",
    "Next",
    "Node",
    "NodeError",
    "PolicyContext",
    "Probe",
    "RecoveryNeeded",
    "Reduce",
    "ReduceContext",
    "Replace",
    "Rerun",
    "Retry",
    "Runtime",
    "Supervision",
    "Task",
    "Unavailable",
    "Union",
    "WorkerLost",
    "__version__",
    "node",
    "start",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            value: Any = version("hayata")
        except PackageNotFoundError:  # a source tree that isn't installed
            value = "0"
    elif name in _HOME_OF:
        from importlib import import_module

        value = getattr(import_module(f"hayata.{_HOME_OF[name]}"), name)
    else:
        raise AttributeError(f"module 'hayata' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
