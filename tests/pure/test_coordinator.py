"""The coordinator's tables, row by row, without processes."""

from __future__ import annotations

import pytest

from hayata.messages import ErrorInfo, InvocationInfo, Partial, RetryManifest
from hayata_supervisor.core import facts as f
from hayata_supervisor.core.coordinator import Refusal
from tests.support.pure_shell import Answers, PureShell, agent, decode, node, raw


def started(*nodes, **changes) -> PureShell:
    shell = PureShell(agent(*(nodes or (node("a"), node("b"), node("c"))), **changes))
    shell.run("one", {"q": 1})
    shell.save()
    return shell


def status(shell: PureShell, name: str = "one") -> str:
    id = next(id for id, fresh in shell.fresh.items() if fresh.name == name)
    return shell.restored(id).status


def event_types(shell: PureShell, index: int = 0) -> list[str]:
    return [kind for _, kind in shell.events[index.to_bytes(16, "big")]]


def test_run_is_acknowledged_after_its_commit_and_not_before():
    shell = PureShell(agent(node("a")))
    token = shell.run("one")
    assert token.answers == []
    shell.save()
    assert isinstance(token.answers[0], InvocationInfo)
    assert token.answers[0].status == "running"


def test_sequential_steps_merge_state_and_finish():
    shell = started(merge={"list": "extend"})
    shell.decide("a", "in")
    assert shell.dispatched == {}, "nothing is handed out before its mark is durable"
    shell.save()
    assert decode(shell.dispatched[shell.only()].input) == "in"
    shell.complete(shell.only(), list=[1], x=1)
    assert shell.asked[0].request.last == "a"
    shell.decide("b")
    shell.save()
    shell.complete(shell.only(), list=[2], x=2)
    state = {key: decode(value) for key, value in shell.asked[0].request.state.items()}
    assert state == {"list": [1, 2], "x": 2}
    shell.decide(None, "done")
    shell.save()
    assert status(shell) == "completed"
    assert decode(shell.settled[-1].info.result) == "done"
    assert event_types(shell) == [
        "invocation_started", "node_started", "node_completed", "node_started", "node_completed",
        "invocation_completed",
    ]  # fmt: skip


def test_result_and_decision_share_their_commit_when_the_policy_is_quick():
    shell = started()
    shell.decide("a")
    shell.save()
    shell.complete(shell.only())
    assert shell.unsaved[-1].hold
    shell.decide("b")
    assert len(shell.unsaved) == 2


def test_parallel_results_come_in_the_order_of_the_request():
    shell = started()
    shell.decide(["b", "a", "c"])
    shell.save()
    executions = {shell.nodes[name]: name for name in shell.dispatched}
    for name in ("c", "b", "a"):
        shell.complete(executions[name], from_=name)
    request = shell.asked[0].request
    assert [decode(each) for each in request.parallel_results] == [{"from_": "b"}, {"from_": "a"}, {"from_": "c"}]
    assert request.last == ["b", "a", "c"]
    assert request.state == {}, "branches are collected, not merged"
    assert request.step == 3


def test_branch_that_finally_fails_cancels_its_siblings_and_kills_after_the_commit():
    shell = started()
    shell.decide(["a", "b", "c"])
    shell.save()
    executions = {shell.nodes[name]: name for name in shell.dispatched}
    shell.complete(executions["c"])
    shell.fail(executions["a"])
    assert shell.kills == []
    shell.save()
    assert [kill.execution_id for kill in shell.kills] == [executions["b"]]
    assert status(shell) == "failed"
    assert event_types(shell)[-3:] == ["node_failed", "node_cancelled", "invocation_failed"]


def test_late_messages_of_a_cancelled_branch_change_nothing():
    shell = started()
    shell.decide(["a", "b"])
    shell.save()
    executions = {shell.nodes[name]: name for name in shell.dispatched}
    shell.fail(executions["a"])
    shell.save()
    before = shell.facts(b"\0" * 16)
    shell.complete(executions["b"], x=1)
    shell.complete(executions["b"], x=1)
    shell.save()
    assert shell.facts(b"\0" * 16) == before
    assert shell.coordinator.late_messages == 2
    assert shell.coordinator.executions.slots["b"].marked == 0


def test_max_steps_schedules_nothing_beyond():
    shell = started(max_steps=2)
    shell.decide(["a", "b", "c"])
    shell.save()
    assert shell.dispatched == {}
    assert shell.settled[-1].info.error.code == "max_steps_exceeded"


def test_slots_limit_what_runs_and_the_waiting_stay_scheduled():
    shell = PureShell(agent(node("a", concurrency=1)))
    for name in ("one", "two", "three"):
        shell.run(name)
        shell.save()
        shell.decide("a")
        shell.save()
    first = shell.only()
    assert [type(fact) for fact in shell.facts(b"\0" * 15 + b"\1")][-1] is f.Decided
    shell.complete(first)
    shell.save()
    assert shell.dispatched[shell.only()].invocation_id == "two"


def test_retry_waits_its_backoff_and_counts_attempts():
    retry = RetryManifest(3, 1.0, 2.0, 10.0, 0.0)
    shell = started(node("a", retry=retry))
    shell.decide("a")
    shell.save()
    shell.fail(shell.only(), retryable=True)
    shell.save()
    shell.advance(0.5)
    assert shell.dispatched == {}
    shell.advance(0.6)
    shell.save()
    assert shell.dispatched[shell.only()].attempt == 2
    shell.fail(shell.only(), retryable=True)
    shell.advance(2.1)
    shell.save()
    shell.fail(shell.only(), retryable=True)
    shell.save()
    assert status(shell) == "failed"


@pytest.mark.parametrize("clock_set_by", [0.0, -86400.0, 86400.0])
def test_retry_pending_over_a_restart_keeps_what_is_left_of_its_delay(clock_set_by: float):
    shell = started(node("a", retry=RetryManifest(3, 10.0, 2.0, 60.0, 0.0)))
    shell.decide("a")
    shell.save()
    shell.fail(shell.only(), retryable=True)
    shell.save()
    shell.time += 4
    shell.clock_set_by = clock_set_by
    shell.reopen()
    shell.save()
    shell.advance(5.5)
    assert shell.dispatched == {}
    shell.advance(1)
    shell.save()
    assert shell.dispatched[shell.only()].attempt == 2


def test_interrupted_under_a_living_supervisor_fails_by_default_and_reruns_when_declared():
    shell = started(node("a"), node("b", rerun=2))
    shell.decide("b")
    shell.save()
    shell.interrupt(shell.only())
    shell.save()
    assert shell.dispatched[shell.only()].attempt == 2
    shell.complete(shell.only())
    shell.decide("a")
    shell.save()
    shell.interrupt(shell.only())
    shell.save()
    assert status(shell) == "failed"
    assert shell.settled[-1].info.error.code == "edge_crashed"


def test_task_that_never_started_is_not_counted_as_interrupted():
    shell = started(node("a", rerun=5))
    shell.decide("a")
    shell.save()
    shell.interrupt(shell.only(), "node_unavailable", started=False)
    shell.save()
    assert shell.settled[-1].info.error.code == "node_unavailable"


def test_recovery_makes_a_marked_task_uncertain_and_reconcile_brings_it_to_its_end():
    shell = started()
    shell.decide("a")
    shell.save()
    execution = shell.only()
    shell.reopen()
    shell.save()
    assert status(shell) == "uncertain"
    assert shell.dispatched == {}
    id = b"\0" * 16
    assert shell.coordinator.uncertain_task(id, 0, 1) is not None
    fact = f.Reconciled(0, 1, "a", "me", "r1", {"x": raw(5)}, {}, None)
    shell.do(shell.coordinator.reconcile(id, fact, shell.now))
    shell.save()
    assert decode(shell.asked[0].request.state["x"]) == 5
    assert shell.coordinator.uncertain_task(id, 0, 1) is None
    shell.decide(None)
    shell.save()
    assert status(shell) == "completed"
    assert execution.endswith(".0.1")


def test_reconcile_with_retry_grants_one_attempt():
    shell = started()
    shell.decide("a")
    shell.save()
    shell.reopen()
    shell.save()
    shell.do(shell.coordinator.reconcile(b"\0" * 16, f.Reconciled(0, 1, "a", "me", "r", None, {}, None), shell.now))
    shell.save()
    assert shell.dispatched[shell.only()].attempt == 2


def test_reconcile_with_an_error_fails_the_invocation():
    shell = started()
    shell.decide(["a", "b"])
    shell.save()
    shell.reopen()
    shell.save()
    error = ErrorInfo("reconciled", "it did not happen")
    shell.do(shell.coordinator.reconcile(b"\0" * 16, f.Reconciled(0, 1, "a", "me", "r", None, {}, error), shell.now))
    shell.save()
    assert status(shell) == "failed"


def test_recovery_of_a_parallel_transition_reuses_one_branch_and_runs_the_other():
    shell = PureShell(agent(node("a"), node("b", concurrency=1), node("c", concurrency=1)))
    shell.run("hold")
    shell.save()
    shell.decide("b")
    shell.save()
    shell.run("one")
    shell.save()
    shell.decide(["a", "b"])
    shell.save()
    executions = {shell.nodes[name]: name for name in shell.dispatched if name.startswith("0" * 31 + "1")}
    assert list(executions) == ["a"], "b waits for its slot"
    shell.complete(executions["a"], done="a")
    shell.save()
    shell.reopen()
    shell.save()
    again = [name for name in shell.dispatched if name.startswith("0" * 31 + "1")]
    assert [shell.nodes[name] for name in again] == ["b"]
    shell.complete(again[0], done="b")
    assert [decode(each) for each in shell.asked[0].request.parallel_results] == [{"done": "a"}, {"done": "b"}]


def test_rerun_after_a_lost_supervisor_is_bounded():
    shell = started(node("a", rerun=2))
    shell.decide("a")
    shell.save()
    shell.reopen()
    shell.save()
    assert shell.dispatched[shell.only()].attempt == 2
    shell.reopen()
    shell.save()
    assert status(shell) == "uncertain"


def test_interrupted_evaluation_is_repeated():
    shell = started()
    shell.decide("a")
    shell.save()
    shell.complete(shell.only(), x=1)
    shell.save()
    shell.reopen()
    shell.save()
    assert len(shell.asked) == 1
    assert shell.asked[0].request.last == "a"


def test_resume_manual_rests_until_recover():
    shell = started(resume="manual")
    shell.reopen()
    shell.save()
    assert shell.asked == []
    info = shell.coordinator.overlay(b"\0" * 16, shell.settled[-1].info)
    assert info.status == "recovery_required"
    effects, touched = shell.coordinator.recover(None, shell.now)
    shell.do(effects)
    shell.save()
    assert len(touched) == 1
    assert len(shell.asked) == 1
    assert "invocation_recovered" in event_types(shell)


def test_changed_definition_is_never_resumed_silently():
    shell = started()
    shell.reopen(agent(node("a"), version="2"))
    assert shell.asked == []
    assert shell.settled[-1].info.error.code == "definition_changed"
    shell.do(shell.coordinator.recover(None, shell.now)[0])
    assert shell.asked == []
    shell.do(shell.coordinator.recover("continue", shell.now)[0])
    shell.save()
    assert len(shell.asked) == 1
    assert shell.restored(b"\0" * 16).version == "2"


def test_busy_session_is_refused_or_queued_and_goes_on_in_order():
    shell = PureShell(agent(node("a")))
    shell.run("one", session="s", own_session=False)
    shell.save()
    with pytest.raises(Refusal) as refused:
        shell.run("two", session="s", own_session=False)
    assert refused.value.error.code == "session_busy"
    token = shell.run("three", session="s", own_session=False, queue=True)
    shell.run("four", session="s", own_session=False, queue=True)
    shell.save()
    assert token.answers[0].status == "queued"
    assert len(shell.asked) == 1
    shell.decide(None)
    shell.save()
    assert shell.asked[0].request.invocation_id == "three"


def test_uncertain_invocation_holds_its_session():
    shell = PureShell(agent(node("a")))
    shell.run("one", session="s", own_session=False)
    shell.save()
    shell.decide("a")
    shell.save()
    shell.reopen()
    shell.save()
    with pytest.raises(Refusal) as refused:
        shell.run("two", session="s", own_session=False)
    assert refused.value.error.code == "recovery_required"


def test_max_concurrency_queues_durably_and_over_a_restart():
    shell = PureShell(agent(node("a"), max_concurrency=1))
    shell.run("one")
    shell.run("two")
    shell.save()
    assert status(shell, "two") == "queued"
    shell.reopen()
    shell.save()
    assert status(shell, "two") == "queued"
    shell.decide(None)
    shell.save()
    assert status(shell, "two") == "running"


def test_long_queue_that_fails_at_once_is_no_deep_recursion():
    shell = PureShell(agent(node("a"), max_concurrency=1))
    for number in range(3000):
        shell.run(f"i{number}")
    shell.save()
    while shell.asked:
        shell.decide(None, fail=True)
        shell.save()
    assert not shell.coordinator.invocations


def test_conversation_memory_carries_messages_only():
    shell = PureShell(agent(node("a"), conversation_memory=True, state={"messages": raw([]), "x": raw(0)}))
    shell.run("one", session="s", own_session=False)
    shell.save()
    shell.decide("a")
    shell.save()
    shell.complete(shell.only(), messages=["hi"], x=9)
    shell.decide(None)
    shell.save()
    shell.reopen()
    shell.run("two", session="s", own_session=False)
    state = {key: decode(value) for key, value in shell.asked[0].request.state.items()}
    assert state == {"messages": ["hi"], "x": 0}


def test_cancel_answers_when_its_executions_are_confirmed_dead():
    shell = started()
    shell.decide("a")
    shell.save()
    token = Answers()
    shell.do(shell.coordinator.cancel(b"\0" * 16, "no more", token, shell.now))
    shell.save()
    assert token.answers == []
    assert len(shell.kills) == 1
    shell.interrupt(shell.only(), "cancelled")
    shell.save()
    assert token.answers[0].status == "cancelled"
    assert event_types(shell)[-2:] == ["node_cancelled", "invocation_cancelled"]


@pytest.mark.parametrize("clock_set_by", [0.0, -86400.0, 86400.0])
def test_invocation_timeout_counts_downtime_and_kills(clock_set_by: float):
    shell = started(node("a", rerun=2), invocation_timeout_s=10.0)
    shell.decide("a")
    shell.save()
    shell.time += 6
    shell.clock_set_by = clock_set_by
    shell.reopen()
    shell.save()
    shell.advance(3)
    shell.save()
    assert status(shell) == "running"
    shell.advance(2)
    shell.save()
    assert shell.settled[-1].info.error.code == "invocation_timeout"
    assert len(shell.kills) == 1


def test_invocation_timeout_stands_still_while_uncertain():
    shell = started(invocation_timeout_s=10.0)
    shell.decide("a")
    shell.save()
    shell.advance(4)
    shell.reopen()
    shell.save()
    shell.advance(100)
    shell.do(shell.coordinator.reconcile(b"\0" * 16, f.Reconciled(0, 1, "a", "me", "r", {}, {}, None), shell.now))
    shell.save()
    shell.advance(5)
    shell.save()
    assert status(shell) == "running"
    shell.advance(2)
    shell.save()
    assert status(shell) == "failed"


def test_partial_is_numbered_published_behind_its_commit_and_acknowledged():
    shell = PureShell(agent(node("a")))
    shell.run("one", stream=True)
    shell.save()
    shell.decide("a")
    shell.save()
    execution = shell.only()
    shell.do(shell.coordinator.partial(Partial(execution, "e", 1, raw({"c": 1})), shell.now))
    assert shell.events[b"\0" * 16][-1] == (3, "node_partial_result")
    assert shell.acks[-1].ack.error is None
    shell.complete(execution)
    shell.do(shell.coordinator.partial(Partial(execution, "e", 2, raw({"c": 2})), shell.now))
    assert len(shell.acks) == 1, "an execution that is over gets no number"


def test_partial_numbers_never_repeat_after_a_restart():
    shell = PureShell(agent(node("a", rerun=3)))
    shell.run("one", stream=True)
    shell.save()
    shell.decide("a")
    shell.save()
    for number in range(600):
        shell.do(shell.coordinator.partial(Partial(shell.only(), "e", number, raw({})), shell.now))
        shell.save()
    seen = {sequence for sequence, _ in shell.events[b"\0" * 16]}
    assert len(seen) == 602
    shell.reopen()
    shell.save()
    assert min(sequence for sequence, _ in shell.events[b"\0" * 16][602:]) > max(seen)


def test_node_given_up_fails_what_waits_and_what_comes():
    shell = started(node("a"), node("b"))
    shell.do(shell.coordinator.node_given_up("a", ErrorInfo("node_unavailable", "it crashes"), shell.now))
    shell.decide("a")
    shell.save()
    assert shell.settled[-1].info.error.code == "node_unavailable"
    shell.do(shell.coordinator.node_back("a", shell.now))
    shell.run("two")
    shell.save()
    shell.decide("a")
    shell.save()
    assert shell.dispatched


def test_failure_is_given_to_the_policy_when_asked_for():
    shell = started(on_failure="policy")
    shell.decide("a")
    shell.save()
    shell.fail(shell.only())
    shell.save()
    assert shell.asked[0].request.failure.code == "node_exception"
    assert shell.asked[0].request.last == "a"
    shell.decide("b")
    shell.save()
    shell.complete(shell.only())
    assert shell.asked[0].request.failure is None


def test_merge_that_does_not_fit_fails_the_task_and_not_the_supervisor():
    shell = started(merge={"n": "add"})
    shell.decide("a")
    shell.save()
    shell.complete(shell.only(), n=1)
    shell.decide("b")
    shell.save()
    shell.complete(shell.only(), n="two")
    shell.save()
    assert shell.settled[-1].info.error.code == "invalid_state"


def test_drain_marks_nothing_and_asks_nothing():
    shell = started()
    shell.decide("a")
    shell.save()
    shell.coordinator.drain()
    shell.complete(shell.only())
    shell.save()
    assert shell.asked == []
    assert not shell.coordinator.executions.busy


def test_marked_task_that_provably_never_began_is_run_again_as_the_same_attempt():
    shell = started()
    shell.decide("a")
    shell.save()
    execution = shell.only()
    shell.reopen(proofs=True)
    shell.save()
    assert shell.only() == execution
    shell.begin_body(execution)
    shell.reopen(proofs=True)
    shell.save()
    assert status(shell) == "uncertain"


def quick_node(count: int) -> PureShell:
    """A node with one slot whose tasks have been quick, and ``count`` invocations that want it."""
    shell = PureShell(agent(node("a", concurrency=1)))
    for number in range(60):
        shell.run(f"warm{number}")
        shell.save()
        shell.decide("a")
        shell.save()
        shell.complete(shell.only())
        shell.decide(None)
        shell.save()
    for number in range(count):
        shell.run(f"i{number}")
        shell.save()
        shell.decide("a")
        shell.save()
    return shell


def test_quick_node_has_tasks_marked_ahead_and_hands_them_out_without_a_commit():
    shell = quick_node(5)
    first = shell.only()
    assert shell.coordinator.executions.slots["a"].marked == 3
    shell.complete(first)
    assert shell.dispatched, "the next was durably marked already"
    assert len(shell.dispatched) == 1, "never more than there are slots"


def test_slow_node_has_nothing_marked_ahead():
    shell = PureShell(agent(node("a", concurrency=1)))
    for number in range(3):
        shell.run(f"i{number}")
        shell.save()
        shell.decide("a")
        shell.save()
    assert shell.coordinator.executions.slots["a"].marked == 1


def test_cancel_of_what_is_marked_ahead_needs_no_kill():
    shell = quick_node(3)
    (ahead,) = [i for i in shell.coordinator.invocations.values() if i.name == "i1"]
    token = Answers()
    shell.do(shell.coordinator.cancel(ahead.id, "no", token, shell.now))
    shell.save()
    assert shell.kills == []
    assert token.answers[0].status == "cancelled"
    shell.complete(shell.only())
    shell.save()
    assert shell.dispatched[shell.only()].invocation_id == "i2"


def test_node_given_up_fails_what_is_marked_ahead():
    shell = quick_node(2)
    shell.do(shell.coordinator.node_given_up("a", ErrorInfo("node_unavailable", "x"), shell.now))
    shell.save()
    assert [each.info.status for each in shell.settled[-1:]] == ["failed"]
    assert shell.coordinator.executions.slots["a"].marked == 1


def test_invocation_with_one_of_two_uncertain_tasks_settled_rests_on():
    shell = started()
    shell.decide(["a", "b"])
    shell.save()
    shell.reopen()
    shell.save()
    told = len(shell.settled)
    shell.do(shell.coordinator.reconcile(b"\0" * 16, f.Reconciled(1, 1, "b", "me", "r", {}, {}, None), shell.now))
    shell.save()
    assert [each.info.status for each in shell.settled[told:]] == ["uncertain"]
    shell.do(shell.coordinator.reconcile(b"\0" * 16, f.Reconciled(0, 1, "a", "me", "r", {}, {}, None), shell.now))
    shell.save()
    assert len(shell.asked) == 1


def test_failure_that_was_handled_is_not_raised_again_after_a_restart_d5():
    """D5, langgraph 8277: a failure that was handled is not raised again on resume."""
    shell = started(node("a"), node("b"), node("c", rerun=3), on_failure="policy")
    shell.decide(["a", "b"])
    shell.save()
    executions = {shell.nodes[name]: name for name in shell.dispatched}
    shell.fail(executions["a"])
    shell.save()
    shell.reopen()
    shell.save()
    assert [each.request.failure.code for each in shell.asked] == ["node_exception"], "it was not handled yet"
    shell.decide("c")
    shell.save()
    for _ in range(2):
        shell.reopen()
        shell.save()
    assert shell.asked == []
    shell.complete(shell.only())
    assert shell.asked[0].request.failure is None
    assert event_types(shell).count("node_failed") == 3, "a's, and two attempts of c that were cut off"


def test_recovering_twice_does_nothing_twice_d11():
    """D11, dbos 759: an empty id would be executed for a month; recovering twice does nothing twice."""
    shell = started(resume="manual")
    shell.decide("a")
    shell.save()
    shell.reopen(proofs=True)
    for _ in range(2):
        shell.do(shell.coordinator.recover(None, shell.now)[0])
        shell.save()
    assert event_types(shell).count("invocation_recovered") == 1
    assert shell.only() == f"{'0' * 32}.0.1"
    assert shell.coordinator.admission.running == 1
