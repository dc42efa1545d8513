"""An agent is stopped and started again: what it had open goes on, as after a restart."""

from __future__ import annotations

from pathlib import Path

import pytest

import hayata
from tests.support.eventually import eventually

_APP = """
import os, time
from pathlib import Path
from hayata import Agent, Finish, Next, Node, Rerun

GATE = Path(__file__).with_name("gate")

def wait(state, ctx):
    GATE.with_name(f"began-{ctx.execution_id}").touch()
    while not GATE.exists():
        time.sleep(0.005)
    return {"attempt": ctx.attempt}

def policy(context):
    return Next(context.input, None) if context.last is None else Finish(context.state)

nodes = {"again": Node(wait, interrupted=Rerun(max_attempts=3)), "once": wait}
agent = Agent(id="stoppable", nodes=nodes, decision_policy=policy)
"""


def test_agent_stopped_and_started_again_goes_on_where_it_was(tmp_path: Path) -> None:
    app = tmp_path / "app.py"
    app.write_text(_APP)
    with hayata.start(str(app), data_dir=tmp_path / "data") as runtime:
        again, once = runtime.run("stoppable", "again"), runtime.run("stoppable", "once")
        for invocation in (again, once):
            (task,) = eventually(invocation.tasks, "a task")
            eventually((tmp_path / f"began-{task.id}").exists, "its body")
        runtime.stop_agent("stoppable")
        assert [agent.status for agent in runtime.agents()] == ["stopped"]
        with pytest.raises(hayata.CallerError) as refused:
            runtime.run("stoppable", "once")
        assert refused.value.code == "unknown_agent"
        (tmp_path / "gate").touch()
        assert [agent.status for agent in runtime.start_agent(str(app))] == ["serving"]
        assert again.result(timeout=10) == {"attempt": 2}
        with pytest.raises(hayata.RecoveryNeeded) as rests:
            once.result(timeout=10)
        assert rests.value.code == "task_execution_uncertain"
        assert runtime.call("stoppable", "once", timeout=10) == {"attempt": 1}
