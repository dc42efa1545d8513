"""Where the daemon listens, and how to reach a socket whose path is longer than the system allows.

Both sides need it, so it is here and light: clients, `hayata-supervisor` and the guard.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from hayata.errors import error_for

SOCKET_PATH_BYTES = 107
"""Longest path in a ``sockaddr_un``: 108 bytes with the terminating zero (unix(7))."""

GUARD_NAME = "hayata-guard"
"""What the kernel calls the guard's process."""


def default_socket(environ: Mapping[str, str] | None = None, uid: int | None = None) -> str:
    """Where a daemon listens unless it is told otherwise.

    Args:
        environ: Environment; None: this process's.
        uid: User id; None: this process's.

    Returns:
        ``$HAYATA_SOCKET`` made absolute, else ``$XDG_RUNTIME_DIR/hayata/hayata.sock``, else
        ``/tmp/hayata-<uid>/hayata.sock``.
    """
    environ = os.environ if environ is None else environ
    if environ.get("HAYATA_SOCKET"):
        return os.path.abspath(environ["HAYATA_SOCKET"])
    return os.path.join(default_directories(environ, uid)[0], "hayata.sock")


def default_directories(environ: Mapping[str, str] | None = None, uid: int | None = None) -> list[str]:
    """Directories that are made for sockets alone, the preferred one first.

    Their owner must be checked before use: anybody can create a name in ``/tmp``.
    """
    environ = os.environ if environ is None else environ
    shared = f"/tmp/hayata-{os.getuid() if uid is None else uid}"
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    # The base directory specification says to ignore a relative one.
    return [os.path.join(runtime, "hayata"), shared] if os.path.isabs(runtime) else [shared]


def check_socket_path(path: str) -> str:
    """Return ``path`` if a socket can be bound to it.

    Raises:
        HayataError: ``invalid_options``: it is empty, has a zero byte, or is longer than the system allows.
    """
    size = len(os.fsencode(path))
    if 0 < size <= SOCKET_PATH_BYTES and "\0" not in path:
        return path
    raise error_for(
        "invalid_options",
        f"the socket path {path!r} has {size} bytes; the system allows 1 to {SOCKET_PATH_BYTES}, none zero",
        details={"path": path, "size_bytes": size, "limit_bytes": SOCKET_PATH_BYTES},
        hint=f"choose a shorter one with --socket or HAYATA_SOCKET, for example /tmp/hayata-{os.getuid()}/hayata.sock",
    )


@contextmanager
def reachable(path: str) -> Iterator[str]:
    """Give a name for ``path`` that is short enough for bind and connect, valid inside the ``with`` block.

    A path that is too long is reached through ``/proc/self/fd/<its directory>``.

    Raises:
        HayataError: ``invalid_options``: even the last part of the path is too long.
        OSError: The directory can't be opened.
    """
    if len(os.fsencode(path)) <= SOCKET_PATH_BYTES:
        yield check_socket_path(path)
        return
    directory, name = os.path.split(path)
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        short = f"/proc/self/fd/{fd}/{name}"
        if len(os.fsencode(short)) > SOCKET_PATH_BYTES:
            check_socket_path(path)
        yield short
    finally:
        os.close(fd)


def connect(path: str, *, timeout_s: float | None = None) -> socket.socket:
    """Connect a stream socket to ``path``, however long it is.

    Args:
        path: Path of the daemon's socket.
        timeout_s: Seconds to wait while the daemon's queue of new connections is full: 0 for not at all, None
            for as long as it takes. It stays the socket's timeout.

    Raises:
        HayataError: ``invalid_options``, see `reachable`.
        BlockingIOError: ``timeout_s`` is 0 and the queue is full.
        TimeoutError: It stayed full.
        OSError: Nobody listens there.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if timeout_s == 0:
            sock.setblocking(False)
        elif timeout_s is not None:
            # Not settimeout: a non-blocking connect to a full queue fails at once, and nothing says when to
            # try again. Linux waits this long in a blocking one.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(timeout_s))
        with reachable(path) as short:
            sock.connect(short)
        if timeout_s:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(0))
            sock.settimeout(timeout_s)
    except BlockingIOError:
        sock.close()
        if timeout_s == 0:
            raise
        raise TimeoutError(f"{path} takes no new connection") from None
    except BaseException:
        sock.close()
        raise
    return sock


def _timeval(seconds: float) -> bytes:
    whole = int(seconds)
    return struct.pack("@ll", whole, int((seconds - whole) * 1_000_000))
