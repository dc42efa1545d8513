"""Both faces of the client against a real daemon, through kills of its processes."""

from __future__ import annotations

import asyncio
import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hayata import AsyncClient, Client
from hayata.client import Process
from hayata.errors import HayataError, InvocationCancelled, InvocationFailed, RecoveryNeeded
from tests.support.daemon import Daemon

DEADLINE_S = 20.0


@pytest.fixture(scope="module")
def shared() -> Iterator[Daemon]:
    with Daemon() as daemon:
        yield daemon


@pytest.fixture
def client(shared: Daemon) -> Iterator[Client]:
    with Client(shared.socket) as client:
        yield client


@pytest.fixture
def own() -> Iterator[Daemon]:
    with Daemon() as daemon:
        yield daemon


def await_file(path: Path) -> str:
    deadline = time.monotonic() + DEADLINE_S
    while not path.exists() or not path.read_text():
        assert time.monotonic() < deadline, f"{path} does not appear"
        time.sleep(0.005)
    return path.read_text()


def held(tmp_path: Path) -> tuple[dict[str, str], Path, Path]:
    """Input for the agent ``wait``: it says in one file that it runs, and waits for the other."""
    started, go = tmp_path / f"started-{uuid.uuid4().hex}", tmp_path / f"go-{uuid.uuid4().hex}"
    return {"started": str(started), "go": str(go)}, started, go


def processes(root: Process) -> dict[str, Process]:
    found = {f"{root.role} {root.name}": root}
    for child in root.children:
        found.update(processes(child))
    return found


# ----------------------------------------------------------------------------------------------------------
# One run
# ----------------------------------------------------------------------------------------------------------


def test_call_returns_the_result_with_its_types(client: Client) -> None:
    given = {"tuple": (1, 2), "set": {3}, "bytes": b"x"}
    assert client.call("echo", given, timeout=DEADLINE_S) == {"echo": given}


def test_run_then_events_then_result_and_tasks(client: Client) -> None:
    invocation = client.run("stream", {"a": 1}, stream=True)
    events = list(invocation.events())
    assert [event.sequence for event in events] == list(range(1, len(events) + 1))
    types = [event.type for event in events]
    assert types[0] == "invocation_started"
    assert events[0].data["input"] == {"a": 1}
    assert [e.data["result"] for e in events if e.type == "node_partial_result"] == [
        {"number": number} for number in range(3)
    ]
    assert types[-1] == "invocation_completed"
    assert invocation.result(timeout=DEADLINE_S) == {"streamed": 3}
    assert invocation.status() == "completed"
    (task,) = invocation.tasks()
    assert (task.node, task.step, task.attempt, task.status) == ("stream", 0, 1, "completed")
    assert task.update == {"streamed": 3}
    assert [e.data["execution_id"] for e in events if e.type == "node_started"] == [task.id]
    assert next(invocation.events(after=types.index("node_completed") + 1)).type == "invocation_completed"
    record = invocation.refresh()
    assert record.status == "completed"
    assert record.result == {"streamed": 3}


def test_failure_arrives_with_code_message_and_traceback(client: Client) -> None:
    invocation = client.run("fail")
    with pytest.raises(InvocationFailed) as failed:
        invocation.result(timeout=DEADLINE_S)
    assert failed.value.code == "node_exception"
    assert failed.value.details["type"] == "ValueError"
    assert "no such luck" in failed.value.details["traceback"]
    with pytest.raises(InvocationFailed):
        client.get_result(invocation.id)


def test_same_key_gives_the_same_invocation_and_other_input_is_refused(client: Client) -> None:
    key = uuid.uuid4().hex
    first = client.run("echo", 1, key=key)
    assert client.run("echo", 1, key=key).id == first.id
    with pytest.raises(HayataError) as refused:
        client.run("echo", 2, key=key)
    assert refused.value.code == "key_reused"


def test_refusals_have_their_codes(client: Client) -> None:
    attempts: list[tuple[Callable[[], object], str]] = [
        (lambda: client.run("nobody"), "unknown_agent"),
        (lambda: client.invocation("nothing"), "unknown_invocation"),
        (lambda: client.get_result("nothing"), "unknown_invocation"),
        (lambda: client.cancel("nothing"), "unknown_invocation"),
        (lambda: client.recover("nobody"), "unknown_agent"),
        (lambda: client.stop_agent("nobody"), "unknown_agent"),
        (lambda: client.reconcile("nothing", "0" * 32 + ".0.1", retry=True), "unknown_invocation"),
    ]
    for attempt, code in attempts:
        with pytest.raises(HayataError) as refused:
            attempt()
        assert refused.value.code == code


def test_busy_session_cancel_and_queue(client: Client, tmp_path: Path) -> None:
    given, started, _ = held(tmp_path)
    session = uuid.uuid4().hex
    first = client.run("wait", given, session=session)
    await_file(started)
    with pytest.raises(HayataError) as busy:
        client.run("wait", given, session=session)
    assert busy.value.code == "session_busy"
    second = client.run("echo", 2, session=session, on_busy="queue")
    with pytest.raises(HayataError) as early:
        client.get_result(first.id)
    assert early.value.code == "result_not_ready"
    with pytest.raises(TimeoutError):
        first.result(timeout=0.05)
    assert [one.id for one in client.invocations(session=session, limit=10)][-1] == first.id
    assert first.cancel() == "cancelled"
    with pytest.raises(InvocationCancelled):
        first.result(timeout=DEADLINE_S)
    if second.record.agent == "echo" and second.record.session == session:
        assert second.result(timeout=DEADLINE_S) == {"echo": 2}


def test_daemon_describes_itself(client: Client) -> None:
    assert {agent.id for agent in client.agents()} >= {"echo", "wait", "gather"}
    assert client.call("gather", 1, timeout=DEADLINE_S) == {"gathered": 1}
    tree = client.tree()
    assert tree.role == "guard"
    assert {child.role for child in tree.children} == {"supervisor"}
    assert all(isinstance(number, float | int) for number in client.stats().values())


def test_async_client_runs_many_at_once(shared: Daemon) -> None:
    async def main() -> list[Any]:
        async with AsyncClient(shared.socket) as client:
            results = await asyncio.gather(*(client.call("echo", n, timeout=DEADLINE_S) for n in range(20)))
            invocation = await client.run("stream", stream=True)
            types = [event.type async for event in invocation.events()]
            assert types[-1] == "invocation_completed"
            assert await invocation.result() == {"streamed": 3}
            return results

    assert asyncio.run(main()) == [{"echo": n} for n in range(20)]


# ----------------------------------------------------------------------------------------------------------
# Through kills
# ----------------------------------------------------------------------------------------------------------


def test_waiting_client_hears_of_the_uncertain_task_after_the_supervisor_was_killed(
    own: Daemon, tmp_path: Path
) -> None:
    given, started, _ = held(tmp_path)
    with Client(own.socket) as client:
        invocation = client.run("wait", given)
        events = invocation.events()
        assert next(events).sequence == 1
        await_file(started)
        os.kill(processes(client.tree())["supervisor supervisor"].pid, signal.SIGKILL)
        with pytest.raises(RecoveryNeeded) as rests:
            invocation.result(timeout=DEADLINE_S)
        assert rests.value.code == "task_execution_uncertain"
        rest = list(events)
        assert [event.sequence for event in rest] == list(range(2, 2 + len(rest)))
        assert rest[-1].type == "node_uncertain"
        (task,) = invocation.tasks()
        assert task.status == "uncertain"
        settled = client.reconcile(invocation.id, task.id, result={"waited": "by hand"}, by="a test")
        assert settled.reconciled is not None
        assert (settled.reconciled.by, settled.reconciled.how) == ("a test", "result")
        assert invocation.result(timeout=DEADLINE_S) == {"waited": "by hand"}
        with pytest.raises(HayataError) as again:
            client.reconcile(invocation.id, task.id, retry=True)
        assert again.value.code in ("already_reconciled", "not_uncertain")


def test_call_during_a_restart_of_the_supervisor_just_takes_longer(own: Daemon) -> None:
    with Client(own.socket) as client:
        assert client.call("echo", 1, timeout=DEADLINE_S) == {"echo": 1}
        os.kill(processes(client.tree())["supervisor supervisor"].pid, signal.SIGKILL)
        assert client.call("echo", 2, timeout=DEADLINE_S) == {"echo": 2}


def test_stopped_daemon_is_unavailable_and_events_read_on_after_its_restart(own: Daemon, tmp_path: Path) -> None:
    with Client(own.socket) as client:
        invocation = client.run("echo", 1)
        assert invocation.result(timeout=DEADLINE_S) == {"echo": 1}
        seen = [event.sequence for event in invocation.events()]
        client.stop(drain=0)
        own.process.wait(DEADLINE_S)
        with pytest.raises(HayataError) as gone:
            invocation.status()
        assert gone.value.code == "daemon_unavailable"
        own.restart()
        assert [event.sequence for event in invocation.events(after=1)] == seen[1:]
        assert client.get_result(invocation.id) == {"echo": 1}


def test_killed_guard_ends_waiting_with_unavailable(own: Daemon, tmp_path: Path) -> None:
    given, started, _ = held(tmp_path)
    with Client(own.socket) as client:
        invocation = client.run("wait", given)
        await_file(started)
        own.process.kill()
        with pytest.raises(HayataError) as gone:
            invocation.result(timeout=DEADLINE_S)
        assert gone.value.code == "daemon_unavailable"
        own.process.wait(DEADLINE_S)
