"""Executions with edges in the coordinator: edges, their reduction, what goes wrong, and recovery."""

from __future__ import annotations

import pytest

from hayata.messages import ErrorInfo, ReduceManifest, ReduceTask, RetryManifest, RunTask
from hayata_supervisor.core import facts as f
from hayata_supervisor.core.views import tasks
from tests.support.pure_shell import PureShell, agent, decode, node, raw

ONE = b"\0" * 16
HEX = ONE.hex()
ALL = ReduceManifest(None, False)
PARTIAL = ReduceManifest(None, True)


def started(*nodes, edges=("x", "y", "z"), reduce=ALL, options=None, **changes) -> PureShell:
    """One invocation whose node ``many`` has been decided, and what may run runs."""
    many = node("many", **{"concurrency": 4, "reduce": reduce, **(options or {})})
    shell = PureShell(agent(many, *nodes, **changes))
    shell.run("one", "given")
    shell.save()
    shell.decide("many", "input", edges={"many": list(edges)})
    shell.save()
    return shell


def edge(number: int, attempt: int = 1) -> str:
    return f"{HEX}.0-{number}.{attempt}"


def reduction(attempt: int = 1) -> str:
    return f"{HEX}.0.{attempt}"


def task_of(shell: PureShell, name: str) -> ReduceTask:
    task = shell.dispatched[name]
    assert isinstance(task, ReduceTask)
    return task


def seen(shell: PureShell) -> dict[str, str]:
    """What a client is told of its tasks: step or edge and attempt → status."""
    return {each.id.partition(".")[2]: each.status for each in tasks(ONE, shell.journals[ONE])}


def complete_edges(shell: PureShell, *numbers: int) -> None:
    for number in numbers:
        shell.complete(edge(number), n=number)
    shell.save()


def ended(shell: PureShell) -> ErrorInfo:
    """The error that the invocation has failed with."""
    invocation = shell.restored(ONE)
    assert invocation.status == "failed"
    assert invocation.error is not None
    return invocation.error


# edges


def test_each_edge_runs_with_its_value_under_its_own_id_and_key():
    shell = started(edges=["x", "y"])
    runs = [shell.dispatched[edge(number)] for number in (0, 1)]
    assert all(isinstance(run, RunTask) for run in runs)
    assert [decode(run.input) for run in runs] == ["x", "y"]
    assert [run.edge for run in runs] == [0, 1]
    assert [run.idempotency_key for run in runs] == [f"{HEX}.0-0", f"{HEX}.0-1"]
    assert seen(shell) == {"0-0.1": "running", "0-1.1": "running", "0.1": "collecting"}


def test_edge_beyond_the_concurrency_stays_scheduled_until_a_slot_is_free():
    shell = started(options={"concurrency": 2})
    assert set(shell.dispatched) == {edge(0), edge(1)}
    assert seen(shell)["0-2.1"] == "scheduled"
    complete_edges(shell, 1)
    assert set(shell.dispatched) == {edge(0), edge(2)}


def test_step_counts_an_execution_with_edges_once():
    shell = started(max_steps=1)
    complete_edges(shell, 0, 1, 2)
    shell.complete(reduction())
    assert shell.asked[-1].request.step == 1


def test_reduction_starts_when_all_results_are_durable_and_gets_them_in_order():
    shell = started()
    complete_edges(shell, 2, 0)
    assert reduction() not in shell.dispatched
    shell.complete(edge(1), n=1)
    assert reduction() not in shell.dispatched, "the last result is not durable yet"
    shell.save()
    task = task_of(shell, reduction())
    assert [{key: decode(value) for key, value in each.items()} for each in task.results if each] == [
        {"n": 0}, {"n": 1}, {"n": 2},
    ]  # fmt: skip
    assert decode(task.input) == "input"
    assert [type(fact) for fact in f.decode_record(shell.journals[ONE][-1]).facts] == [f.Completed, f.Marked]


def test_reduction_gives_the_update_of_the_node_and_the_edges_are_not_merged():
    shell = started(merge={"n": "add"}, state={"n": raw(1)})
    complete_edges(shell, 0, 1, 2)
    shell.complete(reduction(), n=40)
    request = shell.asked[-1].request
    assert {key: decode(value) for key, value in request.state.items()} == {"n": 41}
    assert request.last == "many"
    shell.save()
    assert all(task.update is None for task in shell.restored(ONE).tasks), "results are not kept for longer"


def test_no_edges_reduce_an_empty_list():
    shell = started(edges=[])
    assert task_of(shell, reduction()).results == []
    assert seen(shell) == {"0.1": "running"}


def test_execution_with_edges_is_one_branch_of_a_parallel_transition():
    shell = PureShell(agent(node("many", concurrency=4, reduce=ALL), node("plain")))
    shell.run("one")
    shell.save()
    shell.decide(["many", "plain"], edges={"many": [1, 2]})
    shell.save()
    shell.complete(f"{HEX}.1.1", plain=True)
    complete_edges(shell, 1, 0)
    assert not shell.asked
    assert task_of(shell, reduction()).parallel
    shell.complete(reduction(), total=3)
    request = shell.asked[-1].request
    assert [decode(each) for each in request.parallel_results] == [{"total": 3}, {"plain": True}]
    assert (request.last, request.step) == (["many", "plain"], 2)


def test_events_of_edges_say_which_edge():
    shell = started(edges=["x"])
    complete_edges(shell, 0)
    marked = [fact for fact in shell.facts(ONE) if isinstance(fact, f.Marked)]
    assert [(fact.step, fact.edge) for fact in marked] == [(0, 0), (0, -1)]


# edges that fail


def test_edge_that_finally_fails_fails_the_execution_and_cancels_its_siblings():
    shell = started()
    complete_edges(shell, 0)
    shell.fail(edge(1))
    assert not shell.kills
    shell.save()
    assert [kill.execution_id for kill in shell.kills] == [edge(2)]
    assert seen(shell) == {"0-0.1": "completed", "0-1.1": "failed", "0-2.1": "cancelled", "0.1": "failed"}
    assert (ended(shell).code, ended(shell).message) == ("node_exception", "edge 1 of many: boom")


def test_policy_hears_of_an_edge_that_has_failed():
    shell = started(on_failure="policy")
    shell.fail(edge(0))
    request = shell.asked[-1].request
    assert request.failure.code == "node_exception"
    assert request.last == "many"


def test_edge_is_retried_alone():
    shell = started(options={"retry": RetryManifest(2, 1.0, 2.0, 8.0, 0.0)})
    complete_edges(shell, 0, 2)
    shell.fail(edge(1), retryable=True)
    shell.advance(1.0)
    shell.save()
    assert set(shell.dispatched) == {edge(1, 2)}
    shell.complete(edge(1, 2))
    shell.save()
    assert reduction() in shell.dispatched


def test_partial_reduction_does_without_an_edge_that_has_failed():
    shell = started(reduce=PARTIAL)
    shell.fail(edge(1))
    complete_edges(shell, 0, 2)
    task = task_of(shell, reduction())
    assert [each is None for each in task.results] == [False, True, False]
    assert {number: error.code for number, error in task.errors.items()} == {1: "node_exception"}
    shell.complete(reduction(), x=1)
    assert shell.asked[-1].request.failure is None


def test_partial_reduction_of_nothing_but_failures():
    shell = started(reduce=PARTIAL, edges=[1])
    shell.interrupt(edge(0))
    shell.save()
    assert task_of(shell, reduction()).results == [None]


# time


def test_timeout_fails_the_execution_with_counts():
    shell = started(reduce=ReduceManifest(5.0, False))
    complete_edges(shell, 0)
    shell.advance(4.9)
    assert seen(shell)["0.1"] == "collecting"
    shell.advance(0.2)
    shell.save()
    assert ended(shell).code == "reducer_failed"
    assert decode(ended(shell).details) == {
        "reason": "timeout", "timeout_s": 5.0,
        "expected_edges": 3, "result_count": 1, "error_count": 0, "pending_edges": 2,
    }  # fmt: skip
    assert {kill.execution_id for kill in shell.kills} == {edge(1), edge(2)}


def test_timeout_of_a_partial_reduction_cancels_what_is_pending_and_reduces_the_rest():
    shell = started(reduce=ReduceManifest(5.0, True), options={"concurrency": 2})
    complete_edges(shell, 1)  # 0 and 2 run
    shell.advance(5.0)
    assert not shell.kills
    shell.save()
    assert {kill.execution_id for kill in shell.kills} == {edge(0), edge(2)}
    assert reduction() not in shell.dispatched, "the edges keep their slots until they are confirmed dead"
    shell.interrupt(edge(0))
    shell.save()
    assert [each is None for each in task_of(shell, reduction()).results] == [True, False, True]
    assert task_of(shell, reduction()).errors == {}


def test_result_after_the_timeout_changes_nothing():
    shell = started(reduce=ReduceManifest(5.0, True))
    shell.advance(5.0)
    shell.save()
    before = shell.facts(ONE)
    shell.complete(edge(0), n=1)
    assert shell.facts(ONE) == before
    assert not shell.unsaved


@pytest.mark.parametrize("down", [2.0, 20.0])
def test_timeout_is_durable(down: float):
    shell = started(reduce=ReduceManifest(5.0, True), options={"rerun": 3})
    complete_edges(shell, 0)
    shell.advance(1.0)
    shell.time += down
    shell.reopen()
    shell.advance(0.0)
    shell.save()
    assert (seen(shell)["0-1.2"] == "cancelled") is (down > 4)
    shell.advance(2.0)
    shell.save()
    assert seen(shell)["0-1.2"] == "cancelled"


def test_timeout_stands_still_while_the_invocation_is_uncertain():
    shell = started(reduce=ReduceManifest(5.0, False))
    shell.reopen()
    shell.save()
    assert seen(shell)["0-0.1"] == "uncertain"
    shell.advance(100.0)
    for number in (0, 1, 2):
        settled = f.Reconciled(0, 1, "many", "me", "r", None, {}, None, number)
        shell.do(shell.coordinator.reconcile(ONE, settled, shell.now))
    shell.advance(0.0)
    shell.save()
    assert edge(0, 2) in shell.dispatched
    shell.advance(5.0)
    shell.save()
    assert ended(shell).code == "reducer_failed"


# reductions that fail


def test_reducer_that_is_cut_off_is_started_once_more_with_the_same_results():
    shell = started()
    complete_edges(shell, 0, 1, 2)
    first = task_of(shell, reduction())
    shell.interrupt(reduction(), "reducer_failed")
    shell.save()
    assert task_of(shell, reduction(2)).results == first.results
    shell.complete(reduction(2), x=1)
    assert shell.asked


def test_reducer_that_is_cut_off_twice_has_failed():
    shell = started(reduce=PARTIAL)
    shell.fail(edge(0))
    complete_edges(shell, 1, 2)
    shell.interrupt(reduction())
    shell.save()
    shell.interrupt(reduction(2))
    shell.save()
    assert ended(shell).code == "reducer_failed"
    details = decode(ended(shell).details)
    assert (details["result_count"], details["error_count"], details["expected_edges"]) == (2, 1, 3)
    assert seen(shell)["0.1"] == seen(shell)["0.2"] == "failed"


def test_reduction_that_raises_or_takes_too_long_is_not_repeated():
    for end in (lambda shell: shell.fail(reduction()), lambda shell: shell.interrupt(reduction(), "execution_timeout")):
        shell = started(options={"retry": RetryManifest(3, 0.0, 1.0, 1.0, 0.0)})
        complete_edges(shell, 0, 1, 2)
        end(shell)
        shell.save()
        assert reduction(2) not in shell.dispatched
        assert ended(shell).code in ("node_exception", "execution_timeout")


def test_partial_execution_fails_with_its_reduction():
    shell = started(reduce=PARTIAL)
    complete_edges(shell, 0, 1, 2)
    shell.fail(reduction())
    shell.save()
    assert ended(shell).code == "node_exception"


# recovery


def test_completed_edges_are_not_run_again_after_a_restart():
    shell = started(options={"rerun": 2})
    complete_edges(shell, 0)
    shell.complete(edge(2), n=2)  # not durable
    shell.reopen()
    shell.save()
    assert set(shell.dispatched) == {edge(1, 2), edge(2, 2)}
    shell.complete(edge(1, 2), n=1)
    shell.complete(edge(2, 2), n=2)
    shell.save()
    assert all(task_of(shell, reduction()).results)


def test_edge_that_never_began_is_run_in_the_same_attempt():
    shell = started()
    shell.begin_body(edge(0))
    shell.begin_body(edge(1))
    complete_edges(shell, 0, 1)
    shell.reopen(proofs=True)
    shell.save()
    assert set(shell.dispatched) == {edge(2)}


def test_uncertain_edge_holds_the_reduction_until_it_is_reconciled():
    shell = started()
    complete_edges(shell, 0, 1)
    shell.reopen()
    shell.save()
    assert seen(shell) == {"0-0.1": "completed", "0-1.1": "completed", "0-2.1": "uncertain", "0.1": "collecting"}
    assert shell.coordinator.uncertain_task(ONE, 0, 1) is None
    assert shell.coordinator.uncertain_task(ONE, 0, 1, 2) is not None
    settled = f.Reconciled(0, 1, "many", "me", "r", {"n": raw(9)}, {}, None, 2)
    shell.do(shell.coordinator.reconcile(ONE, settled, shell.now))
    shell.save()
    assert task_of(shell, reduction()).results[2] == {"n": raw(9)}


@pytest.mark.parametrize("reduce", [ALL, PARTIAL])
def test_error_of_a_person_for_an_edge_is_a_failure_like_any_other(reduce: ReduceManifest):
    shell = started(edges=["x", "y"], reduce=reduce)
    complete_edges(shell, 0)
    shell.reopen()
    settled = f.Reconciled(0, 1, "many", "me", "r", None, {}, ErrorInfo("reconciled", "no"), 1)
    shell.do(shell.coordinator.reconcile(ONE, settled, shell.now))
    shell.save()
    if reduce.partial:
        assert task_of(shell, reduction()).errors[1].code == "reconciled"
    else:
        assert ended(shell).message == "edge 1 of many: no"


def test_reduction_is_done_once_more_after_a_restart_and_then_has_failed():
    shell = started()
    complete_edges(shell, 0, 1, 2)
    shell.begin_body(reduction())
    shell.reopen(proofs=True)
    shell.save()
    assert seen(shell)["0.1"] == "failed"
    shell.begin_body(reduction(2))
    shell.reopen(proofs=True)
    shell.save()
    assert ended(shell).code == "reducer_failed"
    assert decode(ended(shell).details)["reason"] == "supervisor_lost"


def test_reduction_that_never_began_keeps_its_attempts():
    shell = started()
    complete_edges(shell, 0, 1, 2)
    for _ in range(5):
        shell.reopen(proofs=True)
        shell.save()
    assert set(shell.dispatched) == {reduction()}


def test_last_result_and_a_crash_before_the_reduction_is_marked():
    """The record of the last result may be durable without the mark, where the node had no slot."""
    shell = started(options={"concurrency": 1}, edges=["x"])
    shell.run("two")
    shell.save()
    shell.decide("many", edges={"many": ["z"]})
    shell.save()
    complete_edges(shell, 0)
    shell.reopen(proofs=True)
    shell.save()
    assert seen(shell)["0.1"] in ("scheduled", "running")
    shell.complete(shell.only())
    shell.save()
    assert len(shell.dispatched) == 1


# ends


def test_cancel_ends_edges_and_execution():
    shell = started(options={"concurrency": 2})
    shell.do(shell.coordinator.cancel(ONE, "test", None, shell.now))
    shell.save()
    assert seen(shell) == {"0-0.1": "cancelled", "0-1.1": "cancelled", "0-2.1": "cancelled", "0.1": "cancelled"}
    assert {kill.execution_id for kill in shell.kills} == {edge(0), edge(1)}


@pytest.mark.parametrize("on_failure", ["fail", "policy"])
@pytest.mark.parametrize("reduce", [ALL, PARTIAL])
def test_node_that_is_given_up_fails_the_execution(on_failure: str, reduce: ReduceManifest):
    shell = started(options={"concurrency": 2}, reduce=reduce, on_failure=on_failure)
    shell.do(shell.coordinator.node_given_up("many", ErrorInfo("node_unavailable", "gone"), shell.now))
    for name in list(shell.dispatched):
        shell.interrupt(name, "node_unavailable", started=False)
    shell.save()
    if on_failure == "policy":
        assert shell.asked[-1].request.failure.code == "node_unavailable"
    else:
        assert ended(shell).code == "node_unavailable"
    assert "running" not in seen(shell).values()


def test_snapshot_in_the_midst_of_edges_is_gone_on_from():
    shell = started(options={"rerun": 2})
    shell.complete(edge(0), large="x" * 70_000)
    shell.save()
    assert shell.snapshots, "else this tests nothing"
    shell.reopen()
    shell.save()
    assert [decode(shell.dispatched[edge(number, 2)].input) for number in (1, 2)] == ["y", "z"]
    shell.complete(edge(1, 2), n=1)
    shell.complete(edge(2, 2), n=2)
    shell.save()
    assert decode(task_of(shell, reduction()).results[0]["large"]) == "x" * 70_000


def test_what_is_live_is_what_is_durable():
    shell = started(reduce=PARTIAL, options={"rerun": 2})
    shell.fail(edge(0))
    shell.interrupt(edge(1))
    shell.save()
    shell.complete(edge(1, 2), n=1)
    shell.save()
    live = shell.coordinator.invocations[ONE]
    assert shell.restored(ONE) == live


def test_reduction_waits_while_a_branch_beside_it_is_uncertain():
    many = node("many", concurrency=4, reduce=ALL)
    shell = PureShell(agent(many, node("asks", probe=3)))
    shell.run("one")
    shell.save()
    shell.decide(["many", "asks"], edges={"many": [1]})
    shell.save()
    shell.interrupt(f"{HEX}.1.1")
    shell.probed(f"{HEX}.1.1", not_done=False)
    complete_edges(shell, 0)
    assert not shell.dispatched
    assert seen(shell) == {"0-0.1": "completed", "0.1": "scheduled", "1.1": "uncertain"}
    settled = f.Reconciled(1, 1, "asks", "me", "r", {"x": raw(1)}, {}, None)
    shell.do(shell.coordinator.reconcile(ONE, settled, shell.now))
    shell.save()
    assert set(shell.dispatched) == {reduction()}


def test_node_given_up_with_edges_marked_ahead_fails_the_execution_once():
    shell = started(edges=range(60), options={"concurrency": 2}, on_failure="policy")
    while edges := [name for name in shell.dispatched if "-" in name]:
        shell.complete(edges[0])
        shell.save()
    shell.complete(reduction())
    shell.decide("many", edges={"many": list(range(8))})
    shell.save()
    assert list(seen(shell).values()).count("running") > 3, "more are marked than run"
    shell.do(shell.coordinator.node_given_up("many", ErrorInfo("node_unavailable", "gone"), shell.now))
    shell.save()
    assert [asked.request.failure.code for asked in shell.asked] == ["node_unavailable"]
    failed = [(fact.step, fact.edge) for fact in shell.facts(ONE) if isinstance(fact, f.Failed)]
    assert [edge >= 0 for _, edge in failed] == [True, False]
