"""Who takes part in `bench.steps` and `bench.syncs`, and how each is run: as a program that prints JSON."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from bench.measure import Outcome, Work
from bench.peers.environment import interpreter

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 900.0
_STOP_S = 15.0


@dataclass(frozen=True)
class Contender:
    """One program: ``command`` is its interpreter, module and options, without the work."""

    name: str
    command: Sequence[str]


def contenders(*, peers: bool) -> list[Contender]:
    """Hayata, and the peers unless they are left out. Makes the peers' environment if need be."""
    ours = [
        Contender("hayata", [sys.executable, "-m", "bench.hayata_steps"]),
        Contender("hayata-async", [sys.executable, "-m", "bench.hayata_steps", "--async"]),
    ]
    if not peers:
        return ours
    python = interpreter()
    return [
        *ours,
        Contender("langgraph", [python, "-m", "bench.peers.langgraph_steps"]),
        Contender("dbos", [python, "-m", "bench.peers.dbos_steps"]),
        Contender("dbos-wal", [python, "-m", "bench.peers.dbos_steps", "--wal"]),
    ]


def run(contender: Contender, work: Work, *, before: Sequence[str] = ()) -> Outcome:
    """Let one contender do the work; ``before`` is put in front of its command line.

    Raises:
        SystemExit: It failed; its own words are in the message.
    """
    return msgspec.convert(run_json([*before, *contender.command, *work.arguments()]), Outcome)


def run_json(command: Sequence[str]) -> Any:
    """Run a program of ours to its end and decode the last line that it printed.

    It is ended with SIGTERM, and given time to clean up, when this process is interrupted.

    Raises:
        SystemExit: It failed, printed no JSON, or took longer than `TIMEOUT_S`.
    """
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=_environment(os.environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=TIMEOUT_S)
        except BaseException as error:
            process.terminate()
            try:
                process.communicate(timeout=_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
            if isinstance(error, subprocess.TimeoutExpired):
                raise SystemExit(f"bench: no end after {TIMEOUT_S:.0f} s: {' '.join(command)}") from None
            raise
    if process.returncode != 0 or not out.strip():
        raise SystemExit(f"bench: exit {process.returncode}: {' '.join(command)}\n{out}{err}")
    return msgspec.json.decode(out.strip().splitlines()[-1])


def _environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Put the project's sources first: every interpreter finds `bench`, and a Hayata that isn't installed."""
    paths = [str(ROOT), str(ROOT / "supervisor"), environment.get("PYTHONPATH", "")]
    return {**environment, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


@contextmanager
def data_dirs(parent: str) -> Iterator[DataDirs]:
    """Make a temporary directory in ``parent`` for all data of this benchmark; it goes with the block."""
    with tempfile.TemporaryDirectory(prefix="hayata-bench-", dir=parent, ignore_cleanup_errors=True) as root:
        yield DataDirs(root)


class DataDirs:
    """Hands out fresh directories, all on one file system."""

    def __init__(self, root: str) -> None:
        self._root = root

    @contextmanager
    def fresh(self) -> Iterator[str]:
        """Make an empty directory; it is removed after use, so that every contender finds the disk alike."""
        with tempfile.TemporaryDirectory(prefix="d", dir=self._root, ignore_cleanup_errors=True) as path:
            yield path


def filesystem(path: str) -> str:
    """Type of the file system that holds ``path``, for example ``ext4``.

    Raises:
        SystemExit: It is in memory: commits cost nothing there, and the figures would mean nothing.
    """
    resolved = Path(path).resolve()
    kind, longest = "unknown", -1
    for line in Path("/proc/self/mounts").read_text().splitlines():
        mountpoint, fstype = line.split(" ")[1:3]
        mountpoint = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), mountpoint)
        # Not shorter: a later mount on the same point hides an earlier one.
        if resolved.is_relative_to(mountpoint) and len(mountpoint) >= longest:
            kind, longest = fstype, len(mountpoint)
    if kind in ("tmpfs", "ramfs"):
        raise SystemExit(f"bench: {path} is in memory ({kind})\n  hint: --dir names a directory on a disk")
    return kind
