"""sd_notify(3): telling the service manager that started us how we are."""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping


class ServiceManager:
    """Talks to ``$NOTIFY_SOCKET``, if there is one, and takes it from the environment of our children."""

    def __init__(self, environ: MutableMapping[str, str] = os.environ) -> None:
        address = environ.pop("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address

    def tell(self, state: str) -> None:
        """Send for example ``READY=1``. A manager that doesn't listen is no reason to stop."""
        if not self._address:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            try:
                sock.setblocking(False)
                sock.connect(self._address)
                sock.send(state.encode())
            except OSError:
                return
