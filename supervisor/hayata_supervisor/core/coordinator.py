"""The coordinator of one agent: which invocation runs, which task may start, what an event means.

Events come in as method calls with the time; effects come out as lists (`core.effects` says what the caller owes).
Nothing here waits, reads a clock or touches a process, so whole histories run in a test in microseconds.

What is durable lives in `Invocation` and changes only by facts. What lives in this class is volatile and is made anew
by `adopt` and `begin` after a restart: who holds a session, who waits for a slot, what has been handed out.

Source: core and shell as in rabbitmq/ra; ``Step``/``Ready`` of etcd/raft.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from hayata.ids import parse_execution_id
from hayata.messages import (
    AgentManifest,
    DecidedFail,
    DecidedFinish,
    DecidedNext,
    ErrorInfo,
    EventInfo,
    InvocationInfo,
    Partial,
    PartialAck,
    PolicyFailed,
    SubstepDone,
    TaskCompleted,
    TaskEnd,
    TaskFailed,
    TaskInterrupted,
    TaskProbed,
)
from hayata_supervisor.core import facts as f
from hayata_supervisor.core import reasons
from hayata_supervisor.core.cells import Cells
from hayata_supervisor.core.effects import Acknowledge, Barrier, Effect, PublishPartial, Reply, Token
from hayata_supervisor.core.invocation import Invocation, Task, cancellations, info
from hayata_supervisor.core.merge import merge
from hayata_supervisor.core.now import Now
from hayata_supervisor.core.reasons import Refusal
from hayata_supervisor.core.switching import Switching

__all__ = ["Coordinator", "Now", "Refusal"]

_encode = msgspec.msgpack.Encoder().encode


class _Cancel(NamedTuple):
    """A cancel that waits until its executions are confirmed dead."""

    left: set[str]
    token: Token
    info: InvocationInfo
    invocation: bytes


class Coordinator(Switching):
    """See the module. One method for each event."""

    def __init__(
        self,
        manifest: AgentManifest,
        cells: Cells,
        began: Callable[[int, str], bool] = lambda cell, execution: True,
    ) -> None:
        super().__init__(manifest, cells, began)
        self.late_messages = 0
        self._adopted: list[Invocation] = []
        self._confirmations: dict[str, list[_Cancel]] = {}

    # ---- clients ---------------------------------------------------------------------------------------------------

    def run(
        self, invocation: Invocation, memory: bytes | None, *, queue: bool, token: Token | None, now: Now
    ) -> list[Effect]:
        """Accept a new invocation.

        Args:
            invocation: Fresh, with its input set; nothing of it is stored yet.
            memory: What the session's last invocation left in the store, encoded.
            queue: Whether it may wait for a busy session.
            token: Whom to answer once it is durable.
            now: The time.

        Raises:
            Refusal: The session is busy, or the agent can't run.
        """
        if (refused := self._gone or self._unavailable) is not None:
            raise Refusal(refused)
        holder_id = self.admission.holder(invocation.session)
        if holder_id is not None and not queue:
            holder = self.invocations[holder_id]
            rests = holder.status == "uncertain" or holder.id in self.resting
            raise Refusal(reasons.session_held(holder, rests=rests))
        self._enter(invocation, memory)
        accepted = f.Accepted(invocation.input)
        room = self.admission.running < self.manifest.max_concurrency
        if holder_id is None and room and not self.admission.queue:
            self._start(invocation, [accepted], now, token)
        else:
            self.admission.enqueue(invocation.id, invocation.session)
            self._persist(invocation, [accepted], now, token=token)
            self._start_queued(now)
        return self._effects()

    def cancel(self, id: bytes, reason: str, token: Token | None, now: Now) -> list[Effect]:
        """Cancel an open invocation; ``token`` is answered when its executions are confirmed dead."""
        invocation = self.invocations[id]
        persist, running = self._end(invocation, [*cancellations(invocation), f.Dropped(reason)], now)
        if token is None:
            return self._effects()
        if running:
            waiting = _Cancel(set(running), token, info(invocation), invocation.id)
            for name in running:
                self._confirmations.setdefault(name, []).append(waiting)
        else:
            persist.after.append(Reply(token, info(invocation)))
        return self._effects()

    def uncertain_task(self, id: bytes, step: int, attempt: int, edge: int = -1) -> Task | None:
        """The task if it is uncertain, and its invocation waits for it: another branch's failure may have ended the
        transition meanwhile.
        """
        invocation = self.invocations.get(id)
        if invocation is None or invocation.status != "uncertain":
            return None
        task = invocation.task(step, edge)
        return task if task and task.attempt == attempt and task.status == "uncertain" else None

    def reconcile(self, id: bytes, fact: f.Reconciled, now: Now) -> list[Effect]:
        """Settle an uncertain task; the caller has found it with `uncertain_task`.

        Raises:
            MergeRefused: The result doesn't fit the state. Nothing has changed.
        """
        invocation = self.invocations[id]
        task = invocation.task(fact.step, fact.edge)
        assert task is not None
        if fact.update is not None and not invocation.parallel and fact.edge < 0:
            merge(invocation.state, fact.update, fact.merge)
        if fact.error is not None and not self._keeps_on(task):
            self._failed_with(invocation, task, fact, fact.error, now)
        else:
            self._recover(invocation, [fact], now, paused_s=self._paused(invocation, now))
        return self._effects()

    def recover(self, changed: str | None, now: Now) -> tuple[list[Effect], list[Invocation]]:
        """Recover what rests. Returns the effects and the invocations that were touched or still need a person.

        One of another version goes on, or is dropped, only when ``changed`` says so (the caller restarts). One whose
        state did not fit goes on, unless it says ``drop`` or ``restart``.

        Raises:
            Refusal: The agent can't run, so that nothing could begin anew. Nothing has changed.
        """
        refused = self._gone or (self._unavailable if changed == "restart" else None)
        if refused is not None:
            raise Refusal(refused)
        touched = []
        for id, rest in list(self.resting.items()):
            invocation = self.invocations[id]
            touched.append(invocation)
            differs = invocation.version != self.manifest.version
            if differs and changed is None:
                continue
            if (differs or rest.error.code == "invalid_state") and changed in ("drop", "restart"):
                self._end(invocation, [*cancellations(invocation), f.Dropped("its definition has changed")], now)
                continue
            if differs:
                self._persist(invocation, [f.Reversioned(self.manifest.version, self.definition)], now)
            del self.resting[id]
            self._recover(invocation, [], now, paused_s=now.wall - rest.since_wall)
        touched += [each for each in self.invocations.values() if each.status == "uncertain" and each not in touched]
        return self._effects(), touched

    # ---- workers ---------------------------------------------------------------------------------------------------

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
                self._end(invocation, [f.Finished(answer.result)], now)
            case DecidedFail() | PolicyFailed():
                unfit = self._misfit(invocation, answer.error) if isinstance(answer, PolicyFailed) else None
                if unfit is None:
                    self._end(invocation, [f.Aborted(answer.error)], now)
                else:
                    self._unfit[invocation.id] = unfit
                    self._rest_if_due(invocation, now)
        return self._effects()

    def ready(self, execution_id: str, now: Now) -> list[Effect]:
        """The execution's mark is durable: hand it out, or let it wait for a slot."""
        slots = self.executions.is_ready(execution_id)
        if slots is not None and not self._taken_back(execution_id, now):
            self._hand_out(slots, now)
        return self._effects()

    def reported(self, report: TaskEnd, now: Now) -> list[Effect]:
        """Take the confirmed end of an execution. One that is superseded or not wanted changes nothing but its slot."""
        execution = self.executions.end(report.execution_id, now.mono)
        if execution is None:
            self.late_messages += 1
            return []
        slots = self.executions.slots[execution.node]
        self._hand_out(slots, now)
        invocation = self.invocations.get(execution.invocation)
        task = invocation.task(execution.step, execution.edge) if invocation else None
        if invocation is None or task is None or task.attempt != execution.attempt or task.status != "running":
            self.late_messages += 1
        elif execution.cause is not None:
            self._probed(invocation, task, execution.cause, report, now)
        elif isinstance(report, TaskCompleted):
            refused = self._completed(invocation, task, report.update, now)
            if refused is not None:
                self._final_failure(invocation, task, refused, now)
        elif isinstance(report, TaskInterrupted) and not report.started and (halted := self._halted(invocation)):
            self._not_begun(invocation, task, halted, now)  # a new generation's worker must not begin it
        elif isinstance(report, TaskFailed) and not report.began and (unfit := self._misfit(invocation, report.error)):
            self._not_begun(invocation, task, unfit, now)
        elif not isinstance(report, TaskProbed):
            self._failed(invocation, task, report, now)
        if invocation is not None:
            self._rest_if_due(invocation, now)
        for cancel in self._confirmations.pop(report.execution_id, ()):
            cancel.left.discard(report.execution_id)
            if not cancel.left:
                self._out.append(Barrier(cancel.invocation, [Reply(cancel.token, cancel.info)]))
        self._grant(slots, now)
        return self._effects()

    def partial(self, partial: Partial, now: Now) -> list[Effect]:
        """Number a chunk and publish it behind what is not durable yet; refuse it from an execution that is over."""
        invocation, node = self._active(partial)
        if invocation is None:
            return self._effects()
        data: dict[str, object] = {
            "node_id": node,
            "execution_id": partial.execution_id,
            "edge_id": partial.edge,
            "result": partial.chunk,
        }
        execution = parse_execution_id(partial.execution_id)
        if execution is not None and execution.edge >= 0:
            data["edge"] = execution.edge
        invocation.sequence += 1
        event = EventInfo(invocation.sequence, "node_partial_result", now.wall, msgspec.Raw(_encode(data)))
        ack = PartialAck(partial.execution_id, partial.number, None)
        after: list[Effect] = [
            PublishPartial(invocation.id, event),
            Acknowledge(self.manifest.id, node, ack),
        ]
        if invocation.sequence > invocation.reserved:
            self._persist(invocation, [], now, extra_reserve=1024).after.extend(after)
        else:
            self._out.append(Barrier(invocation.id, after))
        return self._effects()

    def substep_done(self, done: SubstepDone, now: Now) -> list[Effect]:
        """Store what a sub-step has returned, and let its body go on when that is durable."""
        invocation, node = self._active(done)
        execution = parse_execution_id(done.execution_id)
        if invocation is not None and execution is not None:
            fact = f.SubstepDone(execution.step, execution.attempt, node, done.substep, execution.edge)
            ack = PartialAck(done.execution_id, done.number, None)
            self._persist(invocation, [fact], now).after.append(Acknowledge(self.manifest.id, node, ack))
        return self._effects()

    def _active(self, message: Partial | SubstepDone) -> tuple[Invocation | None, str]:
        """The invocation and the node of a body that waits for an answer; one that is over gets it here."""
        execution = self.executions.get(message.execution_id)
        if execution is None:
            self.late_messages += 1  # its end was confirmed: nobody is left to be told
            return None, ""
        invocation = self.invocations.get(execution.invocation)
        task = invocation.task(execution.step, execution.edge) if invocation else None
        if task and task.attempt == execution.attempt and task.status == "running" and execution.cause is None:
            return invocation, execution.node
        self.late_messages += 1
        error = ErrorInfo("execution_not_active", "this execution is not active any more")
        ack = PartialAck(message.execution_id, message.number, error)
        self._out.append(Acknowledge(self.manifest.id, execution.node, ack))
        return None, execution.node

    def node_given_up(self, node: str, error: ErrorInfo, now: Now) -> list[Effect]:
        """The node fails to stay up: what it was not handed, and what waits for it, fails with ``node_unavailable``."""
        self._node_unavailable(self.executions.slots[node], error, now)
        return self._effects()

    def node_stopped(self, node: str, error: ErrorInfo, now: Now) -> list[Effect]:
        """The node has ended for good: nobody can wait for it either."""
        self.executions.slots[node].stopped = True
        return self.node_given_up(node, error, now)

    def node_back(self, node: str, now: Now) -> list[Effect]:
        """The node is tried again."""
        slots = self.executions.slots[node]
        slots.unavailable, slots.stopped = None, False
        self._grant(slots, now)
        return self._effects()

    def agent_given_up(self, error: ErrorInfo, now: Now) -> list[Effect]:
        """The agent worker fails to stay up: invocations that need a decision fail, new ones are refused."""
        self._unavailable = error
        for id in list(self._evaluating):
            self._end(self.invocations[id], [f.Aborted(error)], now)
        return self._effects()

    def agent_back(self, now: Now) -> list[Effect]:
        """The agent worker is tried again."""
        self._unavailable = None
        self._start_queued(now)
        return self._effects()

    # ---- time, start, end ------------------------------------------------------------------------------------------

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
        self._warn_of_changes(adopted)
        # One that is queued is not recovered: it starts as soon as another ends, which may be in this very loop.
        for invocation in [each for each in adopted if each.status != "queued"]:
            halted = self._halted(invocation)
            by_hand = self.manifest.resume == "manual"
            if invocation.status == "running" and halted is not None:
                self._rest(invocation, halted, now)
            elif invocation.status == "running" and by_hand:
                self._rest(invocation, reasons.restarted(self.manifest), now)
            elif invocation.status == "running" or (
                invocation.status == "uncertain" and halted is None and not by_hand  # branches beside the uncertain one
            ):
                self._recover(invocation, [], now, paused_s=0.0)
        self._start_queued(now)
        return self._effects()

    def drain(self) -> None:
        """Start nothing any more: no decision is asked for, nothing is marked or handed out. Results are taken."""
        self.draining = True

    def forget(self, id: bytes) -> None:
        """Drop an invocation whose record was refused; the store knows better."""
        invocation = self.invocations.get(id)
        if invocation is not None:
            if self._goes_on(invocation):
                self.admission.running -= 1
            self.executions.running(invocation)  # what was not handed out is marked anew, or not at all
            self._leave(invocation)

    def next_due(self) -> float | None:
        """Monotonic time at which `tick` has something to do."""
        return self._timers.next_due()

    def tick(self, now: Now) -> list[Effect]:
        """Do what is due."""
        while (due := self._timers.take(now.mono)) is not None:
            invocation = self.invocations.get(due.invocation)
            if invocation is None:
                continue
            if due.what is None:
                self._check_timeout(invocation, now)
            elif isinstance(due.what, int):
                self._check_edges(invocation, due.what, now)
            else:
                _, task = self._claimed(due.what)
                if task is not None and self._may_begin(invocation):
                    self._schedule(invocation, [task], [], now)
        return self._effects()
