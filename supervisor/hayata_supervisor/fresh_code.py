"""What a forkserver imports is what stands in the files, and whether that is the same as before.

Python believes a ``.pyc`` if it names the source's size and the second of its last change. Code that is edited twice
within a second, or in the second in which somebody imported it, would then run as it was before: with reloads that
happens. So bytecode is used only where it was written at least two seconds after its source, and none is written for
a source younger than that. What is installed beside the interpreter is left alone: there, all is new on the day of
its installation, and compiling it at each start would take seconds.

Source: git's "racily clean" entries of the index.
"""

from __future__ import annotations

import os
import site
import sys
import sysconfig
import time
from collections.abc import Mapping
from importlib.machinery import SourceFileLoader
from importlib.util import cache_from_source
from types import ModuleType
from typing import Any
from zlib import crc32

_MARGIN_NS = 2_000_000_000
_SLACK_NS = 50_000_000
"""A file's time comes from the kernel's coarse clock, which is a tick behind."""


def _installed() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    folders = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders |= {*site.getsitepackages(), site.getusersitepackages()}
    return tuple(os.path.join(folder, "") for folder in folders)


def distrust_young_bytecode() -> None:
    """Have this process, and its forks, import by the rule above."""
    installed = _installed()
    path_stats = SourceFileLoader.path_stats

    def stats(self: SourceFileLoader, path: str) -> Mapping[str, Any]:
        if not path.startswith(installed) and not _is_settled(path):
            raise OSError(f"{path} is too young for its bytecode")  # then it is neither read nor written
        return path_stats(self, path)

    # Every way to import a source file leads here: path entries, scripts by name, finders of editable installs.
    SourceFileLoader.path_stats = stats  # type: ignore[method-assign]


def _is_settled(path: str) -> bool:
    changed_ns = os.stat(path).st_mtime_ns
    if changed_ns > time.time_ns() - _MARGIN_NS:
        return False
    try:
        written_ns = os.stat(cache_from_source(path)).st_mtime_ns
    except OSError:
        return True
    return written_ns >= changed_ns + _MARGIN_NS


def fingerprint(since_ns: int) -> str:
    """Describe the files of all modules that are imported, so that another process can tell whether it has the same.

    Args:
        since_ns: Wall time at which the import began. If a file has changed since, nobody knows what of it was
            read, and the fingerprint equals no other.
    """
    lines = []
    for name, module in sorted(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if not isinstance(module, ModuleType) or not isinstance(path, str):
            continue
        try:
            status = os.stat(path)
        except OSError:
            continue
        if status.st_mtime_ns > since_ns - _SLACK_NS and not path.endswith(".pyc"):
            return os.urandom(8).hex()
        lines.append(f"{name}\0{path}\0{status.st_mtime_ns}\0{status.st_size}")
    return f"{crc32(os.fsencode(chr(10).join(lines))):08x}"
