"""Memory: who limits it, and whom the kernel ends when there is none left."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from hayata.messages import Finding
from hayata_supervisor.core.limits import container_default
from hayata_supervisor.doctor.findings import ok, warn
from hayata_supervisor.process import cgroup

_ANSWER_S = 5.0
_TAKES_ALL = frozenset({"stop", "kill"})


def check_memory(daemon: int | None) -> Iterator[Finding]:
    """Look at the control groups of the daemon that runs, else at our own: those of a shell may be others.

    Args:
        daemon: Pid of its guard; None when none runs, or it can't be told.
    """
    proc = Path("/proc/self" if not daemon else f"/proc/{daemon}")
    whose = "" if daemon else " (of this shell; a service or container may have others)"
    yield _limit(proc, whose)
    if cgroup.kills_together(proc):
        yield warn(
            "memory group",
            f"memory.oom.group is set: one worker out of memory ends the supervisor, too{whose}",
            "unset it, or keep workers below the limit with memory_limit= on nodes",
        )
    unit = cgroup.service_unit(proc)
    policy = None if unit is None else oom_policy(unit, user="/user@" in cgroup.path_of(proc))
    if policy in _TAKES_ALL:
        yield warn(
            "service",
            f"{unit} has OOMPolicy={policy}: one worker out of memory ends the whole service",
            "OOMPolicy=continue in its [Service] section",
        )
    elif policy:
        yield ok("service", f"{unit} has OOMPolicy={policy}")


def _limit(proc: Path, whose: str) -> Finding:
    group = cgroup.memory_group(proc)
    machine_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    default = None if group is None else container_default(group.limit_bytes, machine_bytes, group.used_bytes)
    if group is None or default is None:
        return warn(
            "memory limit",
            f"only the machine's {_gib(machine_bytes)}{whose}: a task that takes it all slows down everything",
            "give nodes a memory_limit=, or the daemon MemoryMax= or --memory",
        )
    return ok(
        "memory limit",
        f"{_gib(group.limit_bytes)} ({group.path}); a node without memory_limit= gets {_gib(default)} an edge",
    )


def oom_policy(unit: str, *, user: bool) -> str | None:
    """What systemd does with a service of which the kernel has killed a process; None where nobody knows."""
    program = shutil.which("systemctl")
    if program is None:
        return None
    command = [program, *(["--user"] if user else []), "show", "--property=OOMPolicy", "--value", unit]
    try:
        said = subprocess.run(command, capture_output=True, timeout=_ANSWER_S, check=True, text=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return said.stdout.strip() or None


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
