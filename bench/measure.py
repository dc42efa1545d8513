"""What every contender shares: the work, the clock in the step's body, and the outcome as JSON.

Only the standard library, since the peers run with an interpreter of their own, without Hayata's packages.
"""

from __future__ import annotations

import argparse
import functools
import json
import mmap
import os
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

INVOCATION_STEPS = 50
"""Steps of one invocation. One shape for all: LangGraph's cost of a step grows with the graph's length."""

CONCURRENT = 64
"""Invocations at once in the second measurement."""

THREADS = 16
"""Threads of the peers whose calls block; more of them are slower."""

WARM_UP_STEPS = 20


@dataclass(frozen=True)
class Work:
    """What one contender does in one run.

    Attributes:
        data_dir: An empty directory for everything that is to be durable.
        invocations: Invocations one after another, of `INVOCATION_STEPS` each: the sequential measurement.
        concurrent: Invocations at once, of `INVOCATION_STEPS` each; 0 leaves this measurement out.
    """

    data_dir: str
    invocations: int
    concurrent: int

    @property
    def sequential_steps(self) -> int:
        """Steps of the sequential measurement."""
        return self.invocations * INVOCATION_STEPS

    def arguments(self) -> list[str]:
        """The work as a command line, for `parse_work`."""
        return [self.data_dir, f"--invocations={self.invocations}", f"--concurrent={self.concurrent}"]


def work_parser(description: str | None) -> argparse.ArgumentParser:
    """Make the parser that `parse_work` needs; a contender may add options of its own."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("data_dir", help="an empty directory")
    parser.add_argument("--invocations", type=int, default=4, help="one after another")
    parser.add_argument("--concurrent", type=int, default=CONCURRENT, help="at once; 0: leave this out")
    return parser


def parse_work(options: argparse.Namespace) -> Work:
    """Take the work out of parsed options."""
    return Work(options.data_dir, options.invocations, options.concurrent)


class Stamps:
    """When each step's body began, in a page of memory that bodies in any process write to.

    It is a memfd, reached by its path in ``/proc``: nothing that a step writes here touches the disk under
    test, and nothing is left behind, however the run ends.
    """

    def __init__(self, count: int) -> None:
        self._fd = os.memfd_create("hayata-bench-stamps")
        os.ftruncate(self._fd, max(count, 1) * 8)
        self.count = count
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"

    def values(self) -> list[int]:
        """What was written, 0 where nothing was."""
        return list(_open(self.path))[: self.count]

    def intervals_ms(self, group: int) -> list[float]:
        """From each body's begin to the next one's, in milliseconds, within groups of ``group`` stamps.

        Raises:
            ValueError: A body did not run.
        """
        values = self.values()
        if 0 in values:
            raise ValueError(f"step {values.index(0)} of {self.count} never ran")
        return [(values[i + 1] - values[i]) / 1e6 for i in range(len(values) - 1) if (i + 1) % group != 0]


def stamp(path: str, index: int, *, only_once: bool = False) -> None:
    """Write down that body ``index`` begins now. CLOCK_MONOTONIC is one clock for all processes."""
    if not only_once or not _open(path)[index]:
        _open(path)[index] = time.monotonic_ns()


def write_value(path: str, index: int, value: int) -> None:
    """Write another number down than the time."""
    _open(path)[index] = value


@functools.lru_cache(maxsize=4)
def _open(path: str) -> memoryview:
    fd = os.open(path, os.O_RDWR)
    try:
        return memoryview(mmap.mmap(fd, 0)).cast("q")
    finally:
        os.close(fd)


@dataclass(frozen=True)
class Outcome:
    """What one contender measured in one run.

    Attributes:
        about: Version and durability settings, as the running program reports them.
        step_p50_ms: Median of body to next body within an invocation: one whole durable step.
        step_p99_ms: 99th percentile of the same.
        step_mean_ms: Wall time of the sequential measurement by its steps, begin and end of the invocations
            included.
        concurrent_steps_s: Steps of all concurrent invocations by the wall time from the first start to the
            last result; None when left out.
    """

    about: str
    step_p50_ms: float
    step_p99_ms: float
    step_mean_ms: float
    concurrent_steps_s: float | None


def outcome(work: Work, about: str, stamps: Stamps, sequential_s: float, concurrent_s: float | None) -> Outcome:
    """Turn the wall times and the stamps of one run into an `Outcome`."""
    intervals = stamps.intervals_ms(INVOCATION_STEPS)
    steps_s = None if concurrent_s is None else work.concurrent * INVOCATION_STEPS / concurrent_s
    return Outcome(
        about=about,
        step_p50_ms=statistics.median(intervals),
        step_p99_ms=percentile(intervals, 99),
        step_mean_ms=sequential_s * 1e3 / work.sequential_steps,
        concurrent_steps_s=steps_s,
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest of ``values`` that at least ``percent`` per cent of them do not exceed (nearest rank)."""
    ordered = sorted(values)
    rank = -(-len(ordered) * percent // 100)
    return ordered[max(int(rank), 1) - 1]


def require(condition: bool, message: str) -> None:
    """End the program with ``message`` unless the work that was timed is the work that was asked for."""
    if not condition:
        raise SystemExit(f"bench: {message}")


def print_json(value: Any) -> None:
    """Print a dataclass as the one line that the caller reads."""
    json.dump(asdict(value), sys.stdout)
    sys.stdout.write("\n")
    sys.stdout.flush()


def end_cleanly_on_sigterm() -> None:
    """Let SIGTERM unwind the ``with`` blocks, so that temporary directories and child processes go."""

    def unwind(_signal: int, _frame: object) -> NoReturn:
        raise SystemExit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, unwind)
