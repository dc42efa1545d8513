"""Thousands of histories of the coordinator with a crash at any record, against what an outside ledger would see.

The ledger notes what bodies and clients can observe: a body started, a body ended, a run was acknowledged. The
invariants are those of docs/architecture.md, "Invariants".
"""

from __future__ import annotations

from collections import Counter
from unittest import mock

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hayata.ids import Execution, parse_execution_id
from hayata.messages import AgentManifest, ErrorInfo, Partial, ReduceManifest, ReduceTask, RetryManifest, RunTask
from hayata_supervisor.core import commits
from hayata_supervisor.core import facts as f
from hayata_supervisor.core.coordinator import Refusal
from hayata_supervisor.core.events import TERMINAL_EVENTS
from hayata_supervisor.core.facts import TERMINAL
from tests.support.pure_shell import PureShell, agent, encode, is_probe, node, raw

NODES = ("plain", "rerun", "retry", "narrow", "probe", "many", "partial")
ATTEMPTS = {"plain": 1, "narrow": 1, "rerun": 3, "retry": 3, "probe": 3, "many": 2, "partial": 1}
REDUCTIONS = 2


class Histories(RuleBasedStateMachine):
    @initialize(
        on_failure=st.sampled_from(["fail", "policy"]),
        limit=st.integers(1, 3),
        snapshot_bytes=st.sampled_from([64 * 1024, 100]),
    )
    def begin(self, on_failure: str, limit: int, snapshot_bytes: int) -> None:
        self.patch = mock.patch.object(commits, "_SNAPSHOT_MIN_BYTES", snapshot_bytes)
        self.patch.start()
        self.shell = self.new_shell(
            agent(
                node("plain"),
                node("rerun", rerun=3),
                node("retry", retry=RetryManifest(3, 1.0, 2.0, 8.0, 0.5)),
                node("narrow", concurrency=1),
                node("probe", concurrency=1, probe=3),
                node("many", rerun=2, reduce=ReduceManifest(None, False)),
                node("partial", reduce=ReduceManifest(10.0, True)),
                on_failure=on_failure,
                max_concurrency=limit,
                max_steps=8,
            )
        )
        self.whole = self.shell.manifest
        self.names = 0
        self.acknowledged: dict[str, bytes] = {}
        self.tokens: list[tuple[str, bytes, object]] = []
        self.body_started: Counter[tuple[bytes, int, int]] = Counter()
        self.granted: Counter[tuple[bytes, int, int]] = Counter()
        self.not_done: Counter[tuple[bytes, int, int]] = Counter()
        self.substeps = 0
        self.results: dict[str, bytes] = {}
        self.seen: set[str] = set()
        self.begun: set[str] = set()
        self.ended: dict[bytes, str] = {}

    def new_shell(self, manifest: AgentManifest) -> PureShell:
        return PureShell(manifest)

    # clients

    @precondition(lambda self: self.names < 6)
    @rule(session=st.sampled_from([None, "s"]), stream=st.booleans())
    def run(self, session: str | None, stream: bool) -> None:
        self.names += 1
        name = f"i{self.names}"
        changes = {} if session is None else {"session": session, "own_session": False}
        try:
            token = self.shell.run(name, queue=self.names % 2 == 0, stream=stream, **changes)
        except Refusal:
            return
        id = list(self.shell.fresh)[-1]
        self.tokens.append((name, id, token))

    @precondition(lambda self: self.names > 3 and self.shell.coordinator.invocations)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(sorted(self.shell.coordinator.invocations)))
        self.shell.do(self.shell.coordinator.cancel(id, "test", None, self.shell.now))

    @rule(data=st.data(), how=st.sampled_from(["result", "error", "retry"]))
    def reconcile(self, data: st.DataObject, how: str) -> None:
        uncertain = [
            (id, task)
            for id, invocation in self.shell.coordinator.invocations.items()
            for task in invocation.tasks
            if self.shell.coordinator.uncertain_task(id, task.step, task.attempt, task.edge)
        ]
        if not uncertain:
            return
        id, task = data.draw(st.sampled_from(uncertain))
        update = {"x": raw(1)} if how == "result" else None
        error = f"{how}" if how == "error" else None
        fact = f.Reconciled(
            task.step, task.attempt, task.node, "me", "r", update, {},
            None if error is None else _error(error), task.edge,
        )  # fmt: skip
        if how == "retry":
            self.granted[id, task.step, task.edge] += 1
        self.shell.do(self.shell.coordinator.reconcile(id, fact, self.shell.now))

    # the policy

    @precondition(lambda self: self.shell.asked)
    @rule(
        names=st.lists(st.sampled_from(NODES), min_size=1, max_size=3, unique=True),
        parallel=st.booleans(),
        count=st.integers(0, 3),
    )
    def decide_next(self, names: list[str], parallel: bool, count: int) -> None:
        self.shell.decide(names if parallel else names[0], edges=_edges(names if parallel else names[:1], count))

    @precondition(lambda self: self.shell.asked)
    @rule(names=st.lists(st.sampled_from(NODES), min_size=2, max_size=4, unique=True), count=st.integers(1, 3))
    def decide_branches_and_save(self, names: list[str], count: int) -> None:
        self.shell.decide(names, edges=_edges(names, count))
        self.shell.save()

    @precondition(lambda self: self.shell.asked)
    @rule(name=st.sampled_from(["many", "partial"]), count=st.integers(1, 3))
    def decide_edges_and_save(self, name: str, count: int) -> None:
        self.shell.decide(name, edges=_edges([name], count))
        self.shell.save()

    @precondition(lambda self: self.names > 2 and self.shell.asked)
    @rule(fail=st.booleans())
    def decide_end(self, fail: bool) -> None:
        self.shell.decide(None, fail=fail)

    # workers

    def _out(self, *, probe: bool = False) -> list[str]:
        """Executions that are out: bodies, or probes."""
        return sorted(name for name, task in self.shell.dispatched.items() if is_probe(task) == probe)

    @precondition(lambda self: self._out())
    @rule(data=st.data())
    def begin_body(self, data: st.DataObject) -> None:
        self._body_starts(data.draw(st.sampled_from(self._out())))

    @precondition(lambda self: self._out(probe=True))
    @rule(
        data=st.data(),
        outcome=st.sampled_from(["result", "not_done", "not_done", "unknown", "fail", "interrupt"]),
    )
    def answer_probe(self, data: st.DataObject, outcome: str) -> None:
        name = data.draw(st.sampled_from(self._out(probe=True)))
        match outcome:
            case "result":
                self.shell.complete(name, x="probed")
            case "fail":
                self.shell.fail(name, retryable=True)
            case "interrupt":
                self.shell.interrupt(name)
            case _:
                execution = parse_execution_id(name)
                assert execution is not None
                self.not_done[_task(execution)] += outcome == "not_done"
                self.shell.probed(name, not_done=outcome == "not_done")

    @precondition(lambda self: self._out())
    @rule(data=st.data(), outcome=st.sampled_from(["complete", "complete", "fail", "retryable", "interrupt"]))
    def report(self, data: st.DataObject, outcome: str) -> None:
        name = data.draw(st.sampled_from(self._out()))
        self._body_starts(name)
        match outcome:
            case "complete":
                self.shell.complete(name, x=len(self.seen))
            case "fail":
                self.shell.fail(name)
            case "retryable":
                self.shell.fail(name, retryable=True)
            case "interrupt":
                self.shell.interrupt(name)

    @precondition(lambda self: len(self._out()) > 1)
    @rule(data=st.data(), ok=st.booleans())
    def report_one_of_several(self, data: st.DataObject, ok: bool) -> None:
        name = data.draw(st.sampled_from(self._out()))
        self._body_starts(name)
        self.shell.complete(name, x=0) if ok else self.shell.fail(name)

    @precondition(lambda self: self.shell.dispatched)
    @rule(data=st.data(), count=st.sampled_from([1, 3, 300]))
    def stream(self, data: st.DataObject, count: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.shell.dispatched)))
        task = self.shell.dispatched[name]
        if not isinstance(task, RunTask) or not task.stream:
            return
        for number in range(count):
            partial = Partial(name, "edge", number, raw({}))
            self.shell.do(self.shell.coordinator.partial(partial, self.shell.now))

    @precondition(lambda self: self._out())
    @rule(data=st.data())
    def substep(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self._out()))
        self._body_starts(name)
        if isinstance(self.shell.dispatched[name], ReduceTask):
            return
        self.substeps += 1
        self.shell.substep(name, 1_000 + self.substeps, self.substeps)

    def _acknowledged(self, execution: Execution) -> set[int]:
        """Keys of the sub-steps of all attempts of this task that were acknowledged."""
        acks = [each.ack for each in self.shell.acks if each.ack.error is None and each.ack.number > 1_000]
        found = [(parse_execution_id(ack.execution_id), ack.number - 1_000) for ack in acks]
        return {key for of, key in found if of is not None and _task(of) == _task(execution)}

    @precondition(lambda self: self.seen)
    @rule(data=st.data())
    def report_again(self, data: st.DataObject) -> None:
        """A message that comes twice, or late, changes nothing."""
        name = data.draw(st.sampled_from(sorted(self.seen)))
        if name not in self.shell.dispatched:
            before = len(self.shell.unsaved)
            self.shell.complete(name, x="late")
            assert len(self.shell.unsaved) == before

    # time, disk, power

    @rule(seconds=st.sampled_from([0.5, 2.0, 20.0]))
    def wait(self, seconds: float) -> None:
        self.shell.advance(seconds)

    @rule(count=st.sampled_from([1, 2, None]))
    def save(self, count: int | None) -> None:
        self.shell.save(count)

    @rule(proofs=st.booleans())
    def crash(self, proofs: bool) -> None:
        self.shell.reopen(proofs=proofs)
        self.begun.clear()  # what ran is dead: if it is dispatched now, it begins again
        self.tokens = [each for each in self.tokens if each[2].answers]  # type: ignore[attr-defined]

    # reloads

    @rule(version=st.sampled_from(["1", "2"]), without=st.sampled_from([None, None, "plain", "narrow"]))
    def reload(self, version: str, without: str | None) -> None:
        nodes = [each for each in self.whole.nodes if each.name != without]
        self.shell.reload(msgspec.structs.replace(self.whole, version=version, nodes=nodes))

    @precondition(lambda self: self.names > 1)
    @rule()
    def reload_without_the_agent(self) -> None:
        self.shell.reload(None)

    @rule(changed=st.sampled_from([None, "continue", "drop"]))
    def recover(self, changed: str | None) -> None:
        try:
            self.shell.do(self.shell.coordinator.recover(changed, self.shell.now)[0])
        except Refusal:
            return

    # what must hold

    @invariant()
    def check(self) -> None:
        shell = self.shell
        for name, id, token in self.tokens:
            if token.answers:  # type: ignore[attr-defined]
                self.acknowledged[name] = id
        for id in self.acknowledged.values():
            assert shell.journals.get(id), "an acknowledged run is durable"
        for name, slots in shell.coordinator.executions.slots.items():
            assert 0 <= slots.active <= slots.manifest.concurrency, name
            assert slots.active <= slots.marked, name
        resting = shell.coordinator.resting
        going = [id for id, each in shell.coordinator.invocations.items() if each.status == "running"]
        going = [id for id in going if id not in resting]
        for id in resting:
            assert not self._live(id), "nothing of what rests runs"
        assert shell.coordinator.admission.running == len(going)
        for id in shell.journals:
            self._check_journal(id)

    def _body_starts(self, name: str) -> None:
        if name in self.begun:
            return
        self.begun.add(name)
        assert name not in self.seen, "no attempt begins twice"
        task = self.shell.dispatched[name]
        assert not is_probe(task)
        self.shell.begin_body(name)
        execution = parse_execution_id(name)
        assert execution is not None
        if isinstance(task, ReduceTask):
            self._reduction_starts(execution, task)
        stored = {each.key for each in task.substeps} if isinstance(task, RunTask) else set()
        assert self._acknowledged(execution) <= stored, "what was acknowledged is given to the next attempt"
        marks = [fact for fact in self.shell.facts(execution.invocation) if isinstance(fact, f.Marked)]
        assert any(
            (mark.step, mark.edge, mark.attempt) == (execution.step, execution.edge, execution.attempt)
            for mark in marks
        ), "the mark is durable before the body's first instruction"
        self.seen.add(name)
        self.body_started[_task(execution)] += 1
        kind = self.shell.nodes[name]
        bound = REDUCTIONS if isinstance(task, ReduceTask) else ATTEMPTS[kind]
        if kind == "probe":
            bound = min(bound, 1 + self.not_done[_task(execution)])
        assert self.body_started[_task(execution)] <= bound + self.granted[_task(execution)]

    def _reduction_starts(self, execution: Execution, task: ReduceTask) -> None:
        """All its edges are durably over, and what it is given is what they have made."""
        restored = self.shell.restored(execution.invocation)
        if restored.task(execution.step) is None:
            return  # it is not wanted any more: the policy has decided something else
        edges = restored.edges(execution.step)
        assert all(each.over for each in edges)
        assert [each.update for each in edges] == task.results
        if self.shell.nodes[task.execution_id] == "many":
            assert all(each.status == "completed" for each in edges)

    def _live(self, id: bytes) -> list[str]:
        invocation = self.shell.coordinator.invocations[id]
        names = [invocation.execution(task) for task in invocation.tasks if task.status == "running"]
        return [name for name in names if self.shell.coordinator.executions.get(name)]

    def _check_journal(self, id: bytes) -> None:
        facts = self.shell.facts(id)
        completed = [(fact.step, fact.edge) for fact in facts if isinstance(fact, f.Completed)]
        assert len(completed) == len(set(completed)), "no task completes twice"
        over: set[tuple[int, int, int]] = set()
        for fact in facts:
            if isinstance(fact, f.Marked | f.Completed | f.Failed | f.Cancelled | f.Uncertain | f.Reconciled):
                attempt = fact.step, fact.edge, fact.attempt
                assert attempt not in over, "an attempt that has ended stays as it ended"
                if not isinstance(fact, f.Marked | f.Uncertain):
                    over.add(attempt)
        restored = self.shell.restored(id)
        if restored.status in TERMINAL:
            assert self.ended.setdefault(id, restored.status) == restored.status, "a terminal status never changes"
        assert id not in self.ended or restored.status == self.ended[id]
        told = [sequence for sequence, _ in self.shell.events.get(id, [])]
        assert told == sorted(set(told)), "event numbers rise and never repeat"
        ends = [kind for _, kind in self.shell.events.get(id, []) if kind in TERMINAL_EVENTS]
        assert len(ends) <= 1
        assert not ends or self.shell.events[id][-1][1] in TERMINAL_EVENTS

    def teardown(self) -> None:
        """When the faults stop, everything ends, rests or is in line behind what rests."""
        if not hasattr(self, "shell"):
            return
        try:
            self._come_to_an_end(self.shell)
        finally:
            self.patch.stop()

    def _come_to_an_end(self, shell: PureShell) -> None:
        shell.reload(self.whole)
        for _ in range(500):
            shell.save()
            shell.do(shell.coordinator.recover("continue", shell.now)[0])
            shell.save()
            if shell.asked:
                shell.decide(None)
            elif self._out(probe=True):
                shell.complete(self._out(probe=True)[0])
            elif self._out():
                name = self._out()[0]
                self._body_starts(name)
                shell.complete(name)
            elif shell.coordinator.next_due() is not None:
                shell.advance(20)
            else:
                break
        self.check()
        rests = {each.session for each in shell.coordinator.invocations.values() if each.status == "uncertain"}
        for invocation in shell.coordinator.invocations.values():
            queued_behind = invocation.status == "queued" and invocation.session in rests
            assert invocation.status == "uncertain" or queued_behind, (invocation.name, invocation.status)
            durable = shell.restored(invocation.id)
            assert encode(durable.state) == encode(invocation.state), "what is live is what is durable"
            assert encode(durable.tasks) == encode(invocation.tasks)


def _edges(names: list[str], count: int) -> dict[str, list[object]]:
    return {name: list(range(count)) for name in names if name in ("many", "partial")}


def _task(execution: Execution) -> tuple[bytes, int, int]:
    return execution.invocation, execution.step, execution.edge


def _error(text: str) -> ErrorInfo:
    return ErrorInfo("reconciled", text)


TestHistories = Histories.TestCase
TestHistories.settings = settings(
    max_examples=400, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck), database=None
)
