"""Requests that can't be granted and bytes that are not our protocol: each gets an answer, others are served.

The same as in `test_bad_input` is looked at around every test.
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

import hayata
from hayata import AsyncClient, InvocationFailed, RecoveryNeeded
from hayata.framing import frame
from hayata.ids import execution_id
from hayata.messages import PROTOCOL_VERSION
from tests.support.crash_site import Daemon, Site, flat
from tests.support.eventually import eventually
from tests.support.raw_client import RawClient
from tests.support.shared_daemon import (
    WAIT_S,
    app,
    descriptors,
    holding,
    refused,
    serving,
    supervisor,
    undisturbed,
)

APP = app("bad_input")


@pytest.fixture(scope="module")
def shared() -> Iterator[Daemon]:
    with serving(APP) as daemon, holding(daemon):
        yield daemon


@pytest.fixture
def daemon(shared: Daemon) -> Iterator[Daemon]:
    """The shared daemon, that must be the same afterwards, and serve."""
    with undisturbed(shared, "echo"):
        yield shared


# ---- what clients ask --------------------------------------------------------------------------------------


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
    [
        ("on_busy", "wait"),
        ("stream", 1),
        ("session", 5),
        ("key", ""),
        ("invocation_id", "a b"),
        ("input", object()),
    ],
)
def test_option_that_cannot_be_is_refused(daemon: Daemon, option: str, value: object):
    code = "unserializable_value" if option == "input" else "invalid_options"
    error = refused(code, lambda: daemon.client.run("echo", **{option: value}))
    assert option.replace("_", " ") in str(error).replace("_", " ")


RUN = {"type": "run", "agent": "echo", "invocation_id": "raw"}
RECONCILE = {
    "type": "reconcile", "invocation_id": "held", "task_id": "x", "request_id": "y", "by": "z", "retry": True
}  # fmt: skip


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
        ({**RECONCILE, "error": "both"}, "exactly one"),
        ({**RECONCILE, "by": ""}, "by"),
        ({**RECONCILE, "by": "z" * 257}, "by"),
        ({**RECONCILE, "request_id": ""}, "request_id"),
        ({**RECONCILE, "request_id": "y" * 129}, "request_id"),
        ({"type": "list_invocations", "after": "here"}, "after"),
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
    """Well-formed msgpack, but not what `hayata.values` makes: only the worker looks at it."""
    run = {**RUN, "agent": "policy", "invocation_id": "no-value", "input": msgspec.msgpack.Ext(99, b"?")}
    with RawClient(daemon.socket) as raw:
        assert raw.answer(run)["status"] in ("running", "failed")
    with pytest.raises(InvocationFailed) as failure:
        daemon.client.invocation("no-value").result(timeout=WAIT_S)
    assert failure.value.code == "unserializable_value"


def deep_run(name: str, depth: int, **options: str) -> bytes:
    """A request whose input is ``{"gate": "open", "deep": [[…]]}``."""
    request = {**RUN, **options, "invocation_id": name, "input": {"gate": "open", "deep": None}}
    head = msgspec.msgpack.encode({"type": "ask", "number": 1, "request": request})
    assert head.endswith(b"\xc0")
    return head[:-1] + b"\x91" * depth + b"\xc0"


@pytest.mark.parametrize("depth", [20_000, 100_000, 10_000_000])  # CPython 3.12 and later read 10,000 levels
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
    assert events[-1].type in (
        "invocation_completed",
        "invocation_failed",
    )  # as far as its worker can read it
    assert daemon.client.call("echo", 1, timeout=WAIT_S) == {"echo": 1}


# ---- bytes that are not our protocol -----------------------------------------------------------------------

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


def test_second_hello_ends_the_connection(daemon: Daemon):
    with RawClient(daemon.socket) as raw:
        raw.send(HELLO)
        assert raw.farewell()["code"] == "protocol_error"


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
    eventually(lambda: all(each.status == "serving" for each in flat(daemon.client.tree())), "all workers")
    assert daemon.client.call("echo", 0, timeout=WAIT_S) == {"echo": 0}  # it has an edge now
    before = descriptors(daemon)
    clients = [RawClient(daemon.socket, greet=number % 2 == 0) for number in range(200)]
    assert daemon.client.call("echo", 1, timeout=WAIT_S) == {"echo": 1}
    for raw in clients:
        raw.close()
    daemon.client.stats()  # asked behind the 200 ends, so answered behind them
    assert descriptors(daemon) <= before + 1
