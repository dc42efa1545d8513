"""The forkserver and the agent worker."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import cloudpickle
import msgspec
import pytest

from hayata import values
from hayata.messages import (
    CheckUpdate,
    DecidedFail,
    DecidedFinish,
    DecidedNext,
    Evaluate,
    Fork,
    ForkFailed,
    PolicyFailed,
    StopWorker,
    UpdateChecked,
    WorkerFailed,
    WorkerReady,
    encode,
)
from hayata_supervisor.process.pidfd import children_of
from tests.support.worker_harness import Supervisor, details

pytest_plugins = ["tests.support.worker_fixtures"]


def _evaluate(number: int, step: Any) -> Evaluate:
    return Evaluate(
        evaluation=number,
        invocation_id="i",
        state={},
        input=msgspec.Raw(values.encode(step)),
        step=0,
        parallel_results=None,
        last=None,
        failure=None,
        session=None,
        now=0.0,
    )


def _failure(app: str, **launch: Any) -> WorkerFailed:
    supervisor = Supervisor(app, **launch)
    try:
        failed = supervisor.forkserver.wait_for(WorkerFailed)
        assert supervisor.forkserver.wait_dead().code == 2
        return failed
    finally:
        supervisor.close()


def test_manifest_names_agents_and_nodes(supervisor: Supervisor):
    (agent,) = supervisor.start().agents
    assert agent.id == "workshop"
    assert [node.name for node in agent.nodes][:2] == ["single", "pair"]
    ready = supervisor.forkserver.messages[0]
    assert isinstance(ready, WorkerReady)
    assert (ready.role, ready.incarnation, ready.pid) == ("forkserver", "f1", supervisor.forkserver.pid)


def test_worker_is_the_supervisors_child_and_survives_the_forkserver():
    supervisor = Supervisor()
    try:
        supervisor.start()
        agent = supervisor.fork("workshop", None)
        node = supervisor.node("single")
        assert {agent.pid, node.pid} <= set(children_of(__import__("os").getpid()))
        supervisor.forkserver.kill()
        supervisor.forkserver.wait_dead()
        assert node.call("a", {"do": "echo", "value": 7}) == {"value": 7}
        agent.send(_evaluate(1, "next"))
        agent.wait_for(DecidedNext)
    finally:
        supervisor.close()


def test_import_error_is_told_with_its_traceback(tmp_path: Path):
    app = tmp_path / "app.py"
    app.write_text("def boom():\n    raise KeyError('missing')\nboom()\n")
    error = _failure(f"{app}:agent").error
    assert error.code == "agent_start_failed"
    assert "KeyError" in error.message or "KeyError" in str(details(error))
    assert "in boom" in str(details(error))


def test_import_that_exits_is_told(tmp_path: Path):
    app = tmp_path / "app.py"
    app.write_text("import sys\nsys.exit(4)\n")
    assert _failure(f"{app}:agent").error.code == "agent_start_failed"


@pytest.mark.parametrize(
    ("start", "name"),
    [
        (
            "import threading as t\nt.Thread(target=time.sleep, args=(60,), name='refresher', daemon=True).start()",
            "refresher",
        ),
        (
            "import _thread\n_thread.start_new_thread(lambda: time.sleep(60), ())\ntime.sleep(0.2)",
            "does not know",
        ),
    ],
)
def test_import_that_leaves_a_thread_is_refused_by_name(tmp_path: Path, start: str, name: str):
    app = tmp_path / "app.py"
    app.write_text(
        "import time\nfrom hayata import Agent\n"
        "def greet(state): return {}\n"
        f"agent = Agent(id='a', nodes=[greet])\n{start}\n"
    )
    error = _failure(f"{app}:agent").error
    assert error.code == "agent_start_failed"
    assert name in error.message


def test_agents_by_value_are_loaded_from_the_memfd():
    from hayata import Agent

    secret = "only in the closure"
    agent = Agent(id="closure", nodes={"tell": lambda state: {"secret": secret}})
    supervisor = Supervisor(value=cloudpickle.dumps([agent]))
    try:
        assert [agent.id for agent in supervisor.start().agents] == ["closure"]
        assert supervisor.node("tell", "closure").call("a") == {"secret": secret}
    finally:
        supervisor.close()


def test_command_line_of_the_forkserver_is_hidden_from_the_app(tmp_path: Path):
    app = tmp_path / "app.py"
    app.write_text(
        "import sys, os\nfrom hayata import Agent\nARGUMENTS = sys.argv[1:]\n"
        "def tell(state): return {'arguments': ARGUMENTS, 'cwd': os.getcwd()}\n"
        "agent = Agent(id='a', nodes=[tell])\n"
    )
    supervisor = Supervisor(f"{app}:agent")
    try:
        supervisor.start()
        assert supervisor.node("tell", "a").call("a") == {"arguments": [], "cwd": supervisor.launch.cwd}
    finally:
        supervisor.close()


def test_fork_of_an_unknown_worker_is_refused(supervisor: Supervisor):
    for number, (agent, node, code) in enumerate(
        [("nobody", None, "unknown_agent"), ("workshop", "x", "unknown_node")]
    ):
        pairs = [socket.socketpair() for _ in range(4)]
        theirs = [pair[1].fileno() for pair in pairs]
        body = encode(Fork(900 + number, agent, node, "w"))
        socket.send_fds(supervisor.forkserver.fds_socket, [body], theirs)
        failed = supervisor.forkserver.wait_for(ForkFailed)
        assert (failed.request, failed.error.code) == (900 + number, code)
        for pair in pairs:
            pair[0].close()
            pair[1].close()


def test_forkserver_ends_with_its_stream():
    supervisor = Supervisor()
    try:
        supervisor.start()
        supervisor.forkserver.channel.close()
        assert supervisor.forkserver.wait_dead().code == 0
    finally:
        supervisor.close()


def test_agent_answers_in_order(supervisor: Supervisor):
    agent = supervisor.fork("workshop", None)
    steps = ["next", "fail", "raise", "exit", "finish", "nonsense"]
    for number, step in enumerate(steps):
        agent.send(_evaluate(number, step))
    agent.wait(lambda: len(agent.messages) == len(steps))
    kinds = [DecidedNext, DecidedFail, PolicyFailed, PolicyFailed, DecidedFinish, DecidedFinish]
    assert [type(message) for message in agent.messages] == kinds
    assert [message.evaluation for message in agent.messages] == list(range(len(steps)))
    assert details(agent.messages[3].error)["type"] == "SystemExit"
    agent.wait(lambda: ("stdout", "policy says finish") in agent.lines)


def test_policy_that_forks_and_falls_through_answers_once(supervisor: Supervisor):
    agent = supervisor.fork("workshop", None)
    for number in range(20):
        agent.send(_evaluate(number, "fork"))
    agent.send(_evaluate(20, "finish"))
    agent.wait(lambda: any(message.evaluation == 20 for message in agent.messages))
    assert [message.evaluation for message in agent.messages] == list(range(21))


def test_agent_checks_an_update(supervisor: Supervisor):
    agent = supervisor.fork("workshop", None)
    agent.send(CheckUpdate(1, "single", msgspec.Raw(values.encode({"a": 1}))))
    agent.send(CheckUpdate(2, "single", msgspec.Raw(values.encode([1]))))
    good, bad = agent.wait_for(UpdateChecked), agent.wait_for(UpdateChecked)
    assert values.decode_mapping(good.update) == {"a": 1}
    assert good.error is None
    assert bad.update is None
    assert bad.error.code == "invalid_node_result"


def test_agent_decision_over_the_cap_is_an_error_and_the_agent_stays():
    supervisor = Supervisor(frame_cap_bytes=1_000_000)
    try:
        supervisor.start()
        agent = supervisor.fork("workshop", None)
        agent.send(_evaluate(1, "big"))
        assert agent.wait_for(PolicyFailed).error.code == "frame_too_large"
        agent.send(_evaluate(2, "finish"))
        assert agent.wait_for(DecidedFinish).evaluation == 2
    finally:
        supervisor.close()


@pytest.mark.parametrize("ending", ["stop", "eof"])
def test_agent_ends_when_told_or_left(supervisor: Supervisor, ending: str):
    agent = supervisor.fork("workshop", None)
    if ending == "stop":
        agent.send(StopWorker())
    else:
        agent.channel.close()
    assert agent.wait_dead().code == 0
