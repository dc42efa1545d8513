"""Partial results and events: in order, exact for every ``after``, refused from what has ended, bounded."""

from __future__ import annotations

import contextlib
import select
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from hayata import InvocationCancelled
from hayata.client import Invocation
from hayata.client.records import Event
from tests.support.crash_site import Daemon
from tests.support.eventually import eventually
from tests.support.ledger import check_events
from tests.support.raw_client import RawClient
from tests.support.shared_daemon import WAIT_S, app, descriptors, serving, supervisor, undisturbed

APP = app("streaming")
MIB = 1 << 20


@pytest.fixture(scope="module")
def shared() -> Iterator[Daemon]:
    with serving(APP) as daemon:
        yield daemon


@pytest.fixture
def daemon(shared: Daemon) -> Iterator[Daemon]:
    """The shared daemon, that must be the same afterwards, and serve."""
    with undisturbed(shared, "echo"):
        yield shared


def partials(events: list[Event]) -> list[Event]:
    return [event for event in events if event.type == "node_partial_result"]


def numbers(events: list[Event], node: str | None = None) -> list[int]:
    """What the chunks say of their order."""
    found = [event for event in partials(events) if node in (None, event.data["node_id"])]
    return [event.data["result"]["number"] for event in found]


def paused(daemon: Daemon, agent: str, chunks: int, pause_at: int, gate: str, **more: int) -> Invocation:
    """Start an invocation that streams, and return when it waits at its gate."""
    given = {"chunks": chunks, "pause_at": pause_at, "gate": gate, **more}
    invocation = daemon.client.run(agent, given, stream=True)
    daemon.site.ledger.wait("paused", invocation=invocation.id)
    return invocation


# ---- order -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("agent", ["pour", "pour_async"])
def test_chunks_come_in_order_between_the_start_and_the_end_of_their_node(daemon: Daemon, agent: str):
    invocation = daemon.client.run(agent, {"chunks": 50}, stream=True)
    events = list(invocation.events())
    check_events(events, "completed")
    kinds = [event.type for event in events]
    assert kinds[:2] == ["invocation_started", "node_started"]
    assert kinds[2:-2] == ["node_partial_result"] * 50
    assert kinds[-2:] == ["node_completed", "invocation_completed"]
    assert numbers(events) == list(range(50))
    (task,) = invocation.tasks()
    for event in partials(events):
        assert (event.data["node_id"], event.data["execution_id"]) == (agent, task.id)
        assert event.data["edge_id"]
    assert [event.time for event in events] == sorted(event.time for event in events)


def test_chunks_of_parallel_nodes_come_each_in_their_order(daemon: Daemon):
    invocation = daemon.client.run("both", {"chunks": 200}, stream=True)
    events = list(invocation.events())
    check_events(events, "completed")
    assert numbers(events, "pour") == numbers(events, "pour_async") == list(range(200))
    for node in ("pour", "pour_async"):
        of_node = [event.type for event in events if event.data.get("node_id") == node]
        assert (of_node[0], of_node[-1]) == ("node_started", "node_completed")


def test_without_a_stream_chunks_are_nobodys_and_the_result_is_the_same(daemon: Daemon):
    invocation = daemon.client.run("both", {"chunks": 5})
    assert invocation.result(timeout=WAIT_S) == [{"poured": 5}] * 2
    events = list(invocation.events())
    check_events(events, "completed")
    assert partials(events) == []


@pytest.mark.parametrize("agent", ["linger", "linger_async"])
def test_chunk_after_the_end_of_its_body_is_refused(daemon: Daemon, agent: str):
    invocation = daemon.client.run(agent, stream=True)
    assert invocation.result(timeout=WAIT_S) == {"ended": True}
    line = daemon.site.ledger.wait("refused", invocation=invocation.id)
    assert line["code"] == "execution_not_active"
    events = list(invocation.events())
    check_events(events, "completed")
    assert [event.type for event in events[-2:]] == ["node_completed", "invocation_completed"]


def test_chunk_of_a_cancelled_task_is_refused_by_the_supervisor(daemon: Daemon):
    invocation = daemon.client.run("complain", stream=True)
    daemon.site.ledger.wait("running", invocation=invocation.id)
    assert invocation.cancel() == "cancelled"
    (line,) = daemon.site.ledger.lines("refused", invocation=invocation.id)
    assert line["code"] == "execution_not_active"
    assert partials(list(invocation.events())) == []
    with pytest.raises(InvocationCancelled):
        invocation.result(timeout=WAIT_S)


# ---- events(after=) ----------------------------------------------------------------------------------------


def test_events_after_each_number_are_exactly_the_rest(daemon: Daemon):
    invocation = daemon.client.run("both", {"chunks": 10}, stream=True)
    whole = list(invocation.events())
    assert len(whole) == 26
    for after in range(len(whole) + 3):
        for until in ("now", "settled", "terminal"):
            assert list(invocation.events(after=after, until=until)) == whole[after:]
    assert list(invocation.events(after=2**62)) == []


def test_events_beyond_the_memory_for_partial_results_are_gaps(daemon: Daemon):
    """More chunks than are kept, and more than one commit reserves numbers for; no event of a node is lost."""
    invocation = daemon.client.run("twice", {"chunks": [200, 2_400]}, stream=True)
    assert invocation.result(timeout=WAIT_S) == {"poured": 2_400}
    whole = list(invocation.events())
    check_events(whole, "completed")
    assert [event.sequence for event in whole if event.type == "node_completed"] == [203, 2_605]
    gaps = [(event.data["from"], event.data["to"], event.sequence) for event in whole if event.type == "gap"]
    assert [gap[0] for gap in gaps] == [3, 205]
    assert [gap[1] for gap in gaps] == [gap[2] for gap in gaps]
    kept = gaps[1][1] + 1
    assert numbers(whole) == list(range(kept - 205, 2_400))
    for after in (0, 1, 2, 3, 100, 202, 203, 204, 205, 400, kept - 2, kept - 1, kept, 2_604, 2_605, 2_606):
        rest = list(invocation.events(after=after))
        check_events(rest, "completed" if rest else "running", first=after + 1)
        told = [event for event in rest if event.type != "gap"]
        assert told == [event for event in whole if event.type != "gap" and event.sequence > after]


def test_reader_in_the_middle_sees_what_was_and_what_comes(daemon: Daemon):
    invocation = paused(daemon, "pour", 20, 10, "middle")
    so_far = list(invocation.events(until="now"))
    check_events(so_far, "running")
    assert numbers(so_far) == list(range(10))
    last = so_far[-1].sequence
    with ThreadPoolExecutor(4) as pool:
        readers = [pool.submit(lambda after=after: list(invocation.events(after=after))) for after in (0, 5, last)]
        rest = invocation.events(after=last - 1)
        assert next(rest) == so_far[-1]
        daemon.site.open_gate("middle")
        assert numbers(list(rest)) == list(range(10, 20))
        whole, some, new = (reader.result(WAIT_S) for reader in readers)
    check_events(whole, "completed")
    assert (some, new) == (whole[5:], whole[last:])
    assert whole[:last] == so_far


def test_reader_that_hangs_up_in_the_middle_changes_nothing(daemon: Daemon):
    invocation = paused(daemon, "pour_async", 20, 10, "hang-up")
    before = descriptors(daemon)
    for _ in range(20):
        events = invocation.events()
        assert next(events).type == "invocation_started"
        events.close()
    daemon.site.open_gate("hang-up")
    assert invocation.result(timeout=WAIT_S) == {"poured": 20}
    assert numbers(list(invocation.events())) == list(range(20))
    eventually(lambda: descriptors(daemon) <= before + 1, "their descriptors are closed")


# ---- clients that do not read ------------------------------------------------------------------------------


def test_clients_that_never_read_their_events_cost_bounded_memory_and_hold_nobody_up(daemon: Daemon):
    """128 MiB of chunks, to four who sleep and one who reads; then one of the four wakes up."""
    invocation = paused(daemon, "pour", 2_048, 0, "flood", bytes=64 * 1024)
    sleepers = [RawClient(daemon.socket) for _ in range(4)]
    for sleeper in sleepers:
        sleeper.ask({"type": "follow_events", "invocation_id": invocation.id})
    before = supervisor(daemon).memory_bytes
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(lambda: [event.sequence for event in invocation.events()])
        daemon.site.open_gate("flood")
        peak = before
        while not reading.done():
            assert daemon.client.call("echo", 1, timeout=WAIT_S) == {"echo": 1}
            peak = max(peak, supervisor(daemon).memory_bytes)
        assert reading.result()[-1] == 2_052
    assert invocation.result(timeout=WAIT_S) == {"poured": 2_048}
    assert peak - before < 48 * MIB
    covered = 0
    while True:
        answer = sleepers[0].receive()["answer"]
        if answer["type"] == "done":
            break
        for sequence, kind, _, data in answer["events"]:
            first = data["from"] if kind == "gap" else sequence
            assert first == covered + 1
            covered = sequence
    assert covered == 2_052
    for sleeper in sleepers:
        sleeper.close()


def test_client_that_asks_and_does_not_read_the_answers_is_not_read_either(daemon: Daemon):
    """What is answered waits for its reader in bounded memory; no more questions are taken meanwhile."""
    question = msgspec.msgpack.encode({"type": "ask", "number": 1, "request": {"type": "list_agents"}})
    question = len(question).to_bytes(4, "big") + question
    open_before = descriptors(daemon)
    before = supervisor(daemon).memory_bytes
    with RawClient(daemon.socket) as deaf, RawClient(daemon.socket) as rude:
        asked = [ask_until_nobody_listens(client, question, 8 * MIB) for client in (deaf, rude)]
        assert supervisor(daemon).memory_bytes - before < 32 * MIB
        rude.close()
        for _ in range(asked[0] // len(question)):
            assert deaf.receive()["answer"]["type"] == "agents"
    eventually(lambda: descriptors(daemon) <= open_before + 1, "both are closed")


def ask_until_nobody_listens(client: RawClient, question: bytes, most_bytes: int) -> int:
    """Send questions without reading an answer; returns how many bytes of them were taken."""
    sent = 0
    client.sock.setblocking(False)
    while select.select([], [client.sock], [], 0.2)[1]:
        assert sent < most_bytes, "it is read on and on"
        with contextlib.suppress(BlockingIOError):
            sent += client.sock.send((question * 2_000)[sent % len(question) :])
    return sent
