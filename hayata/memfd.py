"""Sealed memory files: how a start hands its `hayata.messages.Launch`, and agents by value, to the guard.

Sealed, so that what one process wrote is what every later supervisor and forkserver reads.
"""

from __future__ import annotations

import errno
import fcntl
import os

_MFD_NOEXEC_SEAL = 0x8  # Linux 6.3; a host with vm.memfd_noexec=2 refuses memory files without it
_SEALS = ("F_SEAL_SEAL", "F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_WRITE")


def sealed_memfd(name: str, data: bytes) -> int:
    """Put ``data`` in a memory file that nobody can change any more.

    Returns:
        Its descriptor, not inheritable.
    """
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        fd = os.memfd_create(name, flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fd = os.memfd_create(name, flags)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        seals = 0
        for seal in _SEALS:
            seals |= getattr(fcntl, seal)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_memfd(fd: int) -> bytes:
    """Read it whole. The descriptor's position, which all who inherited it share, is left alone."""
    size = os.fstat(fd).st_size
    parts = []
    done = 0
    while done < size:
        part = os.pread(fd, size - done, done)
        if not part:
            break
        parts.append(part)
        done += len(part)
    return b"".join(parts)
