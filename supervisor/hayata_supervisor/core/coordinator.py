"""The coordinator of one agent: which invocation runs, which task may start, what an event means.

Events come in as method calls with the time; effects come out as lists (`core.effects` says what the caller owes).
Nothing here waits, reads a clock or touches a process, so whole histories run in a test in microseconds.

What is durable lives in `Invocation` and changes only by facts. What lives in this class is volatile and is made anew
by `adopt` after a restart: who holds a session, who waits for a slot, which executions have been handed out.

An execution that was handed out keeps its slot until its end is confirmed by a report, wanted or not: a node never
runs more than its concurrency, and a new attempt never overlaps the old one. One that is marked and was not handed out
yet has provably not begun, and is dropped without a trace when it isn't wanted any more.

Source: core and shell as in rabbitmq/ra; ``Step``/``Ready`` of etcd/raft.
"""

from __future__ import annotations

import heapq
import itertools
import zlib
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from hayata.ids import execution_id
from hayata.messages import (
    AgentManifest,
    DecidedFail,
    DecidedFinish,
    DecidedNext,
    ErrorInfo,
    Evaluate,
    EventInfo,
    InvocationInfo,
    Partial,
    PartialAck,
    PolicyFailed,
    RunTask,
    TaskCompleted,
    TaskFailed,
    TaskInterrupted,
    Update,
)
from hayata_supervisor.core import facts as f
from hayata_supervisor.core.admission import Admission
from hayata_supervisor.core.cells import Cells
from hayata_supervisor.core.commits import Growth, make_record
from hayata_supervisor.core.effects import (
    Acknowledge,
    AskPolicy,
    Barrier,
    Dispatch,
    Effect,
    Kill,
    Persist,
    PublishPartial,
    Ready,
    Reply,
    Settled,
    Token,
)
from hayata_supervisor.core.invocation import Invocation, Task, info
from hayata_supervisor.core.merge import MergeRefused, merge, relevant
from hayata_supervisor.core.recovery import classify
from hayata_supervisor.core.slots import Claim, Slots

_encode = msgspec.msgpack.Encoder().encode


class Now(NamedTuple):
    """The time of an event: ``wall`` for what is stored, ``mono`` (monotonic seconds) for what is waited for."""

    wall: float
    mono: float


class Execution(msgspec.Struct):
    """A task that is marked and whose end has not been confirmed.

    ``task``: what to hand out, until that has happened at ``handed_at`` (monotonic seconds).
    """

    invocation: bytes
    step: int
    attempt: int
    node: str
    cell: int
    task: RunTask | None
    handed_at: float = 0.0


class Resting(NamedTuple):
    """An open invocation that waits for `Coordinator.recover`. Derived at the start, never stored."""

    error: ErrorInfo
    since_wall: float


class _Timer(NamedTuple):
    due_mono: float
    order: int
    invocation: bytes
    claim: Claim | None  # a retry's; None for the invocation's timeout


class Coordinator:
    """See the module.

    Args:
        manifest: What the agent is.
        cells: Hands out start notes' cells, one object for all agents.
        began: What the start notes of the incarnation before say of a cell and an execution id; True: it may have
            begun.
    """

    def __init__(
        self, manifest: AgentManifest, cells: Cells, began: Callable[[int, str], bool] = lambda cell, execution: True
    ) -> None:
        self.manifest = manifest
        self._cells = cells
        self._began = began
        self.invocations: dict[bytes, Invocation] = {}
        self.names: dict[str, bytes] = {}
        self.keys: dict[str, bytes] = {}
        self.resting: dict[bytes, Resting] = {}
        self.admission = Admission()
        self.slots = {node.name: Slots(node) for node in manifest.nodes}
        self.late_messages = 0
        self.draining = False
        self._adopted: list[Invocation] = []
        self._unavailable: ErrorInfo | None = None
        self._starting = False
        self._evaluations: dict[int, bytes] = {}
        self._evaluating: dict[bytes, int] = {}
        self._executions: dict[str, Execution] = {}
        self._confirmations: dict[str, list[_Cancel]] = {}
        self._growth: dict[bytes, Growth] = {}
        self._timers: list[_Timer] = []
        self._numbers = itertools.count(1)
        self._out: list[Effect] = []

    # ---- events: clients -------------------------------------------------------------------------------------------

    def run(self, invocation: Invocation, memory: bytes | None, *, queue: bool, token: Token | None, now: Now) -> list[Effect]:
        """Accept a new invocation, or refuse it with `Refusal`.

        Args:
            invocation: Fresh, with its input set; nothing of it is stored yet.
            memory: What the session's last invocation left in the store, encoded.
            queue: Whether it may wait for a busy session.
            token: Whom to answer once it is durable.

        Raises:
            Refusal: The session is busy, or the agent can't run.
        """
        if self._unavailable is not None:
            raise Refusal(self._unavailable)
        holder = self.admission.holder(invocation.session)
        if holder is not None and not queue:
            raise Refusal(self._busy(self.invocations[holder]))
        self._enter(invocation, memory)
        accepted = f.Accepted(invocation.input)
        if holder is None and self.admission.running < self.manifest.max_concurrency and not self.admission.queue:
            self._start(invocation, [accepted], now, token)
        else:
            self.admission.enqueue(invocation.id, invocation.session)
            self._persist(invocation, [accepted], now, token=token)
            self._start_queued(now)
        return self._effects()

    def cancel(self, id: bytes, reason: str, token: Token | None, now: Now) -> list[Effect]:
        """Cancel an open invocation; ``token`` is answered when its executions are confirmed dead."""
        invocation = self.invocations[id]
        cancelled = [f.Cancelled(task.step, task.attempt, task.node) for task in _pending(invocation)]
        running = self._running_executions(invocation)
        persist = self._end(invocation, [*cancelled, f.Dropped(reason)], now, running)
        if token is None:
            return self._effects()
        if running:
            waiting = _Cancel(set(running), token, info(invocation), invocation.id)
            for name in running:
                self._confirmations.setdefault(name, []).append(waiting)
        else:
            persist.after.append(Reply(token, info(invocation)))
        return self._effects()

    def reconcile(self, id: bytes, fact: f.Reconciled, now: Now) -> list[Effect]:
        """Settle an uncertain task; the caller has found it with `uncertain_task`.

        Raises:
            MergeRefused: The result doesn't fit the state. Nothing has changed.
        """
        invocation = self.invocations[id]
        facts: list[f.Fact] = [fact]
        if fact.update is not None and not invocation.parallel:
            merge(invocation.state, fact.update, fact.merge)
        if fact.error is not None:
            self._persist(invocation, facts, now)
            self._transition_failed(invocation, [], fact.error, now)
        elif any(task.status == "uncertain" and task.step != fact.step for task in invocation.tasks):
            self._persist(invocation, facts, now)
        else:
            self._persist(invocation, [*facts, f.Recovered(self._paused(invocation, now))], now)
            self._resume(invocation, now)
        return self._effects()

    def uncertain_task(self, id: bytes, step: int, attempt: int) -> Task | None:
        """The task if it is uncertain."""
        invocation = self.invocations.get(id)
        task = invocation.task(step) if invocation else None
        return task if task and task.attempt == attempt and task.status == "uncertain" else None

    def recover(self, changed: str | None, now: Now) -> tuple[list[Effect], list[Invocation]]:
        """Recover what rests. Returns the effects and the invocations that were touched or still need a person.

        A definition of another version is continued, or dropped, only when ``changed`` says so (the caller restarts).
        """
        touched = []
        for id in list(self.resting):
            invocation = self.invocations[id]
            touched.append(invocation)
            if invocation.version != self.manifest.version:
                if changed is None:
                    continue
                if changed != "continue":
                    del self.resting[id]
                    self._end(invocation, [f.Dropped("its definition has changed")], now, [])
                    continue
                self._persist(invocation, [f.Reversioned(self.manifest.version)], now)
            rest = self.resting.pop(id)
            self._recover(invocation, now, paused_s=now.wall - rest.since_wall)
        touched += [each for each in self.invocations.values() if each.status == "uncertain" and each not in touched]
        return self._effects(), touched

    # ---- events: workers -------------------------------------------------------------------------------------------

    def policy_answered(
        self, answer: DecidedNext | DecidedFinish | DecidedFail | PolicyFailed, now: Now
    ) -> list[Effect]:
        """Take the policy's decision."""
        invocation = self.invocations.get(self._evaluations.pop(answer.evaluation, b""))
        if invocation is None or self._evaluating.get(invocation.id) != answer.evaluation:
            self.late_messages += 1
            return []
        del self._evaluating[invocation.id]
        match answer:
            case DecidedNext():
                self._decided(invocation, answer, now)
            case DecidedFinish():
                self._end(invocation, [f.Finished(answer.result)], now, [])
            case DecidedFail() | PolicyFailed():
                self._end(invocation, [f.Aborted(answer.error)], now, [])
        return self._effects()

    def reported(self, report: TaskCompleted | TaskFailed | TaskInterrupted, now: Now) -> list[Effect]:
        """Take the confirmed end of an execution. One that is superseded or not wanted changes nothing but its slot."""
        execution = self._executions.pop(report.execution_id, None)
        if execution is None:
            self.late_messages += 1
            return []
        slots = self.slots[execution.node]
        slots.took(now.mono - execution.handed_at)
        self._cells.release(execution.cell)
        self._hand_out_ready(slots, now)
        invocation = self.invocations.get(execution.invocation)
        task = invocation.task(execution.step) if invocation else None
        if invocation is None or task is None or task.attempt != execution.attempt or task.status != "running":
            self.late_messages += 1
        elif isinstance(report, TaskCompleted):
            self._completed(invocation, task, report.update, now)
        else:
            self._failed(invocation, task, report, now)
        self._confirm(report.execution_id)
        self._grant(slots, now)
        return self._effects()

    def ready(self, execution_id: str, now: Now) -> list[Effect]:
        """The execution's mark is durable: hand it out, or let it wait for a slot."""
        execution = self._executions.get(execution_id)
        if execution is not None:
            slots = self.slots[execution.node]
            slots.ready.append(execution_id)
            self._hand_out_ready(slots, now)
        return self._effects()

    def partial(self, partial: Partial, now: Now) -> list[Effect]:
        """Number a chunk and publish it behind what is not durable yet; refuse it from an execution that is over."""
        execution = self._executions.get(partial.execution_id)
        invocation = self.invocations.get(execution.invocation) if execution else None
        task = invocation.task(execution.step) if execution and invocation else None
        if (
            execution is None
            or invocation is None
            or task is None
            or task.attempt != execution.attempt
            or task.status != "running"
        ):
            self.late_messages += 1
            error = ErrorInfo("execution_not_active", "this execution is not active any more")
            if execution is not None:
                ack = PartialAck(partial.execution_id, partial.number, error)
                self._out.append(Acknowledge(self.manifest.id, execution.node, ack))
            return self._effects()
        data = {
            "node_id": execution.node,
            "execution_id": partial.execution_id,
            "edge_id": partial.edge,
            "result": partial.chunk,
        }
        invocation.sequence += 1
        event = EventInfo(invocation.sequence, "node_partial_result", now.wall, msgspec.Raw(_encode(data)))
        after: list[Effect] = [
            PublishPartial(invocation.id, event),
            Acknowledge(self.manifest.id, execution.node, PartialAck(partial.execution_id, partial.number, None)),
        ]
        if invocation.sequence > invocation.reserved:
            self._persist(invocation, [], now, extra_reserve=1024).after.extend(after)
        else:
            self._out.append(Barrier(invocation.id, after))
        return self._effects()

    def node_given_up(self, node: str, error: ErrorInfo, now: Now) -> list[Effect]:
        """The node fails to stay up: what waits for it fails with ``node_unavailable``."""
        slots = self.slots[node]
        slots.unavailable = error
        for name in slots.ready:
            execution = self._executions.get(name)
            if execution is not None:
                self._drop(name)
                invocation = self.invocations[execution.invocation]
                task = invocation.task(execution.step)
                assert task is not None
                self._final_failure(invocation, task, error, now)
        slots.ready.clear()
        waiting, slots.waiting = list(slots.waiting), type(slots.waiting)()
        for claim in waiting:
            invocation, task = self._claimed(claim)
            if invocation is not None and task is not None:
                self._final_failure(invocation, task, error, now)
        return self._effects()

    def node_back(self, node: str, now: Now) -> list[Effect]:
        """The node is tried again."""
        slots = self.slots[node]
        slots.unavailable = None
        self._grant(slots, now)
        return self._effects()

    def agent_given_up(self, error: ErrorInfo, now: Now) -> list[Effect]:
        """The agent worker fails to stay up: invocations that need a decision fail, new ones are refused."""
        self._unavailable = error
        for id in list(self._evaluating):
            self._end(self.invocations[id], [f.Aborted(error)], now, [])
        return self._effects()

    def agent_back(self, now: Now) -> list[Effect]:
        """The agent worker is tried again."""
        self._unavailable = None
        self._start_queued(now)
        return self._effects()

    # ---- events: time, start, end ----------------------------------------------------------------------------------

    def adopt(self, invocation: Invocation, memory: bytes | None) -> None:
        """Take over an open invocation from the store; `begin` follows when all have been adopted, oldest first."""
        invocation.sequence = max(invocation.sequence, invocation.reserved)
        self._enter(invocation, memory)
        self._adopted.append(invocation)
        if invocation.status == "queued":
            self.admission.enqueue(invocation.id, invocation.session)
        else:
            self.admission.hold(invocation.session, invocation.id)

    def begin(self, now: Now) -> list[Effect]:
        """Recover what `adopt` took over: classify, go on, or rest. No process of an earlier incarnation lives."""
        adopted, self._adopted = self._adopted, []
        for invocation in adopted:
            if invocation.status != "running":
                continue
            if invocation.version != self.manifest.version:
                self._rest(invocation, self._definition_changed(invocation), now)
            elif self.manifest.resume == "manual":
                hint = f"hayata recover {self.manifest.id}"
                self._rest(invocation, ErrorInfo("recovery_required", "the supervisor was restarted", hint), now)
            else:
                self._recover(invocation, now, paused_s=0.0)
        self._start_queued(now)
        return self._effects()

    def take_manifest(self, manifest: AgentManifest, now: Now) -> list[Effect]:
        """Go on with the definition that a new forkserver has loaded; slots in use stay counted."""
        self.manifest = manifest
        for node in manifest.nodes:
            if node.name in self.slots:
                self.slots[node.name].manifest = node
            else:
                self.slots[node.name] = Slots(node)
        known = {node.name for node in manifest.nodes}
        for name, slots in self.slots.items():
            if name not in known:
                slots.unavailable = self._unknown_node(name)
            self._grant(slots, now)
        self._start_queued(now)
        return self._effects()

    def drain(self) -> None:
        """Start nothing any more: no decision is asked for, no task is marked. Results are still taken."""
        self.draining = True

    @property
    def busy(self) -> bool:
        """Whether executions were handed out whose end is not confirmed."""
        return any(slots.active for slots in self.slots.values())

    def forget(self, id: bytes) -> None:
        """Drop an invocation whose record was refused; the store knows better."""
        invocation = self.invocations.get(id)
        if invocation is not None:
            if invocation.status == "running" and id not in self.resting:
                self.admission.running -= 1
            self._leave(invocation)

    def next_due(self) -> float | None:
        """Monotonic time at which `tick` has something to do."""
        return self._timers[0].due_mono if self._timers else None

    def tick(self, now: Now) -> list[Effect]:
        """Do what is due."""
        while self._timers and self._timers[0].due_mono <= now.mono:
            timer = heapq.heappop(self._timers)
            invocation = self.invocations.get(timer.invocation)
            if invocation is None:
                continue
            if timer.claim is None:
                self._check_timeout(invocation, now)
            else:
                _, task = self._claimed(timer.claim)
                if task is not None and invocation.status == "running":
                    self._schedule(invocation, [task], [], now)
        return self._effects()

    # ---- steps -----------------------------------------------------------------------------------------------------

    def _start(self, invocation: Invocation, facts: list[f.Fact], now: Now, token: Token | None = None) -> None:
        state = dict(self.manifest.state)
        memory = self.admission.memory(invocation.session)
        if self.manifest.conversation_memory and memory is not None:
            state["messages"] = msgspec.Raw(memory)
        self.admission.hold(invocation.session, invocation.id)
        self.admission.running += 1
        invocation.version = self.manifest.version
        self._persist(invocation, [*facts, f.Started(state)], now, token=token, hold=True)
        self._arm_timeout(invocation, now)
        self._ask_policy(invocation, now)

    def _start_queued(self, now: Now) -> None:
        """Start those in line while there is room. What starts may end at once, which calls this again: the outer
        loop goes on, so that a long line is no deep recursion."""
        if self._starting or self.draining or self._unavailable is not None:
            return
        self._starting = True
        try:
            while self.admission.running < self.manifest.max_concurrency:
                id = self.admission.next_ready()
                if id is None:
                    return
                self._start(self.invocations[id], [], now)
        finally:
            self._starting = False

    def _ask_policy(self, invocation: Invocation, now: Now) -> None:
        if self.draining or invocation.id in self._evaluating:
            return
        if invocation.version != self.manifest.version:
            self.admission.running -= 1
            self._rest(invocation, self._definition_changed(invocation), now)
            return
        if self._unavailable is not None:
            self._end(invocation, [f.Aborted(self._unavailable)], now, [])
            return
        number = next(self._numbers)
        self._evaluations[number] = invocation.id
        self._evaluating[invocation.id] = number
        results = invocation.parallel_results
        self._out.append(
            AskPolicy(
                self.manifest.id,
                Evaluate(
                    evaluation=number,
                    invocation_id=invocation.name,
                    state=invocation.state,
                    input=invocation.input,
                    step=invocation.step,
                    parallel_results=None if results is None else [msgspec.Raw(_encode(each)) for each in results],
                    last=invocation.last,
                    failure=invocation.failure,
                    session=None if invocation.own_session else invocation.session,
                    now=now.wall,
                ),
            )
        )

    def _decided(self, invocation: Invocation, decision: DecidedNext, now: Now) -> None:
        error = self._refuse_decision(invocation, decision)
        if error is not None:
            self._end(invocation, [f.Aborted(error)], now, [])
            return
        step = invocation.step
        decided = f.Decided(step, decision.nodes, decision.parallel, decision.input)
        tasks = [Task(step + offset, node) for offset, node in enumerate(decision.nodes)]
        self._schedule(invocation, tasks, [decided], now)

    def _refuse_decision(self, invocation: Invocation, decision: DecidedNext) -> ErrorInfo | None:
        for node in decision.nodes:
            if node not in self.slots:
                return ErrorInfo("unknown_node", f"the policy chose {node!r}, which is no node of {self.manifest.id}")
        if not decision.nodes or len(set(decision.nodes)) != len(decision.nodes):
            return ErrorInfo("invalid_policy_decision", "Next needs one node or more, each once")
        if invocation.step + len(decision.nodes) > self.manifest.max_steps:
            return ErrorInfo(
                "max_steps_exceeded",
                f"{invocation.step} executions were scheduled, {len(decision.nodes)} more are over {self.manifest.max_steps}",
                "raise max_steps, or have the policy finish",
            )
        return None

    def _schedule(self, invocation: Invocation, tasks: list[Task], facts: list[f.Fact], now: Now) -> None:
        """Mark the tasks that have a slot, in one record with ``facts``; the others wait."""
        marked = []
        for task in tasks:
            slots = self.slots.get(task.node)
            if slots is not None and not self.draining and slots.mark():
                marked.append(task)
                facts.append(f.Marked(task.step, task.attempt, task.node, self._cells.take()))
            elif slots is not None:
                slots.waiting.append(Claim(invocation.id, task.step, task.attempt))
        if facts:
            persist = self._persist(invocation, facts, now)
            for task in marked:
                persist.after.append(self._marked(invocation, task.step))
        for task in tasks:
            slots = self.slots.get(task.node)
            error = slots.unavailable if slots is not None else self._unknown_node(task.node)
            if error is not None and not invocation.terminal:
                current = invocation.task(task.step)
                if current is not None and current.status == "scheduled":
                    self._final_failure(invocation, current, error, now)

    def _marked(self, invocation: Invocation, step: int) -> Ready:
        """Prepare the hand-over of a task that was just marked."""
        task = invocation.task(step)
        assert task is not None
        name = execution_id(invocation.id, task.step, task.attempt)
        run = RunTask(
            execution_id=name,
            timeout_s=self.slots[task.node].manifest.execution_timeout_s,
            invocation_id=invocation.name,
            attempt=task.attempt,
            idempotency_key=f"{invocation.id.hex()}.{task.step}",
            session=None if invocation.own_session else invocation.session,
            stream=invocation.stream,
            state=invocation.state,
            input=invocation.node_input,
            cell=task.cell,
        )
        self._executions[name] = Execution(invocation.id, task.step, task.attempt, task.node, task.cell, run)
        return Ready(self.manifest.id, name)

    def _hand_out_ready(self, slots: Slots, now: Now) -> None:
        while slots.ready and not self.draining:
            name = slots.ready[0]
            execution = self._executions.get(name)
            if execution is not None:
                if not slots.hand_out():
                    return
                assert execution.task is not None
                self._out.append(Dispatch(self.manifest.id, execution.node, execution.task))
                execution.task, execution.handed_at = None, now.mono
            slots.ready.popleft()

    def _drop(self, name: str) -> None:
        """Forget an execution that was not handed out: it never began."""
        execution = self._executions.pop(name)
        self._cells.release(execution.cell)
        self.slots[execution.node].unmark()

    def _grant(self, slots: Slots, now: Now) -> None:
        """Give free slots to those who wait for them."""
        while not self.draining:
            claim = slots.next_claim()
            if claim is None:
                return
            invocation, task = self._claimed(claim)
            if invocation is None or task is None or invocation.status != "running":
                slots.unmark()
                continue
            mark = f.Marked(task.step, task.attempt, task.node, self._cells.take())
            self._persist(invocation, [mark], now).after.append(self._marked(invocation, task.step))

    def _grant_again(self, invocation: Invocation, now: Now) -> None:
        """Its tasks may have been dropped from the marked ones: there is room for those who wait."""
        for task in invocation.tasks:
            if task.node in self.slots:
                self._grant(self.slots[task.node], now)

    def _claimed(self, claim: Claim) -> tuple[Invocation | None, Task | None]:
        invocation = self.invocations.get(claim.invocation)
        task = invocation.task(claim.step) if invocation else None
        if task is None or task.attempt != claim.attempt or task.status != "scheduled":
            return invocation, None
        return invocation, task

    def _completed(self, invocation: Invocation, task: Task, update: Update, now: Now) -> None:
        operations = {} if invocation.parallel else relevant(update, self.manifest.merge)
        if operations:
            try:
                merge(invocation.state, update, operations)
            except MergeRefused as refused:
                error = ErrorInfo("invalid_state", str(refused), details=msgspec.Raw(_encode({"path": refused.path})))
                self._final_failure(invocation, task, error, now)
                return
        fact = f.Completed(task.step, task.attempt, task.node, update, operations)
        last = all(each.status == "completed" for each in invocation.tasks if each is not task)
        self._persist(invocation, [fact], now, hold=last)
        if last:
            self._ask_policy(invocation, now)

    def _failed(
        self, invocation: Invocation, task: Task, report: TaskFailed | TaskInterrupted, now: Now
    ) -> None:
        delay_s = self._retry_delay(invocation, task, report)
        if delay_s is None:
            self._final_failure(invocation, task, report.error, now)
            return
        fact = f.Failed(task.step, task.attempt, task.node, report.error, now.wall + delay_s)
        self._persist(invocation, [fact], now)
        self._await_retry(invocation, task, delay_s, now)

    def _retry_delay(self, invocation: Invocation, task: Task, report: TaskFailed | TaskInterrupted) -> float | None:
        """Seconds until the next attempt; None when there is none."""
        node = self.slots[task.node].manifest
        if isinstance(report, TaskInterrupted):
            return 0.0 if report.started and task.attempt < node.rerun_attempts else None
        retry = node.retry
        if retry is None or not report.retryable or task.attempt >= retry.max_attempts:
            return None
        delay = min(retry.max_backoff_s, retry.backoff_s * retry.backoff_factor ** (task.attempt - 1))
        # A spread that a replay repeats: pure code has no dice.
        spread = zlib.crc32(invocation.execution(task).encode()) / 0xFFFFFFFF * 2 - 1
        return max(0.0, delay * (1 + retry.jitter * spread))

    def _await_retry(self, invocation: Invocation, task: Task, delay_s: float, now: Now) -> None:
        claim = Claim(invocation.id, task.step, task.attempt)
        if delay_s > 0:
            heapq.heappush(self._timers, _Timer(now.mono + delay_s, next(self._numbers), invocation.id, claim))
        else:
            self._schedule(invocation, [task], [], now)

    def _final_failure(self, invocation: Invocation, task: Task, error: ErrorInfo, now: Now) -> None:
        """No attempt is left: the task fails, its siblings are cancelled, and the invocation or its policy hears."""
        fact = f.Failed(task.step, task.attempt, task.node, error, None)
        self._transition_failed(invocation, [fact], error, now)

    def _transition_failed(self, invocation: Invocation, facts: list[f.Fact], error: ErrorInfo, now: Now) -> None:
        failed = {fact.step for fact in facts if isinstance(fact, f.Failed)}
        facts += [
            f.Cancelled(task.step, task.attempt, task.node)
            for task in _pending(invocation)
            if task.step not in failed
        ]
        running = self._running_executions(invocation)
        if self.manifest.on_failure == "policy":
            if invocation.status == "uncertain":
                facts.append(f.Recovered(self._paused(invocation, now)))
                self.admission.running += 1
            persist = self._persist(invocation, facts, now, hold=True)
            persist.after.extend(self._kills(running, "sibling_failed"))
            self._grant_again(invocation, now)
            self._ask_policy(invocation, now)
        else:
            self._end(invocation, [*facts, f.Aborted(error)], now, running)

    def _end(self, invocation: Invocation, facts: list[f.Fact], now: Now, running: list[str]) -> Persist:
        """Reach a terminal status: the session and the place among the running ones are free for the next."""
        counted = invocation.status == "running" and invocation.id not in self.resting
        messages = invocation.state.get("messages")
        memory = None
        if self.manifest.conversation_memory and messages is not None and invocation.started_at is not None:
            memory = (invocation.session, bytes(messages))
            self.admission.keep(invocation.session, memory[1])
        persist = self._persist(invocation, facts, now, memory=memory)
        persist.after.extend(self._kills(running, "not_wanted"))
        persist.after.append(Settled(invocation.id, info(invocation)))
        if counted:
            self.admission.running -= 1
        self._leave(invocation)
        self._grant_again(invocation, now)
        self._start_queued(now)
        return persist

    # ---- recovery --------------------------------------------------------------------------------------------------

    def _recover(self, invocation: Invocation, now: Now, *, paused_s: float) -> None:
        facts = classify(invocation, self.manifest, self._began)
        for task in invocation.tasks:
            self._cells.release(task.cell)
        if any(isinstance(fact, f.Uncertain) for fact in facts):
            persist = self._persist(invocation, facts, now)
            persist.after.append(Settled(invocation.id, info(invocation)))
            return
        self._persist(invocation, [*facts, f.Recovered(paused_s)], now)
        self._resume(invocation, now)

    def _resume(self, invocation: Invocation, now: Now) -> None:
        """Go on with an invocation that runs again: what is scheduled is run, or else the policy is asked."""
        self.admission.running += 1
        self._arm_timeout(invocation, now)
        pending = _pending(invocation)
        if not pending:
            self._ask_policy(invocation, now)
            return
        for task in pending:
            if invocation.terminal:
                return
            self._await_retry(invocation, task, self._left(task, now), now)

    def _left(self, task: Task, now: Now) -> float:
        """What is left of a retry's delay: never more than the longest that its policy gives, if the clock jumped."""
        slots = self.slots.get(task.node)
        retry = slots.manifest.retry if slots is not None else None
        longest = retry.max_backoff_s * (1 + retry.jitter) if retry is not None else 0.0
        return min(max(0.0, task.retry_at - now.wall), longest)

    def _rest(self, invocation: Invocation, error: ErrorInfo, now: Now) -> None:
        self.resting[invocation.id] = Resting(error, now.wall)
        shown = self.overlay(invocation.id, info(invocation))
        self._out.append(Barrier(invocation.id, [Settled(invocation.id, shown)]))

    def overlay(self, id: bytes, stored: InvocationInfo) -> InvocationInfo:
        """Add to what is stored of an invocation what is derived: that it rests, and why."""
        rest = self.resting.get(id)
        if rest is None:
            return stored
        return msgspec.structs.replace(stored, status="recovery_required", error=rest.error)

    def _definition_changed(self, invocation: Invocation) -> ErrorInfo:
        return ErrorInfo(
            "definition_changed",
            f"it was started by version {invocation.version!r} of {self.manifest.id}, this is {self.manifest.version!r}",
            f"hayata recover {self.manifest.id} --changed continue|restart|drop",
        )

    def _busy(self, holder: Invocation) -> ErrorInfo:
        details = msgspec.Raw(_encode({"session": holder.session, "invocation_id": holder.name}))
        if holder.status == "uncertain" or holder.id in self.resting:
            return ErrorInfo(
                "recovery_required",
                f"session {holder.session!r} is held by {holder.name}, which waits for a person",
                "recover or reconcile it, or run with on_busy='queue'",
                details,
            )
        return ErrorInfo(
            "session_busy",
            f"session {holder.session!r} is held by {holder.name}",
            "wait for it, use another session, or run with on_busy='queue'",
            details,
        )

    def _unknown_node(self, node: str) -> ErrorInfo:
        return ErrorInfo("unknown_node", f"{self.manifest.id} has no node {node!r} any more")

    # ---- timers ----------------------------------------------------------------------------------------------------

    def _timeout_left(self, invocation: Invocation, now: Now) -> float | None:
        limit = self.manifest.invocation_timeout_s
        if limit is None or invocation.started_at is None:
            return None
        left = invocation.started_at + limit + invocation.paused_s - now.wall
        return min(left, limit)

    def _arm_timeout(self, invocation: Invocation, now: Now) -> None:
        left = self._timeout_left(invocation, now)
        if left is not None:
            timer = _Timer(now.mono + max(0.0, left), next(self._numbers), invocation.id, None)
            heapq.heappush(self._timers, timer)

    def _check_timeout(self, invocation: Invocation, now: Now) -> None:
        left = self._timeout_left(invocation, now)
        if left is None or invocation.status != "running" or invocation.id in self.resting:
            return
        if left > 0:
            self._arm_timeout(invocation, now)
            return
        error = ErrorInfo("invocation_timeout", f"it took longer than {self.manifest.invocation_timeout_s} s")
        cancelled = [f.Cancelled(task.step, task.attempt, task.node) for task in _pending(invocation)]
        self._end(invocation, [*cancelled, f.Aborted(error)], now, self._running_executions(invocation))

    def _paused(self, invocation: Invocation, now: Now) -> float:
        return max(0.0, now.wall - invocation.paused_at) if invocation.paused_at is not None else 0.0

    def _enter(self, invocation: Invocation, memory: bytes | None) -> None:
        self.invocations[invocation.id] = invocation
        self.names[invocation.name] = invocation.id
        if invocation.key is not None:
            self.keys[invocation.key] = invocation.id
        self._growth[invocation.id] = Growth()
        self.admission.remember(invocation.session, memory)

    def _leave(self, invocation: Invocation) -> None:
        del self.invocations[invocation.id]
        self.names.pop(invocation.name, None)
        if invocation.key is not None:
            self.keys.pop(invocation.key, None)
        self.resting.pop(invocation.id, None)
        self._evaluating.pop(invocation.id, None)
        self._growth.pop(invocation.id, None)
        self.admission.leave(invocation.session, invocation.id)

    # ---- pieces ----------------------------------------------------------------------------------------------------

    def _persist(
        self,
        invocation: Invocation,
        facts: list[f.Fact],
        now: Now,
        *,
        token: Token | None = None,
        hold: bool = False,
        memory: tuple[str, bytes] | None = None,
        extra_reserve: int = 0,
    ) -> Persist:
        persist = make_record(
            invocation,
            facts,
            now.wall,
            self._growth[invocation.id],
            hold=hold,
            memory=memory,
            extra_reserve=extra_reserve,
        )
        if token is not None:
            persist.after.append(Reply(token, info(invocation)))
        self._out.append(persist)
        return persist

    def _running_executions(self, invocation: Invocation) -> list[str]:
        """The invocation's executions that were handed out; those that were not are dropped."""
        names = [invocation.execution(task) for task in invocation.tasks if task.status == "running"]
        found = []
        for name in names:
            execution = self._executions.get(name)
            if execution is None:
                continue
            if execution.task is None:
                found.append(name)
            else:
                self._drop(name)
        return found

    def _kills(self, executions: list[str], reason: str) -> list[Effect]:
        return [Kill(self.manifest.id, self._executions[name].node, name, reason) for name in executions]

    def _confirm(self, execution: str) -> None:
        for cancel in self._confirmations.pop(execution, ()):
            cancel.left.discard(execution)
            if not cancel.left:
                self._out.append(Barrier(cancel.invocation, [Reply(cancel.token, cancel.info)]))

    def _effects(self) -> list[Effect]:
        effects, self._out = self._out, []
        return effects


class Refusal(Exception):
    """A request that can't be granted; nothing has changed."""

    def __init__(self, error: ErrorInfo) -> None:
        super().__init__(error.message)
        self.error = error


class _Cancel(NamedTuple):
    """A cancel that waits until its executions are confirmed dead."""

    left: set[str]
    token: Token
    info: InvocationInfo
    invocation: bytes


def _pending(invocation: Invocation) -> list[Task]:
    return [task for task in invocation.tasks if task.status in ("scheduled", "running")]
