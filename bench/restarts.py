"""Descriptors, zombies and memory of guard and supervisor, before and after many crash-restarts of what is below them.

    python -m bench.restarts [--kills N]

Kills edges, node workers, agent workers and now and then the forkserver with SIGKILL, each time when the last one is
replaced and a step has run. Aim: after 500 of them everything is where it was.
"""

from __future__ import annotations

import argparse
import functools
import os
import signal
import sys
import time
from pathlib import Path
from typing import NamedTuple

import hayata
from bench import app
from bench.contenders import data_dirs
from bench.measure import end_cleanly_on_sigterm, require
from bench.processes import Process, wait_for_tree, walk, with_role

_ROUND = ("edge", "node", "edge", "agent")
_FORKSERVER_EVERY = 50
"""It is started later each time, when it dies often."""

_WARM_UP = 40
_TIMEOUT_S = 60.0
_GROWTH_BYTES = 2_000_000
"""What an allocator may keep; a leak of 4 KB a restart would be as much."""


class Held(NamedTuple):
    """What there is at a quiet moment.

    Attributes:
        descriptors: Of guard and supervisor, but those of edges.
        zombies: Dead and not reaped, below the guard.
        guard_bytes: Anonymous memory that is resident: not the pages of the store's file.
        supervisor_bytes: The same.
        processes: Below the guard.
    """

    descriptors: int
    zombies: int
    guard_bytes: int
    supervisor_bytes: int
    processes: int


def victim(number: int) -> str:
    """The role that is killed as ``number``, from 0."""
    if number % _FORKSERVER_EVERY == _FORKSERVER_EVERY - 1:
        return "forkserver"
    return _ROUND[number % len(_ROUND)]


def kill_all(runtime: hayata.Client, kills: int, first: int = 0) -> None:
    """Kill one after the other, and see each one replaced."""
    for number in range(first, first + kills):
        root = wait_for_tree(runtime.tree, _is_whole, _TIMEOUT_S)
        process = with_role(root, victim(number))[0]
        pidfd = os.pidfd_open(process.pid)
        try:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        finally:
            os.close(pidfd)
        wait_for_tree(runtime.tree, functools.partial(_is_replaced, process), _TIMEOUT_S)
        done = runtime.run("restarts", app.work(1)).result(timeout=_TIMEOUT_S)
        require(done == 1, f"an invocation of one step gave {done!r}")


def _is_replaced(dead: Process, root: Process) -> bool:
    return dead.pid not in {process.pid for process in walk(root)}


def _is_whole(root: Process) -> bool:
    """Whether everybody is there, with one edge."""
    found = [process for process in walk(root) if process.pid]
    counts = {role: sum(process.role == role for process in found) for role in ("edge", "node", "agent", "forkserver")}
    return counts == {"edge": 1, "node": 1, "agent": 1, "forkserver": 1}


def held(runtime: hayata.Client) -> Held:
    """Wait for a quiet moment and look."""
    deadline_s = time.monotonic() + _TIMEOUT_S
    last = None
    while True:
        root = wait_for_tree(runtime.tree, _is_whole, _TIMEOUT_S)
        supervisor = with_role(root, "supervisor")[0]
        below = _below(root.pid)
        seen = Held(
            sum(len(os.listdir(f"/proc/{process.pid}/fd")) for process in (root, supervisor)),
            sum(state in "ZX" for state in below),
            _anonymous(root.pid),
            _anonymous(supervisor.pid),
            len(below),
        )
        if last is not None and (seen.descriptors, seen.zombies, seen.processes) == last[:2] + last[4:]:
            return seen
        require(time.monotonic() < deadline_s, f"it does not get quiet: {seen}")
        last = seen
        time.sleep(0.2)


def _below(guard: int) -> list[str]:
    """The states of all descendants."""
    children: dict[int, list[tuple[int, str]]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                state, parent, *_ = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            children.setdefault(int(parent), []).append((int(name), state))
    states, front = [], [guard]
    while front:
        for pid, state in children.get(front.pop(), ()):
            states.append(state)
            front.append(pid)
    return states


def _anonymous(pid: int) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.partition("RssAnon:")[2].split()[0]) * 1024


def main() -> None:
    """Measure, print a table; exit 1 when something has grown."""
    parser = argparse.ArgumentParser(prog="python -m bench.restarts", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=500, help="how many (default 500)")
    parser.add_argument("--dir", default="/var/tmp", help="where the data goes (default /var/tmp)")
    options = parser.parse_args()
    if options.kills < 1:
        parser.error("--kills must be at least 1")
    end_cleanly_on_sigterm()
    with (
        data_dirs(options.dir) as dirs,
        dirs.fresh() as path,
        hayata.start(app.patient_agent, data_dir=path, log_level="error") as runtime,
    ):
        runtime.run("restarts", app.work(1)).result(timeout=_TIMEOUT_S)
        kill_all(runtime, _WARM_UP)
        before, began_s = held(runtime), time.monotonic()
        kill_all(runtime, options.kills, _WARM_UP)
        took_s, after = time.monotonic() - began_s, held(runtime)
    sys.exit(_report(before, after, options.kills, took_s))


def _report(before: Held, after: Held, kills: int, took_s: float) -> int:
    print(f"| {f'after {_WARM_UP}, and after {kills} more kills':33} |  before |   after |")
    print("|-----------------------------------|---------|---------|")
    print(f"| descriptors, guard and supervisor | {before.descriptors:7} | {after.descriptors:7} |")
    print(f"| zombies below the guard           | {before.zombies:7} | {after.zombies:7} |")
    print(f"| processes below the guard         | {before.processes:7} | {after.processes:7} |")
    print(f"| guard's own memory, MB            | {before.guard_bytes / 1e6:7.2f} | {after.guard_bytes / 1e6:7.2f} |")
    supervisor = f"{before.supervisor_bytes / 1e6:7.2f} | {after.supervisor_bytes / 1e6:7.2f}"
    print(f"| supervisor's own memory, MB       | {supervisor} |")
    grown_bytes = max(after.guard_bytes - before.guard_bytes, after.supervisor_bytes - before.supervisor_bytes)
    same = after.descriptors <= before.descriptors and after.processes <= before.processes
    met = same and not after.zombies and grown_bytes <= _GROWTH_BYTES
    print(f"\n{kills} crash-restarts in {took_s:.0f} s; aim, all as before: {'met' if met else 'not met'}")
    return 0 if met else 1


if __name__ == "__main__":
    main()
