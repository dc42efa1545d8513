"""The work of `bench.steps` on DBOS with SQLite, durable at every step. Prints one line of JSON.

One invocation is a workflow of `INVOCATION_STEPS` trivial steps. DBOS leaves SQLite's settings alone: a
rollback journal and ``synchronous=FULL``. ``--wal`` switches the database to a write-ahead log
beforehand, which DBOS does not do by itself, but which is as durable and faster. Workflows are called
from a pool of threads, which is a little faster than ``DBOS.start_workflow`` for all at once.
"""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import Any

from dbos import DBOS
from sqlalchemy import Engine, event

from bench.measure import (
    INVOCATION_STEPS,
    THREADS,
    WARM_UP_STEPS,
    Outcome,
    Stamps,
    Work,
    end_cleanly_on_sigterm,
    outcome,
    parse_work,
    print_json,
    require,
    stamp,
    work_parser,
)

Workflow = Callable[[int, str, int], int]
"""(steps, path of the stamps, number of the first stamp or a negative one for none) → steps done."""


def define() -> Workflow:
    """Register the step and the workflow with DBOS."""

    def step(count: int, stamps_path: str, first: int) -> int:
        if first >= 0:
            stamp(stamps_path, first + count)
        return count + 1

    durable_step = DBOS.step()(step)

    def steps_in_sequence(steps: int, stamps_path: str, first: int) -> int:
        count = 0
        while count < steps:
            count = durable_step(count, stamps_path, first)
        return count

    workflow: Workflow = DBOS.workflow()(steps_in_sequence)
    return workflow


def watch_settings() -> set[tuple[str, int]]:
    """Collect journal mode and ``synchronous`` of each connection that DBOS opens, as SQLite reports them."""
    seen: set[tuple[str, int]] = set()

    def connected(connection: Any, _record: Any) -> None:
        journal = connection.execute("PRAGMA journal_mode").fetchone()[0]
        seen.add((journal, connection.execute("PRAGMA synchronous").fetchone()[0]))

    event.listen(Engine, "connect", connected)
    return seen


def launch(data_dir: str, wal: bool) -> None:
    """Start DBOS on a fresh database."""
    path = os.path.join(data_dir, "dbos.db")
    if wal:
        connection = sqlite3.connect(path)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.close()
    DBOS(
        config={
            "name": "bench",
            "system_database_url": f"sqlite:///{path}",
            "log_level": "WARNING",
            "enable_otlp": False,
        }
    )


def run(work: Work, wal: bool) -> Outcome:
    """Do the work."""
    settings = watch_settings()
    launch(work.data_dir, wal)
    workflow = define()
    DBOS.launch()
    stamps = Stamps(work.sequential_steps)

    def invoke(steps: int, first: int) -> None:
        done = workflow(steps, stamps.path, first)
        require(done == steps, f"DBOS ran {done} of {steps} steps")

    try:
        invoke(WARM_UP_STEPS, -1)
        begin = time.perf_counter()
        for number in range(work.invocations):
            invoke(INVOCATION_STEPS, number * INVOCATION_STEPS)
        sequential_s = time.perf_counter() - begin

        concurrent_s = None
        if work.concurrent:
            with ThreadPoolExecutor(THREADS) as threads:
                begin = time.perf_counter()
                list(threads.map(lambda _: invoke(INVOCATION_STEPS, -1), range(work.concurrent)))
                concurrent_s = time.perf_counter() - begin
    finally:
        DBOS.destroy()
    require(settings == {("wal" if wal else "delete", 2)}, f"SQLite's settings are {settings}")
    journal = "WAL" if wal else "DELETE"
    about = f"DBOS {version('dbos')}, SQLite, {journal}, synchronous=FULL"
    return outcome(work, about, stamps, sequential_s, concurrent_s)


def main() -> None:
    """Do the work, print JSON."""
    parser = work_parser(__doc__)
    parser.add_argument("--wal", action="store_true", help="switch the database to a write-ahead log")
    options = parser.parse_args()
    end_cleanly_on_sigterm()
    print_json(run(parse_work(options), options.wal))


if __name__ == "__main__":
    main()
