"""Signals as something a loop can wait for.

A Python handler runs only between bytecodes, so a loop that sleeps in the kernel needs the C handler's
wake-up descriptor as well. The descriptor only wakes; which signals came is kept by the handler, so a full
pipe loses none.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from types import FrameType


class SignalInbox:
    """Takes over ``numbers`` of this process, and unblocks all signals. Main thread only.

    Attributes:
        fd: Readable when a signal has come.
    """

    def __init__(self, numbers: Iterable[int]) -> None:
        self._came: list[int] = []
        self.fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        for number in numbers:
            signal.signal(number, self._note)
            if number == signal.SIGCHLD:
                # It comes often, and to any thread: no system call that can be restarted shall fail for it.
                signal.siginterrupt(number, False)
        # Whoever exec'd us may have blocked them, so that none got lost until now.
        signal.pthread_sigmask(signal.SIG_SETMASK, [])

    @property
    def descriptors(self) -> list[int]:
        """Its descriptors, for a child that must close them after fork."""
        return [self.fd, self._write_fd]

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._came.append(number)

    def take(self) -> list[int]:
        """The signals that have come since the last call, in order, repeats included."""
        try:
            while os.read(self.fd, 4096):
                pass
        except BlockingIOError:
            pass
        came, self._came = self._came, []
        return came
