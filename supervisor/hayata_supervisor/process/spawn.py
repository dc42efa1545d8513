"""Starting a fresh Python on one of our modules: exec, never fork alone, so that threads do no harm.

It is `os.posix_spawn` and not `subprocess`, because the caller reaps everything itself, and because what
would otherwise be a fork of a large process is a vfork.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence

from hayata_supervisor import failpoints

_DEFAULT_AGAIN = ("HUP", "INT", "QUIT", "TERM", "USR1", "USR2", "PIPE", "CHLD", "XFSZ")


def module_command(module: str, arguments: Iterable[str]) -> list[str]:
    """The command line that runs one of our modules.

    ``-P``: a file in the working directory must not stand in for a module of the standard library.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def spawn_module(
    module: str,
    arguments: Sequence[str],
    *,
    pass_fds: Iterable[int],
    environ: Mapping[str, str],
    move_fds: Mapping[int, int] | None = None,
) -> int:
    """Start ``python -m module arguments`` as our child, in a session of its own.

    Its signals are as in a fresh process, stdin is empty, stdout and stderr are ours. Call it from the main
    thread when the child asks to die with its parent, for that promise follows the thread.

    Args:
        module: Dotted name.
        arguments: What follows it on the command line.
        pass_fds: Descriptors that the child gets under the same number. All others must be non-inheritable
            (see `keep_descriptors_to_ourselves`).
        environ: The child's whole environment.
        move_fds: The child's number → ours, for example ``{1: pipe}``.

    Returns:
        The child's pid. It is ours to reap.

    Raises:
        OSError: The system refused.
    """
    actions: list[tuple[int, int, int] | tuple[int, int, str, int, int]] = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
    ]
    # A dup of a descriptor onto itself clears close-on-exec, in the child alone (glibc 2.29, musl 1.1.24).
    actions += [(os.POSIX_SPAWN_DUP2, fd, fd) for fd in pass_fds]
    actions += [(os.POSIX_SPAWN_DUP2, ours, theirs) for theirs, ours in (move_fds or {}).items()]
    failpoints.hit(".before_spawn")
    pid = os.posix_spawn(
        sys.executable,
        module_command(module, arguments),
        dict(environ),
        file_actions=actions,
        setsid=True,
        setsigmask=[],
        setsigdef=[getattr(signal, f"SIG{name}") for name in _DEFAULT_AGAIN],
    )
    failpoints.hit(".after_spawn")
    return pid


def open_missing_standard_streams() -> None:
    """Fill 0, 1 and 2 where our starter closed them: a socket that took such a number would be written to."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number, so this one


def keep_descriptors_to_ourselves() -> None:
    """Mark every descriptor above stderr as not to be inherited: what our starter leaked to us ends here."""
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        if fd > 2:
            try:
                os.set_inheritable(fd, False)
            except OSError:
                continue  # the one that listed the directory
