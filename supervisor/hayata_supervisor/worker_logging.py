"""``logging`` in a worker: each record becomes one line of JSON on stderr, which the supervisor's log reads.

A line begins with `MARK`, which nobody types, and holds ``level``, ``logger``, ``event``, the ids of the task
that logged it, the record's own fields, and ``exception`` as text. The app's levels decide what is logged, as
ever.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

import msgspec

MARK = "\x1e"
"""RS, the record separator; RFC 7464 puts it before JSON texts in a stream, too."""

LINE_BYTES = 64 * 1024 - 1
"""Longest line, its end not counted: a longer one would be cut by whoever reads the pipe."""

current_task: ContextVar[Mapping[str, Any] | None] = ContextVar("hayata_current_task", default=None)
"""Ids of the task that runs in this context (invocation_id, execution_id, attempt); set by the edge."""

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "hayata_fields"}
_LEVELS = ((logging.ERROR, "error"), (logging.WARNING, "warning"), (logging.INFO, "info"))
_SHORTER_CHARS = (24 * 1024, 4 * 1024, 1024)  # for each text of a too long record; the last surely fits
_CORE = ("level", "logger", "event", "exception", "agent_id", "node_id", "invocation_id", "execution_id")
_encode = msgspec.json.Encoder(enc_hook=repr).encode


class WorkerLogHandler(logging.Handler):
    """Writes records to a descriptor, each in one write.

    Args:
        fd: The worker's stderr. The descriptor and not `sys.stderr`: an app may have put anything in its
            place.
        level: As of any handler.
        ids: Fields of every record: who this worker is.
    """

    def __init__(self, fd: int = 2, level: int = logging.NOTSET, ids: Mapping[str, str] | None = None) -> None:
        super().__init__(level)
        self._fd = fd
        self._ids = dict(ids or {})

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record; one that can't be rendered is reported as `logging` does."""
        try:
            line = memoryview(_line(record, self._ids))
            while line:
                line = line[os.write(self._fd, line) :]
        except OSError:
            return  # stderr is closed, and so there is nobody to tell
        except Exception:  # noqa: BLE001  whatever a foreign object does when it is rendered
            self.handleError(record)


def install(agent_id: str, node_id: str | None = None, *, fd: int = 2) -> WorkerLogHandler:
    """Put the handler on the root logger, in the place of handlers that write to the standard streams.

    Those (of ``logging.basicConfig`` in the app, for example) would say everything a second time, without
    ids. Files and what else the app logs to are left alone, and so are its levels.
    """
    root = logging.getLogger()
    replaced = [handler for handler in root.handlers if _writes_to_standard_stream(handler)]
    ids = {"agent_id": agent_id} if node_id is None else {"agent_id": agent_id, "node_id": node_id}
    handler = WorkerLogHandler(fd, min((old.level for old in replaced), default=logging.NOTSET), ids)
    for old in replaced:
        root.removeHandler(old)
        for kept in old.filters:
            handler.addFilter(kept)
    root.addHandler(handler)
    return handler


def _writes_to_standard_stream(handler: logging.Handler) -> bool:
    streams = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    if isinstance(handler, WorkerLogHandler):
        return True
    return isinstance(handler, logging.StreamHandler) and any(handler.stream is stream for stream in streams)


def _line(record: logging.LogRecord, ids: Mapping[str, str]) -> bytes:
    fields: dict[str, Any] = {
        name: value for name, value in vars(record).items() if name not in _STANDARD and not name.startswith("_")
    }
    fields.update(vars(record).get("hayata_fields") or {})
    fields.update(ids)
    fields.update({name: value for name, value in (current_task.get() or {}).items() if value is not None})
    fields["level"] = next((name for least, name in _LEVELS if record.levelno >= least), "debug")
    fields["logger"] = record.name
    fields["event"] = record.getMessage()
    if record.exc_info:
        fields["exception"] = "".join(traceback.format_exception(*record.exc_info)).rstrip("\n")
    elif record.exc_text:
        fields["exception"] = record.exc_text
    if record.stack_info:
        fields["stack"] = record.stack_info
    line = _render(fields)
    size = len(line)
    for limit in _SHORTER_CHARS:
        if len(line) <= LINE_BYTES:
            break
        short = {name: _cut(fields[name], limit) for name in _CORE if name in fields}
        line = _render({**short, "cut_from_bytes": size})
    return line + b"\n"


def _render(fields: dict[str, Any]) -> bytes:
    try:
        body = _encode(fields)
    except (TypeError, ValueError, OverflowError, RecursionError, UnicodeError):
        # Keys that are no strings, surrogates, cycles: say it in Python's words.
        body = _encode({str(name): _plain(value) for name, value in fields.items()})
    return MARK.encode() + body


def _plain(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text.encode("utf-8", "backslashreplace").decode()


def _cut(value: Any, limit: int) -> str:
    text = _plain(value)
    return text if len(text) <= limit else text[:limit] + "…"
