"""Both faces of the client on a real socket: protocol, losses, bad bytes, timeouts, threads, forks."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
import threading
import time
import warnings
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import msgspec
import pytest

from hayata import address
from hayata import messages as m
from hayata.client import AsyncClient, Client, Event, core, operations
from hayata.errors import HayataError, InvocationCancelled, InvocationFailed, RecoveryNeeded
from hayata.framing import frame
from hayata.values import encode
from tests.support.fake_server import Connection, FakeServer, info

DEADLINE_S = 10.0


class Face:
    """One face, driven the same way as the other."""

    def __init__(self, client: Client | AsyncClient) -> None:
        self.client: Any = client
        self._runner = asyncio.Runner() if isinstance(client, AsyncClient) else None

    def do(self, action: Callable[[Any], Any]) -> Any:
        """Call a method of the client, or await it."""
        if self._runner is None:
            return action(self.client)

        async def awaited() -> Any:
            outcome = action(self.client)
            return await outcome if isinstance(outcome, Awaitable) else outcome

        return self._runner.run(awaited())

    def events(self, invocation: Any, **options: Any) -> list[Event]:
        if self._runner is None:
            return list(invocation.events(**options))

        async def read() -> list[Event]:
            return [event async for event in invocation.events(**options)]

        return self._runner.run(read())

    def first_event(self, invocation: Any) -> Event:
        """Read one event and let go of the stream."""
        stream = invocation.events()
        event: Event = next(stream) if self._runner is None else self.do(lambda _: stream.__anext__())
        return event

    def close(self) -> None:
        self.do(lambda client: client.close())
        if self._runner is not None:
            self._runner.close()


@pytest.fixture
def path(tmp_path: Any) -> str:
    return str(tmp_path / "s")


@pytest.fixture(params=["blocking", "async"])
def face(request: Any, path: str) -> Iterator[Face]:
    face = Face(Client(path) if request.param == "blocking" else AsyncClient(path))
    yield face
    face.close()


def value(thing: Any) -> msgspec.Raw:
    return msgspec.Raw(encode(thing))


def event(sequence: int, kind: str = "node_partial_result", **data: Any) -> m.EventInfo:
    return m.EventInfo(sequence, kind, 1.0, value(data))


def answering(**answers: m.Answer) -> Callable[[Connection, m.Ask], None]:
    """Answer by the type of the request."""

    def handler(connection: Connection, ask: m.Ask) -> None:
        connection.tell(ask.number, answers[type(ask.request).__name__])

    return handler


def refusal(code: str, **details: Any) -> m.Refused:
    return m.Refused(m.ErrorInfo(code, "because", "do that", value(details)))


# ----------------------------------------------------------------------------------------------------------
# What is sent, what comes back
# ----------------------------------------------------------------------------------------------------------


def test_run_sends_what_was_given_and_an_id_of_its_own(path: str, face: Face) -> None:
    with FakeServer(path, answering(Run=info("i1", agent="a"))) as server:
        invocation = face.do(lambda c: c.run("a", {"x": (1, 2)}, stream=True, session="s", key="k", on_busy="queue"))
    (sent,) = server.requests
    assert isinstance(sent, m.Run)
    assert (sent.agent, sent.stream, sent.session, sent.key, sent.on_busy) == ("a", True, "s", "k", "queue")
    assert bytes(sent.input) == encode({"x": (1, 2)})
    assert len(sent.invocation_id) == 32
    assert invocation.id == "i1"
    assert invocation.record.agent == "a"
    assert server.hellos[0].protocol == m.PROTOCOL_VERSION


def test_result_of_each_status_is_value_or_typed_error(path: str, face: Face) -> None:
    reason = m.ErrorInfo("node_exception", "ValueError: no", "", value({"type": "ValueError", "traceback": "T"}))
    ends = {
        "done": info("done", "completed", result=value({"n": 1})),
        "failed": info("failed", "failed", error=reason),
        "gone": info("gone", "cancelled"),
        "unsure": info("unsure", "uncertain"),
        "resting": info("resting", "recovery_required", error=m.ErrorInfo("definition_changed", "2, not 1")),
    }
    with FakeServer(path, lambda c, ask: c.tell(ask.number, ends[ask.request.invocation_id])):  # type: ignore[union-attr]

        def result(name: str) -> Any:
            return face.do(lambda c: c.get_result(name))

        assert result("done") == {"n": 1}
        with pytest.raises(InvocationFailed) as failed:
            result("failed")
        assert (failed.value.code, failed.value.details["type"]) == ("node_exception", "ValueError")
        assert failed.value.details["invocation_id"] == "failed"
        assert failed.value.__notes__ == ["In the worker:\nT"]
        with pytest.raises(InvocationCancelled):
            result("gone")
        with pytest.raises(RecoveryNeeded, match="task_execution_uncertain"):
            result("unsure")
        with pytest.raises(RecoveryNeeded, match="definition_changed"):
            result("resting")


def test_get_result_of_running_invocation_is_not_ready(path: str, face: Face) -> None:
    with FakeServer(path, answering(GetInvocation=info("i"))), pytest.raises(HayataError) as error:
        face.do(lambda c: c.get_result("i"))
    assert error.value.code == "result_not_ready"


def test_refusal_arrives_as_its_error(path: str, face: Face) -> None:
    with (
        FakeServer(path, answering(Run=refusal("session_busy", holder="x"))),
        pytest.raises(HayataError) as error,
    ):
        face.do(lambda c: c.run("a"))
    assert error.value.code == "session_busy"
    assert error.value.details == {"holder": "x"}
    assert error.value.hint == "do that"


def test_records_have_what_the_daemon_said(path: str, face: Face) -> None:
    task = m.TaskInfo(
        "0" * 32 + ".0.1", "n", 0, 1, "completed", 1.0, 2.0, 3.0, None, {"a": value({1, 2})},
        m.Reconciliation("me", 4.0, "result", "r"),
    )  # fmt: skip
    agent = m.AgentInfo("a", "1", "x:y", "serving", [m.NodeInfo("n", "serving", False, 2, 1)], 3, 4)
    edge = m.ProcessInfo("edge", "e", 12, "busy", tasks={"t": 1.5})
    answers = answering(
        ListTasks=m.TaskList([task]),
        ListInvocations=m.InvocationList([info("i", "queued", session="s")]),
        GetInvocation=info("i"),
        Reconcile=task,
        Recover=m.InvocationList([info("j")]),
        Cancel=info("i", "cancelled"),
        ListAgents=m.AgentList([agent]),
        StartAgent=m.AgentList([agent]),
        StopAgent=m.Done(),
        Reload=m.ReloadReport(3, [m.ReloadedAgent("a", "x:y", "kept", "2", "1", ["node n is new"])]),
        GetTree=m.Tree(m.ProcessInfo("guard", "", 1, "up", children=[edge])),
        GetStats=m.Stats({"steps": 2.0}),
        StopDaemon=m.Done(),
    )
    with FakeServer(path, answers) as server:
        invocation = face.do(lambda c: c.invocation("i"))
        (got,) = face.do(lambda _: invocation.tasks())
        assert (got.node, got.update, got.reconciled.by) == ("n", {"a": {1, 2}}, "me")
        assert face.do(lambda _: invocation.status()) == "running"
        assert face.do(lambda _: invocation.cancel()) == "cancelled"
        assert face.do(lambda c: c.cancel("i")) == "cancelled"
        (listed,) = face.do(lambda c: c.invocations(agent="a", status="queued", session="s", limit=5))
        assert (listed.id, listed.record.session) == ("i", "s")
        assert face.do(lambda c: c.recover("a", changed="restart"))[0].id == "j"
        assert face.do(lambda c: c.reconcile("i", task.id, result={"a": 1}, by="me")).id == task.id
        assert face.do(lambda c: c.agents())[0].nodes[0].busy == 1
        assert face.do(lambda c: c.start_agent("x:y"))[0].id == "a"
        assert face.do(lambda c: c.stop_agent("a")) is None
        (agent_now,) = face.do(lambda c: c.reload()).agents
        assert (agent_now.id, agent_now.was, agent_now.changes) == ("a", "1", ("node n is new",))
        assert face.do(lambda c: c.tree()).children[0].tasks == {"t": 1.5}
        assert face.do(lambda c: c.stats()) == {"steps": 2.0}
        assert face.do(lambda c: c.stop(drain=1.5)) is None
    assert m.ListInvocations("a", "queued", "s", 5) in server.requests
    assert m.StopDaemon(1.5) in server.requests
    assert len(server.connections) == 1, "one connection serves one caller after another"


def test_answer_of_the_wrong_kind_is_protocol_error(path: str, face: Face) -> None:
    with FakeServer(path, answering(Run=m.Done())), pytest.raises(HayataError, match="protocol_error"):
        face.do(lambda c: c.run("a"))


def test_options_that_cannot_be_are_refused_before_anything_is_sent(path: str, face: Face) -> None:
    attempts: list[Callable[[Any], Any]] = [
        lambda c: c.run(""),
        lambda c: c.run("a", session="é"),
        lambda c: c.run("a", invocation_id="x" * 129),
        lambda c: c.run("a", key=""),
        lambda c: c.run("a", on_busy="wait"),
        lambda c: c.run("a", stream="yes"),
        lambda c: c.invocations(status="done"),
        lambda c: c.invocations(limit=0),
        lambda c: c.invocations(limit=True),
        lambda c: c.call("a", timeout=-1),
        lambda c: c.call("a", timeout=float("nan")),
        lambda c: c.reconcile("i", "t"),
        lambda c: c.reconcile("i", "t", result={}, retry=True),
        lambda c: c.reconcile("i", "t", result=[1]),
        lambda c: c.reconcile("i", "t", error=""),
        lambda c: c.reconcile("i", "t", error="\ud800"),
        lambda c: c.reconcile("i", "t", retry=True, by=""),
        lambda c: c.recover("a", changed="yes"),
        lambda c: c.start_agent(""),
        lambda c: c.stop(drain=float("inf")),
    ]
    with FakeServer(path, answering()) as server:
        for attempt in attempts:
            with pytest.raises(HayataError) as error:
                face.do(attempt)
            assert error.value.code == "invalid_options"
        with pytest.raises(HayataError) as error:
            face.do(lambda c: c.run("a", {"x": [object()]}))
        assert error.value.code == "unserializable_value"
        assert error.value.details["path"].startswith("input.x[0]")
        with pytest.raises(TypeError):
            face.do(lambda c: c.run("a", nope=1))
    assert server.asked == []


def test_reconcile_all_settles_every_uncertain_task_of_the_node_once(path: str, face: Face) -> None:
    def task(name: str, node: str, status: str = "uncertain") -> m.TaskInfo:
        return m.TaskInfo(name, node, 0, 1, status)

    tasks = {
        "i": [task("i.0", "n"), task("i.1", "other")],
        "j": [task("j.0", "n"), task("j.1", "n", "completed")],
    }

    def handler(connection: Connection, ask: m.Ask) -> None:
        match ask.request:
            case m.ListInvocations():
                connection.tell(ask.number, m.InvocationList([info("i", "uncertain"), info("j", "uncertain")]))
            case m.ListTasks(invocation_id=name):
                connection.tell(ask.number, m.TaskList(tasks[name]))
            case m.Reconcile(task_id="i.0"):
                connection.tell(ask.number, refusal("already_reconciled"))
            case m.Reconcile(task_id=name):
                connection.tell(ask.number, task(name, "n", "completed"))

    with FakeServer(path, handler) as server:
        settled = face.do(lambda c: c.reconcile_all("a", "n", retry=True, by="me"))
    assert [done.id for done in settled] == ["j.0"]
    sent = [request for request in server.requests if isinstance(request, m.Reconcile)]
    assert [(request.task_id, request.retry, request.by) for request in sent] == [
        ("i.0", True, "me"),
        ("j.0", True, "me"),
    ]


# ----------------------------------------------------------------------------------------------------------
# Timeouts
# ----------------------------------------------------------------------------------------------------------


def test_result_timeout_changes_nothing_and_the_next_call_works(path: str, face: Face) -> None:
    def handler(connection: Connection, ask: m.Ask) -> None:
        if not isinstance(ask.request, m.AwaitInvocation):
            connection.tell(ask.number, info("i"))

    with FakeServer(path, handler):
        invocation = face.do(lambda c: c.run("a"))
        began = time.monotonic()
        with pytest.raises(TimeoutError, match=r"invocation i has not ended in 0\.05 s; it goes on"):
            face.do(lambda _: invocation.result(timeout=0.05))
        assert time.monotonic() - began < 2
        assert face.do(lambda _: invocation.status()) == "running"


def test_result_with_no_time_at_all_still_returns_what_is_there(path: str, face: Face) -> None:
    done = info("i", "completed", result=value(7))
    with FakeServer(path, answering(GetInvocation=done, AwaitInvocation=done)):
        invocation = face.do(lambda c: c.invocation("i"))
        assert face.do(lambda _: invocation.result(timeout=0)) == 7


def test_daemon_that_never_answers_is_unavailable(path: str, face: Face, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "ANSWER_S", 0.1)
    with FakeServer(path, lambda c, ask: None), pytest.raises(HayataError, match="gave no answer") as error:
        face.do(lambda c: c.run("a"))
    assert error.value.code == "daemon_unavailable"


def test_daemon_that_never_greets_is_unavailable(path: str, face: Face, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "PATIENCE_S", 0.2)
    with FakeServer(path, lambda c, ask: None, greeting=None), pytest.raises(HayataError) as error:
        face.do(lambda c: c.run("a"))
    assert error.value.code == "daemon_unavailable"
    assert "did not greet" in error.value.message


def test_timeout_of_result_holds_while_the_daemon_does_not_greet(path: str, face: Face) -> None:
    with FakeServer(path, lambda c, ask: None, greeting=None), pytest.raises(TimeoutError):
        face.do(lambda c: c._perform(operations.result("i", 0.05)))


# ----------------------------------------------------------------------------------------------------------
# Lost connections
# ----------------------------------------------------------------------------------------------------------


def test_no_daemon_is_said_at_once_with_the_path(path: str, face: Face) -> None:
    began = time.monotonic()
    with pytest.raises(HayataError) as error:
        face.do(lambda c: c.agents())
    assert error.value.code == "daemon_unavailable"
    assert path in error.value.message
    assert time.monotonic() - began < 1


def test_socket_without_listener_is_unavailable(path: str, face: Face) -> None:
    left_over = socket.socket(socket.AF_UNIX)
    left_over.bind(path)
    left_over.close()
    with pytest.raises(HayataError) as error:
        face.do(lambda c: c.agents())
    assert error.value.code == "daemon_unavailable"


def test_daemon_with_a_full_queue_of_connections_is_waited_for(
    path: str, face: Face, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connect that does not wait meets EAGAIN, to be taken neither for success nor for absence."""
    monkeypatch.setattr(core, "PATIENCE_S", 0.3)
    with contextlib.ExitStack() as opened:
        listener = opened.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(path)
        listener.listen(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                opened.enter_context(address.connect(path, timeout_s=0))
        with pytest.raises(HayataError, match="queue of new connections is full"):
            face.do(lambda c: c.agents())


def test_socket_of_somebody_else_is_permission_denied(path: str, face: Face, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str, *, timeout_s: float | None) -> socket.socket:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(address, "connect", refuse)
    with pytest.raises(HayataError) as error:
        face.do(lambda c: c.agents())
    assert error.value.code == "permission_denied"


def test_lost_connection_is_made_anew_and_the_same_request_sent_again(path: str, face: Face) -> None:
    def handler(connection: Connection, ask: m.Ask) -> None:
        if connection.index < 3:
            connection.close()
        else:
            connection.tell(ask.number, info("i"))

    with FakeServer(path, handler) as server:
        face.do(lambda c: c.run("a", {"x": 1}))
    first, *others = server.requests
    assert len(server.requests) >= 2
    assert all(other == first for other in others), "the same invocation id each time"


def test_connection_closed_while_idle_is_replaced_silently(path: str, face: Face) -> None:
    with FakeServer(path, answering(ListAgents=m.AgentList([]))) as server:
        face.do(lambda c: c.agents())
        server.drop_all()
        server.connections[0].closed.wait(DEADLINE_S)
        assert face.do(lambda c: c.agents()) == []


def test_what_was_said_on_an_idle_connection_is_not_the_next_calls_answer(path: str) -> None:
    with FakeServer(path, answering(ListAgents=m.AgentList([]))) as server, Client(path) as client:
        client.agents()
        server.connections[0].tell(0, refusal("overloaded"))
        assert client.agents() == []
        assert len(server.connections) == 2


def test_daemon_that_is_gone_for_good_is_unavailable(path: str, face: Face) -> None:
    with FakeServer(path, answering(ListAgents=m.AgentList([]))):
        face.do(lambda c: c.agents())
    with pytest.raises(HayataError, match="no daemon listens"):
        face.do(lambda c: c.agents())


def test_waiting_for_result_survives_a_restart(path: str, face: Face) -> None:
    def handler(connection: Connection, ask: m.Ask) -> None:
        if isinstance(ask.request, m.Run):
            connection.tell(ask.number, info("i"))
        elif connection.index < 1:
            connection.server.drop_all()
        else:
            connection.tell(ask.number, info("i", "completed", result=value("late")))

    with FakeServer(path, handler):
        assert face.do(lambda c: c.call("a")) == "late"


def test_endless_losses_end_with_unavailable(path: str, face: Face, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "PATIENCE_S", 0.3)
    with FakeServer(path, lambda c, ask: c.close()) as server, pytest.raises(HayataError) as error:
        face.do(lambda c: c.run("a"))
    assert error.value.code == "daemon_unavailable"
    assert 2 <= len(server.requests) < 50


# ----------------------------------------------------------------------------------------------------------
# Bad bytes
# ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "greeting",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"\xff\xff\xff\xff",
        frame(b"\xc1"),
        frame(b"nonsense"),
        frame(m.encode(m.Hello(protocol=2, package="9.9"))),
        frame(msgspec.msgpack.encode({"type": "hello", "protocol": 2, "colour": "red"})),
        frame(m.encode(m.Tell(1, m.Done()))),
        FakeServer.GREETING * 2,
        FakeServer.GREETING + frame(b"\x93"),
        FakeServer.GREETING + frame(m.encode(m.Tell(77, m.Done()))),
        FakeServer.GREETING + b"\xff\xff\xff\xff",
    ],
    ids=[
        "http",
        "4 GB",
        "no msgpack",
        "no message",
        "other version",
        "unknown field",
        "no greeting",
        "two greetings",
        "no answer",
        "unasked answer",
        "4 GB later",
    ],
)
def test_bytes_that_are_not_our_protocol_are_a_clear_error(path: str, face: Face, greeting: bytes) -> None:
    with FakeServer(path, lambda c, ask: None, greeting=greeting), pytest.raises(HayataError) as error:
        face.do(lambda c: c.agents())
    assert error.value.code == "protocol_error"


def test_what_the_daemon_says_of_the_connection_is_raised(path: str, face: Face) -> None:
    greeting = FakeServer.GREETING + frame(m.encode(m.Tell(0, refusal("overloaded"))))
    with FakeServer(path, lambda c, ask: None, greeting=greeting), pytest.raises(HayataError) as error:
        face.do(lambda c: c.agents())
    assert error.value.code == "overloaded"


def test_answer_to_an_earlier_question_is_protocol_error(path: str) -> None:
    def handler(connection: Connection, ask: m.Ask) -> None:
        connection.tell(1, m.AgentList([]))

    with FakeServer(path, handler), Client(path) as client:
        assert client.agents() == []
        with pytest.raises(HayataError, match="out of turn"):
            client.agents()


def test_what_the_daemon_says_before_it_stops_reading_is_raised(path: str, face: Face) -> None:
    """Its reason is worth more than the broken pipe that the rest of the request meets."""
    greeting = FakeServer.GREETING + frame(m.encode(m.Tell(0, refusal("frame_too_large"))))
    server = FakeServer(path, lambda c, ask: None, greeting=greeting, reads=False)
    with server, pytest.raises(HayataError) as error:
        face.do(lambda c: c.run("a", "x" * 5_000_000))
    assert error.value.code == "frame_too_large"


def test_request_over_the_cap_is_a_typed_error_and_the_client_still_works(
    path: str, face: Face, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(face.client, "_cap", 1000)
    with FakeServer(path, answering(ListAgents=m.AgentList([]))) as server:
        face.do(lambda c: c.agents())
        with pytest.raises(HayataError) as error:
            face.do(lambda c: c.run("a", "x" * 2000))
        assert error.value.code == "frame_too_large"
        assert face.do(lambda c: c.agents()) == []
    assert len(server.asked) == 2


def test_large_messages_go_both_ways(path: str, face: Face) -> None:
    big = "x" * 5_000_000
    with FakeServer(path, answering(Run=info("i"), AwaitInvocation=info("i", "completed", result=value(big)))):
        assert face.do(lambda c: c.call("a", big)) == big


# ----------------------------------------------------------------------------------------------------------
# Events
# ----------------------------------------------------------------------------------------------------------


def test_events_come_in_order_with_their_data(path: str, face: Face) -> None:
    def handler(connection: Connection, ask: m.Ask) -> None:
        if isinstance(ask.request, m.GetInvocation):
            connection.tell(ask.number, info("i"))
            return
        connection.tell(ask.number, m.EventBatch([event(3, node_id="n"), event(4)]))
        connection.tell(ask.number, m.EventBatch([event(5)]))
        connection.tell(ask.number, m.Done())

    with FakeServer(path, handler) as server:
        invocation = face.do(lambda c: c.invocation("i"))
        events = face.events(invocation, after=2, until="now")
    assert [(e.sequence, e.invocation_id) for e in events] == [(3, "i"), (4, "i"), (5, "i")]
    assert events[0].data == {"node_id": "n"}
    assert m.FollowEvents("i", 2, "now") in server.requests


def test_events_go_on_after_a_loss_without_repeating_or_missing_any(path: str, face: Face) -> None:
    """The stream breaks behind each batch, once in the middle of a frame, and once behind a gap."""
    everything = [event(1), event(2), event(3, "gap", **{"from": 3, "to": 6}), event(7), event(8)]

    def handler(connection: Connection, ask: m.Ask) -> None:
        if isinstance(ask.request, m.GetInvocation):
            connection.tell(ask.number, info("i"))
            return
        assert isinstance(ask.request, m.FollowEvents)
        rest = [e for e in everything if e.sequence > ask.request.after]
        if not rest:
            connection.tell(ask.number, m.Done())
            return
        connection.tell(ask.number, m.EventBatch(rest[:1]))
        if rest[1:]:
            half = frame(m.encode(m.Tell(ask.number, m.EventBatch(rest[1:]))))
            connection.write(half[: len(half) // 2])
        connection.close()

    with FakeServer(path, handler) as server:
        invocation = face.do(lambda c: c.invocation("i"))
        events = face.events(invocation)
    assert [e.sequence for e in events] == [1, 2, 3, 7, 8]
    follows = [request.after for request in server.requests if isinstance(request, m.FollowEvents)]
    assert follows == [0, 1, 2, 6, 7, 8]


def test_events_refused_is_the_error(path: str, face: Face) -> None:
    answers = answering(GetInvocation=info("i"), FollowEvents=refusal("unknown_invocation"))
    with FakeServer(path, answers):
        invocation = face.do(lambda c: c.invocation("i"))
        with pytest.raises(HayataError) as error:
            face.events(invocation)
    assert error.value.code == "unknown_invocation"


def test_wrong_options_of_events_are_refused_before_the_first_is_read(path: str, face: Face) -> None:
    with FakeServer(path, answering(GetInvocation=info("i"))):
        invocation = face.do(lambda c: c.invocation("i"))
        for options in ({"after": -1}, {"until": "never"}):
            with pytest.raises(HayataError, match="invalid_options"):
                invocation.events(**options)


def test_slow_reader_of_events_holds_back_the_daemon_not_memory(path: str, face: Face) -> None:
    """The server can write only what the kernel's buffers take until the reader asks for more."""
    written = threading.Semaphore(0)
    chunk = "x" * 100_000
    total = 200

    def handler(connection: Connection, ask: m.Ask) -> None:
        if isinstance(ask.request, m.GetInvocation):
            connection.tell(ask.number, info("i"))
            return
        for sequence in range(1, total + 1):
            connection.tell(ask.number, m.EventBatch([event(sequence, chunk=chunk)]))
            written.release()
        connection.tell(ask.number, m.Done())

    def count() -> int:
        found = 0
        while written.acquire(timeout=0.2):
            found += 1
        return found

    with FakeServer(path, handler):
        invocation = face.do(lambda c: c.invocation("i"))
        if isinstance(face.client, Client):
            events = invocation.events()
            next(events)
            assert count() < total / 2
            assert len(list(events)) == total - 1
        else:
            stream = invocation.events()
            face.do(lambda _: stream.__anext__())
            assert count() < total / 2

            async def rest() -> int:
                return len([e async for e in stream])

            assert face.do(lambda _: rest()) == total - 1


def test_stream_that_is_dropped_closes_its_connection(path: str, face: Face) -> None:
    def handler(connection: Connection, ask: m.Ask) -> None:
        if isinstance(ask.request, m.GetInvocation):
            connection.tell(ask.number, info("i"))
        else:
            connection.tell(ask.number, m.EventBatch([event(1)]))

    with FakeServer(path, handler) as server:
        invocation = face.do(lambda c: c.invocation("i"))
        face.first_event(invocation)
        gc.collect()
        assert server.connections[1].closed.wait(DEADLINE_S)


# ----------------------------------------------------------------------------------------------------------
# Threads, forks, loops
# ----------------------------------------------------------------------------------------------------------


def test_many_threads_share_a_client(path: str) -> None:
    def handler(connection: Connection, ask: m.Ask) -> None:
        assert isinstance(ask.request, m.GetInvocation)
        connection.tell(ask.number, info(ask.request.invocation_id))

    wrong: list[str] = []

    def work(client: Client, name: str) -> None:
        for _ in range(50):
            got = client.invocation(name).id
            if got != name:
                wrong.append(got)

    with FakeServer(path, handler) as server, Client(path) as client:
        threads = [threading.Thread(target=work, args=(client, f"t{n}")) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
    assert wrong == []
    assert len(server.asked) == 400
    assert len(server.connections) <= 40


def test_forked_child_makes_connections_of_its_own(path: str) -> None:
    with FakeServer(path, answering(ListAgents=m.AgentList([]))) as server, Client(path) as client:
        client.agents()
        assert client._pool._lock.acquire()  # as another thread might hold it at the moment of the fork
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks beside threads
            pid = os.fork()
        if pid == 0:
            status = 1
            with contextlib.suppress(BaseException):
                status = 0 if client.agents() == [] else 2
            os._exit(status)
        client._pool._lock.release()
        _, code = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(code) == 0
        assert client.agents() == []
        assert len(server.connections) == 2, "the parent goes on with its own"


def test_closed_client_says_so(path: str, face: Face) -> None:
    with FakeServer(path, answering(ListAgents=m.AgentList([]), GetInvocation=info("i"))) as server:
        invocation = face.do(lambda c: c.invocation("i"))
        face.do(lambda c: c.close())
        assert server.connections[0].closed.wait(DEADLINE_S)
        with pytest.raises(HayataError, match="this client is closed"):
            face.do(lambda c: c.agents())
        with pytest.raises(HayataError, match="this client is closed"):
            face.events(invocation)


def test_client_that_is_forgotten_closes_its_connection(path: str) -> None:
    with FakeServer(path, answering(ListAgents=m.AgentList([]))) as server:
        Client(path).agents()
        gc.collect()
        assert server.connections[0].closed.wait(DEADLINE_S)

        async def forget() -> None:
            await AsyncClient(path).agents()

        asyncio.run(forget())
        gc.collect()
        assert server.connections[1].closed.wait(DEADLINE_S)


def test_async_client_shares_one_connection_and_matches_answers(path: str) -> None:
    """Answers come in the reverse order of the questions."""
    held: list[m.Ask] = []

    def handler(connection: Connection, ask: m.Ask) -> None:
        held.append(ask)
        if len(held) == 20:
            for one in reversed(held):
                assert isinstance(one.request, m.GetInvocation)
                connection.tell(one.number, info(one.request.invocation_id))

    async def main() -> list[str]:
        async with AsyncClient(path) as client:
            found = await asyncio.gather(*(client.invocation(f"i{n}") for n in range(20)))
            return [one.id for one in found]

    with FakeServer(path, handler) as server:
        assert asyncio.run(main()) == [f"i{n}" for n in range(20)]
    assert len(server.connections) == 1


def test_cancelled_call_leaves_nothing_behind(path: str) -> None:
    asked = threading.Event()

    def handler(connection: Connection, ask: m.Ask) -> None:
        if isinstance(ask.request, m.Run):
            asked.set()
            return  # its answer comes late, below
        connection.tell(1, info("late"))
        connection.tell(ask.number, m.AgentList([]))

    async def main() -> None:
        async with AsyncClient(path) as client:
            running = asyncio.create_task(client.run("a"))
            await asyncio.to_thread(asked.wait, DEADLINE_S)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert await client.agents() == []
            assert client._link is not None
            assert client._link._waiting == {}

    with FakeServer(path, handler) as server:
        asyncio.run(main())
    assert len(server.connections) == 1


def test_call_cancelled_in_the_middle_of_its_request_does_not_spoil_the_others(path: str) -> None:
    """The daemon reads no more, a large request is cut off half way: the connection is given up."""
    stuck = threading.Event()
    go_on = threading.Event()

    def handler(connection: Connection, ask: m.Ask) -> None:
        if connection.index == 0:
            stuck.set()
            go_on.wait(DEADLINE_S)
        else:
            connection.tell(ask.number, m.AgentList([]))

    async def main() -> None:
        async with AsyncClient(path) as client:
            first = asyncio.create_task(client.agents())
            await asyncio.to_thread(stuck.wait, DEADLINE_S)
            large = asyncio.create_task(client.run("a", "x" * 20_000_000))
            while not client._link or not client._link._sending.locked():
                await asyncio.sleep(0)
            large.cancel()
            with pytest.raises(asyncio.CancelledError):
                await large
            assert await first == []

    with FakeServer(path, handler):
        asyncio.run(main())
        go_on.set()


def test_cancelled_anext_loses_no_event(path: str) -> None:
    first_read = threading.Event()

    def handler(connection: Connection, ask: m.Ask) -> None:
        if isinstance(ask.request, m.GetInvocation):
            connection.tell(ask.number, info("i"))
            return
        assert isinstance(ask.request, m.FollowEvents)
        if ask.request.after == 0:
            connection.tell(ask.number, m.EventBatch([event(1)]))
            first_read.set()
        else:
            connection.tell(ask.number, m.EventBatch([event(2)]))
            connection.tell(ask.number, m.Done())

    async def main() -> list[int]:
        async with AsyncClient(path) as client:
            stream = (await client.invocation("i")).events()
            seen = [(await anext(stream)).sequence]
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(stream), 0.05)
            seen += [e.sequence async for e in stream]
            return seen

    with FakeServer(path, handler):
        assert asyncio.run(main()) == [1, 2]


def test_async_client_works_in_one_loop_after_another(path: str) -> None:
    client = AsyncClient(path)

    async def ask() -> Any:
        return await client.agents()

    with FakeServer(path, answering(ListAgents=m.AgentList([]))):
        assert asyncio.run(ask()) == []
        assert asyncio.run(ask()) == []
        asyncio.run(client.close())


def test_async_client_works_in_two_loops_at_once(path: str) -> None:
    client = AsyncClient(path)
    asked = threading.Event()

    async def first() -> Any:
        await client.agents()
        await asyncio.to_thread(asked.wait, DEADLINE_S)
        return await client.agents()

    async def second() -> Any:
        found = await asyncio.wait_for(client.agents(), DEADLINE_S)
        asked.set()
        return found

    with FakeServer(path, answering(ListAgents=m.AgentList([]))) as server:
        other = threading.Thread(target=lambda: asyncio.run(first()))
        other.start()
        while not server.asked and other.is_alive():
            time.sleep(0.001)
        assert asyncio.run(second()) == []
        other.join(DEADLINE_S)
        asyncio.run(client.close())
    assert len(server.connections) >= 2


def test_loss_reaches_every_waiting_call_of_the_async_client(path: str) -> None:
    lock = threading.Lock()
    waiting = 0

    def handler(connection: Connection, ask: m.Ask) -> None:
        nonlocal waiting
        assert isinstance(ask.request, m.AwaitInvocation | m.GetInvocation)
        if connection.index == 0 and isinstance(ask.request, m.AwaitInvocation):
            with lock:
                waiting += 1
                if waiting == 5:
                    connection.close()
            return
        name = ask.request.invocation_id
        connection.tell(ask.number, info(name, "completed", result=value(name)))

    async def main() -> list[Any]:
        async with AsyncClient(path) as client:
            found = [await client.invocation(f"i{n}") for n in range(5)]
            return await asyncio.gather(*(one.result() for one in found))

    with FakeServer(path, handler):
        assert asyncio.run(main()) == [f"i{n}" for n in range(5)]
