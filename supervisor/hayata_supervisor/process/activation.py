"""Socket activation: the listening socket that a service manager made for us, and queues clients on, before we are.

Source: sd_listen_fds(3).
"""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping
from typing import NamedTuple

from hayata.errors import HayataError, error_for

NAME = "hayata"
"""``FileDescriptorName=`` of our socket, where several are passed."""

_FIRST_FD = 3
_VARIABLES = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PIDFDID")


class Passed(NamedTuple):
    """A listening socket that is the manager's: its mode, its owner and its end are none of our business."""

    fd: int
    path: str


def take(environ: MutableMapping[str, str] = os.environ) -> Passed | None:
    """Take the socket that was passed to this process, if one was.

    Args:
        environ: Where the variables are, and are not afterwards.

    Raises:
        HayataError: ``invalid_options``: it is not a listening Unix stream socket with a path, or none of several
            is named ``hayata``.
    """
    whose, count, names, _ = (environ.pop(name, "") for name in _VARIABLES)
    if whose != str(os.getpid()) or count in ("", "0"):
        return None
    if not count.isdecimal():
        raise _refused(f"LISTEN_FDS is {count!r}")
    fd = _FIRST_FD + _index(int(count), names.split(":"))
    return Passed(fd, _checked(fd))


def _index(count: int, names: list[str]) -> int:
    if count == 1:
        return 0
    ours = [index for index, name in enumerate(names[:count]) if name == NAME]
    if len(ours) != 1:
        raise _refused(f"{count} sockets are passed, and {len(ours)} of them are named {NAME}")
    return ours[0]


def _checked(fd: int) -> str:
    """The path of the socket, which must be one of the right kind."""
    try:
        sock = socket.socket(fileno=fd)
    except OSError as error:
        raise _refused(f"descriptor {fd} is no socket ({error.strerror})") from None
    try:
        kind = sock.family, sock.type
        if kind != (socket.AF_UNIX, socket.SOCK_STREAM):
            raise _refused(f"descriptor {fd} is a socket of kind {kind[0].name}, {kind[1].name}")
        if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            raise _refused(f"the socket in descriptor {fd} does not listen")
        path = sock.getsockname()
        if not isinstance(path, str) or not os.path.isabs(path):
            raise _refused(f"the address of the socket in descriptor {fd} is no absolute path")
        return path
    finally:
        sock.detach()


def _refused(problem: str) -> HayataError:
    return error_for(
        "invalid_options",
        f"the socket that the service manager passed can't be used: {problem}",
        hint=f"pass one listening Unix stream socket, or several and ours with FileDescriptorName={NAME}",
    )
