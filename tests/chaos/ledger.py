"""The outside ledger: append-only files of JSON lines, synced line by line.

``ledger`` is written by the bodies of the tasks, ``told-*`` by the clients (what the product has told them),
``faults`` by whoever makes the faults. Each line has ``what`` and ``mono``, monotonic seconds, which all
processes share.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

Line = dict[str, Any]


class Ledger:
    """One file, to be written by one process."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def note(self, what: str, **fields: Any) -> Line:
        """Append one line; durable on return."""
        line = {"what": what, "mono": time.monotonic(), **fields}
        os.write(self._fd, json.dumps(line, default=repr).encode() + b"\n")
        os.fsync(self._fd)
        return line

    def close(self) -> None:
        """Close it."""
        os.close(self._fd)


def plain(value: Any) -> Any:
    """What `read` gives for a value that was written."""
    return json.loads(json.dumps(value, default=repr))


def read(path: Path) -> list[Line]:
    """All lines, without one that was cut off by a kill."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith(b"\n")]
