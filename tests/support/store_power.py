"""Power cuts: what a disk may hold of a file, at any moment of a run that strace has recorded.

A disk keeps what was synced, and of the rest any sectors, in any order. A recording knows which is which:
`fdatasync` makes all earlier writes to the file durable, a write on an O_DSYNC descriptor only itself.
"""

from __future__ import annotations

import random
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.store_rig import DEADLINE_S, ENVIRONMENT, ROOT, command

SECTOR_BYTES = 512

_CALL = re.compile(r"(?:\d+ +)?(\w+)\((\d+)<([^>]*)>(.*)\) += (\d+)")
_HEX = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')
_OPEN = re.compile(r'(?:\d+ +)?openat\(.*data\.mdb".*(O_DSYNC).*\) += (\d+)<')


@dataclass
class Disk:
    """A file on a disk that has not been told to sync everything."""

    durable: bytearray
    pending: list[tuple[int, bytes]] = field(default_factory=list)

    def write(self, offset: int, data: bytes) -> None:
        self.pending.append((offset, data))

    def sync(self) -> None:
        for offset, data in self.pending:
            _put(self.durable, offset, data)
        self.pending.clear()

    def after_power_cut(self, chance: random.Random, share: float) -> bytes:
        """What may be found: the durable part, and about this share of the sectors that were not synced."""
        image = bytearray(self.durable)
        for offset, data in self.pending:
            for start, end in _sectors(offset, len(data)):
                if chance.random() < share:
                    _put(image, offset + start, data[start:end])
        return bytes(image)


def record(data_dir: Path, *words: object) -> list[str]:
    """Run a command of `store_child` under strace; its calls, one a line."""
    log = data_dir.with_suffix(".strace")
    calls = "openat,lseek,writev,pwrite64,write,fdatasync"
    prefix = ["strace", "-f", "-qq", "-y", "-xx", "-s", "1000000", "-e", f"trace={calls}", "-o", str(log)]
    subprocess.run(
        [*prefix, *command(words[0], data_dir, *words[1:])],
        check=True, capture_output=True, timeout=DEADLINE_S, cwd=ROOT, env=ENVIRONMENT,
    )  # fmt: skip
    return log.read_text().splitlines()


def moments(before: bytes, calls: list[str]) -> Iterator[tuple[int, Disk]]:
    """After each call that changes the data file: how many batches were acknowledged, and the disk."""
    disk = Disk(bytearray(before))
    position, acknowledged = 0, -1
    dsync: set[str] = set()
    for line in calls:
        if opened := _OPEN.match(_plain(line)):
            dsync.add(opened[2])
        match = _CALL.match(line)
        if match is None:
            continue
        name, fd, path, rest, result = match.groups()
        data = b"".join(bytes.fromhex(text.replace("\\x", "")) for text in _HEX.findall(rest))
        if name == "write" and fd == "1":
            acknowledged = int(data.split()[-1])
        if not _plain(path).endswith("data.mdb"):
            continue
        assert name != "write"
        match name:
            case "lseek":
                position = int(result)
                continue
            case "writev":
                assert len(data) == int(result)
                disk.write(position, data)
            case "pwrite64":
                assert len(data) == int(result)
                offset = int(rest.rsplit(", ", 1)[1])
                if fd in dsync:
                    yield acknowledged, Disk(bytearray(disk.durable), [*disk.pending, (offset, data)])
                    _put(disk.durable, offset, data)
                else:
                    disk.write(offset, data)
            case "fdatasync":
                disk.sync()
        yield acknowledged, disk


def _plain(text: str) -> str:
    """Undo strace's ``-xx``, which spares not even paths."""
    return re.sub(r"\\x([0-9a-f]{2})", lambda match: chr(int(match[1], 16)), text)


def _sectors(offset: int, size: int) -> Iterator[tuple[int, int]]:
    start = 0
    while start < size:
        end = min(size, start + SECTOR_BYTES - (offset + start) % SECTOR_BYTES)
        yield start, end
        start = end


def _put(image: bytearray, offset: int, data: bytes) -> None:
    if len(image) < offset:
        image.extend(bytes(offset - len(image)))
    image[offset : offset + len(data)] = data
