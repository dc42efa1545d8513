"""What follows from what: the coordinator's inner half, with its volatile state.

`core.coordinator` says which events there are; here is what they set in motion: an invocation starts, its policy is
asked, what it decides is scheduled and marked, an execution ends well or not, a transition fails, an invocation ends
or rests. Executions with edges are in `core.reducing`; how it goes on after something went wrong is in
`core.recovering`. Every method adds to the list of effects
and leaves all of it consistent.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from hayata.messages import (
    AgentManifest,
    DecidedNext,
    ErrorInfo,
    Evaluate,
    InvocationInfo,
    Update,
)
from hayata_supervisor.core import facts as f
from hayata_supervisor.core import reasons
from hayata_supervisor.core.admission import Admission
from hayata_supervisor.core.cells import Cells
from hayata_supervisor.core.commits import Growth, make_record
from hayata_supervisor.core.definitions import encode_definition
from hayata_supervisor.core.effects import (
    AskPolicy,
    Barrier,
    Dispatch,
    Effect,
    Kill,
    Persist,
    Ready,
    Reply,
    Settled,
    Token,
)
from hayata_supervisor.core.executions import Executions
from hayata_supervisor.core.invocation import Invocation, Task, cancellations, decided_tasks, info
from hayata_supervisor.core.merge import MergeRefused, merge, relevant
from hayata_supervisor.core.now import Now
from hayata_supervisor.core.slots import Claim, Slots
from hayata_supervisor.core.timers import Timers

_encode = msgspec.msgpack.Encoder().encode
_NONE: list[Effect] = []


class Resting(NamedTuple):
    """An open invocation that waits for a recovery by hand. Derived at the start, never stored."""

    error: ErrorInfo
    since_wall: float


class Transitions:
    """See the module.

    Args:
        manifest: What the agent is.
        cells: Hands out start notes' cells, one object for all agents.
        began: What the start notes of the incarnation before say of a cell and an execution id; True: it may have
            begun.
    """

    def __init__(
        self,
        manifest: AgentManifest,
        cells: Cells,
        began: Callable[[int, str], bool] = lambda cell, execution: True,
    ) -> None:
        self.manifest = manifest
        self.definition = encode_definition(manifest.definition)
        self.invocations: dict[bytes, Invocation] = {}
        self.names: dict[str, bytes] = {}
        self.keys: dict[str, bytes] = {}
        self.resting: dict[bytes, Resting] = {}
        self.admission = Admission()
        self.executions = Executions(manifest.nodes, cells)
        self.draining = False
        self._began = began
        self._unavailable: ErrorInfo | None = None
        self._gone: ErrorInfo | None = None
        self._unfit: dict[bytes, ErrorInfo] = {}
        self._starting = False
        self._evaluations: dict[int, bytes] = {}
        self._evaluating: dict[bytes, int] = {}
        self._growth: dict[bytes, Growth] = {}
        self._timers = Timers()
        self._numbers = itertools.count(1)
        self._out: list[Effect] = []

    # ---- starting --------------------------------------------------------------------------------------------------

    def _start(self, invocation: Invocation, facts: list[f.Fact], now: Now, token: Token | None = None) -> None:
        state = dict(self.manifest.state)
        memory = self.admission.memory(invocation.session)
        if self.manifest.conversation_memory and memory is not None:
            state["messages"] = msgspec.Raw(memory)
        self.admission.hold(invocation.session, invocation.id)
        self.admission.running += 1
        invocation.version = self.manifest.version
        self._persist(invocation, [*facts, f.Started(state, self.definition, now.lasting)], now, token=token, hold=True)
        self._arm_timeout(invocation, now)
        self._ask_policy(invocation, now)

    def _start_queued(self, now: Now) -> None:
        """Start those in line while there is room. What starts may end at once, which calls this again: the outer
        loop goes on, so that a long line is no deep recursion.
        """
        if self._starting or self.draining or self._unavailable is not None or self._gone is not None:
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

    # ---- deciding --------------------------------------------------------------------------------------------------

    def _ask_policy(self, invocation: Invocation, now: Now) -> None:
        if self.draining or invocation.id in self._evaluating:
            return
        halted = self._halted(invocation)
        if halted is not None:
            self.admission.running -= 1
            self._rest(invocation, halted, now)
            return
        if self._unavailable is not None:
            self._end(invocation, [f.Aborted(self._unavailable)], now)
            return
        number = next(self._numbers)
        self._evaluations[number] = invocation.id
        self._evaluating[invocation.id] = number
        results = invocation.parallel_results
        request = Evaluate(
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
        )
        self._out.append(AskPolicy(self.manifest.id, request))

    def _decided(self, invocation: Invocation, decision: DecidedNext, now: Now) -> None:
        error = reasons.bad_decision(invocation, decision, self.manifest)
        if error is not None:
            self._end(invocation, [f.Aborted(error)], now)
            return
        edges, since = None, None
        if decision.edges:
            edges, since = decision.edges, now.lasting - invocation.paused_s
        decided = f.Decided(invocation.step, decision.nodes, decision.parallel, decision.input, edges, since)
        tasks = decided_tasks(decided)
        if edges is not None:
            tasks = [task for task in tasks if task.status == "scheduled"]
        self._schedule(invocation, tasks, [decided], now)

    # ---- executing -------------------------------------------------------------------------------------------------

    def _schedule(
        self, invocation: Invocation, tasks: list[Task], facts: list[f.Fact], now: Now, *, kills: list[Effect] = _NONE
    ) -> None:
        """Mark the tasks that may be, in one record with ``facts``; the others wait. ``kills`` follow the record."""
        marked = []
        for task in tasks:
            slots = self.executions.slots.get(task.node)
            if slots is not None and not self.draining and slots.mark():
                marked.append(task)
                facts.append(self._mark(task))
            elif slots is not None:
                slots.waiting.append(Claim(invocation.id, task.step, task.attempt, task.edge))
        if facts:
            persist = self._persist(invocation, facts, now)
            persist.after.extend(kills)
            persist.after.extend(self._marked(invocation, task) for task in marked)
        for task in tasks:
            self._refuse_without_node(invocation, task, now)

    def _refuse_without_node(self, invocation: Invocation, task: Task, now: Now) -> None:
        slots = self.executions.slots.get(task.node)
        error = slots.unavailable if slots is not None else reasons.unknown_node(self.manifest, task.node)
        current = None if error is None or invocation.terminal else invocation.task(task.step, task.edge)
        if error is not None and current is not None and current.status == "scheduled":
            self._final_failure(invocation, current, error, now)

    def _mark(self, task: Task) -> f.Marked:
        return f.Marked(task.step, task.attempt, task.node, self.executions.new_cell(), task.edge)

    def _marked(self, invocation: Invocation, marked: Task) -> Ready:
        task = invocation.task(marked.step, marked.edge)
        assert task is not None
        return Ready(self.manifest.id, self.executions.add(invocation, task))

    def _grant(self, slots: Slots, now: Now) -> None:
        """Mark those who wait, as far as there is room."""
        while not self.draining:
            claim = slots.next_claim()
            if claim is None:
                return
            invocation, task = self._claimed(claim)
            if invocation is None or task is None or not self._may_begin(invocation):
                slots.unmark()
                continue
            self._persist(invocation, [self._mark(task)], now).after.append(self._marked(invocation, task))

    def _grant_again(self, invocation: Invocation, now: Now) -> None:
        """Its tasks may have been dropped from the marked ones: there is room for those who wait."""
        for task in invocation.tasks:
            if task.node in self.executions.slots:
                self._grant(self.executions.slots[task.node], now)

    def _claimed(self, claim: Claim) -> tuple[Invocation | None, Task | None]:
        """The invocation, and its task if that is still what was claimed for."""
        invocation = self.invocations.get(claim.invocation)
        task = invocation.task(claim.step, claim.edge) if invocation else None
        if task is None or task.attempt != claim.attempt or task.status != "scheduled":
            return invocation, None
        return invocation, task

    def _hand_out(self, slots: Slots, now: Now) -> None:
        if not self.draining:
            for task in self.executions.hand_out(slots, now.mono):
                self._out.append(Dispatch(self.manifest.id, slots.manifest.name, task))

    # ---- ending ----------------------------------------------------------------------------------------------------

    def _completed(self, invocation: Invocation, task: Task, update: Update, now: Now) -> ErrorInfo | None:
        """Take a result. Returns why it can't be merged, and then nothing has changed."""
        operations = {} if invocation.parallel else relevant(update, self.manifest.merge)
        if operations:
            try:
                merge(invocation.state, update, operations)
            except MergeRefused as refused:
                return ErrorInfo("invalid_state", str(refused), details=msgspec.Raw(_encode({"path": refused.path})))
        fact = f.Completed(task.step, task.attempt, task.node, update, operations)
        last = all(each.status == "completed" for each in invocation.tasks if each is not task and each.edge < 0)
        self._persist(invocation, [fact], now, hold=last)
        if last:
            self._ask_policy(invocation, now)
        return None

    def _final_failure(self, invocation: Invocation, task: Task, error: ErrorInfo, now: Now) -> None:
        """No attempt is left: the task fails, its siblings are cancelled, and the invocation or its policy hears."""
        fact = f.Failed(task.step, task.attempt, task.node, error, None)
        self._transition_failed(invocation, [fact], error, now)

    def _transition_failed(self, invocation: Invocation, facts: list[f.Fact], error: ErrorInfo, now: Now) -> None:
        failed = {(fact.step, fact.edge) for fact in facts if isinstance(fact, f.Failed)}
        facts += [fact for fact in cancellations(invocation) if (fact.step, fact.edge) not in failed]
        if self.manifest.on_failure != "policy":
            self._end(invocation, [*facts, f.Aborted(error)], now)
            return
        running = self.executions.running(invocation)
        if invocation.status == "uncertain":
            facts.append(f.Recovered(self._paused(invocation, now)))
            self.admission.running += 1
        persist = self._persist(invocation, facts, now, hold=True)
        persist.after.extend(self._kills(running, "sibling_failed"))
        self._grant_again(invocation, now)
        self._ask_policy(invocation, now)

    def _end(self, invocation: Invocation, facts: list[f.Fact], now: Now) -> tuple[Persist, list[str]]:
        """Reach a terminal status: the session and the place among the running ones are free for the next.

        Returns:
            The record, and the executions that are killed once it is durable.
        """
        counted = self._goes_on(invocation)
        running = self.executions.running(invocation)
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
        return persist, running

    def _kills(self, executions: list[str], reason: str) -> list[Effect]:
        kills: list[Effect] = []
        for name in executions:
            execution = self.executions.get(name)
            if execution is not None:
                kills.append(Kill(self.manifest.id, execution.node, name, reason))
        return kills

    # ---- resting ---------------------------------------------------------------------------------------------------

    def _rest(self, invocation: Invocation, error: ErrorInfo, now: Now) -> None:
        self._unfit.pop(invocation.id, None)
        self.resting[invocation.id] = Resting(error, now.wall)
        shown = self.overlay(invocation.id, info(invocation))
        self._out.append(Barrier(invocation.id, [Settled(invocation.id, shown)]))

    def overlay(self, id: bytes, stored: InvocationInfo) -> InvocationInfo:
        """Add to what is stored of an invocation what is derived: that it rests, and why."""
        rest = self.resting.get(id)
        if rest is None:
            return stored
        return msgspec.structs.replace(stored, status="recovery_required", error=rest.error)

    # ---- time ------------------------------------------------------------------------------------------------------

    def _timeout_left(self, invocation: Invocation, now: Now) -> float | None:
        limit = self.manifest.invocation_timeout_s
        if limit is None or invocation.started_at is None:
            return None
        since = invocation.started_lasting or invocation.started_at
        return min(since + limit + invocation.paused_s - now.lasting, limit)

    def _arm_timeout(self, invocation: Invocation, now: Now) -> None:
        left = self._timeout_left(invocation, now)
        if left is not None:
            self._timers.arm(now.mono + max(0.0, left), invocation.id)

    def _check_timeout(self, invocation: Invocation, now: Now) -> None:
        left = self._timeout_left(invocation, now)
        if left is None or invocation.status != "running" or invocation.id in self.resting:
            return
        if left > 0:
            self._arm_timeout(invocation, now)
        else:
            aborted = f.Aborted(reasons.timed_out(self.manifest))
            self._end(invocation, [*cancellations(invocation), aborted], now)

    def _paused(self, invocation: Invocation, now: Now) -> float:
        return max(0.0, now.wall - invocation.paused_at) if invocation.paused_at is not None else 0.0

    # ---- pieces ----------------------------------------------------------------------------------------------------

    def _goes_on(self, invocation: Invocation) -> bool:
        """Whether it runs, and is counted as running: not queued, at rest or over."""
        return invocation.status == "running" and invocation.id not in self.resting

    def _halted(self, invocation: Invocation) -> ErrorInfo | None:
        """Why nothing of it may begin with this definition: it belongs to another version, or there is none."""
        if self._gone is None and invocation.version != self.manifest.version:
            return reasons.definition_changed(invocation, self.manifest)
        return self._gone

    def _may_begin(self, invocation: Invocation) -> bool:
        return self._goes_on(invocation) and self._halted(invocation) is None

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
        self._unfit.pop(invocation.id, None)
        self._evaluating.pop(invocation.id, None)
        self._growth.pop(invocation.id, None)
        self.admission.leave(invocation.session, invocation.id)

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
        growth = self._growth[invocation.id]
        persist = make_record(
            invocation, facts, now.wall, growth, hold=hold, memory=memory, extra_reserve=extra_reserve
        )
        if token is not None:
            persist.after.append(Reply(token, info(invocation)))
        if invocation.status == "uncertain":
            persist.after.append(Settled(invocation.id, info(invocation)))
        self._out.append(persist)
        return persist

    def _effects(self) -> list[Effect]:
        effects, self._out = self._out, []
        return effects
