"""prctl(2): the two kernel promises that supervision rests on."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36

NO_DEATH_SIGNAL = "HAYATA_TEST_NO_PDEATHSIG"
"""For tests: with this in its environment a process does without PDEATHSIG, as where setuid has cleared it. What the
kernel would have killed, the edge watcher and the sweeps must."""

_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, argument: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(argument), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def become_subreaper() -> None:
    """Adopt descendants whose parent dies, so that nothing escapes by a double fork (Linux 3.4)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Have the kernel SIGKILL this process when the *thread* that forked or adopted it dies.

    Set it from the main thread of a process whose parent forks from its own main thread. It is cleared by fork and by
    setuid. The caller must compare ``os.getppid()`` afterwards: the parent may have died before the call.
    """
    if os.environ.get(NO_DEATH_SIGNAL):
        return
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def set_name(name: str) -> None:
    """Set what ``ps -o comm`` shows, cut to 15 bytes."""
    buffer = ctypes.create_string_buffer(name.encode()[:15])
    _libc.prctl(_PR_SET_NAME, buffer, 0, 0, 0)
