"""Apps, policies and nodes that do wrong: each a clear error with its code, and a daemon that goes on.

One daemon takes all of it. Around every test the same things are looked at: the supervisor is still the one
that was started, the invocation that has been held at its gate since the beginning runs on, another agent
answers at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from hayata import InvocationFailed
from tests.support.crash_site import Daemon, Site
from tests.support.shared_daemon import WAIT_S, app, failed, holding, refused, serving, undisturbed

APP = app("bad_input")
POLICY_TIMEOUT_S = 0.5


@pytest.fixture(scope="module")
def shared() -> Iterator[Daemon]:
    with serving(APP, HAYATA_POLICY_TIMEOUT=str(POLICY_TIMEOUT_S)) as daemon, holding(daemon):
        yield daemon


@pytest.fixture
def daemon(shared: Daemon) -> Iterator[Daemon]:
    """The shared daemon, that must be the same afterwards, and serve."""
    with undisturbed(shared, "echo"):
        yield shared


def run_failed(daemon: Daemon, agent: str, input: object = None, *, stream: bool = False) -> InvocationFailed:
    """Run it, and return how it has failed."""
    return failed(daemon.client.run(agent, input, stream=stream))


# ---- apps that can't be ------------------------------------------------------------------------------------

TWICE = """
from hayata import Agent, Node

def work(state):
    return {}

agent = Agent("twice", nodes=[work, Node(work), 5], max_step=3, max_steps=0)
"""


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import hayata\n1 / 0\n", ["agent_start_failed", "Traceback", "line 2", "ZeroDivisionError"]),
        ("def broken(:\n", ["agent_start_failed", "SyntaxError", "line 1"]),
        ("import no_such_module\n", ["agent_start_failed", "ModuleNotFoundError", "no_such_module"]),
        ("raise SystemExit(0)\n", ["agent_start_failed", "SystemExit"]),
        ("import os\nos.abort()\n", ["agent_start_failed", "SIGABRT"]),
        ("agent = 42\n", ["agent_start_failed", "Agent"]),
        (TWICE, ["nodes[1]: there is another node 'work'", "nodes[2].fn: 5", "max_step: ", "max_steps: "]),
        (
            "from hayata import Agent\ndef a(state): pass\nx = Agent('x', [a, a])\n",
            ["duplicate_nodes", "nodes[1]"],
        ),
    ],
)
def test_app_that_cannot_be_loaded_ends_with_2_its_reason_and_nothing_left(site: Site, source: str, said: list[str]):
    path = Path(site.home) / "app.py"
    path.write_text(source)
    daemon = site.daemon(str(path))
    assert daemon.launch().wait(WAIT_S) == 2
    log = site.log.read_text()
    assert not [word for word in said if word not in log], log
    assert not site.marked()
    assert not os.path.lexists(daemon.socket)


def test_app_that_cannot_be_loaded_into_a_running_daemon_is_an_error_alone(daemon: Daemon, tmp_path: Path):
    path = tmp_path / "app.py"
    path.write_text("import hayata\n1 / 0\n")
    error = refused("agent_start_failed", lambda: daemon.client.start_agent(str(path)))
    assert "ZeroDivisionError" in error.details["traceback"]
    refused("agent_start_failed", lambda: daemon.client.start_agent("no_such_module:agent"))
    refused("agent_start_failed", lambda: daemon.client.start_agent("what is this"))


# ---- policies ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "code", "said"),
    [
        ("nothing", "invalid_policy_decision", "None"),
        ("a word", "invalid_policy_decision", "echo"),
        ("a list", "invalid_policy_decision", "Next("),
        ("the class", "invalid_policy_decision", "Finish"),
        ("no node", "invalid_policy_decision", "at least one node"),
        ("a node twice", "invalid_policy_decision", "twice"),
        ("not a node", "invalid_policy_decision", "42"),
        ("not a name", "invalid_policy_decision", "Anything"),
        ("unknown node", "unknown_node", "'ehco'"),
        ("unknown branch", "unknown_node", "'ehco'"),
        ("unknown function", "unknown_node", "'for_ever'"),
        ("a coroutine", "invalid_policy_decision", "coroutine"),
        ("raises", "policy_exception", "ZeroDivisionError"),
        ("raises what is picky", "policy_exception", "order 7: no stock"),
        ("exits", "policy_exception", "SystemExit"),
        ("never returns", "policy_timeout", f"{POLICY_TIMEOUT_S:g} s"),
        ("dies", "agent_crashed", "SIGABRT"),
        ("loops", "max_steps_exceeded", "3"),
    ],
)
def test_policy_that_does_wrong_fails_its_invocation(daemon: Daemon, what: str, code: str, said: str):
    error = run_failed(daemon, "policy", what)
    assert error.code == code
    assert said in f"{error} {error.details}"
    if code == "policy_exception":
        assert "bad_input.py" in error.details["traceback"]
    else:
        assert error.hint or code == "agent_crashed"


def test_policy_that_never_returns_holds_nobody_else_up(daemon: Daemon):
    stuck = daemon.client.run("policy", "never returns")
    others = [daemon.client.run("policy", "loops") for _ in range(3)]
    for invocation, code in ((stuck, "policy_timeout"), *((other, "max_steps_exceeded") for other in others)):
        assert failed(invocation).code == code


# ---- nodes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("agent", ["result", "result_async"])
@pytest.mark.parametrize("what", ["list", "None", "text", "pairs", "generator", "class", "Finish", "coroutine"])
def test_node_that_returns_no_mapping_is_refused(daemon: Daemon, agent: str, what: str):
    error = run_failed(daemon, agent, what)
    assert error.code == "invalid_node_result"
    assert error.details["path"] == "result"
    assert "dict" in error.hint


def test_node_that_returns_a_key_that_is_no_text_is_refused(daemon: Daemon):
    error = run_failed(daemon, "result", "int key")
    assert error.code in ("invalid_node_result", "unserializable_value")
    assert "int" in error.message


PLACES = {
    "update": ("value", "state.here[0]"),
    "chunk": ("value", "chunk.here[0]"),
    "input": ("value_of_policy", "input.here[0]"),
    "result": ("value_of_policy", "result.here[0]"),
    "reason": ("value_of_policy", "reason.here[0]"),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("value", "below", "said"),
    [
        ("object", "", "Anything"),
        ("secret", "", "SecretStr"),
        ("function", "", "function"),
        ("open file", "", "TextIOWrapper"),
        ("int of 65 bits", "", "64 bits"),
        ("negative int of 65 bits", "", "64 bits"),
        ("complex", "", "complex"),
        ("lone surrogate", "", "surrogate"),
        ("circle", "[0][0]", "refers to itself"),
        ("lists too deep", "[0][0]", "deep"),
        ("maps too deep", ".in.in", "deep"),
        ("tuple key", "", "tuple"),
        ("generator", "", "generator"),
    ],
)
def test_value_that_cannot_be_stored_is_refused_with_its_path_d9(
    daemon: Daemon, place: str, value: str, below: str, said: str
):
    """D9, langgraph 8673: ints above 64 bits, fractions, complex: a typed error with the path."""
    agent, path = PLACES[place]
    error = run_failed(daemon, agent, {"value": value, "as": place}, stream=True)
    assert error.code == "unserializable_value"
    assert error.details["path"].startswith(path + below)
    assert said in error.message
    assert "hunter2" not in f"{error} {error.details}"


def test_value_that_just_fits_is_kept_d9(daemon: Daemon):
    """D9, langgraph 8673: ints above 64 bits, fractions, complex: a typed error with the path."""
    result = daemon.client.call("value", {"value": "fine", "as": "update"}, timeout=WAIT_S)
    assert result == {"fine": 1, "here": [2**64 - 1]}


@pytest.mark.parametrize("chunk", [None, [1], "text", 7])
def test_chunk_that_is_no_mapping_is_refused(daemon: Daemon, chunk: object):
    for stream in (True, False):
        assert run_failed(daemon, "chunk", chunk, stream=stream).code == "invalid_partial_result"


@pytest.mark.parametrize("agent", ["raise", "raise_async"])
def test_exception_that_cannot_be_rebuilt_arrives_as_data_p12_d13(daemon: Daemon, agent: str):
    """P12, cpython 103061; D13, dbos 371: exceptions with required keyword arguments."""
    error = run_failed(daemon, agent, 12)
    assert error.code == "node_exception"
    assert error.details["type"] == "Picky"
    assert error.details["message"] == "order 12: no stock"
    assert "raise Picky(order=ctx.input" in error.details["traceback"]
