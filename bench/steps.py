"""Durable steps: one invocation after another, and 64 at once; beside probes and peers, in the same run.

    python -m bench.steps [--steps N] [--runs R] [--no-peers] [--dir D]

See `bench/README.md` for what is measured and how to read the tables.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from bench.contenders import Contender, DataDirs, contenders, data_dirs, filesystem, run, run_json
from bench.measure import CONCURRENT, INVOCATION_STEPS, Outcome, Work, end_cleanly_on_sigterm
from bench.probes import Probes

ROUND_TRIPS = 3
"""Of a sequential step: S → N → E and back counts as two, S → A → S as one."""

NAMES = {
    "hayata": "**Hayata**",
    "hayata-async": "Hayata, coroutine steps",
    "langgraph": "LangGraph",
    "dbos": "DBOS",
    "dbos-wal": "DBOS, switched to WAL",
}


@dataclass
class Runs:
    """What all runs have measured: one entry a run, the same index is the same run."""

    probes: list[Probes] = field(default_factory=list)
    outcomes: dict[str, list[Outcome]] = field(default_factory=dict)

    def median(self, name: str, value: Callable[[Outcome], float]) -> float:
        """Median over the runs of one contender's figure."""
        return statistics.median(value(one) for one in self.outcomes[name])

    def floors_ms(self) -> list[float]:
        """One commit and three round trips, for each run."""
        return [one.commit_p50_ms + ROUND_TRIPS * one.round_trip_p50_ms for one in self.probes]

    def median_ratio(self, over: Sequence[float], under: Sequence[float]) -> float:
        """Median over the runs of a ratio taken within each: what slows a whole run down cancels out."""
        return statistics.median(a / b for a, b in zip(over, under, strict=True))


def measure(todo: Sequence[Contender], invocations: int, runs: int, dirs: DataDirs) -> Runs:
    """Run everything ``runs`` times, interleaved; each run begins with another contender."""
    result = Runs(outcomes={contender.name: [] for contender in todo})
    for number in range(runs):
        with dirs.fresh() as path:
            command = [sys.executable, "-m", "bench.probes", path]
            result.probes.append(msgspec.convert(run_json(command), Probes))
        turn = number % len(todo)
        for contender in [*todo[turn:], *todo[:turn]]:
            print(f"bench: run {number + 1} of {runs}: {contender.name}", file=sys.stderr)
            with dirs.fresh() as path:
                outcome = run(contender, Work(path, invocations, CONCURRENT))
            result.outcomes[contender.name].append(outcome)
    return result


def figures(runs: Runs) -> list[str]:
    """The table of what was measured, as lines of Markdown."""
    first = runs.probes
    rows = [
        ["", "p50, ms", "p99, ms", "ms a step", f"steps/s, {CONCURRENT} concurrent", "settings"],
        [
            "probe: LMDB sync commit",
            f"{statistics.median(one.commit_p50_ms for one in first):.3f}",
            f"{statistics.median(one.commit_p99_ms for one in first):.3f}",
            "",
            "",
            "one record",
        ],
        [
            "probe: round trip between two processes",
            f"{statistics.median(one.round_trip_p50_ms for one in first):.3f}",
            f"{statistics.median(one.round_trip_p99_ms for one in first):.3f}",
            "",
            "",
            "socketpair, msgspec",
        ],
    ]
    for name, outcomes in runs.outcomes.items():
        rows.append(
            [
                NAMES[name],
                f"{runs.median(name, lambda one: one.step_p50_ms):.2f}",
                f"{runs.median(name, lambda one: one.step_p99_ms):.2f}",
                f"{runs.median(name, lambda one: one.step_mean_ms):.2f}",
                f"{runs.median(name, _concurrent):,.0f}",
                outcomes[0].about,
            ]
        )
    return _table(rows)


@dataclass(frozen=True)
class Aim:
    """One aim: ``met`` compares what was measured with the target."""

    text: str
    measured: float
    target: float
    at_most: bool = False

    @property
    def met(self) -> bool:
        """Whether it is reached."""
        return self.measured <= self.target if self.at_most else self.measured >= self.target

    def row(self) -> list[str]:
        """As a row of the table."""
        shown = f"{self.measured:,.0f}" if self.measured >= 100 else f"{self.measured:.2f}"
        return [
            self.text,
            shown,
            f"{'≤' if self.at_most else '≥'} {self.target:,g}",
            "yes" if self.met else "**no**",
        ]


def aims(runs: Runs) -> list[Aim]:
    """What Hayata should reach, as ratios within each run wherever there is something to compare with."""
    ours = runs.outcomes["hayata"]
    p50 = [one.step_p50_ms for one in ours]
    steps_s = [_concurrent(one) for one in ours]
    result = [
        Aim(
            "p50 ÷ (one commit + three round trips)",
            runs.median_ratio(p50, runs.floors_ms()),
            2,
            at_most=True,
        ),
        Aim(f"steps/s, {CONCURRENT} concurrent", statistics.median(steps_s), 4000),
    ]
    for name, factor in (("langgraph", 10), ("dbos", 20)):
        if name not in runs.outcomes:
            continue
        theirs = runs.outcomes[name]
        if name == "langgraph":
            their_p50 = [one.step_p50_ms for one in theirs]
            result.append(Aim("LangGraph's p50 ÷ Hayata's", runs.median_ratio(their_p50, p50), 3))
        ratio = runs.median_ratio(steps_s, [_concurrent(one) for one in theirs])
        result.append(Aim(f"Hayata's steps/s ÷ {NAMES[name]}'s", ratio, factor))
    return result


def _concurrent(one: Outcome) -> float:
    if one.concurrent_steps_s is None:
        raise SystemExit("bench: a contender left the concurrent measurement out")
    return one.concurrent_steps_s


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return lines


def _about(where: str, kind: str, runs: int, invocations: int) -> str:
    cores = len(os.sched_getaffinity(0))
    load = ", ".join(f"{value:.2f}" for value in os.getloadavg())
    return (
        f"Medians of {runs} interleaved runs, {invocations * INVOCATION_STEPS} sequential steps a run in "
        f"invocations of {INVOCATION_STEPS}; {cores} cores, {kind} ({where}), "
        f"CPython {platform.python_version()}, Linux {platform.release()}, "
        f"load at the start {load}, {time.strftime('%Y-%m-%d')}."
    )


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.steps", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000, help="sequential steps a run (default 1000)")
    parser.add_argument("--runs", type=int, default=5, help="runs to take the medians of (default 5)")
    parser.add_argument("--no-peers", action="store_true", help="Hayata and the probes alone")
    parser.add_argument("--dir", default="/var/tmp", help="where the data goes, on a disk (default /var/tmp)")
    options = parser.parse_args()
    if options.steps < 1 or options.runs < 1:
        parser.error("--steps and --runs must be at least 1")
    end_cleanly_on_sigterm()
    invocations = -(-options.steps // INVOCATION_STEPS)
    about = _about(options.dir, filesystem(options.dir), options.runs, invocations)
    todo = contenders(peers=not options.no_peers)
    with data_dirs(options.dir) as dirs:
        runs = measure(todo, invocations, options.runs, dirs)
    print(
        "\n".join(
            [
                *figures(runs),
                "",
                *_table([["aim", "measured", "target", "met"], *(aim.row() for aim in aims(runs))]),
            ]
        )
    )
    print(f"\n{about}")


if __name__ == "__main__":
    main()
