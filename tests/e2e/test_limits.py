"""Limits of size, steps and time, deaths in the middle of a task, and what is tried again after them."""

from __future__ import annotations

import itertools
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hayata import Client, HayataError, InvocationCancelled
from hayata.client import Invocation
from hayata.client.records import Process
from tests.support.crash_site import Daemon
from tests.support.eventually import eventually
from tests.support.ledger import check_events
from tests.support.shared_daemon import WAIT_S, app, failed, serving, supervisor, undisturbed

APP = app("limits")
CAP = 1 << 20
LIMIT_S = 0.5
LATE_S = 0.3
"""How much later than due something may be on a machine that does other things, too."""


@pytest.fixture(scope="module")
def shared() -> Iterator[Daemon]:
    with serving(APP, HAYATA_FRAME_CAP_BYTES=str(CAP), HAYATA_NODE_RETRY="0.5") as daemon:
        yield daemon


@pytest.fixture
def daemon(shared: Daemon) -> Iterator[Daemon]:
    """The shared daemon, that must be the same afterwards, and serve."""
    with undisturbed(shared, "echo"):
        yield shared


def lives(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


def began(daemon: Daemon, invocation: Invocation, attempt: int = 1) -> int:
    """Wait until the body runs; the pid of its process."""
    pid: int = daemon.site.ledger.wait("began", invocation=invocation.id, attempt=attempt)["pid"]
    return pid


def attempts(daemon: Daemon, invocation: Invocation) -> list[int]:
    """The attempts whose bodies have begun; their idempotency key is the same."""
    lines = daemon.site.ledger.lines("attempt", invocation=invocation.id)
    assert len({line.get("key") for line in lines}) == 1
    return [line["number"] for line in lines]


# ---- sizes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["update", "chunk", "input", "result", "reason"])
def test_value_over_the_frame_cap_is_an_error_and_the_workers_stay_p11(daemon: Daemon, place: str):
    """P11, loky 143."""
    edge_pid = daemon.client.call("large", {"as": "update", "bytes": 10}, timeout=WAIT_S)
    agent_pid = agent_worker(daemon, "large").pid
    error = failed(daemon.client.run("large", {"as": place, "bytes": CAP}, stream=True))
    assert error.code == "frame_too_large"
    assert CAP - 10_000 < error.details["cap_bytes"] <= CAP
    assert error.hint
    assert daemon.client.call("large", {"as": "update", "bytes": CAP // 2}, timeout=WAIT_S) == edge_pid
    assert agent_worker(daemon, "large").pid == agent_pid


def agent_worker(daemon: Daemon, name: str) -> Process:
    (found,) = [each for each in supervisor(daemon).children if (each.role, each.name) == ("agent", name)]
    return found


def test_state_that_grows_over_the_frame_cap_fails_its_invocation(daemon: Daemon):
    invocation = daemon.client.run("grow", CAP // 4)
    assert failed(invocation).code == "frame_too_large"
    assert {task.status for task in invocation.tasks()} == {"completed"}


@pytest.mark.parametrize("less", [0, 50, 100, 150, 200, 300, 500, 1_000, 4_000, 8_000, 8_200, 9_000])
def test_result_near_the_frame_cap_arrives_or_fails_its_invocation(daemon: Daemon, less: int):
    """What fits the worker's message must fit every other one that it is in later."""
    invocation = daemon.client.run("large", {"as": "result", "bytes": CAP - less})
    list(invocation.events())
    if invocation.status() == "completed":
        assert invocation.result(timeout=WAIT_S) == bytes(CAP - less)
    else:
        assert failed(invocation).code == "frame_too_large"
    assert less < 9_000 or invocation.status() == "completed"


@pytest.mark.parametrize("less", [0, 50, 100, 150, 200, 300, 500, 1_000, 4_000, 8_000, 8_200, 9_000])
def test_update_near_the_frame_cap_can_be_looked_at_or_fails_its_invocation(daemon: Daemon, less: int):
    invocation = daemon.client.run("large", {"as": "update", "bytes": CAP - less})
    list(invocation.events())
    (task,) = invocation.tasks()
    if task.status == "completed":
        assert task.update["value"] == bytes(CAP - less)
    else:
        assert failed(invocation).code == "frame_too_large"
    assert less < 9_000 or task.status == "completed"


def test_many_large_tasks_can_be_listed(daemon: Daemon):
    """Together they are over the cap, in which they come in order all the same."""
    invocation = daemon.client.run("grow", CAP // 8)
    assert failed(invocation).code == "frame_too_large"
    tasks = invocation.tasks()
    assert sum(len(task.update["grown"][0]) for task in tasks) == len(tasks) * (CAP // 8) > CAP - CAP // 4
    assert [task.step for task in tasks] == list(range(len(tasks)))


def test_many_failures_with_long_tracebacks_can_be_listed(daemon: Daemon):
    """Together they are over the cap, in which they come newest first all the same."""
    runs = [daemon.client.run("flaky", {"raise": "KeyError", "until": 9, "say": "x" * 60_000}) for _ in range(24)]
    for run in runs:
        failed(run)
    listed = daemon.client.invocations("flaky", "failed")
    assert [each.id for each in listed[:24]] == [run.id for run in reversed(runs)]
    assert sum(len(each.record.error.details["traceback"]) for each in listed[:24]) > CAP
    assert [each.id for each in daemon.client.invocations("flaky", limit=20)] == [each.id for each in listed[:20]]
    assert daemon.client.invocations("flaky", "recovery_required") == []


def test_input_over_the_daemons_cap_is_an_error_on_either_side(daemon: Daemon):
    for client in (Client(daemon.socket), Client(daemon.socket, frame_cap_bytes=CAP)):
        with client:
            for size in (CAP, 5 * CAP):
                with pytest.raises(HayataError) as refusal:
                    client.run("echo", bytes(size))
                assert refusal.value.code == "frame_too_large"
            assert client.call("echo", bytes(CAP // 4), timeout=WAIT_S)["echo"] == bytes(CAP // 4)


# ---- steps -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("agent", "scheduled"), [("loop", 5), ("by_twos", 4)])
def test_step_past_max_steps_is_not_scheduled(daemon: Daemon, agent: str, scheduled: int):
    invocation = daemon.client.run(agent)
    assert failed(invocation).code == "max_steps_exceeded"
    assert [task.status for task in invocation.tasks()] == ["completed"] * scheduled
    assert invocation.refresh().step == scheduled


# ---- time --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("agent", "grace_s"), [("spin", 0.0), ("spin_async", 1.0)])
def test_loop_without_end_is_killed_at_its_deadline_d10(daemon: Daemon, agent: str, grace_s: float):
    """D10, langgraph 8842: the body itself says how long it has lived: it writes down the time while it can."""
    invocation = daemon.client.run(agent)
    error = failed(invocation)
    assert (error.code, error.details["interrupted"]) == ("execution_timeout", True)
    notes = Path(f"/dev/shm/spin-{invocation.id}")
    pid, first, *last_two = struct.unpack("=qddd", notes.read_bytes())
    last = max(last_two)
    notes.unlink()
    assert LIMIT_S - 0.1 < last - first < LIMIT_S + grace_s + 0.1 + LATE_S
    assert not lives(pid)


def test_timeout_of_an_execution_takes_its_children_along(daemon: Daemon):
    invocation = daemon.client.run("sleep_limited")
    assert failed(invocation).code == "execution_timeout"
    assert not lives(began(daemon, invocation))
    assert not lives(daemon.site.ledger.lines("child", invocation=invocation.id)[0]["pid"])


@pytest.mark.parametrize("agent", ["sleep_late", "sleep_late_async"])
def test_timeout_of_an_invocation_ends_what_runs(daemon: Daemon, agent: str):
    start = time.monotonic()
    invocation = daemon.client.run(agent)
    pid = began(daemon, invocation)
    assert failed(invocation).code == "invocation_timeout"
    assert time.monotonic() - start < LIMIT_S + LATE_S
    assert [task.status for task in invocation.tasks()] == ["cancelled"]
    if agent == "sleep_late":
        eventually(lambda: not lives(pid), "the worker is gone")
    else:
        daemon.site.ledger.wait("cancelled", invocation=invocation.id)
        assert lives(pid)


def test_new_attempt_begins_when_the_old_one_is_dead_p18(daemon: Daemon):
    """P18, hatchet 1022."""
    invocation = daemon.client.run("overlap")
    assert invocation.result(timeout=WAIT_S) == {"attempt": 3}
    lines = daemon.site.ledger.lines("attempt", invocation=invocation.id)
    assert [(line["number"], line["alive"]) for line in lines] == [(1, False), (2, False), (3, False)]
    assert [task.status for task in invocation.tasks()] == ["failed", "failed", "completed"]
    assert lines[2]["at"] - lines[0]["at"] < 2 * 0.2 + LATE_S


def test_coroutine_past_its_deadline_is_cancelled_and_its_neighbours_go_on(daemon: Daemon):
    patient = daemon.client.run("neighbour", {"how": "patient", "gate": "patient"})
    pid = began(daemon, patient)
    idle = [daemon.client.run("neighbour", {"how": "idle"}) for _ in range(3)]
    time_out = [failed(invocation).code for invocation in idle[:1]]
    assert time_out == ["execution_timeout"]
    late = daemon.client.run("neighbour", {"how": "patient", "gate": "patient"})
    assert began(daemon, late) == pid == began(daemon, idle[0])
    daemon.site.open_gate("patient")
    assert late.result(timeout=WAIT_S)["pid"] == pid
    assert [failed(invocation).code for invocation in idle[1:]] == ["execution_timeout"] * 2


def test_coroutine_that_blocks_past_its_deadline_takes_its_neighbours_along(daemon: Daemon):
    """The process is killed a second after the deadline. Here `Rerun` allows both to be run again."""
    busy = daemon.client.run("neighbour_again", {"how": "busy", "gate": "blocked"})
    pid = began(daemon, busy)
    time.sleep(1.1)  # else the neighbour's own deadline would come before the death of its process
    patient = daemon.client.run("neighbour_again", {"how": "patient", "gate": "patient-2"})
    assert began(daemon, patient) == pid
    daemon.site.open_gate("blocked")
    again = began(daemon, patient, attempt=2)
    assert again != pid
    assert not lives(pid)
    daemon.site.open_gate("patient-2")
    assert patient.result(timeout=WAIT_S) == {"pid": again, "attempt": 2}
    assert busy.result(timeout=WAIT_S) == {"pid": again, "attempt": 2}
    errors = [invocation.tasks()[0].error for invocation in (busy, patient)]
    assert [(error.code, error.details["reason"]) for error in errors] == [
        ("execution_timeout", "timeout"),
        ("edge_crashed", "neighbour"),
    ]


# ---- cancel ------------------------------------------------------------------------------------------------


def test_cancel_of_a_running_task_is_answered_when_its_processes_are_dead(daemon: Daemon):
    invocation = daemon.client.run("sleep")
    pid = began(daemon, invocation)
    child = daemon.site.ledger.lines("child", invocation=invocation.id)[0]["pid"]
    assert invocation.cancel() == "cancelled"
    assert (lives(pid), lives(child)) == (False, False)
    cancelled(invocation)


def test_cancel_of_a_coroutine_is_answered_when_it_has_ended(daemon: Daemon):
    beside = daemon.client.run("sleep_async")
    invocation = daemon.client.run("sleep_async")
    pids = {began(daemon, beside), began(daemon, invocation)}
    assert invocation.cancel() == "cancelled"
    assert daemon.site.ledger.lines("cancelled", invocation=invocation.id)
    assert not daemon.site.ledger.lines("cancelled", invocation=beside.id)
    assert [lives(pid) for pid in pids] == [True]
    cancelled(invocation)
    assert beside.cancel() == "cancelled"


def test_cancel_of_a_coroutine_that_does_not_end_is_answered_when_its_process_is_dead(daemon: Daemon):
    invocation = daemon.client.run("stubborn")
    pid = began(daemon, invocation)
    assert invocation.cancel() == "cancelled"
    assert not lives(pid)
    cancelled(invocation)


def cancelled(invocation: Invocation) -> None:
    """All says so, and cancelling again changes nothing."""
    with pytest.raises(InvocationCancelled):
        invocation.result(timeout=WAIT_S)
    assert [task.status for task in invocation.tasks()] == ["cancelled"]
    events = list(invocation.events())
    check_events(events, "cancelled")
    assert [event.type for event in events[-2:]] == ["node_cancelled", "invocation_cancelled"]
    assert invocation.cancel() == "cancelled"
    assert list(invocation.events()) == events


# ---- death -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "told"), [("abort", "SIGABRT"), ("segfault", "SIGSEGV"), ("kill", "SIGKILL"), ("exit", 7)]
)
@pytest.mark.parametrize("agent", ["die", "die_async"])
def test_task_that_ends_its_process_fails_alone_p17(daemon: Daemon, agent: str, how: str, told: str | int):
    """P17, temporal sdk-python 245."""
    beside = daemon.client.run("sleep")
    pid = began(daemon, beside)
    invocation = daemon.client.run(agent, {"how": how})
    error = failed(invocation)
    assert error.code == "edge_crashed"
    assert error.details["interrupted"] is True
    assert told in (error.details.get("signal"), error.details.get("exit_code"))
    assert attempts(daemon, invocation) == [1]
    assert daemon.client.call(agent, {"how": how, "until": 1}, timeout=WAIT_S) == {"attempt": 1}
    assert lives(pid)
    assert beside.cancel() == "cancelled"


def test_deaths_of_many_at_once_hit_only_themselves_p17(daemon: Daemon):
    """P17, temporal sdk-python 245."""
    doomed = [daemon.client.run("die", {"how": "abort"}) for _ in range(12)]
    lucky = [daemon.client.run("die", {"how": "abort", "until": 1}) for _ in range(12)]
    assert {failed(invocation).code for invocation in doomed} == {"edge_crashed"}
    assert [invocation.result(timeout=WAIT_S) for invocation in lucky] == [{"attempt": 1}] * 12


@pytest.mark.parametrize("agent", ["die_again", "die_again_async"])
@pytest.mark.parametrize("how", ["exit", "kill"])
def test_task_that_was_cut_off_is_run_again_as_often_as_its_node_says_p13(daemon: Daemon, agent: str, how: str):
    """P13, celery 1628 and 3053."""
    saved = daemon.client.run(agent, {"how": how, "until": 3})
    assert saved.result(timeout=WAIT_S) == {"attempt": 3}
    assert attempts(daemon, saved) == [1, 2, 3]
    assert [task.status for task in saved.tasks()] == ["failed", "failed", "completed"]
    retries = [event.data["will_retry"] for event in saved.events() if event.type == "node_failed"]
    assert retries == [True, True]
    lost = daemon.client.run(agent, {"how": how})
    error = failed(lost)
    assert (error.code, attempts(daemon, lost)) == ("edge_crashed", [1, 2, 3])
    assert ("SIGKILL" if how == "kill" else 7) in error.details.values()


LIMITS = {
    "memory": ("memory_limit", "limit_bytes", "measured_bytes", 64 << 20),
    "cpu": ("cpu_limit", "limit_s", "measured_s", 0.5),
}


@pytest.mark.parametrize("of", ["memory", "cpu"])
@pytest.mark.parametrize(("agent", "most"), [("greedy", 1), ("greedy_again", 2)])
def test_task_over_a_limit_fails_after_as_many_attempts_as_its_node_says_p13(
    daemon: Daemon, of: str, agent: str, most: int
):
    """P13, celery 1628 and 3053: the limit is below the kernel's, and says so itself."""
    reason, limit, measured, expected = LIMITS[of]
    invocation = daemon.client.run(agent, {"of": of})
    error = failed(invocation)
    told = error.details
    assert (error.code, told["interrupted"], told["reason"], told[limit]) == ("edge_crashed", True, reason, expected)
    assert told[measured] > expected
    assert reason in error.hint
    assert attempts(daemon, invocation) == list(range(1, most + 1))
    if most == 2:
        saved = daemon.client.run(agent, {"of": of, "until": 2})
        assert saved.result(timeout=WAIT_S) == {"attempt": 2}


# ---- failure -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("agent", "error", "until", "expected"),
    [
        ("flaky", "Busy", 3, [1, 2, 3]),
        ("flaky", "VeryBusy", 2, [1, 2]),
        ("flaky", "Busy", 9, [1, 2, 3]),
        ("flaky", "KeyError", 9, [1]),
        ("flaky", "SystemExit", 9, [1]),
        ("flaky_async", "KeyError", 3, [1, 2, 3]),
        ("flaky_async", "SystemExit", 9, [1]),
        ("flaky_asked", "Busy", 2, [1, 2]),
        ("flaky_asked", "KeyError", 9, [1]),
        ("flaky_not_again", "Busy", 9, [1]),
    ],
)
def test_failure_is_tried_again_if_it_matches(daemon: Daemon, agent: str, error: str, until: int, expected: list[int]):
    invocation = daemon.client.run(agent, {"raise": error, "until": until})
    if until == expected[-1]:
        assert invocation.result(timeout=WAIT_S) == {"attempt": until}
    else:
        reason = failed(invocation)
        assert (reason.code, reason.details["type"]) == ("node_exception", error)
    assert attempts(daemon, invocation) == expected
    assert [task.attempt for task in invocation.tasks()] == expected
    assert invocation.refresh().step == 1  # attempts are no steps


def test_pause_between_attempts_grows_to_its_maximum(daemon: Daemon):
    invocation = daemon.client.run("flaky_slowly", {"raise": "Busy", "until": 4})
    assert invocation.result(timeout=WAIT_S) == {"attempt": 4}
    times = [line["at"] for line in daemon.site.ledger.lines("attempt", invocation=invocation.id)]
    pauses = [after - before for before, after in itertools.pairwise(times)]
    for pause, wanted in zip(pauses, [0.05, 0.1, 0.1], strict=True):
        assert wanted - 0.005 < pause < wanted + LATE_S


def test_failure_that_goes_to_the_policy_can_be_repaired(daemon: Daemon):
    single = daemon.client.call("handled", {"nodes": "fail", "then": "repair"}, timeout=WAIT_S)
    assert single == {"repaired": {"code": "node_exception", "type": "ValueError", "last": "fail"}}
    given = {"nodes": ["echo", "die"], "then": "repair", "how": "exit"}
    invocation = daemon.client.run("handled", given)
    repaired = invocation.result(timeout=WAIT_S)["repaired"]
    assert (repaired["code"], repaired["last"]) == ("edge_crashed", ("echo", "die"))
    assert [event.type for event in invocation.events()].count("node_failed") == 1
    error = failed(daemon.client.run("handled", {"nodes": "fail", "then": "fail"}))
    assert error.code == "policy_failed"
    assert error.details["reason"]["type"] == "ValueError"


# ---- lifespans ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("agent", ["with_deps", "with_deps_async"])
def test_lifespan_gives_each_worker_its_own_deps_once(daemon: Daemon, agent: str):
    for result in [daemon.client.call(agent, timeout=WAIT_S) for _ in range(3)]:
        assert result["deps"] == {"connection": result["pid"]}
    entered = [line["pid"] for line in daemon.site.ledger.lines("entered")]
    assert len(entered) == len(set(entered))


def test_lifespan_that_fails_makes_its_node_unavailable_until_it_does_not(daemon: Daemon):
    first = failed(daemon.client.run("without_database"))
    assert first.code == "node_unavailable"
    assert "the database is down" in f"{first} {first.details}"
    assert len(daemon.site.ledger.lines("tried")) >= 3

    def shown() -> list[str]:
        (agent,) = [each for each in daemon.client.agents() if each.id == "without_database"]
        return [node.status for node in agent.nodes]

    eventually(lambda: shown() == ["failed"], "it is seen that the node is given up")
    daemon.site.open_gate("database")

    def served() -> bool:
        invocation = daemon.client.run("without_database")
        list(invocation.events())
        if invocation.status() == "failed":
            return failed(invocation).code != "node_unavailable"
        return invocation.result(timeout=WAIT_S)["deps"] == "database"

    eventually(served, "the node is back")
