"""Going on after something went wrong: retries, probes of what was cut off, rests, and recovery.

The third layer of the coordinator, below the events (`core.coordinator`). The rules that need no state are in
`core.retries` and `core.recovery`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import assert_never

import msgspec

from hayata.messages import ErrorInfo, TaskCompleted, TaskEnd, TaskFailed, TaskInterrupted, TaskProbed
from hayata_supervisor.core import facts as f
from hayata_supervisor.core import reasons
from hayata_supervisor.core.definitions import changes
from hayata_supervisor.core.effects import Warn
from hayata_supervisor.core.executions import Execution
from hayata_supervisor.core.invocation import Invocation, Task
from hayata_supervisor.core.now import Now
from hayata_supervisor.core.recovery import LOST, classify
from hayata_supervisor.core.reducing import Reducing
from hayata_supervisor.core.retries import delay_left, retry_delay
from hayata_supervisor.core.slots import Claim


class Recovering(Reducing):
    """See the module."""

    # ---- attempts that went wrong ------------------------------------------------------------------------

    def _failed(self, invocation: Invocation, task: Task, report: TaskFailed | TaskInterrupted, now: Now) -> None:
        """A body ended with a failure, or was cut off while the supervisor lives."""
        if task.edges >= 0:
            self._reduction_failed(invocation, task, report, now)
            return
        node = self.executions.slots[task.node].manifest
        if isinstance(report, TaskInterrupted) and report.started and node.probe_attempts:
            self._probe(invocation, task, report.error, now)
            return
        delay_s = retry_delay(node, task.attempt, report)
        if delay_s is None:
            self._final_failure(invocation, task, report.error, now)
        else:
            self._try_again(invocation, task, report.error, delay_s, now)

    def _try_again(self, invocation: Invocation, task: Task, error: ErrorInfo, delay_s: float, now: Now) -> None:
        fact = f.Failed(task.step, task.attempt, task.node, error, now.lasting + delay_s, task.edge)
        self._persist(invocation, [fact], now)
        self._await_retry(invocation, task, delay_s, now)

    def _await_retry(self, invocation: Invocation, task: Task, delay_s: float, now: Now) -> None:
        if not self._may_begin(invocation):
            return  # `_resume` looks at it again
        if delay_s > 0:
            claim = Claim(invocation.id, task.step, task.attempt, task.edge)
            self._timers.arm(now.mono + delay_s, invocation.id, claim)
        else:
            self._schedule(invocation, [task], [], now)

    # ---- probes ------------------------------------------------------------------------------------------

    def _probe(self, invocation: Invocation, task: Task, cause: ErrorInfo, now: Now) -> None:
        """Have the node's probe asked about a body that was cut off; the task stays as it is meanwhile."""
        slots = self.executions.slots.get(task.node)
        error = self._halted(invocation)
        if error is None:
            error = reasons.unknown_node(self.manifest, task.node) if slots is None else slots.unavailable
        if slots is None or error is not None:
            self._uncertain(invocation, task, reasons.no_answer(error or cause), now)
        else:
            self._hand_out(self.executions.probe(invocation, task, cause), now)

    def _probed(self, invocation: Invocation, task: Task, cause: ErrorInfo, report: TaskEnd, now: Now) -> None:
        """Take what a probe says; one that fails in whatever way does not know."""
        match report:
            case TaskCompleted():
                refused = self._completed(invocation, task, report.update, now)
                if refused is not None:
                    self._uncertain(invocation, task, reasons.no_answer(refused), now)
            case TaskProbed():
                if report.not_done:
                    self._not_done(invocation, task, cause, now)
                else:
                    self._uncertain(invocation, task, cause, now)
            case TaskFailed() | TaskInterrupted():
                self._uncertain(invocation, task, reasons.no_answer(report.error), now)
            case _:
                assert_never(report)

    def _not_done(self, invocation: Invocation, task: Task, cause: ErrorInfo, now: Now) -> None:
        if task.attempt < self.executions.slots[task.node].manifest.probe_attempts:
            self._try_again(invocation, task, cause, 0.0, now)
        else:
            self._final_failure(invocation, task, cause, now)

    def _uncertain(self, invocation: Invocation, task: Task, error: ErrorInfo, now: Now) -> None:
        """Nobody knows; a person decides. What runs beside it runs on, what is scheduled waits."""
        if self._goes_on(invocation):
            self.admission.running -= 1
        self._persist(invocation, [f.Uncertain(task.step, task.attempt, task.node, error, task.edge)], now)
        self._start_queued(now)

    def _given_up(self, execution: Execution, error: ErrorInfo, now: Now) -> None:
        """The node of an execution that was not handed out is unavailable."""
        invocation = self.invocations.get(execution.invocation)
        task = invocation.task(execution.step, execution.edge) if invocation else None
        if invocation is None or task is None or task.attempt != execution.attempt or task.status != "running":
            return  # a sibling's failure has ended it a moment ago
        if execution.cause is not None:
            self._uncertain(invocation, task, reasons.no_answer(error), now)
        else:
            self._final_failure(invocation, task, error, now)

    # ---- state that does not fit -------------------------------------------------------------------------

    def _misfit(self, invocation: Invocation, error: ErrorInfo) -> ErrorInfo | None:
        """Why an invocation should rest whose state does not fit; None where the definition is not to blame.

        Resting, it can go on when the definition fits again, or be restarted; failing, it would be lost for a slip.
        """
        if error.code != "invalid_state":
            return None
        found = changes(invocation.definition, self.definition)
        return reasons.unfit(error, found, self.manifest) if found or invocation.reversioned else None

    def _not_begun(self, invocation: Invocation, task: Task, why: ErrorInfo, now: Now) -> None:
        """A body could not be given its state: it is scheduled again, and the invocation rests."""
        self._persist(invocation, [f.Unmarked(task.step, task.attempt, task.node, task.edge)], now)
        self._unfit[invocation.id] = why

    def _rest_if_due(self, invocation: Invocation, now: Now) -> None:
        """Have one that can't go on rest when nothing of it runs any more: branches may have begun before."""
        if not self._goes_on(invocation):
            return
        why = self._unfit.get(invocation.id) or self._halted(invocation)
        if why is not None and not self.executions.any_of(invocation):
            self.admission.running -= 1
            self._rest(invocation, why, now)
            self._start_queued(now)

    def _warn_of_changes(self, invocations: Iterable[Invocation]) -> None:
        """Log what has changed in a definition whose version has not: once for each that these were made by."""
        counts = Counter(
            bytes(each.definition)
            for each in invocations
            if each.version == self.manifest.version and each.status in ("running", "uncertain")
        )
        for definition, count in counts.items():
            found = changes(msgspec.Raw(definition), self.definition)
            if found:
                fields: dict[str, str | int] = {
                    "agent": self.manifest.id,
                    "version": self.manifest.version,
                    "invocations": count,
                    "changes": "; ".join(found),
                }
                self._out.append(Warn("definition changed, its version did not", fields))

    # ---- recovery ----------------------------------------------------------------------------------------

    def _recover(self, invocation: Invocation, facts: list[f.Fact], now: Now, *, paused_s: float) -> None:
        """Classify what is marked and runs nowhere, and go on unless a person must decide.

        Args:
            invocation: One that does not go on.
            facts: What is to be recorded together with it: how a person settled a task.
            now: The time.
            paused_s: For how long the invocation's timeout has stood still.
        """
        settled = {(fact.step, fact.edge) for fact in facts if isinstance(fact, f.Reconciled)}
        # A task that is uncertain in one that is not is what another branch's failure has left behind.
        unsure = invocation.status == "uncertain" and any(
            task.status == "uncertain" and (task.step, task.edge) not in settled for task in invocation.tasks
        )
        halted = self._halted(invocation)
        if halted is not None:
            facts = [*facts, *([] if unsure else [f.Recovered(paused_s)])]
            if facts:
                self._persist(invocation, facts, now)
            if not unsure:
                self.admission.running += 1
                self._rest_if_due(invocation, now)
            return
        lost = self.executions.lost(invocation)
        found = classify(invocation, lost, self.manifest, self._began)
        for task in lost:
            if task not in found.probes:
                self.executions.free_cell(task.cell)
        unsure = unsure or any(isinstance(fact, f.Uncertain) for fact in found.facts)
        facts = [*facts, *found.facts, *([] if unsure else [f.Recovered(paused_s)])]
        if facts:
            self._persist(invocation, facts, now)
        if not unsure:
            self._resume(invocation, now)
        for task in found.spent:
            if task.status == "running" and not invocation.terminal:
                self._final_failure(invocation, task, reasons.reducer_failed(invocation, task, LOST), now)
        for task in found.probes:
            if task.status == "running" and not invocation.terminal:
                self._probe(invocation, task, LOST, now)

    def _resume(self, invocation: Invocation, now: Now) -> None:
        """Go on with an invocation that runs again: what is scheduled is run, or else the policy is asked."""
        self.admission.running += 1
        self._arm_timeout(invocation, now)
        self._arm_edges(invocation, now)
        pending = [task for task in invocation.tasks if task.status == "scheduled"]
        if not pending and not any(task.status == "running" for task in invocation.tasks):
            self._ask_policy(invocation, now)
        self._take_up(invocation, pending, now)

    def _take_up(self, invocation: Invocation, pending: list[Task], now: Now) -> None:
        """Have what is scheduled wait for its slot, or for the time at which it is tried again."""
        for task in pending:
            if not self._goes_on(invocation):
                return
            if task.status != "scheduled":
                continue  # a sibling that has failed just now has ended it
            slots = self.executions.slots.get(task.node)
            left_s = delay_left(slots.manifest if slots else None, task.retry_at, now.lasting)
            self._await_retry(invocation, task, left_s, now)
