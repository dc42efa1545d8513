"""Errors ↔ data. What travels and is stored is type name, message and text, never an exception object.

So any class of exception arrives: one whose constructor needs keyword arguments, one whose ``__str__``
raises, one that only the worker can import.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import msgspec

from hayata.errors import HayataError, error_for
from hayata.messages import ErrorInfo
from hayata.values import decode, encode

MAX_MESSAGE = 4_000
MAX_TRACEBACK = 64_000
"""Characters kept of a message and of a traceback."""


def error_info(error: HayataError) -> ErrorInfo:
    """Make data of an error. Never raises: a detail that can't be stored is kept as text."""
    return ErrorInfo(
        code=error.code,
        message=_text(error.message, MAX_MESSAGE),
        hint=_text(error.hint, MAX_MESSAGE),
        details=msgspec.Raw(_encode_details(error.details)),
    )


def error_from(info: ErrorInfo) -> HayataError:
    """Make the error of the class that belongs to its code. Never raises."""
    try:
        details = decode(info.details)
    except HayataError:
        details = {}
    return error_for(info.code, info.message, details=details if isinstance(details, dict) else {}, hint=info.hint)


def exception_info(code: str, error: BaseException) -> ErrorInfo:
    """Describe any exception: details ``type`` (the class's name), ``message`` and ``traceback`` (text).
    Never raises.
    """
    return error_info(exception_error(code, error))


def exception_error(code: str, error: BaseException, hint: str = "") -> HayataError:
    """Like `exception_info`, as an error to raise. Our own frames above the user's code are left out."""
    name = type(error).__name__
    message = _text(error, MAX_MESSAGE)
    return error_for(
        code,
        _text(f"{name}: {message}" if message else name, MAX_MESSAGE),
        details={"type": name, "message": message, "traceback": traceback_text(error)},
        hint=hint,
    )


def traceback_text(error: BaseException) -> str:
    """The traceback as Python would print it, from the first frame of the user's code."""
    try:
        lines = traceback.format_exception(type(error), error, _users_part(error))
    except Exception:  # noqa: BLE001 - formatting calls the exception's own methods
        lines = [*traceback.format_tb(error.__traceback__), f"{type(error).__name__}\n"]
    text = "".join(lines)
    if len(text) > MAX_TRACEBACK:
        half = MAX_TRACEBACK // 2
        text = f"{text[:half]}\n  … {len(text) - 2 * half} characters left out …\n{text[-half:]}"
    return _text(text, MAX_TRACEBACK + 100)


def _users_part(error: BaseException) -> TracebackType | None:
    """Skip our own frames and the import system's.

    If there are no others: nothing for a module that isn't there or can't be parsed, everything for the rest.
    """
    step = error.__traceback__
    while step is not None:
        name = str(step.tb_frame.f_globals.get("__name__", ""))
        if not name.startswith(("hayata.", "hayata_supervisor.", "importlib", "runpy")):
            return step
        step = step.tb_next
    return None if isinstance(error, ImportError | SyntaxError) else error.__traceback__


def _encode_details(details: Mapping[str, Any]) -> bytes:
    try:
        return encode(dict(details), "details")
    except HayataError:
        pass
    kept: dict[str, Any] = {}
    for key, value in details.items():
        name = _text(key, 200)
        try:
            encode(value)
            kept[name] = value
        except HayataError:
            kept[name] = _text(value, MAX_MESSAGE)
    return encode(kept, "details")


def _text(value: object, limit: int) -> str:
    """``str(value)`` without lone surrogates, not too long, whatever ``__str__`` does."""
    try:
        text = value if type(value) is str else str(value)
    except Exception:  # noqa: BLE001 - a user's __str__
        text = f"<{type(value).__name__} that can't be printed>"
    text = str.__str__(text).encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= limit else text[: limit - 1] + "…"
