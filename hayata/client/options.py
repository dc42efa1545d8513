"""Checks of what callers give, before anything is sent: the errors are those that the daemon would give."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from hayata import durations
from hayata.errors import HayataError, error_for
from hayata.ids import check_name, new_uuid7
from hayata.values import encode

FOREVER = math.inf
STATUSES = (
    "queued", "running", "waiting", "recovery_required", "uncertain", "completed", "failed", "cancelled"
)  # fmt: skip


class _Absent:
    def __repr__(self) -> str:
        return "..."


ABSENT: Any = _Absent()
"""Default of an argument for which None is a value."""


def invalid(message: str, field: str, hint: str = "") -> HayataError:
    """The error for an option that can't be."""
    return error_for("invalid_options", message, details={"field": field}, hint=hint)


def check_choice(field: str, value: object, allowed: tuple[str, ...]) -> None:
    """Refuse a value that isn't one of those allowed."""
    if value not in allowed:
        raise invalid(f"{field} can't be {value!r}", field, f"one of: {', '.join(allowed)}")


def check_flag(field: str, value: object) -> bool:
    """Refuse all but True and False: 0 or "no" in their place is a mistake."""
    if not isinstance(value, bool):
        raise invalid(f"{field} is True or False, not {value!r}", field)
    return value


def check_count(field: str, value: object, least: int, most: int) -> int:
    """Refuse all but whole numbers between two bounds."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise invalid(f"{field} can't be {value!r}", field, f"a whole number from {least} to {most}")
    return value


def check_seconds(field: str, value: object) -> None:
    """Refuse what is no duration; None is one."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise invalid(f"{field} can't be {value!r}", field, "seconds, 0 or more; None waits as long as it takes")


def check_age(field: str, value: object) -> float:
    """Seconds of a duration that was given as text, a timedelta or a number of seconds."""
    try:
        return durations.seconds(value)
    except ValueError as error:
        raise invalid(f"{field}: {error}", field, durations.FORMS) from None


def check_optional_name(what: str, name: str | None) -> None:
    """As `check_name`, for names that may be left out."""
    if name is not None:
        check_name(what, name)


def new_id() -> str:
    """Make an id that nothing else has and that sorts by time."""
    return new_uuid7(time.time_ns() // 1_000_000).hex()


def login() -> str:
    """Who runs this process."""
    try:
        import pwd  # here: not every system has it

        return pwd.getpwuid(os.getuid()).pw_name
    except ImportError:
        return os.environ.get("USERNAME", "somebody")
    except KeyError:
        return f"uid {os.getuid()}"


def check_verdict(result: Any, error: str | None, retry: bool) -> dict[str, Any]:
    """Check that there is exactly one, and encode it."""
    given: dict[str, Any] = {}
    if result is not ABSENT:
        if not isinstance(result, Mapping):
            raise invalid("result is no mapping of updates", "result", "what the node function would have returned")
        given["result"] = msgspec.Raw(encode(result, "result"))
    if error is not None:
        if not isinstance(error, str) or not error:
            raise invalid("error is no sentence", "error", "why the task failed, in a few words")
        given["error"] = error
    if check_flag("retry", retry):
        given["retry"] = True
    if len(given) != 1:
        raise invalid(
            f"exactly one of result, error and retry must be given, not {' and '.join(given) or 'none'}",
            "result",
        )
    return given


def check_author(name: str | None) -> str:
    """The name that a decision is recorded under."""
    if name is None:
        return login()
    if not isinstance(name, str) or not 1 <= len(name) <= 256:
        raise invalid("by is no name", "by", "1 to 256 characters")
    return name


def absolute_reference(app: str) -> str:
    """Make the path of an app reference absolute; leave a module alone."""
    path, colon, attribute = app.rpartition(":")
    if not colon:
        path, attribute = app, ""
    if path.endswith(".py") or os.sep in path:
        return os.path.abspath(os.path.expanduser(path)) + colon + attribute
    return app
