"""Who runs, who waits and who is refused: sessions, queues, keys and ids; and many clients at once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from hayata import AsyncClient, Client, InvocationCancelled, InvocationFailed
from hayata.client import Invocation
from tests.support.crash_site import Daemon, Site, check_gone
from tests.support.eventually import eventually
from tests.support.ledger import check_events
from tests.support.raw_client import RawClient
from tests.support.shared_daemon import WAIT_S, app, descriptors, refused, serving, undisturbed

APP = app("sessions")


@pytest.fixture(scope="module")
def shared() -> Iterator[Daemon]:
    with serving(APP) as daemon:
        yield daemon


@pytest.fixture
def daemon(shared: Daemon) -> Iterator[Daemon]:
    """The shared daemon, that must be the same afterwards, and serve."""
    with undisturbed(shared, "work"):
        yield shared


def at_gate(daemon: Daemon, agent: str, gate: str, **options: object) -> Invocation:
    """Start an invocation, and return when it waits at its gate."""
    invocation = daemon.client.run(agent, {"gate": gate, "text": gate}, **options)
    daemon.site.ledger.wait("began", invocation=invocation.id)
    return invocation


def bodies(daemon: Daemon, invocation: Invocation) -> int:
    """How many bodies of it have begun."""
    return len(daemon.site.ledger.lines("began", invocation=invocation.id))


def begun(daemon: Daemon, invocations: list[Invocation]) -> list[int]:
    """Which of these have begun, in the order in which they did."""
    order = {invocation.id: number for number, invocation in enumerate(invocations)}
    lines = daemon.site.ledger.lines("began")
    return [order[line["invocation"]] for line in lines if line["invocation"] in order]


# ---- sessions ----------------------------------------------------------------------------------------------


def test_busy_session_refuses_or_queues_and_others_run(daemon: Daemon):
    first = at_gate(daemon, "work", "busy", session="s")
    error = refused("session_busy", lambda: daemon.client.run("work", session="s"))
    assert error.details == {"session": "s", "invocation_id": first.id}
    assert error.hint
    queued = [daemon.client.run("work", {"number": n}, session="s", on_busy="queue") for n in range(5)]
    assert {each.status() for each in queued} == {"queued"}
    assert daemon.client.run("work", session="t").result(timeout=WAIT_S)
    assert daemon.client.run("other", session="s").result(timeout=WAIT_S)  # another agent, another session
    assert daemon.client.run("work").result(timeout=WAIT_S)
    refused("session_busy", lambda: daemon.client.run("work", session="s", on_busy="reject"))
    daemon.site.open_gate("busy")
    tokens = [each.result(timeout=WAIT_S)["token"] for each in [first, *queued]]
    assert len(set(tokens)) == 6
    assert begun(daemon, queued) == [0, 1, 2, 3, 4]
    spans = [line["what"] for line in daemon.site.ledger.lines() if line["invocation"] in {i.id for i in queued}]
    assert spans == ["began", "ended"] * 5  # one after the other
    listed = daemon.client.invocations(agent="work", session="s")
    assert [each.id for each in listed] == [each.id for each in reversed([first, *queued])]
    assert daemon.client.run("work", session="s").result(timeout=WAIT_S)  # it is free again


@pytest.mark.parametrize("end", ["cancelled", "failed"])
def test_session_goes_on_with_the_next_in_line_however_one_ends(daemon: Daemon, end: str):
    session = f"goes-on-{end}"
    first = at_gate(daemon, "chat", session, session=session)
    second = daemon.client.run("chat", {"text": "second", "stumble": True}, session=session, on_busy="queue")
    skipped = daemon.client.run("chat", {"text": "skipped"}, session=session, on_busy="queue")
    last = daemon.client.run("chat", {"text": "last"}, session=session, on_busy="queue")
    assert skipped.cancel() == "cancelled"
    if end == "cancelled":
        assert first.cancel() == "cancelled"
    daemon.site.open_gate(session)
    with pytest.raises(InvocationFailed, match="lost the thread"):
        second.result(timeout=WAIT_S)
    heard = [] if end == "cancelled" else [session]
    assert last.result(timeout=WAIT_S) == [*heard, "second"]  # what had been said before the failure counts
    with pytest.raises(InvocationCancelled):
        skipped.result(timeout=WAIT_S)
    assert bodies(daemon, skipped) == 0
    check_events(list(skipped.events()), "cancelled")


def test_conversation_needs_a_session_or_a_default(daemon: Daemon):
    error = refused("session_required", lambda: daemon.client.run("chat", {"text": "to whom?"}))
    assert error.hint
    refused("session_required", lambda: daemon.client.call("chat", {"text": "to whom?"}, on_busy="queue"))
    assert daemon.client.call("lobby", {"text": "hello"}, timeout=WAIT_S) == []
    assert daemon.client.call("lobby", {"text": "who is there?"}, timeout=WAIT_S) == ["hello"]
    assert daemon.client.call("lobby", {"text": "hush"}, session="corner", timeout=WAIT_S) == []
    assert daemon.client.invocations(agent="lobby")[1].record.session == "lobby"


def test_conversations_are_remembered_each_by_its_own_session_and_agent(daemon: Daemon):
    def say(text: str, session: str, agent: str = "chat") -> list[str]:
        return daemon.client.call(agent, {"text": text}, session=session, timeout=WAIT_S)

    assert say("a1", "ann") == []
    assert say("b1", "bob") == []
    assert say("a2", "ann") == ["a1"]
    assert say("l1", "ann", agent="lobby") == []
    assert say("b2", "bob") == ["b1"]
    assert say("a3", "ann") == ["a1", "a2"]


def test_conversation_is_remembered_over_stops_and_kills_of_the_daemon(site: Site):
    daemon = site.daemon(app("sessions", "chats")).start()

    def say(text: str, **more: object) -> list[str]:
        return daemon.client.call("chat", {"text": text, **more}, session="s", timeout=WAIT_S)

    assert say("one") == []
    daemon.stop()
    daemon.start()
    assert say("two") == ["one"]
    with pytest.raises(InvocationFailed):
        say("three", stumble=True)
    tree = daemon.tree()
    for seen in tree:
        seen.kill()
    daemon.wait_lost()
    daemon.start()
    check_gone(tree, since=0.0)
    assert say("four") == ["one", "two", "three"]


# ---- max_concurrency ---------------------------------------------------------------------------------------


def test_invocations_over_max_concurrency_wait_in_line(daemon: Daemon):
    running = [at_gate(daemon, "narrow", f"narrow-{number}") for number in range(2)]
    queued = [daemon.client.run("narrow", {"number": number}) for number in range(4)]
    assert {each.status() for each in queued} == {"queued"}
    (agent,) = [each for each in daemon.client.agents() if each.id == "narrow"]
    assert (agent.running, agent.queued) == (2, 4)
    assert [each.id for each in daemon.client.invocations(agent="narrow", status="queued")] == [
        each.id for each in reversed(queued)
    ]
    assert queued[1].cancel() == "cancelled"
    daemon.site.open_gate("narrow-0")
    for each in (queued[0], queued[2], queued[3]):
        assert each.result(timeout=WAIT_S)
    assert running[1].status() == "running"
    assert begun(daemon, queued) == [0, 2, 3]
    daemon.site.open_gate("narrow-1")
    assert running[1].result(timeout=WAIT_S)


# ---- keys and ids ------------------------------------------------------------------------------------------


def test_key_gives_the_same_invocation_while_its_input_is_the_same(daemon: Daemon):
    run = daemon.client.run
    first = at_gate(daemon, "work", "keyed", key="k")
    given = {"gate": "keyed", "text": "keyed"}
    assert run("work", given, key="k").id == first.id
    error = refused("key_reused", lambda: run("work", {"gate": "keyed", "text": "other"}, key="k"))
    assert error.details["invocation_id"] == first.id
    other = run("other", given, key="k")
    assert other.id != first.id  # keys belong to their agent
    daemon.site.open_gate("keyed")
    result = first.result(timeout=WAIT_S)
    again = run("work", given, key="k")
    assert (again.id, again.result(timeout=WAIT_S)) == (first.id, result)
    refused("key_reused", lambda: run("work", None, key="k"))
    assert daemon.client.call("work", given, key="k", timeout=WAIT_S) == result
    assert bodies(daemon, first) == 1
    assert other.result(timeout=WAIT_S) != result


def test_invocation_id_that_is_sent_again_is_the_same_invocation(daemon: Daemon):
    run = daemon.client.run
    first = at_gate(daemon, "work", "resent", invocation_id="mine", session="resent")
    given = {"gate": "resent", "text": "resent"}
    for _ in range(3):  # also when its session is busy: it is busy with this very one
        assert run("work", given, invocation_id="mine", session="resent").id == "mine"
    refused("invocation_exists", lambda: run("work", {"gate": "resent"}, invocation_id="mine"))
    refused("invocation_exists", lambda: run("other", given, invocation_id="mine"))
    daemon.site.open_gate("resent")
    result = first.result(timeout=WAIT_S)
    assert run("work", given, invocation_id="mine").result(timeout=WAIT_S) == result
    refused("invocation_exists", lambda: run("work", {"gate": "resent"}, invocation_id="mine"))
    assert bodies(daemon, first) == 1


@pytest.mark.parametrize("option", ["key", "invocation_id"])
def test_many_at_once_with_one_key_or_id_are_one_invocation(daemon: Daemon, option: str):
    async def run_all() -> list[str]:
        clients = [AsyncClient(daemon.socket) for _ in range(10)]
        runs = [client.run("work", {"n": 1}, **{option: f"one-{option}"}) for client in clients for _ in range(5)]
        started = await asyncio.gather(*runs)
        for client in clients:
            await client.close()
        return [invocation.id for invocation in started]

    ids = asyncio.run(run_all())
    assert len(ids) == 50
    assert len(set(ids)) == 1
    invocation = daemon.client.invocation(ids[0])
    assert invocation.result(timeout=WAIT_S)
    assert bodies(daemon, invocation) == 1


BAD_NAMES = ["", "x" * 129, "a b", "-x", "~x", "a\n", "a/\0", "ü", "../x"]


@pytest.mark.parametrize("name", BAD_NAMES, ids=ascii)
def test_names_that_cannot_be_are_refused_everywhere_d11(daemon: Daemon, name: str):
    """D11, dbos 759: an empty id would be executed for a month; recovering twice does nothing twice."""
    client = daemon.client
    calls: list[Callable[[], object]] = [
        lambda: client.run(name),
        *(lambda option=option: client.run("work", **{option: name}) for option in ("session", "key", "invocation_id")),
        *(lambda ask=ask: ask(name) for ask in (client.invocation, client.get_result, client.cancel, client.recover)),
        lambda: client.invocations(agent=name),
    ]
    for call in calls:
        refused("invalid_options", call)
    run = {"type": "run", "agent": "work", "invocation_id": "raw"}
    with RawClient(daemon.socket) as raw:  # the daemon does not rely on its clients
        for field in ("agent", "session", "key", "invocation_id"):
            answer = raw.answer({**run, field: name})
            assert answer["error"]["code"] == "invalid_options"
            assert field in answer["error"]["message"]
        for kind in ("get_invocation", "await_invocation", "list_tasks", "follow_events", "cancel"):
            assert raw.answer({"type": kind, "invocation_id": name})["error"]["code"] == "invalid_options"
    refused("unknown_invocation", lambda: client.invocation("raw"))


def test_longest_names_are_taken_d11(daemon: Daemon):
    """D11, dbos 759: an empty id would be executed for a month; recovering twice does nothing twice."""
    for name in ("x" * 128, "a", "_", "0", "A_b.c:d@e/f+g=h~i-j"):
        names = {"session": name, "key": name, "invocation_id": name}
        invocation = daemon.client.run("work", 1, **names)
        assert invocation.result(timeout=WAIT_S)
        record = daemon.client.invocation(name).record
        assert (record.id, record.session, record.key) == (name, name, name)


# ---- many at once ------------------------------------------------------------------------------------------


def test_branches_that_finish_together_all_count_in_their_order_d4(daemon: Daemon):
    """D4, langgraph 8115: 32 branches finish together: 32 results."""
    order = [f"branch-{number}" for number in range(32)]
    random.Random(4).shuffle(order)
    given = {"order": order, "gate": "together"}
    invocation = daemon.client.run("fan", given)
    ledger = daemon.site.ledger
    eventually(lambda: len(ledger.lines("began", invocation=invocation.id)) == 32, "all branches wait")
    daemon.site.open_gate("together")
    assert invocation.result(timeout=WAIT_S) == [{"branch": name, "given": given} for name in order]
    tasks = invocation.tasks()
    assert [(task.node, task.status) for task in tasks] == [(name, "completed") for name in order]
    assert [task.update["branch"] for task in tasks] == order
    check_events(list(invocation.events()), "completed")


def test_two_hundred_clients_at_once_are_all_served(daemon: Daemon):
    async def one(number: int) -> int:
        async with AsyncClient(daemon.socket) as client:
            invocation = await client.run("work", {"number": number}, stream=True)
            events = [event async for event in invocation.events()]
            check_events(events, "completed")
            assert events[0].data["input"] == {"number": number}
            return len({(await invocation.result(timeout=WAIT_S * 3))["token"]})

    async def all_of_them() -> int:
        return sum(await asyncio.gather(*map(one, range(200))))

    assert asyncio.run(all_of_them()) == 200


def test_clients_that_hang_up_while_they_wait_change_nothing(daemon: Daemon):
    invocation = at_gate(daemon, "work", "hang-up")
    before = descriptors(daemon)
    for kind in ("await_invocation", "follow_events", "get_invocation") * 30:
        with RawClient(daemon.socket) as raw:
            raw.ask({"type": kind, "invocation_id": invocation.id})
    with ThreadPoolExecutor(1) as pool, Client(daemon.socket) as client:
        waiting = pool.submit(client.invocation(invocation.id).result, WAIT_S)
        eventually(lambda: descriptors(daemon) <= before + 2, "their descriptors are closed")
        assert not waiting.done()
        daemon.site.open_gate("hang-up")
        assert waiting.result(WAIT_S)["token"]
    assert bodies(daemon, invocation) == 1


def test_client_that_hangs_up_behind_its_run_has_started_it(daemon: Daemon):
    """Whether it is acknowledged can't be known then; asked again with its id, it is the same."""
    with RawClient(daemon.socket) as raw:
        raw.ask({"type": "run", "agent": "work", "invocation_id": "orphan"})
    again = daemon.client.run("work", invocation_id="orphan")
    assert again.result(timeout=WAIT_S)["token"]
    assert bodies(daemon, again) == 1
