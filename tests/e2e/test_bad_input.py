"""Whatever comes in that can't be: a clear error with its code, and a daemon that goes on as if nothing had been.

One daemon takes all of it. Around every test the same things are looked at: the supervisor is still the one that was
started, the invocation that has been held at its gate since the beginning runs on, another agent answers at once.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

import hayata
from hayata import AsyncClient, Client, HayataError, InvocationFailed, RecoveryNeeded
from hayata.framing import frame
from hayata.ids import execution_id
from hayata.client.records import Process
from hayata.messages import PROTOCOL_VERSION
from tests.support.crash_site import Daemon, Site
from tests.support.raw_client import RawClient

APP = str(Path(__file__).parents[1] / "support" / "apps" / "bad_input.py") + ":agents"
WAIT_S = 20.0
POLICY_TIMEOUT_S = 0.5


@pytest.fixture(scope="module")
def shared() -> Iterator[Daemon]:
    site = Site()
    try:
        daemon = site.daemon(APP).start(HAYATA_POLICY_TIMEOUT=str(POLICY_TIMEOUT_S))
        held = daemon.client.run("hold", {"gate": "end"}, invocation_id="held")
        site.ledger.wait("holding", invocation=held.id)
        yield daemon
        site.open_gate("end")
        assert held.result(timeout=WAIT_S) == {"held": True}
        assert [task.attempt for task in held.tasks()] == [1]
        stats = daemon.client.stats()
        assert (stats["open_invocations"], stats["late_messages"]) == (0, 0)
    finally:
        site.close()


@pytest.fixture
def daemon(shared: Daemon) -> Iterator[Daemon]:
    """The shared daemon, that must be the same afterwards, and serve."""
    before = supervisor(shared).pid
    yield shared
    assert supervisor(shared).pid == before
    assert shared.client.call("echo", {"still": "there"}, timeout=WAIT_S) == {"echo": {"still": "there"}}
    assert shared.client.invocation("held").status() == "running"


def supervisor(daemon: Daemon) -> Process:
    return daemon.client.tree().children[0]


def failure(daemon: Daemon, agent: str, input: object = None, *, stream: bool = False) -> InvocationFailed:
    """Run it, and return how it has failed."""
    invocation = daemon.client.run(agent, input, stream=stream)
    with pytest.raises(InvocationFailed) as failed:
        invocation.result(timeout=WAIT_S)
    events = list(invocation.events())
    assert events[-1].type == "invocation_failed"
    assert events[-1].data["reason"]["code"] == failed.value.code
    return failed.value


def refused(code: str, call: Callable[[], object]) -> HayataError:
    with pytest.raises(HayataError) as refusal:
        call()
    assert refusal.value.code == code
    return refusal.value


# ---- apps that can't be ------------------------------------------------------------------------------------------------

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
        ("from hayata import Agent\ndef a(state): pass\nx = Agent('x', [a, a])\n", ["duplicate_nodes", "nodes[1]"]),
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


# ---- policies ----------------------------------------------------------------------------------------------------------


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
    error = failure(daemon, "policy", what)
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
        with pytest.raises(InvocationFailed) as failed:
            invocation.result(timeout=WAIT_S)
        assert failed.value.code == code


# ---- nodes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("agent", ["result", "result_async"])
@pytest.mark.parametrize("what", ["list", "None", "text", "pairs", "generator", "class", "Finish", "coroutine"])
def test_node_that_returns_no_mapping_is_refused(daemon: Daemon, agent: str, what: str):
    error = failure(daemon, agent, what)
    assert error.code == "invalid_node_result"
    assert error.details["path"] == "result"
    assert "dict" in error.hint


def test_node_that_returns_a_key_that_is_no_text_is_refused(daemon: Daemon):
    error = failure(daemon, "result", "int key")
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
    agent, path = PLACES[place]
    error = failure(daemon, agent, {"value": value, "as": place}, stream=True)
    assert error.code == "unserializable_value"
    assert error.details["path"].startswith(path + below)
    assert said in error.message
    assert "hunter2" not in f"{error} {error.details}"


def test_value_that_just_fits_is_kept_d9(daemon: Daemon):
    result = daemon.client.call("value", {"value": "fine", "as": "update"}, timeout=WAIT_S)
    assert result == {"fine": 1, "here": [2**64 - 1]}


@pytest.mark.parametrize("chunk", [None, [1], "text", 7])
def test_chunk_that_is_no_mapping_is_refused(daemon: Daemon, chunk: object):
    for stream in (True, False):
        assert failure(daemon, "chunk", chunk, stream=stream).code == "invalid_partial_result"


@pytest.mark.parametrize("agent", ["raise", "raise_async"])
def test_exception_that_cannot_be_rebuilt_arrives_as_data_p12_d13(daemon: Daemon, agent: str):
    error = failure(daemon, agent, 12)
    assert error.code == "node_exception"
    assert error.details["type"] == "Picky"
    assert error.details["message"] == "order 12: no stock"
    assert "raise Picky(order=ctx.input" in error.details["traceback"]


# ---- what clients ask --------------------------------------------------------------------------------------------------


def test_unknown_names_are_refused(daemon: Daemon):
    client = daemon.client
    assert "echo" in refused("unknown_agent", lambda: client.run("ehco")).hint
    refused("unknown_agent", lambda: client.recover("ehco"))
    refused("unknown_agent", lambda: client.stop_agent("ehco"))
    done = client.run("echo", 1)
    done.result(timeout=WAIT_S)
    for name in ("no-such-id", "0" * 32):
        for ask in (client.invocation, client.get_result, client.cancel):
            refused("unknown_invocation", lambda ask=ask, name=name: ask(name))
    refused("unknown_task", lambda: client.reconcile(done.id, "what", retry=True))
    refused("unknown_task", lambda: client.reconcile(done.id, execution_id(bytes(16), 0, 1), retry=True))
    refused("invocation_terminal", lambda: client.reconcile(done.id, done.tasks()[0].id, retry=True))


def test_option_that_does_not_exist_is_refused_by_both_clients(daemon: Daemon):
    with pytest.raises(TypeError, match="streaming"):
        daemon.client.run("echo", streaming=True)
    with pytest.raises(TypeError, match="streaming"):
        asyncio.run(AsyncClient(daemon.socket).run("echo", streaming=True))
    with pytest.raises(TypeError, match="retries"):
        daemon.client.reconcile("held", "task", retries=True)
    with pytest.raises(TypeError, match="dir"):
        hayata.start(APP, dir="x")


@pytest.mark.parametrize(
    ("option", "value"),
    [("on_busy", "wait"), ("stream", 1), ("session", 5), ("key", ""), ("invocation_id", "a b"), ("input", object())],
)
def test_option_that_cannot_be_is_refused(daemon: Daemon, option: str, value: object):
    code = "unserializable_value" if option == "input" else "invalid_options"
    error = refused(code, lambda: daemon.client.run("echo", **{option: value}))
    assert option.replace("_", " ") in str(error).replace("_", " ")


RUN = {"type": "run", "agent": "echo", "invocation_id": "raw"}


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        ({**RUN, "streaming": True}, "streaming"),
        ({**RUN, "stream": "yes"}, "stream"),
        ({**RUN, "on_busy": "wait"}, "on_busy"),
        ({**RUN, "session": 5}, "session"),
        ({**RUN, "session": "~mine"}, "session"),
        ({**RUN, "invocation_id": ""}, "invocation_id"),
        ({**RUN, "invocation_id": "x" * 129}, "invocation_id"),
        ({**RUN, "key": "ключ"}, "key"),
        ({"type": "run", "agent": "echo"}, "invocation_id"),
        ({"type": "fly"}, "fly"),
        ({"type": "get_invocation", "invocation_id": None}, "invocation_id"),
        ({"type": "follow_events", "invocation_id": "held", "until": "doomsday"}, "until"),
        ({"type": "follow_events", "invocation_id": "held", "after": 1.5}, "after"),
        ({"type": "stop_daemon", "drain_s": float("nan")}, "drain_s"),
        ({"type": "stop_daemon", "drain_s": float("inf")}, "drain_s"),
        ({"type": "stop_daemon", "drain_s": -1.0}, "drain_s"),
        ({"type": "reconcile", "invocation_id": "held", "task_id": "x", "request_id": "y", "by": "z"}, "exactly one"),
        ([1, 2, 3], "array"),
        ("run", "str"),
    ],
    ids=repr,
)
def test_request_that_cannot_be_is_refused_and_the_connection_goes_on(daemon: Daemon, request_: object, said: str):
    with RawClient(daemon.socket) as raw:
        answer = raw.answer(request_)
        assert answer["type"] == "refused"
        assert answer["error"]["code"] == "invalid_options"
        assert said in answer["error"]["message"]
        assert raw.answer({"type": "get_stats"})["type"] == "stats"


def test_input_that_is_no_value_fails_its_invocation_alone(daemon: Daemon):
    """Well-formed msgpack, but not what `hayata.values` makes: the supervisor does not look at it, the worker does."""
    run = {**RUN, "agent": "policy", "invocation_id": "no-value", "input": msgspec.msgpack.Ext(99, b"?")}
    with RawClient(daemon.socket) as raw:
        assert raw.answer(run)["status"] in ("running", "failed")
    with pytest.raises(InvocationFailed) as failed:
        daemon.client.invocation("no-value").result(timeout=WAIT_S)
    assert failed.value.code == "unserializable_value"


def deep_run(name: str, depth: int, **options: str) -> bytes:
    """A request whose input is ``{"gate": "open", "deep": [[…]]}``."""
    request = {**RUN, **options, "invocation_id": name, "input": {"gate": "open", "deep": None}}
    head = msgspec.msgpack.encode({"type": "ask", "number": 1, "request": request})
    assert head.endswith(b"\xc0")
    return head[:-1] + b"\x91" * depth + b"\xc0"


@pytest.mark.parametrize("depth", [1_000, 100_000, 10_000_000])
def test_input_that_is_too_deep_to_be_read_ends_its_connection(daemon: Daemon, depth: int):
    with RawClient(daemon.socket) as raw:
        raw.send(deep_run("deep", depth))
        error = raw.farewell()
    assert (error["code"], "deep" in error["message"]) == ("protocol_error", True)
    refused("unknown_invocation", lambda: daemon.client.invocation("deep"))


def test_deepest_input_that_is_accepted_can_be_read_again_after_a_restart(site: Site):
    """Deeper than any client of ours would send it, it must not be what each next supervisor ends of."""
    daemon = site.daemon(APP).start()
    first = daemon.client.run("hold", {"gate": "first"}, session="s")
    site.ledger.wait("holding", invocation=first.id)

    def accepts(depth: int) -> bool:
        with RawClient(daemon.socket) as raw:
            raw.send(deep_run(f"deep-{depth}", depth, agent="hold", session="s", on_busy="queue"))
            return raw.receive()["number"] == 1

    deepest, too_deep = 200, 20_000
    while too_deep - deepest > 1:
        middle = (deepest + too_deep) // 2
        deepest, too_deep = (middle, too_deep) if accepts(middle) else (deepest, middle)
    assert deepest > 200
    daemon.kill_supervisor()
    with pytest.raises(RecoveryNeeded):
        first.result(timeout=WAIT_S)
    invocation = daemon.client.invocation(f"deep-{deepest}")
    assert invocation.status() == "queued"
    site.open_gate("open")
    assert first.cancel() == "cancelled"
    with ThreadPoolExecutor(1) as shallow:  # this test's own stack may be too long to read it
        events = shallow.submit(lambda: list(invocation.events())).result(WAIT_S)
    assert events[0].data["input"]["gate"] == "open"
    assert events[-1].type in ("invocation_completed", "invocation_failed")  # as far as its worker can read it
    assert daemon.client.call("echo", 1, timeout=WAIT_S) == {"echo": 1}


# ---- bytes that are not our protocol -----------------------------------------------------------------------------------

HELLO = {"type": "hello", "protocol": PROTOCOL_VERSION}


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),  # a TLS client hello
        b"*1\r\n$4\r\nPING\r\n",
        struct.pack(">I", 2**32 - 1),
        struct.pack(">I", 2**32 - 1) + b"\xc1" * 100_000,
        struct.pack("<I", 20) + bytes(20),
    ],
)
def test_header_that_announces_too_much_is_told_and_the_connection_closed(daemon: Daemon, data: bytes):
    with RawClient(daemon.socket, greet=False) as raw:
        raw.write(data)
        assert raw.farewell()["code"] == "frame_too_large"


def test_header_of_4_gb_allocates_nothing_and_ends_a_greeted_connection_too(daemon: Daemon):
    before = supervisor(daemon).memory_bytes
    for _ in range(50):
        with RawClient(daemon.socket) as raw:
            raw.write(struct.pack(">I", 2**32 - 1) + b"x")
            assert raw.farewell()["code"] == "frame_too_large"
    assert supervisor(daemon).memory_bytes - before < 16 << 20


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"hello",
        b"\xc1",
        b"\xdd\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\x91" * 100_000,
        msgspec.msgpack.encode(HELLO) + b"\x00",
        msgspec.msgpack.encode(HELLO)[:-1],
        b"\x81\xa4type\xa5hell\xff",
        b"\x82\xa4type\xa3ask\xa6number" + b"\x91" * 100_000,
        msgspec.msgpack.encode({**HELLO, "cookie": 1}),
        msgspec.msgpack.encode({"type": "tell", "number": 1, "answer": {"type": "done"}}),
        msgspec.msgpack.encode({"type": ["hello"]}),
        msgspec.msgpack.encode({}),
        msgspec.msgpack.encode(None),
    ],
    ids=lambda body: repr(bytes(body[:12])),
)
@pytest.mark.parametrize("greet", [False, True], ids=["at first", "later"])
def test_frame_that_is_no_message_ends_its_connection(daemon: Daemon, body: bytes, greet: bool):
    with RawClient(daemon.socket, greet=greet) as raw:
        raw.send(body)
        assert raw.farewell()["code"] == "protocol_error"


def test_random_bytes_end_their_connection_or_wait_for_more(daemon: Daemon):
    dice = random.Random(11)
    clients = []
    for number in range(100):
        raw = RawClient(daemon.socket, greet=number % 2 == 0)
        clients.append(raw)
        noise = dice.randbytes(dice.randrange(1, 3000))
        raw.write(frame(noise) if number % 4 < 2 else noise)
        if number % 4 < 2:
            assert raw.farewell()["code"] == "protocol_error"
    for raw in clients:
        raw.close()


@pytest.mark.parametrize("greet", [False, True], ids=["at first", "later"])
@pytest.mark.parametrize("cut", [1, 3, 4, 20, -1])
def test_half_a_frame_waits_for_its_rest_and_is_dropped_at_the_end(daemon: Daemon, cut: int, greet: bool):
    whole = frame(msgspec.msgpack.encode(HELLO if not greet else {"type": "ask", "number": 1, "request": RUN}))
    with RawClient(daemon.socket, greet=greet) as silent, RawClient(daemon.socket, greet=greet) as patient:
        silent.write(whole[:cut])
        patient.write(whole[:cut])
        assert daemon.client.call("echo", 1, timeout=WAIT_S) == {"echo": 1}  # neither of the two holds it up
        silent.sock.shutdown(socket.SHUT_WR)
        silent.wait_closed()
        patient.write(whole[cut:])
        assert patient.receive()["type"] == ("tell" if greet else "hello")


def test_frame_that_comes_byte_by_byte_is_read(daemon: Daemon):
    with RawClient(daemon.socket) as raw:
        for byte in frame(msgspec.msgpack.encode({"type": "ask", "number": 1, "request": {"type": "get_stats"}})):
            raw.write(bytes([byte]))
        assert raw.receive()["answer"]["type"] == "stats"


@pytest.mark.parametrize("protocol", [0, PROTOCOL_VERSION + 1, -1, 2**63])
def test_other_protocol_version_is_named_and_the_connection_closed(daemon: Daemon, protocol: int):
    with RawClient(daemon.socket, greet=False) as raw:
        raw.send({"type": "hello", "protocol": protocol})
        error = raw.farewell()
    assert error["code"] == "protocol_error"
    assert str(PROTOCOL_VERSION) in error["message"]
    assert error["hint"]


def test_request_before_the_hello_is_refused(daemon: Daemon):
    with RawClient(daemon.socket, greet=False) as raw:
        raw.ask({**RUN, "invocation_id": "too-early"})
        error = raw.farewell()
    assert (error["code"], "hello" in error["message"]) == ("protocol_error", True)
    refused("unknown_invocation", lambda: daemon.client.invocation("too-early"))


@pytest.mark.parametrize("number", [0, -1, 1])
def test_request_number_that_cannot_be_ends_the_connection(daemon: Daemon, number: int):
    with RawClient(daemon.socket) as raw:
        raw.ask({"type": "await_invocation", "invocation_id": "held"}, number=1)
        raw.ask({"type": "get_stats"}, number=number)
        assert raw.farewell()["code"] == "protocol_error"


def test_request_number_may_be_used_again_after_its_answer(daemon: Daemon):
    with RawClient(daemon.socket) as raw:
        for _ in range(3):
            assert raw.answer({"type": "get_stats"}, number=2**63)["type"] == "stats"


def test_connections_that_only_hang_about_leave_nothing_behind(daemon: Daemon):
    pid = supervisor(daemon).pid
    before = len(os.listdir(f"/proc/{pid}/fd"))
    clients = [RawClient(daemon.socket, greet=number % 2 == 0) for number in range(200)]
    assert daemon.client.call("echo", 1, timeout=WAIT_S) == {"echo": 1}
    for raw in clients:
        raw.close()
    daemon.client.stats()  # asked behind the 200 ends, so answered behind them
    assert len(os.listdir(f"/proc/{pid}/fd")) <= before + 1


# ---- settings and places -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "toml", "said"),
    [
        (["--data-dri", "x"], "", "data-dri"),
        (["--log-format", "xml"], "", "xml"),
        ([], "data_dri = 'x'", "data_dri: there is no such setting"),
        ([], "policy_timeout = 'soon'", "policy_timeout"),
        ([], "[policy_timeout]\n", "policy_timeout"),
        ([], "frame_cap_bytes = 1", "frame_cap_bytes"),
        ([], "this is not toml", "can't be used"),
        (["--socket", "/tmp/" + "s" * 103], "", "107"),
    ],
)
def test_setting_that_cannot_be_ends_with_2_before_anything_is_made(
    site: Site, arguments: list[str], toml: str, said: str
):
    (Path(site.home) / "hayata.toml").write_text(toml)
    before = sorted(os.listdir(site.home))
    done = supervisor_command(site, APP, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("hayata-supervisor: invalid_options: ")
    assert said in done.stderr
    assert "hint: " in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(os.listdir(site.home)) == before


def supervisor_command(site: Site, *arguments: str, before: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*before, sys.executable, "-m", "hayata_supervisor.main", *arguments],
        cwd=site.home,
        env=site.environ(),
        capture_output=True,
        text=True,
        timeout=WAIT_S * 3,
        check=False,
    )


def test_second_daemon_is_refused_and_the_first_goes_on_p16(daemon: Daemon):
    site = daemon.site
    tree = {seen.pid for seen in daemon.tree()}
    for data_dir, sock, code in (("d", "s2", "data_dir_in_use"), ("d2", "s", "socket_in_use")):
        done = supervisor_command(site, APP, "--data-dir", data_dir, "--socket", f"{site.home}/{sock}")
        assert done.returncode == 5
        assert f"{code}: " in done.stderr
        assert "hint: " in done.stderr
        assert "Traceback" not in done.stderr
    with pytest.raises(HayataError) as embedded:
        hayata.start(APP, data_dir=f"{site.home}/d")
    assert embedded.value.code == "data_dir_in_use"
    assert {seen.pid for seen in daemon.tree()} == tree == {seen.pid for seen in site.marked()}


def not_ours(path: Path) -> None:
    path.mkdir()
    (path / "thesis.txt").write_text("the only copy")


def a_file(path: Path) -> None:
    path.write_text("the only copy")


def below_a_file(path: Path) -> None:
    path.parent.write_text("the only copy")


def another_format(path: Path) -> None:
    (path / "store").mkdir(parents=True)
    (path / "store" / "data.mdb").write_bytes(b"the only copy" * 1000)


@pytest.mark.parametrize(
    ("make", "exit_code", "code"),
    [
        (not_ours, 2, "invalid_options"),
        (a_file, 2, "invalid_options"),
        (below_a_file, 2, "invalid_options"),
        (another_format, 65, "store_corrupt"),
    ],
)
def test_data_directory_that_is_not_ours_is_refused_and_left_alone(
    site: Site, make: Callable[[Path], None], exit_code: int, code: str
):
    place = Path(site.home) / "place"
    make(place / "data" if make is below_a_file else place)
    data_dir = place / "data" if make is below_a_file else place
    before = content(place)
    done = supervisor_command(site, APP, "--data-dir", str(data_dir), "--socket", f"{site.home}/s")
    assert done.returncode == exit_code, done.stderr
    assert f"{code}: " in done.stderr
    assert "hint: " in done.stderr
    assert "Traceback" not in done.stderr
    assert content(place) == before
    assert not os.path.lexists(f"{site.home}/s")
    assert not site.marked()


def content(path: Path) -> dict[str, bytes]:
    """All files below that are not our locks."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return {str(file): file.read_bytes() for file in files if file.name not in ("guard.lock", "store.lock")}


@pytest.mark.parametrize("there", [True, False], ids=["there", "missing"])
def test_data_directory_that_is_read_only_is_refused(site: Site, there: bool):
    place = Path(site.home) / "read-only"
    data_dir = place / "data"
    (data_dir if there else place).mkdir(parents=True)
    before: list[str] = []
    if os.geteuid() == 0:  # root may write anything, but not on a file system that is mounted read-only
        script = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'
        before = ["unshare", "-m", "sh", "-c", script, str(place)]
        if subprocess.run([*before, "true"], capture_output=True, check=False).returncode != 0:
            pytest.skip("may not mount")
    (data_dir if there else place).chmod(0o555)
    arguments = ["--data-dir", str(data_dir), "--socket", f"{site.home}/s"]
    done = supervisor_command(site, APP, *arguments, before=before)
    (data_dir if there else place).chmod(0o755)
    assert done.returncode == 5, done.stderr
    assert "permission_denied: " in done.stderr
    assert "hint: " in done.stderr
    assert "Traceback" not in done.stderr
    assert [path for path in place.rglob("*") if path.is_file()] == []
    assert not os.path.lexists(f"{site.home}/s")


@pytest.mark.parametrize("make", [Path.touch, Path.mkdir])
def test_socket_path_that_something_else_has_is_refused_and_left_alone(site: Site, make: Callable[[Path], None]):
    place = Path(site.home) / "s"
    make(place)
    done = supervisor_command(site, APP, "--data-dir", f"{site.home}/d", "--socket", str(place))
    assert done.returncode == 2
    assert "invalid_options: " in done.stderr
    assert "is not a socket" in done.stderr
    assert place.exists()
    place.unlink() if place.is_file() else place.rmdir()


def test_client_of_a_socket_path_that_is_too_long_is_told(site: Site):
    directory = Path(site.home) / ("d" * 100)
    directory.mkdir()
    with Client(directory / "s") as client:
        refused("daemon_unavailable", client.stats)
    with Client(directory / ("s" * 108)) as client:
        refused("invalid_options", client.stats)
