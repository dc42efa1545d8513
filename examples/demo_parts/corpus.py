"""The text to count: source files that every machine with Python has."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

_LARGEST_BYTES = 200_000
_NOT_PLAIN = re.compile(rb"[^\t-\r -~]")
_SKIPPED = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idlelib"}


def folders() -> list[str]:
    """Where to look: Python's standard library, and what is installed beside it if that is not enough."""
    return [sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")]


def batches(places: list[str], number: int, batch_bytes: int) -> list[list[str]]:
    """Make at most ``number`` batches of files, each of about ``batch_bytes`` bytes."""
    found: list[list[str]] = [[]]
    size = 0
    for path in text_files(places):
        if size >= batch_bytes:
            if len(found) == number:
                break
            found.append([])
            size = 0
        found[-1].append(path)
        size += os.path.getsize(path)
    return found


def text_files(places: list[str]) -> Iterator[str]:
    """Files of plain ASCII, of which every ``wc`` in every locale says the same."""
    for place in places:
        for folder, below, names in os.walk(place):
            below[:] = sorted(set(below) - _SKIPPED)
            for name in sorted(names):
                path = os.path.join(folder, name)
                if name.endswith((".py", ".txt", ".rst", ".md")) and _is_plain(path):
                    yield path


def _is_plain(path: str) -> bool:
    try:
        data = Path(path).read_bytes()
    except OSError:
        return False
    return 0 < len(data) <= _LARGEST_BYTES and _NOT_PLAIN.search(data) is None


def words_by_wc(files: list[str]) -> int | None:
    """What ``wc -w`` says of all these files; None without a ``wc``."""
    if shutil.which("wc") is None:
        return None
    total = 0
    for start in range(0, len(files), 200):
        command = ["wc", "-w", "--", *files[start : start + 200]]
        said = subprocess.run(command, capture_output=True, check=True).stdout
        total += int(said.splitlines()[-1].split()[0])
    return total
