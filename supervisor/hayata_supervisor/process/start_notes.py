"""Start notes, the page: a shared file in which edges note, as the last act before a body, which execution begins.

A write to a shared mapping costs a third of a microsecond and outlives every process of this boot; a power cut takes
it. So the header says to which boot and to which file (device and inode: a copied directory proves nothing) the notes
belong, and when that doesn't fit, the page is made anew and everything may have begun.

A cell is in one of three states. *Unknown*: the page was made when there may have been marks already. *Clear*: the
supervisor was about to mark an execution, which has not begun. A *note*: it has begun. So only what the supervisor
has written can prove that a body never began: a mark that is older than the page, and rests through any number of
restarts, stays unknown.

`core.cells` says why a cell is never overwritten too early.

The header has the boot's *anchor*, too: the wall time of the boot as it was when the page was made. So a deadline that
outlives the supervisor counts by a clock that nobody sets, and after another boot by the wall clock.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

from hayata.ids import parse_execution_id
from hayata_supervisor import failpoints
from hayata_supervisor.core.cells import CELLS
from hayata_supervisor.process import clock

FILE = "starts"
_CELL_BYTES = 32
_HEADER_BYTES = 4096
_SIZE = _HEADER_BYTES + CELLS * _CELL_BYTES
_UNKNOWN = b"\xff" * _CELL_BYTES  # no execution has such an id: it would be of the year 10889
_CLEAR = bytes(_CELL_BYTES)
_ANCHOR = struct.Struct("<d")
_ANCHOR_AT = 512


class StartNotes:
    """The supervisor's view: what the incarnations before have noted. Opening it makes the page ready for the next.

    Attributes:
        anchor: Wall time of the boot, in seconds, as it was when the page was made.

    Raises:
        OSError: The file can't be made.
    """

    def __init__(self, data_dir: Path) -> None:
        fd = os.open(data_dir / FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            owner = _owner(fd)
            trusted = os.fstat(fd).st_size == _SIZE and os.pread(fd, len(owner), 0) == owner
            if not trusted:
                os.ftruncate(fd, 0)
                os.posix_fallocate(fd, 0, _SIZE)  # room now: a page that finds none later would be a SIGBUS
                _write_all(fd, _UNKNOWN * CELLS, _HEADER_BYTES)
                os.pwrite(fd, _ANCHOR.pack(clock.wall() - clock.since_boot()), _ANCHOR_AT)
                failpoints.hit("notes.before_own")
                os.pwrite(fd, owner, 0)
                failpoints.hit("notes.after_own")
            self._page = mmap.mmap(fd, _SIZE, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(fd)
        self.anchor: float = _ANCHOR.unpack_from(self._page, _ANCHOR_AT)[0]

    def clear(self, cell: int) -> None:
        """Note that what is about to be marked has not begun."""
        if cell >= 0:
            start = _HEADER_BYTES + cell * _CELL_BYTES
            self._page[start : start + _CELL_BYTES] = _CLEAR

    def began(self, cell: int, execution_id: str) -> bool:
        """Whether the execution may have begun. Its cell must have been held since its mark, and its worker be dead."""
        if cell < 0:
            return True
        start = _HEADER_BYTES + cell * _CELL_BYTES
        return self._page[start : start + _CELL_BYTES] != _CLEAR


class NoteWriter:
    """An edge's view. Made before the fork, shared by all children."""

    def __init__(self, data_dir: Path) -> None:
        fd = os.open(data_dir / FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(fd).st_size < _SIZE:
                # Somebody has removed the page: notes go to one that no supervisor will trust.
                os.posix_fallocate(fd, 0, _SIZE)
            self._page = mmap.mmap(fd, _SIZE, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(fd)

    def begins(self, cell: int, execution_id: str) -> None:
        """Note that a body begins."""
        if cell >= 0:
            start = _HEADER_BYTES + cell * _CELL_BYTES
            self._page[start : start + _CELL_BYTES] = _note(execution_id)


def _note(execution_id: str) -> bytes:
    execution = parse_execution_id(execution_id)
    assert execution is not None
    edge, step, attempt = execution.edge + 1, execution.step, execution.attempt
    return execution.invocation + edge.to_bytes(4, "big") + step.to_bytes(4, "big") + attempt.to_bytes(8, "big")


def _write_all(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def _owner(fd: int) -> bytes:
    """To whom notes belong: this boot, and this very file."""
    status = os.fstat(fd)
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
    except OSError:  # not Linux: no boot is like another
        boot = os.urandom(16).hex().encode()
    return b"hayata starts 3 %s %d %d\n" % (boot, status.st_dev, status.st_ino)
