"""Log lines of the guard: few, small, and never in its way.

The supervisor's log (`hayata_supervisor.logs`) has a thread for this; the guard has none. It asks before each
write whether stderr takes it, and leaves the line out when it does not.
"""

from __future__ import annotations

import os
import select
import time

import msgspec

from hayata.messages import ErrorInfo
from hayata_supervisor.process import clock

_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
_PIECE_BYTES = 4096  # PIPE_BUF: a pipe that polls as writable takes this much without blocking


class Stderr:
    """Writes lines in the launch's log format. ``plain`` is ``console`` for these."""

    def __init__(self, log_format: str, log_level: str, *, fd: int = 2) -> None:
        self._json = log_format == "json"
        self._least = _LEVELS[log_level]
        self._fd = fd

    def log(self, level: str, event: str, **fields: object) -> None:
        """Write one line, or nothing when ``level`` is below the launch's or stderr doesn't take it now."""
        if _LEVELS[level] < self._least:
            return
        if self._json:
            record = {"timestamp": timestamp(clock.wall()), "level": level, "event": event, **fields}
            line = msgspec.json.encode(record).decode()
        else:
            line = f"{timestamp(clock.wall())} [{level:<9}] {event}"
            line += "".join(f" {key}={value}" for key, value in fields.items())
            line = line.replace("\n", "\\n")
        self._write(line + "\n", patience_s=0.0)

    def fatal(self, error: ErrorInfo) -> None:
        """Say why the runtime ends; for a person in several lines, and with more patience than `log`."""
        traceback = _traceback(error)
        if self._json:
            fields = {"event": "fatal", "code": error.code, "message": error.message, "hint": error.hint}
            fields |= {"traceback": traceback}
            record = {"timestamp": timestamp(clock.wall()), "level": "error"}
            record |= {name: value for name, value in fields.items() if value}
            text = msgspec.json.encode(record).decode()
        else:
            text = f"{traceback.rstrip()}\n" if traceback else ""
            text += f"hayata-supervisor: {error.code}: {error.message}"
            text += f"\n  hint: {error.hint}" if error.hint else ""
        self._write(text + "\n", patience_s=1.0)

    def _write(self, text: str, *, patience_s: float) -> None:
        data = memoryview(text.encode("utf-8", "backslashreplace"))
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        while data:
            ready = poll.poll(patience_s * 1000)
            if not ready or not ready[0][1] & select.POLLOUT:
                return
            try:
                data = data[os.write(self._fd, data[:_PIECE_BYTES]) :]
            except OSError:
                return  # stderr is gone, and there is nobody left to tell


def _traceback(error: ErrorInfo) -> str:
    try:
        details = msgspec.msgpack.decode(error.details, ext_hook=lambda code, data: None)
    except msgspec.DecodeError:
        return ""
    found = details.get("traceback", "") if isinstance(details, dict) else ""
    return found if isinstance(found, str) else ""


def timestamp(wall_s: float) -> str:
    """ISO 8601 in UTC with milliseconds."""
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(wall_s))
    return f"{whole}.{int(wall_s * 1000) % 1000:03d}Z"
