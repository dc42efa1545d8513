"""How an invocation stands, as a value or as an error."""

from __future__ import annotations

from typing import Any

from hayata import messages as m
from hayata.client import records
from hayata.errors import HayataError, InvocationCancelled, InvocationFailed, RecoveryNeeded, error_for
from hayata.values import decode


def outcome(info: m.InvocationInfo) -> Any:
    """The result of an invocation, or its error raised."""
    status = info.status
    if status == "completed":
        return decode(info.result) if isinstance(info.result, m.Value) else None
    if status == "failed":
        raise _ended(InvocationFailed, info, "node_exception", "it failed, for a reason that was not recorded")
    if status == "cancelled":
        raise _ended(InvocationCancelled, info, "cancelled", f"invocation {info.id} was cancelled")
    if status == "uncertain":
        raise _ended(
            RecoveryNeeded,
            info,
            "task_execution_uncertain",
            f"invocation {info.id} has a task that was running when its supervisor was lost",
            hint=f"hayata show {info.id} names the task; then hayata reconcile {info.id} TASK …",
        )
    if status == "recovery_required":
        raise _ended(
            RecoveryNeeded,
            info,
            "recovery_required",
            f"invocation {info.id} waits to be recovered",
            hint=f"hayata recover {info.agent}",
        )
    raise error_for(
        "result_not_ready",
        f"invocation {info.id} is {status}",
        details={"invocation_id": info.id, "status": status},
    )


def _ended(kind: type[HayataError], info: m.InvocationInfo, code: str, message: str, hint: str = "") -> HayataError:
    """The reason of an end or rest as an error of class ``kind``; code and message if none was recorded."""
    reason = records.error_of(info.error)
    if reason is None:
        return kind(code, message, details={"invocation_id": info.id}, hint=hint)
    details = {"invocation_id": info.id, **reason.details}
    error = kind(reason.code, reason.message, details=details, hint=reason.hint or hint)
    traceback = reason.details.get("traceback")
    if isinstance(traceback, str) and traceback:
        error.add_note("In the worker:\n" + traceback.rstrip("\n"))
    return error
