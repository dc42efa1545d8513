"""What a step costs does not depend on how many came before it.

The bodies run inline: in one process, CPU time is what all of the runtime needs for a step, whatever else the
machine does. `bench.growth` measures the same with processes and a clock.
"""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hayata
from hayata import Agent, Finish, Next

APPENDED_BYTES = 1024
MOST_BYTES = 3 * 1024
STEPS = 10_000
WINDOW = 1000


@pytest.fixture
def quick_dir() -> Iterator[Path]:
    """In memory where there is such a place: bytes and CPU time are compared, and a sync only waits."""
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="hgrowth-", dir=parent) as path:
        yield Path(path)


def test_a_thousand_appends_of_a_kilobyte_grow_the_file_linearly_d7(quick_dir: Path) -> None:
    """D7, langgraph 7843: the store does not keep the full state of each step."""
    data = quick_dir / "store" / "data.mdb"
    sizes: list[int] = []

    def append(state: Any) -> dict[str, Any]:
        sizes.append(os.stat(data).st_size)
        return {"messages": "x" * APPENDED_BYTES}

    def again(context: Any) -> Any:
        return Next("append") if context.step < context.input else Finish(len(context.state["messages"]))

    agent = Agent(
        "appender",
        nodes={"append": append},
        decision_policy=again,
        merge={"messages": "append"},
        max_steps=1000,
    )
    with hayata.start(agent, data_dir=quick_dir, inline=True) as runtime:
        runtime.call("appender", 1, timeout=60.0)  # the first one needs pages for tables that are empty
        sizes.clear()
        assert runtime.call("appender", 1000, timeout=60.0) == 1000
        assert runtime.verify().problems == ()
    sizes.append(os.stat(data).st_size)
    for step in (10, 30, 100, 300, 1000):
        assert (sizes[step] - sizes[0]) / step <= MOST_BYTES, f"{step} steps: {sizes[step] - sizes[0]} bytes"


def test_ten_thousand_steps_cost_the_same_at_the_end_as_at_the_beginning_d14(quick_dir: Path) -> None:
    """D14, temporal limits: the history of an invocation may be long."""
    used: list[float] = []

    def count(state: Any) -> dict[str, Any]:
        used.append(time.process_time())
        return {"count": state.get("count", 0) + 1}

    def again(context: Any) -> Any:
        return Next("count") if context.step < STEPS else Finish(context.state["count"])

    agent = Agent("counter", nodes={"count": count}, decision_policy=again, max_steps=STEPS)
    with hayata.start(agent, data_dir=quick_dir, inline=True) as runtime:
        assert runtime.call("counter", timeout=120.0) == STEPS
    steps = [after - before for before, after in itertools.pairwise(used)]
    first, last = statistics.median(steps[WINDOW : 2 * WINDOW]), statistics.median(steps[-WINDOW:])
    assert 0.8 < last / first < 1.2, f"{first * 1e3:.3f} ms, then {last * 1e3:.3f} ms"
