"""Node and edge workers when nothing dies: what a task finds, what it may send, what it leaves."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from hayata import values
from hayata.messages import (
    EdgeEnded,
    EdgeStartFailed,
    ErrorInfo,
    StopWorker,
    TaskCompleted,
    TaskFailed,
    TaskInterrupted,
)
from tests.support.worker_harness import APP, Supervisor, details, open_files

pytest_plugins = ["tests.support.worker_fixtures"]


def test_task_warm_edge_is_reused(supervisor: Supervisor):
    node = supervisor.node("single")
    first = node.call("a", {"do": "facts"})
    second = node.call("b", {"do": "facts"})
    assert first["pid"] == second["pid"] == node.edge().pid
    assert first["ppid"] == node.pid
    assert first["random"] != second["random"]


def test_edge_leads_a_session_and_has_only_its_own_descriptors(supervisor: Supervisor):
    node = supervisor.node("single")
    facts = node.call("a", {"do": "facts"})
    assert facts["sid"] == facts["pid"]
    assert facts["stdin"] == ""
    assert facts["app_file"] == '"""', "the app's own descriptor must stay open"
    from_outside = {"/dev/null", *open_files(os.getpid())}
    own = sorted(name.partition(":")[0] for name in open_files(facts["pid"]) if name not in from_outside)
    notes = f"{supervisor.launch.data_dir}/starts"
    assert own == sorted([APP, notes, "pipe", "pipe", "socket"])
    assert node.pid == facts["ppid"]


def test_edges_of_one_node_draw_different_random_numbers(supervisor: Supervisor):
    node = supervisor.node("pair")
    node.run("a", {"do": "facts"})
    node.run("b", {"do": "facts"})
    drawn = {values.decode_mapping(node.end_of(task).update)["random"] for task in "ab"}
    assert len(drawn) == 2


def test_sync_node_runs_as_many_tasks_at_once_as_it_has_edges(supervisor: Supervisor):
    node = supervisor.node("pair")
    for task in "ab":
        node.run(task, {"do": "sleep", "seconds": 30})
    node.wait(lambda: sum(line == "asleep" for line in node.text()) == 2)
    assert len(node.edges) == 2


def test_task_surroundings_are_put_back(supervisor: Supervisor):
    node = supervisor.node("single")
    before = node.call("a", {"do": "facts"})
    mess = node.call("b", {"do": "make_a_mess"})
    after = node.call("c", {"do": "facts"})
    assert mess["pid"] == before["pid"] == after["pid"]
    for fact in ("cwd", "umask", "color", "usr1", "alarm", "blocked"):
        assert after[fact] == before[fact], fact
    assert after["alarm"] == 0
    assert node.call("d", {"do": "prints", "name": "d"}) == {}
    node.wait(lambda: "out d" in node.text())


@pytest.mark.parametrize("leftover", ["leave_thread", "leave_child"])
def test_task_leftover_retires_the_edge_after_its_result(supervisor: Supervisor, leftover: str):
    node = supervisor.node("single")
    first = node.call("a", {"do": leftover})
    second = node.call("b", {"do": "facts"})
    assert second["pid"] != first["pid"]
    ended = node.wait_for(EdgeEnded)
    assert ended.pid == first["pid"]
    assert ended.reason.startswith("left a ")
    if "child" in first:
        assert not Path(f"/proc/{first['child']}").exists()


def test_fresh_node_gives_each_task_a_process(supervisor: Supervisor):
    node = supervisor.node("fresh")
    pids = {node.call(task, {"do": "facts"})["pid"] for task in "abc"}
    assert len(pids) == 3


def test_max_tasks_replaces_the_edge(supervisor: Supervisor):
    node = supervisor.node("limited")
    pids = [node.call(f"t{number}", {"do": "facts"})["pid"] for number in range(7)]
    assert pids[:3] == [pids[0]] * 3
    assert pids[3:6] == [pids[3]] * 3
    assert len({pids[0], pids[3], pids[6]}) == 3


def test_lifespan_is_entered_once_after_the_fork_and_left(supervisor: Supervisor):
    node = supervisor.node("with_deps")
    first, second = (node.call(task, {"do": "facts"}) for task in "ab")
    assert first["deps"] == second["deps"] == {"made_in": first["pid"]}
    node.send(StopWorker())
    assert node.wait_dead().code == 0
    assert node.text() == ["enter", "leave"]


def test_async_lifespan_and_tasks_share_one_process(supervisor: Supervisor):
    node = supervisor.node("many_with_deps")
    for number in range(8):
        node.run(f"t{number}", {"do": "wait", "seconds": 0.3})
    updates = [values.decode_mapping(node.end_of(f"t{number}").update) for number in range(8)]
    assert len({update["pid"] for update in updates}) == 1
    assert updates[0]["deps"] == {"made_in": updates[0]["pid"]}
    assert len(node.edges) == 1


def test_async_max_tasks_replaces_the_edge_and_loses_nothing(supervisor: Supervisor):
    node = supervisor.node("many_limited")
    for number in range(12):
        node.run(f"t{number}", {"do": "wait", "seconds": 0.01})
    ends = [node.end_of(f"t{number}") for number in range(12)]
    assert all(isinstance(end, TaskCompleted) for end in ends), ends
    # A task or two may be on their way when the edge says that it has had enough.
    assert len({values.decode_mapping(end.update)["pid"] for end in ends}) >= 3


def test_async_left_over_child_retires_the_idle_edge(supervisor: Supervisor):
    node = supervisor.node("many")
    first = node.call("a", {"do": "subprocess"})
    assert node.call("b", {"do": "wait", "seconds": 0})["pid"] != first["pid"]
    node.wait_for(EdgeEnded)
    assert not Path(f"/proc/{first['child']}").exists()


def test_chunks_from_many_threads_arrive_before_the_result(supervisor: Supervisor):
    node = supervisor.node("single")
    assert node.call("a", {"do": "streams", "count": 50}) == {"errors": []}
    kinds = [type(message).__name__ for message in node.messages if hasattr(message, "execution_id")]
    assert kinds == ["Partial"] * 150 + ["TaskCompleted"]
    numbers = [message.number for message in node.messages if type(message).__name__ == "Partial"]
    assert numbers == list(range(1, 151))


def test_chunk_refused_by_the_supervisor_raises_in_the_body(supervisor: Supervisor):
    node = supervisor.node("single")
    node.refuse_partials = ErrorInfo("execution_not_active", "no longer")
    assert node.call("a", {"do": "streams", "count": 5}) == {"errors": ["execution_not_active"] * 3}


def test_chunk_of_a_finished_task_is_refused(supervisor: Supervisor):
    node = supervisor.node("with_pool")
    node.call("a", {"do": "stream_late"})
    assert node.call("b", {"do": "late_answer"}) == {"told": "execution_not_active"}
    kinds = [type(message).__name__ for message in node.messages]
    assert "Partial" not in kinds[kinds.index("TaskCompleted") :]


def test_async_chunks_are_acknowledged(supervisor: Supervisor):
    node = supervisor.node("many")
    for task in "abcd":
        node.run(task, {"do": "stream", "count": 20})
    for task in "abcd":
        assert isinstance(node.end_of(task), TaskCompleted)
    assert sum(type(message).__name__ == "Partial" for message in node.messages) == 80


@pytest.mark.parametrize(("name", "launch"), [("single", {}), ("many", {})])
def test_five_megabytes_both_ways_at_once_p10(supervisor: Supervisor, name: str, launch: dict[str, int]):
    """P10, zeek 3396: both directions are full, and both are read."""
    node = supervisor.node(name)
    size = 5_000_000
    for number in range(4):
        node.run(f"t{number}", {"do": "big", "size": size, "ballast": b"y" * size})
    for number in range(4):
        end = node.end_of(f"t{number}")
        assert isinstance(end, TaskCompleted)
        assert len(values.decode_mapping(end.update)["bytes"]) == size


@pytest.mark.parametrize("name", ["single", "many"])
def test_result_over_the_cap_is_an_error_and_the_edge_stays_p11(supervisor: Supervisor, name: str):
    node = supervisor.node(name)
    end = node.end_of(node.run("a", {"do": "big", "size": 70 * 1024 * 1024}))
    assert isinstance(end, TaskFailed)
    assert end.error.code == "frame_too_large"
    edge = node.edge().pid
    assert node.call("b", {"do": "facts"})["pid"] == edge


@pytest.mark.parametrize("name", ["single", "many"])
def test_exception_that_cannot_be_rebuilt_arrives_as_data_p12(supervisor: Supervisor, name: str):
    node = supervisor.node(name)
    end = node.end_of(node.run("a", {"do": "raises"}))
    assert isinstance(end, TaskFailed)
    assert end.error.code == "node_exception"
    told = details(end.error)
    assert (told["type"], told["message"]) == ("NeedsKeyword", "no reason")
    assert "in raises" in told["traceback"]


@pytest.mark.parametrize("name", ["single", "many"])
def test_sys_exit_fails_the_task_and_not_the_edge(supervisor: Supervisor, name: str):
    node = supervisor.node(name)
    end = node.end_of(node.run("a", {"do": "exit_soft"}))
    assert isinstance(end, TaskFailed)
    assert details(end.error)["type"] == "SystemExit"
    assert node.call("b", {"do": "facts"})["pid"] == node.edge().pid


@pytest.mark.parametrize(("name", "action"), [("single", "fork_and_fall_through"), ("many", "fork")])
def test_task_that_forks_and_falls_through_delivers_once(supervisor: Supervisor, name: str, action: str):
    node = supervisor.node(name)
    assert node.call("a", {"do": action}) == {"child": False}
    # The harness refuses a second end of a task; this one comes after whatever the child may have sent.
    node.call("b", {"do": "facts"})


def test_child_forked_by_a_coroutine_does_not_run_the_other_tasks(supervisor: Supervisor, tmp_path: Path):
    node = supervisor.node("many")
    record = tmp_path / "record"
    pid = node.call("warm", {"do": "wait", "seconds": 0})["pid"]
    node.run("before", {"do": "tick", "record": str(record)})
    node.run("forks", {"do": "fork_and_stay"})
    node.run("after", {"do": "tick", "record": str(record)})
    for task in ("before", "forks", "after"):
        assert isinstance(node.end_of(task), TaskCompleted)
    assert record.read_text().split() == [str(pid)] * 40


def test_child_forked_by_a_coroutine_does_not_turn_the_loop(supervisor: Supervisor, tmp_path: Path):
    node = supervisor.node("many")
    record = tmp_path / "record"
    node.run("ticks", {"do": "tick_below", "record": str(record)})
    node.run("forks", {"do": "fork_below"})
    for task in ("ticks", "forks"):
        assert isinstance(node.end_of(task), TaskCompleted)
    # A coroutine that a task has started may take one step in the child, before its loop selects again.
    assert 20 <= len(record.read_text().split()) <= 21


def test_output_has_the_task_and_its_partial_last_line(supervisor: Supervisor):
    node = supervisor.node("single")
    for task in "ab":
        node.call(task, {"do": "prints", "name": task})
    for task in "ab":
        assert node.text(task) == [f"out {task}", "no end"]
        log = node.text(task, "stderr")
        assert log[0] == f"err {task}"
        assert log[1].startswith("\x1e")
        assert f"of-{task}" in log[1]


def test_flooder_is_slowed_and_its_deadline_holds(supervisor: Supervisor):
    node = supervisor.node("pair")
    node.run("a", {"do": "flood"}, timeout_s=1.0)
    node.wait(lambda: len(node.printed) > 10)
    node.call("b", {"do": "facts"}, timeout_s=2.0)
    end = node.end_of("a")
    assert isinstance(end, TaskInterrupted)
    assert end.error.code == "execution_timeout"
    written = sum(len(line) + 1 for line in node.text("a"))
    assert 8 * 1024**2 <= written < 11 * 1024**2


@pytest.mark.parametrize(("name", "told"), [("broken", "RuntimeError: no database"), ("deadly", "exit code 9")])
def test_failing_lifespan_is_a_failed_start_with_backoff(supervisor: Supervisor, name: str, told: str):
    node = supervisor.node(name)
    node.run("a", {"do": "facts"})
    for _ in range(4):
        assert told in node.wait_for(EdgeStartFailed).error.message
    starts = [node.times[number] for number, message in enumerate(node.messages) if type(message) is EdgeEnded]
    assert starts[3] - starts[0] > 0.05 + 0.1 + 0.2
    assert not node.ends
    node.kill_task("a")
    end = node.end_of("a")
    assert isinstance(end, TaskInterrupted)
    assert (end.started, end.error.code) == (False, "cancelled")


def test_stop_lets_a_short_task_end(supervisor: Supervisor):
    node = supervisor.node("single")
    node.run("a", {"do": "sleep", "seconds": 0.2})
    node.wait(lambda: "asleep" in node.text())
    node.send(StopWorker())
    assert isinstance(node.end_of("a"), TaskCompleted)
    assert node.wait_dead().code == 0


def test_stop_cuts_off_a_long_task_and_refuses_a_waiting_one(supervisor: Supervisor):
    node = supervisor.node("held")
    node.run("a", {"do": "sleep", "seconds": 60})
    node.wait(lambda: "asleep" in node.text())
    node.run("b", {"do": "facts"})
    node.send(StopWorker())
    refused, cut = node.end_of("b"), node.end_of("a")
    assert isinstance(refused, TaskInterrupted)
    assert (refused.started, refused.error.code) == (False, "node_unavailable")
    assert isinstance(cut, TaskInterrupted)
    assert (cut.started, details(cut.error)["reason"]) == (True, "shutdown")
    assert node.wait_dead().code == 0


def test_node_ends_with_the_supervisors_stream(supervisor: Supervisor):
    node = supervisor.node("single")
    node.run("a", {"do": "spin"})
    edge = node.edge().pid
    node.channel.close()
    assert node.wait_dead().code == 0
    assert not Path(f"/proc/{edge}").exists()


def test_idle_edge_costs_little_memory_of_its_own(supervisor: Supervisor):
    node = supervisor.node("trivial")
    for number in range(50):
        node.call(f"t{number}")
    own = psutil.Process(node.edge().pid).memory_full_info().uss
    assert own < 4 * 1024**2, "2.7 MB when this was written; without gc.freeze() it is 10"


def test_idle_edges_are_let_go_but_one(supervisor: Supervisor):
    node = supervisor.node("pair")
    for task in "ab":
        node.run(task, {"do": "sleep", "seconds": 0.1})
    for task in "ab":
        node.end_of(task)
    assert len(node.edges) == 2
    ended = node.wait_for(EdgeEnded, timeout_s=15)
    assert ended.reason == "idle"
    assert node.call("c", {"do": "facts"})["pid"] == node.edge().pid


@pytest.mark.parametrize(("name", "action"), [("single", "sleep"), ("many", "wait")])
def test_start_of_a_body_is_noted_before_it_ends(supervisor: Supervisor, name: str, action: str):
    node = supervisor.node(name)
    task = f"{len(name):032x}.3.1"
    node.call(f"{99:032x}.1.1", {"do": "facts" if name == "single" else "wait", "seconds": 0})
    assert supervisor.began(11, task)  # for all that is known
    supervisor.clear(11)
    assert not supervisor.began(11, task)
    node.run(task, {"do": action, "seconds": 30}, cell=11)
    node.wait(lambda: supervisor.began(11, task))
    assert task not in node.ends


def test_start_of_a_task_that_waits_for_its_lifespan_is_not_noted(supervisor: Supervisor):
    node = supervisor.node("broken")
    task = f"{8:032x}.0.1"
    supervisor.clear(12)
    node.run(task, {"do": "facts"}, cell=12)
    node.wait_for(EdgeStartFailed)
    assert not supervisor.began(12, task)
