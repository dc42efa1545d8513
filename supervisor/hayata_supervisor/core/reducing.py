"""Executions with edges: their edges end one by one, then what these have made is reduced.

The second layer of the coordinator. An edge is a task like any other (`core.transitions`); here is what its end means
to the execution it belongs to, and what becomes of edges that take too long.
"""

from __future__ import annotations

from hayata.messages import DecidedNext, ErrorInfo, ReduceManifest, TaskFailed, TaskInterrupted, Update
from hayata_supervisor.core import facts as f
from hayata_supervisor.core import reasons
from hayata_supervisor.core.invocation import Invocation, Task
from hayata_supervisor.core.now import Now
from hayata_supervisor.core.retries import reduced_again
from hayata_supervisor.core.transitions import Transitions


class Reducing(Transitions):
    """See the module."""

    # ---- edges -----------------------------------------------------------------------------------------------------

    def _decided(self, invocation: Invocation, decision: DecidedNext, now: Now) -> None:
        super()._decided(invocation, decision, now)
        if decision.edges:
            self._arm_edges(invocation, now)

    def _completed(self, invocation: Invocation, task: Task, update: Update, now: Now) -> ErrorInfo | None:
        if task.edge < 0:
            return Transitions._completed(self, invocation, task, update, now)  # of each step: cheaper than super()
        fact = f.Completed(task.step, task.attempt, task.node, update, {}, task.edge)
        self._edge_over(invocation, task, fact, now)
        return None

    def _final_failure(self, invocation: Invocation, task: Task, error: ErrorInfo, now: Now) -> None:
        if task.edge < 0:
            super()._final_failure(invocation, task, error, now)
        elif self._keeps_on(task):
            fact = f.Failed(task.step, task.attempt, task.node, error, None, task.edge)
            self._edge_over(invocation, task, fact, now)
        else:
            fact = f.Failed(task.step, task.attempt, task.node, error, None, task.edge)
            self._failed_with(invocation, task, fact, error, now)

    def _failed_with(
        self, invocation: Invocation, task: Task, fact: f.Failed | f.Reconciled, error: ErrorInfo, now: Now
    ) -> None:
        """With a task that has failed for good, as ``fact`` says, its execution and the transition have."""
        facts: list[f.Fact] = [fact]
        execution = invocation.task(task.step) if task.edge >= 0 else None
        if execution is not None:
            error = reasons.edge_failed(task, error)
            facts.append(f.Failed(execution.step, execution.attempt, execution.node, error, None))
        self._transition_failed(invocation, facts, error, now)

    def _keeps_on(self, task: Task) -> bool:
        """Whether the execution of this edge can do without its result."""
        reduce = self._reduce(task)
        return task.edge >= 0 and reduce is not None and reduce.partial

    def _edge_over(self, invocation: Invocation, task: Task, fact: f.Fact, now: Now) -> None:
        """Record the end of an edge; with the last one, the reduction may be marked in the same record."""
        execution = invocation.task(task.step)
        last = all(each.over for each in invocation.edges(task.step) if each is not task)
        if last and execution is not None and self._may_begin(invocation):
            self._schedule(invocation, [execution], [fact], now)
        else:
            self._persist(invocation, [fact], now)  # `_resume` looks at it again

    # ---- their time ------------------------------------------------------------------------------------------------

    def _reduce(self, task: Task) -> ReduceManifest | None:
        slots = self.executions.slots.get(task.node)
        return None if slots is None else slots.manifest.reduce

    def _edges_left(self, invocation: Invocation, execution: Task, now: Now) -> float | None:
        """Seconds that the edges of an execution still have."""
        reduce = self._reduce(execution)
        if reduce is None or reduce.timeout_s is None:
            return None
        return min(execution.since + reduce.timeout_s + invocation.paused_s - now.lasting, reduce.timeout_s)

    def _arm_edges(self, invocation: Invocation, now: Now) -> None:
        for task in invocation.tasks:
            left_s = self._edges_left(invocation, task, now) if task.status == "collecting" else None
            if left_s is not None:
                self._timers.arm(now.mono + max(0.0, left_s), invocation.id, task.step)

    def _check_edges(self, invocation: Invocation, step: int, now: Now) -> None:
        """Do without the edges that have had their time."""
        execution = invocation.task(step)
        if execution is None or execution.status != "collecting" or not self._goes_on(invocation):
            return
        left_s = self._edges_left(invocation, execution, now)
        reduce = self._reduce(execution)
        if left_s is None or reduce is None:
            return
        if left_s > 0:
            self._timers.arm(now.mono + left_s, invocation.id, step)
        elif not reduce.partial:
            error = reasons.edges_late(invocation, execution, reduce)
            fact = f.Failed(execution.step, execution.attempt, execution.node, error, None)
            self._transition_failed(invocation, [fact], error, now)
        else:
            pending = [edge for edge in invocation.edges(step) if not edge.over]
            facts: list[f.Fact] = [f.Cancelled(step, edge.attempt, edge.node, edge.edge) for edge in pending]
            kills = self._kills(self.executions.running(invocation, pending), "reduce_timeout")
            reductions = [execution] if self._may_begin(invocation) else []
            self._schedule(invocation, reductions, facts, now, kills=kills)
            self._grant_again(invocation, now)

    # ---- reductions ------------------------------------------------------------------------------------------------

    def _reduction_failed(
        self, invocation: Invocation, task: Task, report: TaskFailed | TaskInterrupted, now: Now
    ) -> None:
        """A reduction has ended with a failure, or was cut off: then it is done once more."""
        if not isinstance(report, TaskInterrupted) or not report.started or report.error.code == "execution_timeout":
            self._final_failure(invocation, task, report.error, now)
        elif reduced_again(task.attempt):
            fact = f.Failed(task.step, task.attempt, task.node, report.error, now.lasting)
            self._persist(invocation, [fact], now)
            if self._may_begin(invocation):
                self._schedule(invocation, [task], [], now)
        else:
            self._final_failure(invocation, task, reasons.reducer_failed(invocation, task, report.error), now)
