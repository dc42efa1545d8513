"""How long a kill is felt: ``kill -9`` of a node worker and of the supervisor, idle, by a client's clock.

    python -m bench.recovery [--samples N]

Each sample kills one process of a freshly started runtime, so that no restart is delayed for earlier
ones, and reads from the moment of the signal until the processes below it are dead (by pidfd), until the
new supervisor answers, and until a new invocation of one step has its result.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import time
from typing import NamedTuple

import hayata
from bench import app
from bench.contenders import DataDirs, data_dirs
from bench.measure import end_cleanly_on_sigterm, require
from bench.processes import Deaths, Process, wait_for_tree, walk, with_role

_TIMEOUT_S = 30.0


class Measure(NamedTuple):
    """One row of the table. ``aim_ms`` is None where there is none."""

    text: str
    aim_ms: float | None


NODE_EDGES_DEAD = Measure("node killed → its edges are dead", 50)
NODE_SERVES = Measure("node killed → a new invocation has its result", 50)
ALL_DEAD = Measure("supervisor killed → every descendant is dead", 1000)
ACCEPTS = Measure("supervisor killed → the new one answers", 1000)
SUPERVISOR_SERVES = Measure("supervisor killed → a new invocation has its result", None)


def kill_node(runtime: hayata.Client) -> dict[Measure, float]:
    """Kill the node worker; returns milliseconds."""
    node = _only(runtime.tree(), "node")
    with Deaths(edge.pid for edge in node.children) as deaths:
        begin_s = kill(node)
        _one_step(runtime)
        served_s = time.monotonic()
    return {
        NODE_EDGES_DEAD: (deaths.last_s - begin_s) * 1e3,
        NODE_SERVES: (served_s - begin_s) * 1e3,
    }


def kill_supervisor(runtime: hayata.Client) -> dict[Measure, float]:
    """Kill the supervisor; returns milliseconds."""
    supervisor = _only(runtime.tree(), "supervisor")
    below = [process.pid for process in walk(supervisor) if process.pid != supervisor.pid]
    with Deaths(below) as deaths:
        begin_s = kill(supervisor)
        wait_for_tree(runtime.tree, lambda root: _is_replaced(root, supervisor), _TIMEOUT_S)
        accepts_s = time.monotonic()
        _one_step(runtime)
        served_s = time.monotonic()
    return {
        ALL_DEAD: (deaths.last_s - begin_s) * 1e3,
        ACCEPTS: (accepts_s - begin_s) * 1e3,
        SUPERVISOR_SERVES: (served_s - begin_s) * 1e3,
    }


def _is_replaced(root: Process, old: Process) -> bool:
    return any(process.pid not in (0, old.pid) for process in with_role(root, "supervisor"))


def _only(root: Process, role: str) -> Process:
    found = with_role(root, role)
    require(len(found) == 1, f"the tree has {len(found)} processes of role {role}, not one")
    return found[0]


def kill(process: Process) -> float:
    """SIGKILL it; return the monotonic time of the signal."""
    pidfd = os.pidfd_open(process.pid)
    try:
        begin_s = time.monotonic()
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    finally:
        os.close(pidfd)
    return begin_s


def _one_step(runtime: hayata.Client) -> None:
    done = runtime.run("bench", app.work(1)).result(timeout=_TIMEOUT_S)
    require(done == 1, f"an invocation of one step gave {done!r}")


def measure(samples: int, dirs: DataDirs) -> dict[Measure, list[float]]:
    """Take ``samples`` of each kill, alternating; milliseconds."""
    times: dict[Measure, list[float]] = {}
    for number in range(samples):
        for sample in (kill_node, kill_supervisor):
            print(f"bench: sample {number + 1} of {samples}: {sample.__name__}", file=sys.stderr)
            with dirs.fresh() as path, hayata.start(app.agent, data_dir=path) as runtime:
                _one_step(runtime)  # an edge worker is up, and everything has run once
                for what, took_ms in sample(runtime).items():
                    times.setdefault(what, []).append(took_ms)
    return times


def main() -> None:
    """Measure, print a table."""
    parser = argparse.ArgumentParser(prog="python -m bench.recovery", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--samples", type=int, default=10, help="kills of each kind (default 10)")
    parser.add_argument("--dir", default="/var/tmp", help="where the data goes (default /var/tmp)")
    options = parser.parse_args()
    if options.samples < 1:
        parser.error("--samples must be at least 1")
    end_cleanly_on_sigterm()
    with data_dirs(options.dir) as dirs:
        times = measure(options.samples, dirs)
    print("| from → to                                           | p50, ms | most, ms | aim, ms |")
    print("|-----------------------------------------------------|---------|----------|---------|")
    for what, values in times.items():
        aim = "" if what.aim_ms is None else f"≤ {what.aim_ms:.0f}"
        print(f"| {what.text:51} | {statistics.median(values):7.1f} | {max(values):8.1f} | {aim:>7} |")


if __name__ == "__main__":
    main()
