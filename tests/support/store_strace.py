"""Faults of single system calls, by strace."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path


def strace(inject: str, *paths: Path) -> list[str]:
    """A command prefix that injects a fault into the calls on these paths: ``fdatasync:error=EIO:when=3``."""
    calls = inject.split(":")[0]
    options = [f"--trace-path={path}" for path in paths]
    return ["strace", "-f", "-qq", "-o", "/dev/null", f"--trace={calls}", *options, f"--inject={inject}"]


def can_strace() -> bool:
    """Whether there is an strace, and it may trace."""
    if shutil.which("strace") is None:
        return False
    tried = subprocess.run([*strace("fsync:error=EIO"), "true"], capture_output=True, check=False)
    return tried.returncode == 0
