"""Deciding: recover, cancel and reconcile."""

from __future__ import annotations

from hayata import messages as m
from hayata.ids import Execution, check_name, parse_execution_id
from hayata_supervisor.core import facts as f
from hayata_supervisor.core.coordinator import Refusal
from hayata_supervisor.core.effects import Call
from hayata_supervisor.core.invocation import info
from hayata_supervisor.core.merge import MergeRefused, relevant
from hayata_supervisor.hub import Sink
from hayata_supervisor.requests.desk import Desk
from hayata_supervisor.requests.looking import Looking
from hayata_supervisor.requests.running import Running
from hayata_supervisor.store.interface import Header
from hayata_supervisor.tree.port import failure

_MOST_AUTHOR = 256  # characters, as in `hayata.client.options`


class Deciding:
    """Grants what changes invocations that there are."""

    def __init__(self, desk: Desk, looking: Looking, running: Running) -> None:
        self._desk = desk
        self._engine = desk.engine
        self._looking = looking
        self._running = running

    def recover(self, request: m.Recover, sink: Sink) -> None:
        """Let an agent's resting invocations go on, or drop or restart them."""
        agent = self._desk.agent(request.agent, request, sink)
        if agent is None:
            return
        coordinator = agent.coordinator
        effects, touched = coordinator.recover(request.changed, self._engine.now())
        self._engine.perform(request.agent, effects)
        again = [each for each in touched if request.changed == "restart" and each.status == "cancelled"]
        fresh = [self._running.restart(agent, each) for each in again]
        shown = [coordinator.overlay(each.id, info(each)) for each in touched]
        self._when_all_durable([*(each.id for each in touched), *fresh], self._looking.page(shown), sink)

    def _when_all_durable(self, ids: list[bytes], answer: m.Answer, sink: Sink) -> None:
        left = [*ids]

        def durable() -> None:
            left.pop()
            if not left:
                sink.reply(answer)

        if not ids:
            sink.reply(answer)
        for id in ids:
            self._engine.committer.barrier(id, [Call(durable)])

    def cancel(self, request: m.Cancel, sink: Sink) -> None:
        """End an invocation; answers when its tasks are known to be dead."""
        live = self._engine.locate(request.invocation_id)
        if live is not None:
            agent, invocation = live
            self._engine.perform(
                invocation.agent,
                agent.coordinator.cancel(invocation.id, "cancelled by a client", sink, self._engine.now()),
            )
            return

        def found(header: Header) -> None:
            if header.agent not in self._engine.agents and self._engine.apps_pending:
                self._desk.park(request, sink)
            elif header.id in self._engine.open and header.agent not in self._engine.agents:
                raise Refusal(self._engine.why_missing(header.agent))
            else:
                self._engine.committer.barrier(header.id, [Call(lambda: self._looking.show(header, sink))])

        self._desk.with_invocation(request.invocation_id, sink, found)

    def reconcile(self, request: m.Reconcile, sink: Sink) -> None:
        """Settle an uncertain task."""
        if isinstance(request.result, m.Value) + (request.error is not None) + request.retry != 1:
            raise Refusal(failure("invalid_options", "reconcile needs exactly one of result, error and retry"))
        check_name("request_id", request.request_id)
        if not 1 <= len(request.by) <= _MOST_AUTHOR:
            raise Refusal(failure("invalid_options", "by is no name", hint=f"1 to {_MOST_AUTHOR} characters"))
        execution = parse_execution_id(request.task_id)
        if execution is None:
            raise Refusal(
                failure("unknown_task", f"{request.task_id!r} is no task id", hint="hayata show ID lists them")
            )
        live = self._engine.locate(request.invocation_id)
        if live is None and self._engine.apps_pending:
            self._desk.park(request, sink)
            return
        task = None
        if live is not None and live[1].id == execution.invocation:
            task = live[0].coordinator.uncertain_task(*execution)
        if live is None or task is None:
            self._desk.with_invocation(
                request.invocation_id, sink, lambda header: self._not_uncertain(header, request, sink)
            )
        elif not isinstance(request.result, m.Value):
            self._settle(request, execution, None, sink)
        else:
            self._engine.check(
                live[1].agent,
                task.node,
                request.result,
                live[1].parallel,
                execution.edge >= 0,
                lambda checked: self._checked(request, execution, checked, sink),
            )

    def _checked(self, request: m.Reconcile, execution: Execution, checked: m.UpdateChecked, sink: Sink) -> None:
        if checked.update is None:
            sink.reply(m.Refused(checked.error or failure("invalid_node_result", "it can't be a result")))
            return
        try:
            self._settle(request, execution, checked.update, sink)
        except Refusal as refusal:
            sink.reply(m.Refused(refusal.error))

    def _settle(self, request: m.Reconcile, execution: Execution, update: m.Update | None, sink: Sink) -> None:
        live = self._engine.locate(request.invocation_id)
        task = None
        if live is not None:
            task = live[0].coordinator.uncertain_task(*execution)
        if live is None or task is None:
            self._desk.with_invocation(
                request.invocation_id, sink, lambda header: self._not_uncertain(header, request, sink)
            )
            return
        agent, invocation = live
        alone = not invocation.parallel and execution.edge < 0
        merge = relevant(update, agent.coordinator.manifest.merge) if update is not None and alone else {}
        error = None
        if request.error is not None:
            error = failure("reconciled", request.error, by=request.by)
        fact = f.Reconciled(
            execution.step,
            execution.attempt,
            task.node,
            request.by,
            request.request_id,
            update,
            merge,
            error,
            execution.edge,
        )
        try:
            effects = agent.coordinator.reconcile(invocation.id, fact, self._engine.now())
        except MergeRefused as refused:
            raise Refusal(failure("invalid_state", str(refused), path=refused.path)) from None
        self._engine.perform(invocation.agent, effects)

        def durable() -> None:
            self._desk.with_invocation(
                request.invocation_id, sink, lambda header: self._reply_task(header, request.task_id, sink)
            )

        self._engine.committer.barrier(invocation.id, [Call(durable)])

    def _reply_task(self, header: Header, task_id: str, sink: Sink) -> None:
        def answered(found: list[m.TaskInfo]) -> None:
            sink.reply(next(task for task in found if task.id == task_id))

        self._desk.read(lambda: self._looking.read_tasks(header.id), answered, sink)

    def _not_uncertain(self, header: Header, request: m.Reconcile, sink: Sink) -> None:
        """Say why a task can't be reconciled; a request that was sent again gets the answer of the first."""

        def answered(found: list[m.TaskInfo]) -> None:
            task = next((each for each in found if each.id == request.task_id), None)
            if task is None:
                raise Refusal(failure("unknown_task", f"{request.invocation_id} has no task {request.task_id}"))
            if task.reconciled is not None:
                if task.reconciled.request_id == request.request_id:
                    sink.reply(task)
                    return
                by, how = task.reconciled.by, task.reconciled.how
                raise Refusal(failure("already_reconciled", f"{by} settled it ({how})", by=by, how=how))
            if header.id not in self._engine.open:
                raise Refusal(failure("invocation_terminal", f"{header.name} has ended: {header.status}"))
            hint = f"hayata recover {header.agent}" if task.status == "running" else ""
            raise Refusal(failure("not_uncertain", f"task {task.id} is {task.status}", hint=hint))

        self._desk.read(lambda: self._looking.read_tasks(header.id), answered, sink)
