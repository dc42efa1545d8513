"""What growth costs: long histories, many open invocations, a huge state.

    python -m bench.growth [--dir D] [--steps N] [--open N] [--state-mb N] [PART…]

``bytes`` appends 1 KB a step to a list for 1,000 steps and reads the size of the store's file as it goes.
``time`` runs 10,000 steps in one invocation, and beside its last ones the same number in a fresh invocation.
``open`` kills a runtime with 10,000 unfinished invocations, starts it again and waits for the first body that
is resumed. ``state`` has a state of 100 MB, with the default frame cap and with a larger one.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import hayata
from bench import growth_app as app
from bench.contenders import DataDirs, data_dirs
from bench.measure import Stamps, end_cleanly_on_sigterm, require
from hayata.framing import DEFAULT_CAP_BYTES

_TIMEOUT_S = 900.0
_POINTS = (10, 100, 1000)
_WINDOW = 1000
_MOST_BYTES = 3 * 1024
_MOST_DRIFT = 0.20
_MOST_RESTART_S = 2.0


class Row(NamedTuple):
    """One line of the table; ``met`` is None where there is no aim."""

    what: str
    measured: str
    aim: str = ""
    met: bool | None = None


def bytes_a_step(dirs: DataDirs, steps: int) -> list[Row]:
    """How many bytes the store's file has grown by a step, on the average up to some steps."""
    points = [point for point in _POINTS if point < steps] + [steps]
    sizes = Stamps(steps + 1)
    with dirs.fresh() as path, hayata.start(app.appender, data_dir=path) as runtime:
        data = Path(path) / "store" / "data.mdb"
        runtime.call("appender", app.appending(0, None, ""), timeout=_TIMEOUT_S)
        before = data.stat().st_size
        runtime.call("appender", app.appending(steps, sizes.path, str(data)), timeout=_TIMEOUT_S)
        grown = [size - before for size in sizes.values()]
        grown[steps] = data.stat().st_size - before
    rows = []
    for point in points:
        each = grown[point] / point
        rows.append(
            Row(
                f"file grown by step {point:,}, bytes a step of {app.APPENDED_BYTES:,} appended",
                f"{each:,.0f}",
                f"≤ {_MOST_BYTES:,}",
                each <= _MOST_BYTES,
            )
        )
    return rows


def time_a_step(dirs: DataDirs, steps: int) -> list[Row]:
    """How long a step takes at the end of a long invocation, by what one of a fresh one takes.

    The two run beside each other, so that what else the machine does slows both alike.
    """
    window = min(_WINDOW, steps // 4)
    long, fresh = Stamps(steps), Stamps(2 * window)
    with dirs.fresh() as path, hayata.start(app.counter, data_dir=path) as runtime:
        first = runtime.run("counter", app.counting(steps, long.path))
        while not long.values()[steps - 2 * window]:
            require(first.status() == "running", "the long invocation does not run")
            time.sleep(0.01)
        second = runtime.run("counter", app.counting(2 * window, fresh.path))
        for invocation, wanted in ((first, steps), (second, 2 * window)):
            done = invocation.result(timeout=_TIMEOUT_S)
            require(done == wanted, f"Hayata ran {done} of {wanted} steps")
    # Not the very first steps, in which workers come up, and only while both run.
    took = [
        statistics.median(each.intervals_ms(each.count)[-2 * window :][100 : window + 100]) for each in (fresh, long)
    ]
    begin = statistics.median(long.intervals_ms(steps)[100 : window + 100])
    drift = took[1] / took[0] - 1
    return [
        Row(f"step in 100 to {window + 100:,}, alone, p50 ms", f"{begin:.3f}"),
        Row(f"step in the last {2 * window:,} of {steps:,}, p50 ms", f"{took[1]:.3f}"),
        Row("step of a fresh invocation beside it, p50 ms", f"{took[0]:.3f}"),
        Row(
            "the end by the beginning, side by side",
            f"{drift:+.0%}",
            f"± {_MOST_DRIFT:.0%}",
            abs(drift) <= _MOST_DRIFT,
        ),
    ]


def restart(dirs: DataDirs, count: int) -> list[Row]:
    """How long from a start with so many open invocations to the first body that is resumed."""
    with dirs.fresh() as path:
        gate = Path(path) / "gate"
        began = Stamps(1)
        given = app.gated(str(gate), began.path)
        runtime = hayata.start(app.waiter, data_dir=path)
        try:
            for _ in range(count):
                runtime.run("waiter", given)
            open_before = runtime.stats()["open_invocations"]
        finally:
            _kill_all(runtime)
        require(open_before == count, f"{open_before:.0f} of {count} invocations are open")
        gate.touch()
        begin = time.monotonic()
        with hayata.start(app.waiter, data_dir=path) as again:
            serving_s = time.monotonic() - begin
            resumed_s = _first(began) - begin
            open_after = again.stats()["open_invocations"]
            again.close(0.0)
    return [
        Row(
            f"{count:,} open invocations, {open_after:,.0f} when it serves; serving after, s",
            f"{serving_s:.2f}",
        ),
        Row(
            "first resumed body after, s",
            f"{resumed_s:.2f}",
            f"≤ {_MOST_RESTART_S:g}",
            resumed_s <= _MOST_RESTART_S,
        ),
    ]


def _kill_all(runtime: hayata.Client) -> None:
    """SIGKILL guard and supervisor; the workers follow."""
    root = runtime.tree()
    pidfds = [os.pidfd_open(process.pid) for process in (root, root.children[0])]
    for pidfd in pidfds:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    for pidfd in pidfds:
        os.close(pidfd)
    runtime.close()


def _first(began: Stamps) -> float:
    deadline = time.monotonic() + _TIMEOUT_S
    while not (stamp := began.values()[0]):
        require(time.monotonic() < deadline, "nothing is resumed")
        time.sleep(0.001)
    return stamp / 1e9


def huge_state(dirs: DataDirs, megabytes: int) -> list[Row]:
    """Whether a state of so many megabytes works, and how it fails when it may not."""
    rows = []
    for cap in (DEFAULT_CAP_BYTES, 4 * megabytes * 1_000_000):
        for at_once in (True, False):
            with dirs.fresh() as path, hayata.start(app.hoarder, data_dir=path, frame_cap_bytes=cap) as runtime:
                outcome, took_s = _hoard(runtime, megabytes, at_once=at_once)
                goes_on = runtime.call("hoarder", app.hoarding(1), timeout=_TIMEOUT_S)
                require(goes_on == 1_000_000, "the runtime does not go on with others")
            how = "at once" if at_once else "10 MB a step"
            limit = f"{cap / 1e6:,.0f} MB"
            rows.append(Row(f"state of {megabytes} MB, {how}; frame cap {limit}", f"{outcome}, {took_s:.1f} s"))
    return rows


def _hoard(runtime: hayata.Client, megabytes: int, *, at_once: bool) -> tuple[str, float]:
    begin = time.monotonic()
    invocation = runtime.run("hoarder", app.hoarding(megabytes, at_once=at_once))
    try:
        outcome = f"works: {invocation.result(timeout=_TIMEOUT_S):,} bytes"
    except hayata.HayataError as error:
        outcome = f"fails: {error.code}"
        tried = [task.attempt for task in invocation.tasks()]
        require(max(tried, default=1) == 1, f"it was tried {max(tried, default=1)} times")
        require(runtime.invocation(invocation.id).status() == "failed", "it did not end")
    return outcome, time.monotonic() - begin


def main() -> None:
    """Measure, print a table."""
    parser = argparse.ArgumentParser(prog="python -m bench.growth", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", nargs="*", help="bytes, time, open, state (default: all)")
    parser.add_argument("--steps", type=int, default=10_000, help="of the long invocation (default 10,000)")
    parser.add_argument("--open", type=int, default=10_000, help="unfinished invocations (default 10,000)")
    parser.add_argument("--state-mb", type=int, default=100, help="size of the huge state (default 100)")
    parser.add_argument("--dir", default="/var/tmp", help="where the data goes (default /var/tmp)")
    options = parser.parse_args()
    end_cleanly_on_sigterm()
    parts: dict[str, Callable[[DataDirs], list[Row]]] = {
        "bytes": lambda dirs: bytes_a_step(dirs, 1000),
        "time": lambda dirs: time_a_step(dirs, options.steps),
        "open": lambda dirs: restart(dirs, options.open),
        "state": lambda dirs: huge_state(dirs, options.state_mb),
    }
    unknown = set(options.part) - set(parts)
    if unknown:
        parser.error(f"there is no part {min(unknown)}")
    rows = []
    with data_dirs(options.dir) as dirs:
        for name in options.part or parts:
            print(f"bench: {name}", file=sys.stderr)
            rows += parts[name](dirs)
    print("| what | measured | aim | met |")
    print("|---|---|---|---|")
    for row in rows:
        met = "" if row.met is None else ("yes" if row.met else "**no**")
        print(f"| {row.what} | {row.measured} | {row.aim} | {met} |")


if __name__ == "__main__":
    main()
