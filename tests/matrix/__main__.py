"""The command line; see the package."""

from __future__ import annotations

import argparse
import multiprocessing
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from tests.matrix.catalog import ACTIONS, NOT_REACHED, Point, find_points, trials
from tests.matrix.sites import named_points
from tests.matrix.trial import Outcome, Trial, make_template, run

_USUAL = ("worker ready", " stream=std", "dripped")
_MOST_LINES = 30


def main(arguments: Sequence[str] | None = None) -> int:
    """Try everything; return 0 when nothing was violated and every point was struck."""
    options = _parse(arguments)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))  # and nothing is left behind
    began = time.monotonic()
    template = make_template()
    try:
        matrix = Matrix(template.home, options.jobs, keep=options.keep)
        points = [point for point in find_points(template.home) if re.search(options.only, point.name)]
        for action in options.actions:
            matrix.run(action, list(trials(points, action)))
    finally:
        template.destroy(keep=False)
    missed = matrix.report(points) if "kill" in options.actions else []
    if not options.only:
        missed += [name for name in named_points() if name not in {point.name for point in points} | {*NOT_REACHED}]
    for name in missed:
        print(f"never struck: {name}")
    print(f"{len(points)} points, {matrix.struck.total()} of point × action, in {time.monotonic() - began:.0f} s")
    print(f"violations: {len(matrix.violated)}")
    return 1 if matrix.violated or missed else 0


class Matrix:
    """Runs trials, several at once, and keeps count.

    Attributes:
        struck: Action → how many of its cases have struck.
        violated: Outcomes with violations.
    """

    def __init__(self, template: Path, jobs: int, *, keep: bool) -> None:
        self._template = template
        self._jobs = jobs
        self._keep = keep
        self._names: set[str] = set()
        self._missed: list[str] = []
        self.struck: Counter[str] = Counter()
        self.violated: list[Outcome] = []

    def run(self, action: str, wanted: list[Trial]) -> None:
        """Try these; what has not struck beside others is tried alone, and so is what may be to blame."""
        began = time.monotonic()
        alone: list[Trial] = []
        for outcome in self._outcomes(action, wanted):
            self._count(action, outcome)
            missed = [each for each in outcome.trial.armed if each not in outcome.struck]
            blamed = outcome.trial.armed if outcome.violations and len(outcome.trial.armed) > 1 else missed
            alone += [Trial((each,), outcome.trial.fresh) for each in blamed]
        first = []
        for outcome in self._outcomes(action, alone):
            self._count(action, outcome)
            if not outcome.struck:
                first.append(Trial((re.sub(r"@\d+$", "@1", outcome.trial.armed[0]),), outcome.trial.fresh))
        for outcome in self._outcomes(action, first):
            self._count(action, outcome)
            if not outcome.struck:
                self._missed += outcome.trial.armed
        count = len(wanted) + len(alone) + len(first)
        print(
            f"{action:8}{self.struck[action]:5} struck in {count} trials, {time.monotonic() - began:.0f} s", flush=True
        )

    def _outcomes(self, action: str, wanted: Iterable[Trial]) -> Iterator[Outcome]:
        with ProcessPoolExecutor(self._jobs, multiprocessing.get_context("spawn")) as pool:
            trials = [pool.submit(run, trial, self._template, keep=self._keep) for trial in wanted]
            try:
                for done in as_completed(trials):
                    yield done.result()
            finally:  # who ends us does not wait for all that has not begun
                for each in trials:
                    each.cancel()

    def _count(self, action: str, outcome: Outcome) -> None:
        self.struck[action] += len(outcome.struck)
        self._names.update(each.partition("=")[0] for each in outcome.struck)
        if outcome.violations:
            self.violated.append(outcome)
            print("\n".join(_told(outcome)), flush=True)

    def report(self, points: Iterable[Point]) -> list[str]:
        """Say what has not struck; return the points at which nothing has."""
        for each in self._missed:
            print(f"did not strike: {each}")
        return [point.name for point in points if point.name not in self._names]


def _told(outcome: Outcome) -> Iterator[str]:
    yield f"VIOLATED by {outcome.trial} (struck: {', '.join(outcome.struck) or 'nothing'})"
    yield from (f"    {text[:1000]}" for text in outcome.violations)
    lines = [line for line in outcome.log.splitlines() if not any(each in line for each in _USUAL)]
    yield from (f"        {line[:250]}" for line in lines[-_MOST_LINES:])


def _actions(text: str) -> list[str]:
    actions = text.split(",")
    unknown = [action for action in actions if action not in ACTIONS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not among {', '.join(ACTIONS)}")
    return actions


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.matrix", description="Strike at every failpoint, and check what was promised."
    )
    parser.add_argument("--only", default="", metavar="REGEX", help="points whose names match")
    parser.add_argument("--actions", type=_actions, default=list(ACTIONS), metavar="ACTION,…", help=", ".join(ACTIONS))
    parser.add_argument("--jobs", type=int, default=2, help="trials at once")
    parser.add_argument("--keep", action="store_true", help="keep the trials' directories")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
