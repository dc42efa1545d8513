"""What a process looks like from outside, for people: cheap to read, not for decisions.

Source: proc_pid_stat(5).
"""

from __future__ import annotations

import os
from typing import NamedTuple

import msgspec

from hayata.messages import ProcessInfo

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Gauges(NamedTuple):
    """Of one process.

    Attributes:
        memory_bytes: Resident, pages that it shares with others included.
        cpu_s: CPU seconds of itself, its children not included.
        started_at: Wall clock seconds, to a hundredth or so.
    """

    memory_bytes: int
    cpu_s: float
    started_at: float


def gauges(pid: int) -> Gauges | None:
    """Read them; None when there is no such process, or it may not be read."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name in parentheses may hold anything, parentheses included.
            fields = file.read().rpartition(b")")[2].split()
        user, system, started, pages = (int(fields[index]) for index in (11, 12, 19, 21))
        return Gauges(pages * _PAGE_BYTES, (user + system) / _TICKS, _booted_at() + started / _TICKS)
    except (OSError, IndexError):
        return None


def with_gauges(info: ProcessInfo) -> ProcessInfo:
    """The description with what can be seen from outside, and so all below it."""
    seen = gauges(info.pid) if info.pid > 0 else None
    children = [with_gauges(child) for child in info.children]
    if seen is None:
        return msgspec.structs.replace(info, children=children)
    started_at = info.started_at if info.started_at is not None else seen.started_at
    return msgspec.structs.replace(
        info, memory_bytes=seen.memory_bytes, cpu_s=seen.cpu_s, started_at=started_at, children=children
    )


def _booted_at() -> float:
    with open("/proc/stat", "rb") as file:
        for line in file:
            if line.startswith(b"btime "):
                return float(line.split()[1])
    raise OSError("the kernel does not say when it was booted")
