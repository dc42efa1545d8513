"""What a task may change in its process and leave changed: put back before the next task runs there.

Also what can't be put back, a living thread or child process, a standard stream that was closed: it says that the
process should not be used again.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

from hayata_supervisor.process.pidfd import children_of
from hayata_supervisor.process.prologue import get_handler, set_handler

_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_EVERY_CHILD = os.WEXITED | os.WNOHANG | os.WNOWAIT


class Surroundings:
    """The process as it is now, after the lifespan was entered: what each task shall find.

    Args:
        threads_matter: Whether a new thread is something left behind. Not where coroutines share the process:
            there the event loop keeps threads of its own.
    """

    def __init__(self, *, threads_matter: bool) -> None:
        self._cwd = os.getcwd()
        self._umask = os.umask(0o022)
        os.umask(self._umask)
        self._environ = dict(_environ())
        self._handlers = [(number, get_handler(number)) for number in range(1, signal.NSIG)]
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        self._standard = (sys.stdin, sys.stdout, sys.stderr)
        self._pipes = [(fd, _identity(fd)) for fd in (1, 2)]
        self._threads = set(threading.enumerate())
        self._threads_matter = threads_matter
        self._children = frozenset(children_of(os.getpid()) if _has_children() else ())

    def left_behind(self) -> str:
        """Name what a task has left that can't be put back; empty when there is nothing."""
        child = self._new_child()
        if child:
            return child
        for fd, was in self._pipes:
            if getattr(self._standard[fd], "closed", False) or _identity(fd) != was:
                return f"closed its {'stdout' if fd == 1 else 'stderr'}"
        if self._threads_matter and threading.active_count() > len(self._threads):
            for thread in threading.enumerate():
                if thread not in self._threads:
                    return f"left a thread: {thread.name}"
        return ""

    def _new_child(self) -> str:
        if not _has_children():
            return ""
        try:
            new = set(children_of(os.getpid())) - self._children
        except OSError as error:
            return f"left a child process, it seems: {error}"
        return f"left a child process: {min(new)}" if new else ""

    def restore(self) -> None:
        """Put everything back."""
        self._restore_cwd()
        os.umask(self._umask)
        if _environ() != self._environ:
            self._restore_environ()
        sys.stdin, sys.stdout, sys.stderr = self._standard
        for timer in _TIMERS:
            signal.setitimer(timer, 0)
        for number, handler in self._handlers:
            if get_handler(number) is not handler and handler is not None:
                set_handler(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def _restore_cwd(self) -> None:
        try:
            if os.getcwd() == self._cwd:
                return
        except OSError:
            pass  # the task has removed the directory it went to
        os.chdir(self._cwd)

    def _restore_environ(self) -> None:
        now = os.environb
        for key in set(now) - set(self._environ):
            del now[key]
        for key, value in self._environ.items():
            if now.get(key) != value:
                now[key] = value


def _identity(fd: int) -> tuple[int, int] | None:
    try:
        found = os.fstat(fd)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, _EVERY_CHILD)
    except ChildProcessError:
        return False
    return True


def _environ() -> dict[bytes, bytes]:
    """The dict behind `os.environ`: comparing the mapping itself decodes every entry, sixty times as slow."""
    data: dict[bytes, bytes] = os.environ._data  # type: ignore[attr-defined]
    return data
