"""Each role killed in mid-task: who dies with it, what becomes of the task, how the invocation ends."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from hayata import InvocationFailed, RecoveryNeeded
from hayata_supervisor.process.pidfd import children_of
from tests.support.crash_site import Daemon, Seen, Site, check_gone
from tests.support.eventually import eventually
from tests.support.ledger import audit

RERUNS = {"act": 3}
"""Only of agent ``again``; `line` is audited without."""

BURIED = {
    "edge": {"edge"},
    "node": {"node", "edge"},
    "agent": {"agent"},
    "forkserver": {"forkserver"},
    "supervisor": {"supervisor", "forkserver", "agent", "node", "edge"},
    "guard": {"guard", "supervisor", "forkserver", "agent", "node", "edge"},
    "all": {"guard", "supervisor", "forkserver", "agent", "node", "edge"},
}
"""Who is dead a second after the role was killed; of the single workers those that work for `Pair`."""


class Pair:
    """An invocation of ``line`` and one of ``again``: `act` waits at a gate, with a child and a daemon."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon, self.site = daemon, daemon.site
        options = {"act_gate": "act", "act_family": True}
        self.plain = daemon.client.run("line", options)
        self.again = daemon.client.run("again", options)
        self.edges = []
        for invocation in (self.plain, self.again):
            start = self.site.ledger.wait("start", invocation=invocation.id, node="act")
            self.site.ledger.wait("family", execution=start["execution"])
            self.edges.append(start["pid"])

    def check_bodies(self) -> None:
        """Compare with the ledger; each invocation with the bound of its own agent."""
        audit(self.daemon.client, self.site.ledger, [self.plain.id], reruns={})
        audit(self.daemon.client, self.site.ledger, [self.again.id], reruns=RERUNS)

    def works(self, seen: Seen) -> bool:
        """Whether the process works for one of the two."""
        if seen.role == "edge":
            return seen.pid in self.edges
        return seen.role not in ("agent", "node") or seen.name in ("line", "again", "line/act", "again/act")


def kill(pair: Pair, role: str) -> None:
    """Kill the role, and see that all dies in time that has to die, and nothing else."""
    daemon = pair.daemon
    tree = daemon.tree()
    assert {seen.pid for seen in tree if seen.role == "edge"} >= set(pair.edges)
    family = eventually(lambda: sleepers(daemon), "two children and two daemons")
    began = time.monotonic()
    for seen in tree:
        if role == "all" or (seen.role == role and pair.works(seen)):
            seen.kill()
    local = role in ("edge", "node", "agent")
    dead = [seen for seen in tree if seen.role in BURIED[role] and (pair.works(seen) or not local)]
    check_gone(dead, began)
    if role not in ("agent", "forkserver", "all"):
        check_gone(family, began)
    spared = [seen for seen in tree if seen not in dead]
    assert [seen for seen in spared if seen.dead()] == []
    if role in ("guard", "all"):
        # When all die at once, nobody is left to end what a task has started: the next start does.
        # A worker that was just being forked has no name of its own yet, and finds out in a moment.
        check_gone([seen for seen in daemon.site.marked() if seen.name != "sleep"], began)
        daemon.wait_lost()
        daemon.start()
        assert [seen for seen in family if not seen.dead()] == []
    eventually(lambda: not zombies(daemon.tree()), "no zombies")


def sleepers(daemon: Daemon) -> list[Seen] | None:
    """What the pair's tasks have started, when all of it is there."""
    found = [seen for seen in daemon.site.marked() if seen.name == "sleep"]
    return found if len(found) == 4 else None


def zombies(tree: list[Seen]) -> list[int]:
    """Children of the tree's processes that are dead and not reaped."""
    found = []
    for parent in tree:
        for pid in children_of(parent.pid):
            try:
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            except (FileNotFoundError, ProcessLookupError):  # gone before, or while it is read
                continue
            if state == "Z":
                found.append(pid)
    return found


def check_rerun(pair: Pair, attempts: list[int]) -> None:
    """What says `Rerun` goes on by itself."""
    result = pair.again.result(timeout=20)
    assert pair.site.ledger.attempts(pair.again.id, "act") == attempts
    assert [task.attempt for task in pair.again.tasks()] == [1, *attempts, 1]
    assert result["log"] == [result["prepare"], result["act"], result["report"]]


@pytest.mark.parametrize(("role", "code"), [("edge", "edge_crashed"), ("node", "node_crashed")])
def test_task_cut_off_under_a_living_supervisor_fails_or_runs_again_as_its_node_says(
    daemon: Daemon, role: str, code: str
):
    pair = Pair(daemon)
    kill(pair, role)
    with pytest.raises(InvocationFailed) as failed:
        pair.plain.result(timeout=20)
    assert failed.value.code == code
    assert failed.value.details["interrupted"] is True
    assert failed.value.details["signal"] == "SIGKILL"
    daemon.site.open_gate("act")
    check_rerun(pair, [1, 2])
    assert [(task.node, task.status) for task in pair.plain.tasks()] == [
        ("prepare", "completed"),
        ("act", "failed"),
    ]
    assert daemon.site.ledger.attempts(pair.plain.id, "act") == [1]
    pair.check_bodies()
    assert daemon.client.call("line", timeout=20)["act"]  # the worker is replaced


@pytest.mark.parametrize("role", ["agent", "forkserver"])
def test_task_does_not_notice_the_death_of_a_process_that_it_does_not_need(daemon: Daemon, role: str):
    pair = Pair(daemon)
    kill(pair, role)
    daemon.site.open_gate("act")
    assert pair.plain.result(timeout=20)["act"]
    assert daemon.site.ledger.attempts(pair.plain.id, "act") == [1]
    check_rerun(pair, [1])
    pair.check_bodies()
    killed = [process for process in daemon.tree() if process.role == role]
    assert killed
    assert all(not process.dead() for process in killed)


def reconciled(pair: Pair, how: str) -> None:
    """Settle the one uncertain task in this way, and see how its invocation ends."""
    client, invocation = pair.daemon.client, pair.plain
    (unsure,) = [task for task in invocation.tasks() if task.status == "uncertain"]
    match how:
        case "result":
            client.reconcile(invocation.id, unsure.id, result={"act": "by hand", "log": "by hand"})
            assert invocation.result(timeout=20)["log"][1] == "by hand"
        case "error":
            client.reconcile(invocation.id, unsure.id, error="it did not happen")
            with pytest.raises(InvocationFailed, match="it did not happen"):
                invocation.result(timeout=20)
        case "retry":
            client.reconcile(invocation.id, unsure.id, retry=True)
            assert invocation.result(timeout=20)["act"]
    assert pair.site.ledger.attempts(invocation.id, "act") == ([1, 2] if how == "retry" else [1])


@pytest.mark.parametrize(("role", "how"), [("supervisor", "result"), ("guard", "error"), ("all", "retry")])
def test_task_cut_off_with_its_supervisor_is_uncertain_until_it_is_reconciled_p2(daemon: Daemon, role: str, how: str):
    """P2, loky 360: every worker dies with the supervisor, within a second, and the next one serves."""
    pair = Pair(daemon)
    kill(pair, role)
    with pytest.raises(RecoveryNeeded) as needed:
        pair.plain.result(timeout=20)
    assert needed.value.code == "task_execution_uncertain"
    assert pair.plain.status() == "uncertain"
    daemon.site.open_gate("act")
    check_rerun(pair, [1, 2])
    assert pair.site.ledger.attempts(pair.plain.id, "act") == [1]
    assert [task.status for task in pair.plain.tasks()] == ["completed", "uncertain"]
    assert daemon.client.call("line", timeout=20)["act"]  # P2: the new supervisor serves
    reconciled(pair, how)
    pair.check_bodies()


def test_policy_that_was_evaluated_by_a_killed_agent_is_asked_again(daemon: Daemon):
    invocation = daemon.client.run("thinker", {"policy_gate": "think"})
    pondering = daemon.site.ledger.wait("policy", invocation=invocation.id, step=1)
    os.kill(pondering["pid"], 9)
    again = eventually(lambda: daemon.site.ledger.lines("policy", step=1)[1:], "a second evaluation")
    assert again[0]["pid"] != pondering["pid"]
    daemon.site.open_gate("think")
    assert invocation.result(timeout=20)["prepare"]
    assert daemon.site.ledger.attempts(invocation.id, "prepare") == [1]


def test_policy_that_was_evaluated_while_the_supervisor_died_is_asked_again(daemon: Daemon):
    invocation = daemon.client.run("thinker", {"policy_gate": "think"})
    daemon.site.ledger.wait("policy", invocation=invocation.id, step=1)
    # Until its result is stored, a millisecond later than this, the task itself would be uncertain.
    eventually(lambda: invocation.tasks()[0].status == "completed", "the result is stored")
    daemon.kill_supervisor()
    eventually(lambda: daemon.site.ledger.lines("policy", step=1)[1:], "a second evaluation")
    daemon.site.open_gate("think")
    assert invocation.result(timeout=20)["prepare"]
    assert daemon.site.ledger.attempts(invocation.id, "prepare") == [1]


def test_hung_supervisor_is_replaced_with_all_below_it(site: Site):
    daemon = site.daemon(agents="line again", limits={"silence": 1.0, "check": 0.1}).start()
    pair = Pair(daemon)
    tree = daemon.tree()
    hung = next(seen for seen in tree if seen.role == "supervisor")
    hung.kill(19)
    assert hung.dead(10.0)
    check_gone([seen for seen in tree if seen.role != "guard"], time.monotonic())
    with pytest.raises(RecoveryNeeded):
        pair.plain.result(timeout=20)
    site.open_gate("act")
    check_rerun(pair, [1, 2])
    pair.check_bodies()
