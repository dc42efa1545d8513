"""Processes by descriptor: a pidfd names one process for ever, a pid only until it is reaped.

Source: pidfd_open(2), Linux 5.3; waitid(P_PIDFD), Linux 5.4.
"""

from __future__ import annotations

import errno
import os
import select
import signal
from pathlib import Path
from typing import NamedTuple

_NO_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE})


class Exit(NamedTuple):
    """How a process ended: an exit code, or the signal that killed it."""

    code: int | None
    signal: int | None

    @property
    def signal_name(self) -> str | None:
        """The signal by its name, as ``SIGKILL``; None when it was none that ended the process."""
        if self.signal is None:
            return None
        try:
            return signal.Signals(self.signal).name
        except ValueError:
            return str(self.signal)

    def __str__(self) -> str:
        return f"exit code {self.code}" if self.signal is None else f"signal {self.signal_name}"


def open_pidfd(pid: int) -> int:
    """Open ``pid``; it must be a child that nobody has reaped, or a race for its number is possible.

    Raises:
        ProcessLookupError: No such process.
    """
    return os.pidfd_open(pid)


def open_child(pid: int) -> int:
    """Open a child that was just started. One that can't be watched must not live: it is killed and reaped.

    Raises:
        OSError: No descriptors are left.
    """
    try:
        return open_pidfd(pid)
    except OSError:
        os.kill(pid, signal.SIGKILL)  # ours and unreaped: the number is its own
        os.waitpid(pid, 0)
        raise


def send_signal(pidfd: int, number: int = signal.SIGKILL) -> bool:
    """Signal the process; False when it is already gone."""
    try:
        signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        return False
    return True


def is_dead(pidfd: int) -> bool:
    """Whether the process has ended (it may be unreaped)."""
    return wait_dead([pidfd], 0) == [pidfd]


def wait_dead(pidfds: list[int], timeout_s: float | None) -> list[int]:
    """Wait until at least one of the processes has ended; return those that have."""
    poll = select.poll()
    for pidfd in pidfds:
        poll.register(pidfd, select.POLLIN)
    return [fd for fd, _ in poll.poll(None if timeout_s is None else timeout_s * 1000)]


def reap(pidfd: int) -> Exit | None:
    """Reap a dead child of ours; None while it lives.

    Raises:
        ChildProcessError: It isn't our child, or it was reaped.
    """
    result = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
    if result is None:
        return None
    if result.si_code == os.CLD_EXITED:
        return Exit(result.si_status, None)
    return Exit(None, result.si_status)


def children_of(pid: int) -> list[int]:
    """Pids of the living and unreaped children of all threads of ``pid``; empty when it is gone.

    Reads ``/proc/<pid>/task/*/children``; where the kernel was built without it, psutil scans the process table.

    Raises:
        OSError: No descriptors are left to look with: there may be some.
    """
    tasks = Path(f"/proc/{pid}/task")
    found: list[int] = []
    try:
        threads = os.listdir(tasks)
    except OSError as error:
        if error.errno in _NO_DESCRIPTORS:
            raise
        return []
    for thread in threads:
        try:
            found += map(int, (tasks / thread / "children").read_bytes().split())
        except FileNotFoundError:
            if (tasks / thread).exists():
                return _children_by_scan(pid)
        except OSError as error:
            if error.errno in _NO_DESCRIPTORS:
                raise
    return found


def _children_by_scan(pid: int) -> list[int]:
    import psutil  # here: most kernels never need it, and it costs every worker 4 MB

    found = []
    for process in psutil.process_iter(["ppid"]):
        if process.info["ppid"] == pid:
            found.append(process.pid)
    return found
