"""Sub-steps and probes without processes: the same semantics in the user's own thread."""

from __future__ import annotations

import time
from typing import Any

import hayata
from hayata import NOT_DONE, Agent, Node, Probe, Retry


def test_inline_retry_reuses_stored_steps(tmp_path):
    calls: list[Any] = []

    def fetch(value):
        calls.append(value)
        return value

    def work(state, ctx):
        one = ctx.step(fetch, 1)
        if ctx.attempt == 1:
            raise ConnectionError
        return {"sum": one + ctx.step(fetch, 2, key="two")}

    async def work_later(state, ctx):
        one = await ctx.step(fetch, 3)
        if ctx.attempt == 1:
            raise ConnectionError
        return {"later": one}

    retry = Retry(2, backoff=0.0)
    agent = Agent("a", [Node(work, retry=retry), Node(work_later, retry=retry)])
    with hayata.start(agent, data_dir=tmp_path, inline=True) as runtime:
        invocation = runtime.run("a")
        assert invocation.result(timeout=20) == {"sum": 3, "later": 3}
        assert [task.substeps for task in invocation.tasks()] == [("fetch",), ("two",), ("fetch",), ()]
    assert calls == [1, 2, 3]


def test_inline_deadline_asks_the_probe(tmp_path):
    asked: list[int] = []

    def slow(state, ctx):
        if ctx.attempt == 1:
            time.sleep(0.15)
        return {"attempt": ctx.attempt}

    def probe(ctx):
        asked.append(ctx.attempt)
        return NOT_DONE

    agent = Agent("a", [Node(slow, execution_timeout=0.1, interrupted=Probe(probe))])
    with hayata.start(agent, data_dir=tmp_path, inline=True) as runtime:
        assert runtime.run("a").result(timeout=20) == {"attempt": 2}
    assert asked == [1]
