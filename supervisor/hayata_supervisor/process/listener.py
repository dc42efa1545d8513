"""The daemon's listening socket: made safely, never taken from another daemon, removed only when it is ours.

A lock file beside the socket, held for life, serialises all daemons that want the same path. What the lock
can't tell, a connection does: whoever answers on the socket keeps it.
"""

from __future__ import annotations

import errno
import os
import socket
import stat

from hayata.address import check_socket_path, connect, default_directories, reachable
from hayata.errors import HayataError, error_for
from hayata_supervisor.process import locks

BACKLOG = 512


class Listener:
    """A bound, listening, non-blocking stream socket.

    Args:
        lock: Of the path; None: the socket was passed to us, and the path is not ours to remove.

    Attributes:
        sock: The socket. Whoever inherits it accepts; the guard only holds it.
        path: Where clients find it.
    """

    def __init__(self, sock: socket.socket, path: str, lock: locks.FileLock | None) -> None:
        self.sock = sock
        self.path = path
        self._lock = lock
        self._identity = None if lock is None else _identity(path)

    def close(self) -> None:
        """Close it, and remove the path if it is ours and still this socket."""
        if self._lock is None:
            self.sock.close()
            return
        try:
            if _identity(self.path) == self._identity:
                os.unlink(self.path)
        except OSError:
            pass  # somebody was tidier
        self.sock.close()
        try:
            self._lock.release(unlink=True)
        except OSError:
            pass  # the directory went first


def adopt(fd: int, path: str) -> Listener:
    """Take a listening socket that a service manager has passed; whoever may connect to it is the manager's matter."""
    sock = socket.socket(fileno=fd)
    sock.setblocking(False)
    return Listener(sock, path, None)


def listen(path: str, *, any_length: bool = False) -> Listener:
    """Listen on ``path``, mode 0600; its directory is made with mode 0700 when it is missing.

    Args:
        path: Absolute.
        any_length: Also take a path that most programs could not connect to: the only client is ours.

    Raises:
        HayataError: ``invalid_options``: the path is too long, or something else than a socket is there.
            ``permission_denied``: the system refuses, or a default directory is somebody else's.
            ``socket_in_use``: another daemon listens there.
    """
    if not any_length:
        check_socket_path(path)
    try:
        _prepare_directory(os.path.dirname(path))
        lock = locks.take(path + ".lock")
        if lock is None:
            raise _in_use(path)
        try:
            _remove_stale(path)
            return Listener(_bind(path), path, lock)
        except BaseException:
            lock.release(unlink=True)
            raise
    except OSError as error:
        raise _refused(path, error) from error


def _prepare_directory(directory: str) -> None:
    if directory not in default_directories():
        os.makedirs(directory, mode=0o700, exist_ok=True)
        return
    # /tmp is everybody's: another user may have made the name first, as a directory or as a link.
    try:
        os.mkdir(directory, 0o700)
    except FileExistsError:
        pass
    found = os.lstat(directory)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise error_for(
            "permission_denied",
            f"{directory} is not a directory of yours",
            details={"path": directory, "uid": found.st_uid},
            hint="choose another place with --socket, or set XDG_RUNTIME_DIR",
        )
    if found.st_mode & 0o077:
        os.chmod(directory, 0o700)


def _remove_stale(path: str) -> None:
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise error_for(
            "invalid_options",
            f"{path} exists and is not a socket",
            details={"path": path},
            hint="choose another",
        )
    try:
        connect(path, timeout_s=1.0).close()
    except (ConnectionRefusedError, FileNotFoundError):
        pass
    except OSError:
        # A full queue, another type of socket, no permission: somebody is there.
        raise _in_use(path) from None
    else:
        raise _in_use(path)
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


def _bind(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    # Not chmod afterwards: there must be no moment at which others can connect.
    umask = os.umask(0o177)
    try:
        with reachable(path) as short:
            sock.bind(short)
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    finally:
        os.umask(umask)
    return sock


def _identity(path: str) -> tuple[int, int]:
    found = os.lstat(path)
    return found.st_dev, found.st_ino


def _in_use(path: str) -> HayataError:
    return error_for(
        "socket_in_use",
        f"another daemon listens on {path}",
        details={"path": path},
        hint="use it, stop it with `hayata stop`, or choose another socket with --socket",
    )


def _refused(path: str, error: OSError) -> HayataError:
    denied = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
    return error_for(
        "permission_denied" if denied else "invalid_options",
        f"can't listen on {path}: {error.strerror}",
        details={"path": path, "errno": error.errno},
        hint="choose another place with --socket",
    )
