"""Starting `tests.support.store_child`, and ending it."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 30.0
ENVIRONMENT = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'supervisor'}"}


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "tests.support.store_child", *(str(word) for word in words)]


def run(*words: object, before: Sequence[str] = (), **options: Any) -> list[str]:
    """Run it to its end; what it told, as lines."""
    done = run_to_end(*words, before=before, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def run_to_end(*words: object, before: Sequence[str] = (), **options: Any) -> subprocess.CompletedProcess[str]:
    """Run it, whatever comes of it."""
    return subprocess.run(
        [*before, *command(*words)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env=ENVIRONMENT,
        check=False,
        **({"cwd": ROOT} | options),
    )


class Child:
    """A running one, spoken to by lines."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self._kept = b""

    def ask(self, line: str = "") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        """The next line.

        Raises:
            TimeoutError: None came.
            EOFError: It has ended.
        """
        assert self.process.stdout is not None
        fd = self.process.stdout.fileno()
        deadline = time.monotonic() + DEADLINE_S
        while b"\n" not in self._kept:
            if not select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError("the child says nothing")
            more = os.read(fd, 65536)
            if not more:
                raise EOFError("the child has ended")
            self._kept += more
        line, _, self._kept = self._kept.partition(b"\n")
        return line.decode()


@contextmanager
def child(*words: object) -> Iterator[Child]:
    """Start it; killed and reaped at the end."""
    with subprocess.Popen(
        command(*words), stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env=ENVIRONMENT
    ) as process:
        try:
            yield Child(process)
        finally:
            process.kill()
