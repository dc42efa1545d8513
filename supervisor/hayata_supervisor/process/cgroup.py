"""The control groups that a process is in: how much memory and how many processes they allow.

Version 2 and version 1, with the hybrid of both, also in a container, where the group's own directory may be
the root of what is mounted. The limit that counts is the least one on the way up.

Source: cgroups(7); Documentation/admin-guide/cgroup-v2.rst; proc_pid_mountinfo(5).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_UNLIMITED_V1 = 1 << 62  # it says so by the greatest number of pages; nobody has set that
_NAMES = {
    "cgroup2": ("memory.max", "memory.current"),
    "cgroup": ("memory.limit_in_bytes", "memory.usage_in_bytes"),
}


class MemoryGroup(NamedTuple):
    """The group whose memory limit comes first.

    Attributes:
        path: Its directory.
        limit_bytes: Its limit.
        used_bytes: What it holds that the kernel can't drop: all but the pages of files.
        kills_together: The kernel ends all of the group when one of it takes too much
            (``memory.oom.group``), here or further up.
    """

    path: Path
    limit_bytes: int
    used_bytes: int
    kills_together: bool


def memory_group(proc: Path = Path("/proc/self")) -> MemoryGroup | None:
    """The group that limits the memory of a process; None where nothing does, or nothing can be read.

    Args:
        proc: The process's directory in ``/proc``.
    """
    limited = [
        (limit, path, kind)
        for kind, path in _directories(proc, "memory")
        if (limit := _number(path / _NAMES[kind][0])) is not None and limit < _UNLIMITED_V1
    ]
    if not limited:
        return None
    limit, path, kind = min(limited)
    return MemoryGroup(path, limit, _used(path, kind), kills_together(proc))


def kills_together(proc: Path = Path("/proc/self")) -> bool:
    """Whether the kernel ends a whole group of this process's when it is out of memory."""
    return any(_number(path / "memory.oom.group") == 1 for kind, path in _directories(proc, "memory"))


def oom_kills(proc: Path = Path("/proc/self")) -> int:
    """How many processes of the group the kernel has killed for memory; of the machine's, in no group of its own."""
    for kind, path in _directories(proc, "memory"):
        name = "memory.events" if kind == "cgroup2" else "memory.oom_control"
        counted = _values(path / name).get("oom_kill")
        if counted is not None:
            return counted
    return _values(Path("/proc/vmstat")).get("oom_kill", 0)


def process_limit(proc: Path = Path("/proc/self")) -> int | None:
    """The most processes and threads that its groups allow; None without a limit."""
    found = [_number(path / "pids.max") for _, path in _directories(proc, "pids")]
    return min((limit for limit in found if limit is not None), default=None)


def service_unit(proc: Path = Path("/proc/self")) -> str | None:
    """The systemd service that the process belongs to, by the name of its group; a login is a scope, and none."""
    for part in reversed(path_of(proc).split("/")):
        if part.endswith((".service", ".scope")):
            return part if part.endswith(".service") else None
    return None


def path_of(proc: Path = Path("/proc/self")) -> str:
    """The path of the process's group that systemd has made: that of version 2, else systemd's own."""
    found = {tuple(line.split(":", 2)[:2]): line.split(":", 2)[-1] for line in _lines(proc / "cgroup")}
    named = [path for (_, controllers), path in found.items() if controllers == "name=systemd"]
    return next(iter(named), found.get(("0", ""), ""))


def _used(path: Path, kind: str) -> int:
    """v2 counts shared memory among the pages of files, v1 among the cache."""
    total = _number(path / _NAMES[kind][1]) or 0
    values = _values(path / "memory.stat")
    if kind == "cgroup2":
        files = values.get("file", 0) - values.get("shmem", 0)
    else:
        files = values.get("total_cache", 0) - values.get("total_shmem", 0)
    return max(0, total - max(0, files))


def _directories(proc: Path, controller: str) -> Iterator[tuple[str, Path]]:
    """The group's directories for a controller, from itself up to the root of what is mounted."""
    paths = dict(_groups(proc, controller))
    for line in _lines(proc / "mountinfo"):
        before, _, after = line.partition(" - ")
        fields, (kind, *rest) = before.split(" "), after.split(" ")
        if kind not in paths or (kind == "cgroup" and controller not in rest[-1].split(",")):
            continue
        root, mounted = fields[3], Path(_unescaped(fields[4]))
        path = paths[kind]
        # In a container of version 1 the path is the host's, and what is mounted is the group itself.
        below = os.path.relpath(path, root) if f"{path}/".startswith(f"{root.rstrip('/')}/") else "."
        directory = mounted / below
        if not directory.is_dir():
            directory = mounted
        while True:
            yield kind, directory
            if directory == mounted or mounted not in directory.parents:
                break
            directory = directory.parent


def _groups(proc: Path, controller: str) -> Iterator[tuple[str, str]]:
    for line in _lines(proc / "cgroup"):
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            yield "cgroup2", path
        elif controller in controllers.split(","):
            yield "cgroup", path


def _unescaped(path: str) -> str:
    return path.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []


def _values(path: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    pairs = (line.partition(" ") for line in _lines(path))
    return {name: int(value) for name, _, value in pairs if value.isdigit()}


def _number(path: Path) -> int | None:
    """The number in a file; None for ``max``, and where the file isn't."""
    text = "".join(_lines(path)[:1]).strip()
    return int(text) if text.isdigit() else None
