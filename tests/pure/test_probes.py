"""`Probe` in the coordinator: what was cut off is asked about, and what the answer brings about."""

from __future__ import annotations

import pytest

from hayata.messages import ErrorInfo, InvocationInfo, Partial
from hayata_supervisor.core import facts as f
from tests.support.pure_shell import Answers, PureShell, agent, decode, node, raw

ONE = b"\0" * 16


def running(*nodes, decision="a", **changes) -> PureShell:
    """An invocation whose first transition is under way; bodies have begun."""
    shell = PureShell(agent(*(nodes or (node("a", probe=3), node("b", probe=3), node("c"))), **changes))
    shell.run("one", {"q": 1})
    shell.save()
    shell.decide(decision, "in")
    shell.save()
    for name in shell.dispatched:
        shell.begin_body(name)
    return shell


def named(shell: PureShell, name: str) -> str:
    """The execution of that node which is out."""
    (found,) = [execution for execution in shell.dispatched if shell.nodes[execution] == name]
    return found


def kinds(shell: PureShell) -> list[str]:
    return [kind for _, kind in shell.events[ONE]]


def statuses(shell: PureShell) -> list[tuple[int, str]]:
    return [(task.attempt, task.status) for task in shell.restored(ONE).tasks]


LOSSES = {
    "interrupted": lambda shell: shell.interrupt(shell.only()),
    "timed out": lambda shell: shell.interrupt(shell.only(), "execution_timeout"),
    "restarted": lambda shell: (shell.reopen(proofs=True), shell.save()),
}


@pytest.fixture(params=LOSSES)
def lose(request):
    return LOSSES[request.param]


# ---- what it is asked, and its four answers ----------------------------------------------------------------


def test_probe_is_asked_about_the_very_attempt_that_was_cut_off(lose):
    shell = running()
    before = shell.dispatched[shell.only()]
    lose(shell)
    asked = shell.dispatched[shell.only()]
    assert asked.probe
    assert (asked.execution_id, asked.attempt, asked.idempotency_key) == (
        before.execution_id,
        before.attempt,
        before.idempotency_key,
    )
    assert (decode(asked.input), asked.state, asked.cell, asked.stream) == ("in", {}, -1, False)
    assert shell.restored(ONE).status == "running"
    assert shell.asked == [], "the policy is not asked while a probe is"


def test_result_completes_the_task(lose):
    shell = running()
    lose(shell)
    shell.complete(shell.only(), paid=5)
    assert decode(shell.asked[0].request.state["paid"]) == 5
    shell.decide(None)
    shell.save()
    assert shell.restored(ONE).status == "completed"
    assert kinds(shell).count("node_completed") == 1
    assert "node_failed" not in kinds(shell)


def test_not_done_runs_the_next_attempt(lose):
    shell = running()
    lose(shell)
    shell.probed(shell.only(), not_done=True)
    shell.save()
    assert (shell.dispatched[shell.only()].probe, shell.dispatched[shell.only()].attempt) == (False, 2)
    (failed,) = [fact for fact in shell.facts(ONE) if isinstance(fact, f.Failed)]
    assert failed.retry_at is not None
    assert failed.error.code in ("edge_crashed", "execution_timeout", "supervisor_lost")


def test_unknown_is_uncertain_and_names_why_the_body_was_cut_off(lose):
    shell = running()
    lose(shell)
    shell.probed(shell.only(), not_done=False)
    shell.save()
    assert shell.settled[-1].info.status == "uncertain"
    (uncertain,) = [fact for fact in shell.facts(ONE) if isinstance(fact, f.Uncertain)]
    assert uncertain.error.code in ("edge_crashed", "execution_timeout", "supervisor_lost")
    shell.do(shell.coordinator.reconcile(ONE, f.Reconciled(0, 1, "a", "me", "r", {}, {}, None), shell.now))
    shell.save()
    assert len(shell.asked) == 1


@pytest.mark.parametrize("how", ["raises", "dies", "never handed over"])
def test_probe_that_fails_is_unknown(lose, how):
    shell = running()
    lose(shell)
    match how:
        case "raises":
            shell.fail(shell.only(), retryable=True)
        case "dies":
            shell.interrupt(shell.only())
        case "never handed over":
            shell.interrupt(shell.only(), "node_unavailable", started=False)
    shell.save()
    assert statuses(shell) == [(1, "uncertain")]
    (uncertain,) = [fact for fact in shell.facts(ONE) if isinstance(fact, f.Uncertain)]
    assert uncertain.error.message.startswith("its probe gave no answer: ")
    assert shell.dispatched == {}


def test_answer_that_can_not_be_merged_is_unknown(lose):
    shell = running(merge={"n": "add"}, state={"n": raw(1)})
    lose(shell)
    shell.complete(shell.only(), n="two")
    shell.save()
    assert statuses(shell) == [(1, "uncertain")]
    assert shell.restored(ONE).status == "uncertain"


def test_attempts_are_bounded_and_the_last_one_that_was_not_done_has_failed(lose):
    shell = running(node("a", probe=2))
    for _ in range(2):
        lose(shell)
        shell.probed(shell.only(), not_done=True)
        shell.save()
        for name in shell.dispatched:
            shell.begin_body(name)
    assert shell.dispatched == {}
    assert shell.restored(ONE).status == "failed"
    assert kinds(shell)[-2:] == ["node_failed", "invocation_failed"]


# ---- when it is not asked ----------------------------------------------------------------------------------


def test_body_that_ended_with_a_failure_is_not_probed():
    shell = running()
    shell.fail(shell.only())
    shell.save()
    assert shell.restored(ONE).status == "failed"


def test_body_that_provably_never_began_is_run_without_a_question():
    shell = PureShell(agent(node("a", probe=3)))
    shell.run("one")
    shell.save()
    shell.decide("a")
    shell.save()
    shell.reopen(proofs=True)
    shell.save()
    assert (shell.dispatched[shell.only()].probe, shell.dispatched[shell.only()].attempt) == (False, 1)


def test_task_that_was_not_started_is_not_probed():
    shell = running()
    shell.interrupt(shell.only(), "node_unavailable", started=False)
    shell.save()
    assert shell.settled[-1].info.error.code == "node_unavailable"


# ---- crashes, cancel, slots, cells -----------------------------------------------------------------------


def test_probe_that_is_cut_off_by_another_crash_is_asked_again(lose):
    shell = running()
    lose(shell)
    for _ in range(3):
        shell.reopen(proofs=True)
        shell.save()
        assert shell.dispatched[shell.only()].probe
    shell.complete(shell.only())
    shell.save()
    assert statuses(shell) == [(1, "completed")]


def test_outcome_that_is_not_durable_is_asked_for_again():
    shell = running()
    shell.interrupt(shell.only())
    shell.probed(shell.only(), not_done=True)
    shell.reopen(proofs=True)
    shell.save()
    assert (shell.dispatched[shell.only()].probe, shell.dispatched[shell.only()].attempt) == (True, 1)


def test_note_of_a_body_is_kept_while_its_probe_is_asked():
    """Else the next recovery would read another execution's note in the cell, and take the body for one that
    never began."""
    shell = PureShell(agent(node("a", probe=3), node("b")), cells=2)
    shell.run("one")
    shell.save()
    shell.decide("a")
    shell.save()
    shell.begin_body(shell.only())
    shell.interrupt(shell.only())
    probe = shell.only()
    for number in range(4):
        shell.run(f"other{number}")
        shell.save()
        shell.decide("b")
        shell.save()
        shell.begin_body(named(shell, "b"))
        shell.complete(named(shell, "b"))
        shell.decide(None)
        shell.save()
    shell.reopen(proofs=True)
    shell.save()
    assert shell.dispatched[probe].probe


def test_probe_waits_for_a_slot_and_comes_before_what_is_new():
    shell = PureShell(agent(node("a", probe=3, concurrency=1)))
    for name in ("one", "two"):
        shell.run(name)
        shell.save()
        shell.decide("a")
        shell.save()
    shell.begin_body(shell.only())
    shell.interrupt(shell.only())
    assert shell.dispatched[shell.only()].probe, "the slot was free, and its question came first"
    slots = shell.coordinator.executions.slots["a"]
    assert (slots.active, slots.marked) == (1, 1)
    shell.complete(shell.only())
    shell.save()
    assert shell.dispatched[shell.only()].invocation_id == "two"


def test_many_probes_after_a_restart_keep_to_the_slots():
    shell = PureShell(agent(node("a", probe=3, concurrency=3)))
    for number in range(3):
        shell.run(f"i{number}")
        shell.save()
        shell.decide("a")
        shell.save()
    for name in shell.dispatched:
        shell.begin_body(name)
    shell.reopen(agent(node("a", probe=3, concurrency=1)), proofs=True)
    shell.save()
    answered = 0
    while shell.dispatched:
        assert shell.dispatched[shell.only()].probe
        shell.complete(shell.only())
        answered += 1
    assert answered == 3
    assert shell.coordinator.executions.slots["a"].marked == 0


def test_cancel_ends_a_probe_and_answers_when_it_is_dead(lose):
    shell = running()
    lose(shell)
    token = Answers()
    shell.do(shell.coordinator.cancel(ONE, "no more", token, shell.now))
    shell.save()
    assert [kill.execution_id for kill in shell.kills] == [shell.only()]
    assert token.answers == []
    shell.interrupt(shell.only(), "cancelled")
    shell.save()
    assert [answer.status for answer in token.answers if isinstance(answer, InvocationInfo)] == ["cancelled"]
    assert shell.coordinator.executions.slots["a"].marked == 0
    assert statuses(shell) == [(1, "cancelled")]


def test_chunk_of_a_body_that_was_cut_off_is_refused_while_its_probe_is_asked():
    shell = running()
    execution = shell.only()
    shell.interrupt(execution)
    shell.do(shell.coordinator.partial(Partial(execution, "e", 1, raw({})), shell.now))
    assert shell.acks[-1].ack.error.code == "execution_not_active"


def test_node_given_up_makes_what_it_should_have_asked_uncertain():
    shell = PureShell(agent(node("a", probe=3, concurrency=1)))
    for name in ("one", "two"):
        shell.run(name)
        shell.save()
        shell.decide("a")
        shell.save()
    shell.begin_body(shell.only())
    unavailable = ErrorInfo("node_unavailable", "it crashes")
    shell.do(shell.coordinator.node_given_up("a", unavailable, shell.now))
    shell.interrupt(shell.only())
    shell.save()
    assert statuses(shell) == [(1, "uncertain")]
    assert shell.restored((1).to_bytes(16, "big")).status == "failed"


# ---- beside other branches -------------------------------------------------------------------------------


def test_branch_goes_on_beside_one_that_became_uncertain():
    shell = running(decision=["a", "c"])
    shell.interrupt(named(shell, "a"))
    shell.probed(named(shell, "a"), not_done=False)
    shell.save()
    assert statuses(shell) == [(1, "uncertain"), (1, "running")]
    assert shell.coordinator.admission.running == 0
    shell.complete(named(shell, "c"), c=1)
    shell.save()
    assert shell.settled[-1].info.status == "uncertain", "those who wait hear that it still rests"
    assert shell.asked == []
    shell.do(shell.coordinator.reconcile(ONE, f.Reconciled(0, 1, "a", "me", "r", {}, {}, None), shell.now))
    shell.save()
    assert shell.coordinator.admission.running == 1
    assert [decode(each) for each in shell.asked[0].request.parallel_results] == [{}, {"c": 1}]


def test_uncertain_branch_that_is_settled_first_waits_for_the_one_that_runs():
    shell = running(decision=["a", "c"])
    shell.interrupt(named(shell, "a"))
    shell.probed(named(shell, "a"), not_done=False)
    shell.do(shell.coordinator.reconcile(ONE, f.Reconciled(0, 1, "a", "me", "r", {}, {}, None), shell.now))
    shell.save()
    assert shell.asked == []
    assert shell.restored(ONE).status == "running"
    shell.complete(named(shell, "c"), c=1)
    assert len(shell.asked) == 1


def test_recovery_asks_about_one_branch_while_the_other_is_uncertain():
    shell = running(decision=["a", "c"])
    shell.reopen(proofs=True)
    shell.save()
    assert shell.restored(ONE).status == "uncertain"
    shell.probed(named(shell, "a"), not_done=True)
    shell.save()
    assert shell.dispatched == {}, "its next attempt waits until the person has decided"
    shell.do(shell.coordinator.reconcile(ONE, f.Reconciled(1, 1, "c", "me", "r", {}, {}, None), shell.now))
    shell.save()
    assert shell.dispatched[named(shell, "a")].attempt == 2
    shell.complete(shell.only())
    assert len(shell.asked) == 1


@pytest.mark.parametrize("resume", ["auto", "manual"])
def test_branch_beside_an_uncertain_one_is_classified_after_a_crash(resume):
    shell = running(decision=["a", "b"], resume=resume)
    shell.interrupt(named(shell, "a"))
    shell.probed(named(shell, "a"), not_done=False)
    shell.save()
    shell.reopen(proofs=True)
    shell.save()
    assert [shell.nodes[name] for name in shell.dispatched] == (["b"] if resume == "auto" else [])
    shell.do(shell.coordinator.reconcile(ONE, f.Reconciled(0, 1, "a", "me", "r", {}, {}, None), shell.now))
    shell.save()
    assert shell.dispatched[named(shell, "b")].probe
    shell.complete(shell.only())
    assert len(shell.asked) == 1


def test_retry_beside_an_uncertain_branch_waits_for_the_person():
    shell = running(node("a", probe=3), node("c", rerun=3), decision=["a", "c"])
    shell.interrupt(named(shell, "a"))
    shell.probed(named(shell, "a"), not_done=False)
    shell.interrupt(named(shell, "c"))
    shell.save()
    assert shell.dispatched == {}
    assert statuses(shell) == [(1, "uncertain"), (2, "scheduled")]
    shell.do(shell.coordinator.reconcile(ONE, f.Reconciled(0, 1, "a", "me", "r", {}, {}, None), shell.now))
    shell.save()
    assert shell.dispatched[shell.only()].attempt == 2


def test_final_failure_beside_an_uncertain_branch_fails_the_invocation_and_kills():
    shell = running(node("a", probe=3), node("b"), node("c"), decision=["a", "b", "c"])
    shell.interrupt(named(shell, "a"))
    shell.probed(named(shell, "a"), not_done=False)
    shell.fail(named(shell, "b"))
    shell.save()
    assert shell.restored(ONE).status == "failed"
    assert [kill.node for kill in shell.kills] == ["c"]


def test_branch_left_uncertain_by_another_ones_failure_can_not_be_settled_any_more():
    """The policy has heard of the failure and goes on: a late verdict must not start the invocation twice."""
    shell = running(node("a"), node("b"), decision=["a", "b"], on_failure="policy")
    shell.reopen()
    shell.save()
    error = ErrorInfo("reconciled", "it did not happen")
    shell.do(shell.coordinator.reconcile(ONE, f.Reconciled(0, 1, "a", "me", "r", None, {}, error), shell.now))
    shell.save()
    assert len(shell.asked) == 1
    assert shell.coordinator.uncertain_task(ONE, 1, 1) is None
    assert shell.coordinator.admission.running == 1


def test_uncertain_task_of_another_version_is_settled_and_not_run_by_the_new_one():
    shell = running(node("a"))
    shell.reopen(agent(node("a"), version="2"))
    shell.save()
    shell.do(shell.coordinator.recover("continue", shell.now)[0])
    shell.save()
    assert shell.restored(ONE).status == "uncertain"
    shell.reopen(agent(node("a"), version="3"))
    shell.save()
    shell.do(shell.coordinator.reconcile(ONE, f.Reconciled(0, 1, "a", "me", "r", None, {}, None), shell.now))
    shell.save()
    assert shell.dispatched == {}
    assert shell.settled[-1].info.error.code == "definition_changed"
    shell.do(shell.coordinator.recover("continue", shell.now)[0])
    shell.save()
    assert shell.dispatched[shell.only()].attempt == 2
    assert shell.coordinator.admission.running == 1
