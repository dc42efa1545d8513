"""The one tree of errors.

The class says whose fault an error is; ``code`` says what happened, in a word that never changes; ``details``
holds data for programs; ``hint`` says what a person can do about it. Everything that Hayata raises on purpose
is a `HayataError`, also when it travelled over the socket: `error_for` makes the right class from a code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class HayataError(Exception):
    """Something that Hayata reports.

    Attributes:
        code: A stable word, for example ``unknown_agent``.
        message: One sentence for a person.
        details: Values for programs; keys depend on the code.
        hint: What to do about it, or an empty string.
    """

    code: str
    message: str
    details: dict[str, Any]
    hint: str

    def __init__(
        self,
        code: str,
        message: str,
        *,
        details: Mapping[str, Any] | None = None,
        hint: str = "",
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.details = dict(details or {})
        self.hint = hint

    def __str__(self) -> str:
        text = f"{self.code}: {self.message}"
        return f"{text}\n  hint: {self.hint}" if self.hint else text

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.code, self.message, self.details, self.hint))


class DefinitionError(HayataError):
    """The author's: an agent or node that can't be, found before anything runs."""


class NodeError(HayataError):
    """The author's: what a node function or a policy did or returned."""


class CallerError(HayataError):
    """The caller's: a request that can't be granted as it is."""


class WorkerLost(HayataError):
    """Nobody's, or the machine's: a process that ended before its work did."""


class Unavailable(HayataError):
    """The operator's: the daemon, its store or its resources."""


class InvocationFailed(HayataError):
    """An invocation has ended as ``failed``; ``code`` and ``details`` are its reason's."""


class InvocationCancelled(HayataError):
    """An invocation has ended as ``cancelled``."""


class RecoveryNeeded(HayataError):
    """An invocation rests until a person decides: ``task_execution_uncertain`` or ``recovery_required``."""


CODES: dict[str, type[HayataError]] = {
    # definitions
    "duplicate_nodes": DefinitionError,
    "invalid_definition": DefinitionError,
    "agent_start_failed": DefinitionError,
    "definition_changed": RecoveryNeeded,
    # what node functions and policies do
    "policy_exception": NodeError,
    "policy_failed": NodeError,
    "policy_timeout": NodeError,
    "invalid_policy_decision": NodeError,
    "invalid_edges": NodeError,
    "max_steps_exceeded": NodeError,
    "unknown_node": NodeError,
    "node_exception": NodeError,
    "invalid_node_result": NodeError,
    "invalid_node_input": NodeError,
    "invalid_partial_result": NodeError,
    "step_mismatch": NodeError,
    "execution_not_active": NodeError,
    "execution_timeout": NodeError,
    "invocation_timeout": NodeError,
    "unserializable_value": NodeError,
    "frame_too_large": NodeError,
    # requests
    "unknown_agent": CallerError,
    "unknown_invocation": CallerError,
    "unknown_task": CallerError,
    "invocation_exists": CallerError,
    "invocation_terminal": CallerError,
    "result_not_ready": CallerError,
    "invalid_options": CallerError,
    "invalid_state": NodeError,
    "session_busy": CallerError,
    "session_required": CallerError,
    "key_reused": CallerError,
    "already_reconciled": CallerError,
    "not_uncertain": CallerError,
    # processes
    "edge_crashed": WorkerLost,
    "node_crashed": WorkerLost,
    "agent_crashed": WorkerLost,
    "supervisor_lost": WorkerLost,
    "reducer_failed": WorkerLost,
    "node_unavailable": WorkerLost,
    # the daemon
    "store_full": Unavailable,
    "store_corrupt": Unavailable,
    "data_dir_in_use": Unavailable,
    "socket_in_use": Unavailable,
    "daemon_unavailable": Unavailable,
    "permission_denied": Unavailable,
    "protocol_error": Unavailable,
    "overloaded": Unavailable,
    "unsupported_platform": Unavailable,
    # resting or cancelled
    "task_execution_uncertain": RecoveryNeeded,
    "recovery_required": RecoveryNeeded,
    "cancelled": InvocationCancelled,
}


def error_for(code: str, message: str, *, details: Mapping[str, Any] | None = None, hint: str = "") -> HayataError:
    """Make the error of the class that belongs to ``code``; unknown codes give a plain `HayataError`."""
    return CODES.get(code, HayataError)(code, message, details=details, hint=hint)


def _rebuild(kind: type[HayataError], code: str, message: str, details: dict[str, Any], hint: str) -> HayataError:
    return kind(code, message, details=details, hint=hint)
