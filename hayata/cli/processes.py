"""The supervision tree as lines: who stands below whom, and what each process has to do."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

from hayata.client.records import Process

_INCARNATION = re.compile(r"[0-9a-f]{32}")


def lines(root: Process) -> Iterator[tuple[str, Process]]:
    """Each process with the picture of its place and its name, from the root down."""
    pictures = ("├─ ", "│  ", "└─ ", "   ") if "utf" in (sys.stdout.encoding or "").lower() else ("|- ", "|  ") * 2
    for branch, process in _walk(root, "", "", pictures):
        yield branch + name(process), process


def _walk(process: Process, own: str, below: str, pictures: tuple[str, ...]) -> Iterator[tuple[str, Process]]:
    yield own, process
    middle, line, last, space = pictures
    for index, child in enumerate(process.children):
        is_last = index == len(process.children) - 1
        yield from _walk(child, below + (last if is_last else middle), below + (space if is_last else line), pictures)


def name(process: Process) -> str:
    """Role and name, an incarnation in it shortened."""
    if process.name in ("", process.role):
        return process.role
    return f"{process.role} {_INCARNATION.sub(lambda found: found[0][:8], process.name)}"


def tasks(process: Process) -> str:
    """Its oldest task, and how many more."""
    oldest = sorted(process.tasks.items(), key=lambda item: -item[1])
    text = "".join(f"{execution} ({age_s:.1f} s)" for execution, age_s in oldest[:1])
    return text if len(oldest) < 2 else f"{text} and {len(oldest) - 1} more"
