"""What processes use: memory and CPU, read from ``/proc``.

Memory here is what only the death of its owners gives back: anonymous pages, shared memory and what was
swapped out of them. Pages of files don't count: the kernel drops them when it needs room. A page that several
processes share counts in equal parts for each of them (PSS), because an edge is a fork of its node: by RSS
each edge would be charged the whole app again, and by USS a task would be charged nothing of what it shares
with processes that it has forked.

The exact share costs a walk through the process's page tables, about 35 ms for each GiB. `Memory` costs 11 µs
whatever the size, and bounds the share from both sides.

Source: proc_pid_status(5), proc_pid_smaps(5).
"""

from __future__ import annotations

import errno
import os
import re
from typing import NamedTuple

from hayata_supervisor.process.pidfd import children_of

_TICKS = os.sysconf("SC_CLK_TCK")
_STATUS = re.compile(rb"^(RssAnon|RssShmem|VmSwap):\s*(\d+) kB", re.MULTILINE)
_SHARE = re.compile(rb"^(?:Pss_Anon|Pss_Shmem|SwapPss):\s*(\d+) kB", re.MULTILINE)
_READ_BYTES = 8192


class Memory(NamedTuple):
    """What a process has in its page tables, in bytes.

    Attributes:
        anonymous: Resident anonymous pages, shared ones in full.
        most: These, shared memory and what is swapped out. Its share is never more.
    """

    anonymous: int
    most: int


def memory_of(pid: int) -> Memory:
    """Read ``pid``'s; nothing when it is gone or a zombie.

    Raises:
        OSError: No descriptors are left to look with.
    """
    found = {name: 1024 * int(kilobytes) for name, kilobytes in _STATUS.findall(_read(pid, "status"))}
    return Memory(found.get(b"RssAnon", 0), sum(found.values()))


def waited_for_cpu_s(pid: int) -> float:
    """Seconds that the first thread of ``pid`` was ready to run and had no processor, since its birth.

    0.0 when it is gone, or where the kernel does not count it.
    """
    try:
        return int(_read(pid, "schedstat").split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def share_of(pid: int) -> int | None:
    """Bytes that ``pid`` has, pages that it shares in parts; None where the kernel does not say.

    That is so for a process that runs with other rights (a setuid program), and in some sandboxes.

    Raises:
        OSError: No descriptors are left to look with.
    """
    found = _SHARE.findall(_read(pid, "smaps_rollup"))
    return 1024 * sum(map(int, found)) if found else None


def cpu_s(pid: int) -> float:
    """CPU seconds of ``pid`` and of those children that it has waited for; 0 when it is gone.

    Raises:
        OSError: No descriptors are left to look with.
    """
    # The name in parentheses may hold anything, parentheses included.
    fields = _read(pid, "stat").rpartition(b")")[2].split()
    return sum(map(int, fields[11:15])) / _TICKS


def with_descendants(pid: int) -> list[int]:
    """``pid``, its children, and theirs. Zombies are among them.

    Raises:
        OSError: No descriptors are left to look with.
    """
    found = [pid]
    for each in found:
        found += (child for child in children_of(each) if child not in found)
    return found


def _read(pid: int, name: str) -> bytes:
    try:
        fd = os.open(f"/proc/{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        return b""
    try:
        return os.read(fd, _READ_BYTES)
    except OSError:
        return b""  # it died, or gives nothing away
    finally:
        os.close(fd)
