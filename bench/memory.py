"""Memory of an idle Hayata, process by process.

    python -m bench.memory

Starts an agent, runs some invocations at once so that its edge workers come up, waits for their results,
and then reads what each process holds alone (USS: what would be free if it were gone) and its fair share
(PSS). Aim: an idle edge worker holds at most 3 MB alone.
"""
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import argparse
import statistics
from typing import NamedTuple

import psutil

import hayata
from bench import app
from bench.contenders import data_dirs
from bench.measure import end_cleanly_on_sigterm
from bench.processes import Process, walk

AIM_BYTES = 3_000_000
_INVOCATIONS = 8
_STEPS = 10
_TIMEOUT_S = 60.0


class Held(NamedTuple):
    """What one process holds, in bytes."""

    role: str
    name: str
    pid: int
    uss: int
    pss: int


def held(root: Process) -> list[Held]:
    """Read the memory of every process of the tree."""
    result = []
    for process in walk(root):
        memory = psutil.Process(process.pid).memory_full_info()
        result.append(Held(process.role, process.name, process.pid, memory.uss, memory.pss))
    return result


def main() -> None:
    """Measure, print a table."""
    parser = argparse.ArgumentParser(prog="python -m bench.memory", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dir", default="/var/tmp", help="where the data goes (default /var/tmp)")
    options = parser.parse_args()
    end_cleanly_on_sigterm()
    with (
        data_dirs(options.dir) as dirs,
        dirs.fresh() as path,
        hayata.start(app.agent, data_dir=path) as runtime,
    ):
        running = [runtime.run("bench", app.work(_STEPS)) for _ in range(_INVOCATIONS)]
        for invocation in running:
            invocation.result(timeout=_TIMEOUT_S)
        rows = held(runtime.tree())
    print("| role       | name                           | USS, MB | PSS, MB |")
    print("|------------|--------------------------------|---------|---------|")
    for row in rows:
        print(f"| {row.role:10} | {row.name[:30]:30} | {row.uss / 1e6:7.2f} | {row.pss / 1e6:7.2f} |")
    edges = [row.uss for row in rows if row.role == "edge"]
    if not edges:
        raise SystemExit("bench: there is no idle edge worker")
    median = statistics.median(edges)
    aim = f"aim ≤ {AIM_BYTES / 1e6:.0f} MB: {'met' if median <= AIM_BYTES else 'not met'}"
    print(f"\n{len(edges)} idle edge workers, USS {median / 1e6:.2f} MB (median); {aim}")


if __name__ == "__main__":
    main()
