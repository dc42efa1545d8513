"""What one runtime must have for itself before its first supervisor starts: directory, silence, socket."""

from __future__ import annotations

import os
import uuid
from typing import NamedTuple

from hayata.messages import Launch
from hayata_supervisor.process import data_dir
from hayata_supervisor.process.listener import Listener, adopt, listen
from hayata_supervisor.process.locks import FileLock
from hayata_supervisor.process.stderr import Stderr
from hayata_supervisor.process.supervised import Limits
from hayata_supervisor.process.sweep import COOKIE, cookie_prefix, end_orphan, sweep


class Claim(NamedTuple):
    """Held for life by the guard.

    Attributes:
        lock: The data directory's.
        listener: Where clients connect.
        environ: For every process below: ours, and the cookie by which the next start finds what is left of
            them.
    """

    lock: FileLock
    listener: Listener
    environ: dict[str, str]

    def release(self) -> None:
        """Give it back, the socket first: nobody must connect to what is ending."""
        self.listener.close()
        self.lock.release()


def claim(launch: Launch, limits: Limits, stderr: Stderr) -> Claim:
    """Take it all; nothing of an earlier runtime on the directory lives afterwards.

    Raises:
        HayataError: ``data_dir_in_use``, ``socket_in_use``, ``permission_denied`` or ``invalid_options``.
    """
    lock = data_dir.claim(launch.data_dir)
    try:
        prefix = cookie_prefix(lock.identity)
        store_lock = os.path.join(launch.data_dir, data_dir.STORE_LOCK)
        orphan = end_orphan(store_lock, prefix, patience_s=limits.orphan, timeout_s=limits.kill)
        swept = sweep(prefix, timeout_s=limits.kill)
        if orphan or swept:
            stderr.log("warning", "earlier runtime ended", supervisor=orphan, killed=len(swept))
        # Only now: an orphaned supervisor would still answer on its socket.
        if launch.listen_fd is None:
            listener = listen(launch.socket, any_length=launch.control_fd is not None)
        else:
            listener = adopt(launch.listen_fd, launch.socket)
    except BaseException:
        lock.release()
        raise
    return Claim(lock, listener, {**os.environ, COOKIE: prefix + uuid.uuid4().hex})
