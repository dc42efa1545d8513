"""Another generation's definition: what goes on, what rests, what is scheduled again."""

from __future__ import annotations

import pytest

from hayata.messages import AgentManifest
from hayata_supervisor.core import facts as f
from hayata_supervisor.core.coordinator import Refusal
from tests.support.pure_shell import PureShell, agent, decode, encode, node

ONE = bytes(16)
TWO = (1).to_bytes(16, "big")


def manifest(version: str = "1", *, without: str = "", **changes) -> AgentManifest:
    nodes = [node("a", concurrency=1), node("b"), node("p", probe=2)]
    return agent(*(each for each in nodes if each.name != without), version=version, **changes)


@pytest.fixture
def shell() -> PureShell:
    shell = PureShell(manifest())
    shell.run("one")
    return shell


def status(shell: PureShell, id: bytes = ONE) -> tuple[str, str]:
    """What a client is told, and why, when all is durable."""
    shell.save()
    found = next(each.info for each in reversed(shell.settled) if each.invocation == id)
    return found.status, found.error.code if found.error else ""


def kinds(shell: PureShell, id: bytes = ONE) -> list[str]:
    return [type(fact).__name__ for fact in shell.facts(id)]


def test_question_to_the_old_policy_is_asked_again_and_its_answer_is_late(shell: PureShell):
    old = shell.asked[0]
    shell.reload(manifest())
    assert [each.request.evaluation for each in shell.asked] != [old.request.evaluation]
    fresh = shell.asked.pop()
    shell.asked.append(old)
    shell.decide(None, "old")
    assert shell.coordinator.late_messages == 1
    shell.asked.append(fresh)
    shell.decide(None, "new")
    shell.save()
    assert shell.restored(ONE).status == "completed"
    assert bytes(shell.restored(ONE).result) == encode("new")


def test_body_that_runs_counts_and_the_next_step_is_the_new_definitions(shell: PureShell):
    shell.decide("a")
    shell.save()
    shell.reload(manifest())
    assert shell.asked == []
    shell.complete(shell.only(), x=1)
    assert [dict(decode(encode(each.request.state))) for each in shell.asked] == [{"x": 1}]


def test_body_that_runs_with_another_version_counts_and_its_invocation_rests(shell: PureShell):
    shell.decide(["a", "b"])
    shell.save()
    shell.reload(manifest("2"))
    first, second = shell.dispatched
    shell.complete(first, x=1)
    shell.save()
    assert not shell.coordinator.resting
    shell.complete(second, y=1)
    shell.save()
    assert (status(shell), shell.asked) == (("recovery_required", "definition_changed"), [])
    assert kinds(shell).count("Completed") == 2
    assert shell.coordinator.admission.running == 0


def test_mark_that_is_not_durable_yet_is_taken_back_when_it_is(shell: PureShell):
    shell.decide("a")
    shell.reload(manifest("2"))
    assert not shell.coordinator.resting, "it might begin twice if it were marked again before that"
    shell.save()
    assert shell.dispatched == {}
    assert kinds(shell)[-2:] == ["Marked", "Unmarked"]
    assert status(shell)[1] == "definition_changed"
    shell.do(shell.coordinator.recover("continue", shell.now)[0])
    shell.save()
    shell.complete(shell.only())
    assert shell.coordinator.executions.slots["a"].marked == 0


def test_task_that_waits_for_a_slot_is_not_begun_by_another_version(shell: PureShell):
    shell.run("two")
    shell.decide("a")
    shell.decide("a")
    shell.save()
    shell.reload(manifest("2"))
    shell.complete(shell.only())
    shell.save()
    assert shell.dispatched == {}
    assert [status(shell, each) for each in (ONE, TWO)] == [("recovery_required", "definition_changed")] * 2


def test_attempt_that_is_due_is_not_begun_by_another_version(shell: PureShell):
    retry = agent(node("a", rerun=3))
    shell = PureShell(retry)
    shell.run("one")
    shell.decide("a")
    shell.save()
    shell.reload(agent(node("a", rerun=3), version="2"))
    shell.interrupt(shell.only())
    shell.save()
    assert shell.dispatched == {}
    assert status(shell) == ("recovery_required", "definition_changed")
    shell.reload(retry)
    shell.save()
    assert shell.only().endswith(".2")


def test_worker_that_did_not_read_its_task_leaves_it_to_the_version_that_comes_back(shell: PureShell):
    shell.decide("a")
    shell.save()
    shell.reload(manifest("2"))
    shell.interrupt(shell.only(), "unknown_node", started=False)
    shell.save()
    assert status(shell)[1] == "definition_changed"
    shell.reload(manifest())
    shell.save()
    assert shell.only().endswith(".1")


def test_probe_of_another_version_is_not_asked(shell: PureShell):
    shell.decide("p")
    shell.save()
    shell.reload(manifest("2"))
    shell.interrupt(shell.only())
    shell.save()
    assert (shell.dispatched, status(shell)) == ({}, ("uncertain", ""))
    retried = f.Reconciled(0, 1, "p", "me", "r", None, {}, None)
    shell.do(shell.coordinator.reconcile(ONE, retried, shell.now))
    shell.save()
    assert status(shell) == ("recovery_required", "definition_changed")


def test_version_that_comes_back_takes_up_what_rests(shell: PureShell):
    shell.reload(manifest("2"))
    assert (shell.asked, list(shell.coordinator.resting)) == ([], [ONE])
    shell.run("two")
    shell.reload(manifest("1"))
    assert list(shell.coordinator.resting) == [TWO]
    assert [each.request.invocation_id for each in shell.asked] == ["one"]


def test_agent_that_resumes_by_hand_waits_for_it_also_when_its_version_comes_back(shell: PureShell):
    shell.reload(manifest("2", resume="manual"))
    shell.reload(manifest("1", resume="manual"))
    assert shell.coordinator.resting[ONE].error.code == "recovery_required"
    shell.do(shell.coordinator.recover(None, shell.now)[0])
    assert [each.request.invocation_id for each in shell.asked] == ["one"]


def test_agent_that_is_gone_accepts_and_begins_nothing_until_it_is_back(shell: PureShell):
    shell.coordinator.manifest = manifest(max_concurrency=1)
    shell.run("two")
    shell.reload(None)
    assert status(shell) == ("recovery_required", "unknown_agent")
    with pytest.raises(Refusal, match="gone"):
        shell.run("three")
    assert [each.status for each in shell.coordinator.invocations.values()] == ["running", "queued"]
    assert shell.asked == []
    shell.reload(manifest())
    assert [each.request.invocation_id for each in shell.asked] == ["one", "two"]


def test_node_that_is_gone_fails_what_waits_for_it_and_lets_end_what_it_runs(shell: PureShell):
    shell.run("two")
    shell.decide("a")
    shell.decide("a")
    shell.save()
    shell.reload(manifest(without="a"))
    shell.save()
    assert status(shell, TWO) == ("failed", "unknown_node")
    shell.complete(shell.only())
    assert [each.request.invocation_id for each in shell.asked] == ["one"]
    shell.decide("a")
    assert status(shell) == ("failed", "unknown_node")
    shell.reload(manifest())
    assert shell.coordinator.executions.slots["a"].unavailable is None


def test_slots_in_use_stay_counted(shell: PureShell):
    shell.decide("a")
    shell.save()
    shell.reload(manifest())
    shell.run("two")
    shell.decide("a")
    shell.save()
    assert len(shell.dispatched) == 1
    shell.complete(shell.only())
    shell.save()
    assert len(shell.dispatched) == 1


def test_drain_writes_nothing(shell: PureShell):
    shell.save()
    shell.coordinator.drain()
    shell.reload(manifest("2"))
    shell.reload(None)
    assert (shell.unsaved, shell.asked) == ([], [])


def test_one_of_two_uncertain_branches_that_is_settled_does_not_settle_the_other(shell: PureShell):
    shell.decide(["a", "p"])
    shell.save()
    shell.reopen(manifest("2"))
    assert status_of_tasks(shell) == ["running", "running"]
    shell.do(shell.coordinator.recover("continue", shell.now)[0])
    shell.save()
    for name in list(shell.dispatched):
        shell.probed(name, not_done=False)
    shell.save()
    assert status_of_tasks(shell) == ["uncertain", "uncertain"]
    shell.reload(manifest("3"))
    settled = f.Reconciled(0, 1, "a", "me", "r", {}, {}, None)
    shell.do(shell.coordinator.reconcile(ONE, settled, shell.now))
    shell.save()
    assert shell.restored(ONE).status == "uncertain"


def status_of_tasks(shell: PureShell) -> list[str]:
    return [task.status for task in shell.coordinator.invocations[ONE].tasks]
