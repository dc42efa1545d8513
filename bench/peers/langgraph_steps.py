"""The work of `bench.steps` on LangGraph with SQLite, durable at every step. Prints one line of JSON.

One invocation is a graph of `INVOCATION_STEPS` trivial nodes in sequence. ``durability="sync"`` makes
LangGraph wait for the checkpoint of a step before it begins the next, ``synchronous=FULL`` makes SQLite
wait for the disk.
"""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import itertools
import os
import sqlite3
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import Any, TypedDict

from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import END, START, StateGraph

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


class State(TypedDict):
    """``first`` is the number of the invocation's first stamp, negative for none."""

    count: int
    first: int


def chain(saver: Any, steps: int, stamps_path: str) -> Any:
    """Compile a graph of ``steps`` nodes in sequence."""

    def step(state: State) -> dict[str, int]:
        if state["first"] >= 0:
            stamp(stamps_path, state["first"] + state["count"])
        return {"count": state["count"] + 1}

    graph = StateGraph(State)
    names = [START, *(f"step_{number}" for number in range(steps)), END]
    for name in names[1:-1]:
        graph.add_node(name, step)
    for source, target in itertools.pairwise(names):
        graph.add_edge(source, target)
    return graph.compile(checkpointer=saver)


def invoke(app: Any, steps: int, first: int) -> None:
    """Run one invocation to its end."""
    config = {"configurable": {"thread_id": uuid.uuid4().hex}, "recursion_limit": steps + 10}
    state = app.invoke({"count": 0, "first": first}, config, durability="sync")
    require(state["count"] == steps, f"LangGraph ran {state['count']} of {steps} steps")


def connect(data_dir: str) -> tuple[sqlite3.Connection, str]:
    """Open the database; returns it with its settings as SQLite reports them."""
    connection = sqlite3.connect(os.path.join(data_dir, "langgraph.db"), check_same_thread=False)
    connection.execute("PRAGMA journal_mode=WAL")  # what SqliteSaver sets, too
    connection.execute("PRAGMA synchronous=FULL")
    journal = connection.execute("PRAGMA journal_mode").fetchone()[0]
    synchronous = connection.execute("PRAGMA synchronous").fetchone()[0]
    require(synchronous == 2, f"synchronous is {synchronous}, not 2 (FULL)")
    return connection, f'SQLite, {journal.upper()}, synchronous=FULL, durability="sync"'


def run(work: Work) -> Outcome:
    """Do the work."""
    connection, settings = connect(work.data_dir)
    stamps = Stamps(work.sequential_steps)
    saver = SqliteSaver(connection)
    invoke(chain(saver, WARM_UP_STEPS, stamps.path), WARM_UP_STEPS, -1)
    app = chain(saver, INVOCATION_STEPS, stamps.path)

    begin = time.perf_counter()
    for number in range(work.invocations):
        invoke(app, INVOCATION_STEPS, number * INVOCATION_STEPS)
    sequential_s = time.perf_counter() - begin

    concurrent_s = None
    if work.concurrent:
        with ThreadPoolExecutor(THREADS) as threads:
            begin = time.perf_counter()
            list(threads.map(lambda _: invoke(app, INVOCATION_STEPS, -1), range(work.concurrent)))
            concurrent_s = time.perf_counter() - begin
    connection.close()
    return outcome(work, f"LangGraph {version('langgraph')}, {settings}", stamps, sequential_s, concurrent_s)


def main() -> None:
    """Do the work, print JSON."""
    options = work_parser(__doc__).parse_args()
    end_cleanly_on_sigterm()
    print_json(run(parse_work(options)))


if __name__ == "__main__":
    main()
