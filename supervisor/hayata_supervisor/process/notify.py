"""sd_notify(3): telling the service manager that started us how we are.

Only the guard speaks, and a guard that embeds its runtime in another's service does not: readiness is that
program's to tell. What the manager's socket has no room for is sent with the next word.
"""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping

_VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")


class ServiceManager:
    """Talks to ``$NOTIFY_SOCKET``, if there is one, and takes it from the environment of our children.

    Args:
        environ: Where the variables are, and are not afterwards: user code must not speak for the service.
        mute: Say nothing.

    Attributes:
        watchdog_s: Seconds without ``WATCHDOG=1`` after which the manager ends us; None when it doesn't look.
    """

    def __init__(self, environ: MutableMapping[str, str] = os.environ, *, mute: bool = False) -> None:
        address, limit_us, whose = (environ.pop(name, "") for name in _VARIABLES)
        self._address = "" if mute else "\0" + address[1:] if address.startswith("@") else address
        self.watchdog_s = _watchdog_s(limit_us, whose) if self._address else None
        self._status = ""
        self._owed: list[str] = []

    def tell(self, *states: str) -> None:
        """Send for example ``READY=1``. A manager that doesn't listen is no reason to stop."""
        if not self._address:
            return
        self._owed = [state for state in self._owed if state not in states] + list(states)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            try:
                sock.setblocking(False)
                sock.connect(self._address)
                sock.send("\n".join(self._owed).encode())
            except BlockingIOError:
                return  # it is behind; the number of different states bounds what we owe
            except OSError:
                pass
        self._owed.clear()

    def status(self, text: str) -> None:
        """Say in one line what we do, if that is new; nothing is no news."""
        if text and text != self._status:
            self._status = text
            self._owed = [state for state in self._owed if not state.startswith("STATUS=")]
            self.tell("STATUS=" + text.replace("\n", " "))

    def extend(self, seconds: float) -> None:
        """Ask for patience with a start or a stop that goes on, until ``seconds`` from now."""
        self.tell(f"EXTEND_TIMEOUT_USEC={seconds * 1e6:.0f}")


def _watchdog_s(limit_us: str, whose: str) -> float | None:
    """sd_watchdog_enabled(3): the limit, if it is meant for this process."""
    if (whose and whose != str(os.getpid())) or not limit_us.isdecimal():
        return None
    return int(limit_us) / 1e6 or None
