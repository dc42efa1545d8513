"""What clients ask, one method for each request. Answers come when what they say is durable."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TypeVar

from hayata import messages as m
from hayata.errors import HayataError
from hayata.framing import DEFAULT_CAP_BYTES
from hayata.ids import Execution, RisingIds, check_name, parse_execution_id
from hayata_supervisor.admin import Admin
from hayata_supervisor.core import facts as f
from hayata_supervisor.core.coordinator import Refusal
from hayata_supervisor.core.effects import Call, Persist
from hayata_supervisor.core.invocation import Invocation, info
from hayata_supervisor.core.merge import MergeRefused, relevant
from hayata_supervisor.core.views import journal_page, tasks
from hayata_supervisor.engine import Agent, Engine, now
from hayata_supervisor.hub import Follower, Sink
from hayata_supervisor.process import clock
from hayata_supervisor.store.interface import Header, Loaded
from hayata_supervisor.stored import info_of_header, restored
from hayata_supervisor.tree.port import failure

T = TypeVar("T")

_TASK_BYTES = 1024  # of a task in a message, without what its node returned
_LONGEST_DRAIN_S = 7 * 24 * 3600.0  # as in the configuration; more, or none at all, would be no timer


class Requests:
    """Grants requests.

    Args:
        engine: The coordinators and their surroundings.
        tree: The process tree from the guard down.
        stop: Begins to stop the daemon, with a drain time in seconds or None for the configured one.
        admin: Grants what is asked of the store as a whole.
        page_bytes: About how much of a list goes into one message.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        tree: Callable[[], m.ProcessInfo],
        stop: Callable[[float | None], None],
        admin: Admin,
        page_bytes: int = DEFAULT_CAP_BYTES // 2,
    ) -> None:
        self._engine = engine
        self._page_bytes = page_bytes
        self._tree = tree
        self._stop = stop
        self._admin = admin
        self._ids = RisingIds()
        self._parked: list[tuple[m.Request, Sink]] = []
        self._loading: dict[int, Sink | None] = {}

    def handle(self, request: m.Request, sink: Sink) -> None:
        """Grant a request or refuse it; never raises for what a client can cause."""
        try:
            self._handle(request, sink)
        except Refusal as refusal:
            sink.reply(m.Refused(refusal.error))
        except HayataError as error:
            sink.reply(m.Refused(failure(error.code, error.message, hint=error.hint, **error.details)))

    def _handle(self, request: m.Request, sink: Sink) -> None:
        match request:
            case m.Run():
                self._run(request, sink)
            case m.GetInvocation():
                self._with_invocation(request.invocation_id, sink, lambda header: self._look(header, request, sink))
            case m.AwaitInvocation():
                self._with_invocation(request.invocation_id, sink, lambda header: self._await(header, sink))
            case m.ListInvocations():
                self._list(request, sink)
            case m.ListTasks():
                self._with_invocation(request.invocation_id, sink, lambda header: self._look(header, request, sink))
            case m.FollowEvents():
                self._with_invocation(
                    request.invocation_id,
                    sink,
                    lambda header: self._engine.hub.follow(
                        Follower(header.id, sink, max(0, request.after), request.until)
                    ),
                )
            case m.Recover():
                self._recover(request, sink)
            case m.Reconcile():
                self._reconcile(request, sink)
            case m.Cancel():
                self._cancel(request, sink)
            case m.ListAgents() if self._engine.apps_pending:
                self._parked.append((request, sink))
            case m.ListAgents():
                sink.reply(m.AgentList([self._agent_info(name, each) for name, each in self._engine.agents.items()]))
            case m.StartAgent():
                self._loading[self._engine.workers.load_app(request.app)] = sink
            case m.StopAgent():
                self._stop_agent(request, sink)
            case m.GetTree():
                sink.reply(m.Tree(self._tree()))
            case m.GetStats():
                sink.reply(m.Stats(self._stats()))
            case m.StopDaemon():
                drain_s = request.drain_s
                if drain_s is not None and not 0 <= drain_s <= _LONGEST_DRAIN_S:
                    raise Refusal(failure("invalid_options", f"drain_s can't be {drain_s}", hint="seconds, 0 or more"))
                sink.reply(m.Done())
                self._stop(drain_s)
            case m.ReadJournal():
                self._with_invocation(request.invocation_id, sink, lambda header: self._journal(header, request, sink))
            case m.VerifyStore() | m.BackupStore() | m.PruneStore():
                self._admin.handle(request, sink)

    # ---- agents and apps -------------------------------------------------------------------------------------------

    def app_settled(self, index: int, reference: str, error: m.ErrorInfo | None) -> None:
        """An app that `StartAgent` asked for is here, or can't be."""
        sink = self._loading.pop(index, None)
        if sink is None:
            return
        if error is not None:
            sink.reply(m.Refused(error))
            return
        mine = [(name, agent) for name, agent in self._engine.agents.items() if agent.app == reference]
        sink.reply(m.AgentList([self._agent_info(name, agent) for name, agent in mine]))

    def apps_ready(self) -> None:
        """All apps of the launch are loaded or given up: what waited for them is granted now."""
        self._engine.apps_ready()
        parked, self._parked = self._parked, []
        for request, sink in parked:
            match request:
                case m.GetInvocation() | m.ListTasks():
                    self._look_when_recovered(request, sink)
                case _:
                    self.handle(request, sink)

    def _agent(self, name: str, request: m.Request, sink: Sink) -> Agent | None:
        """The agent; None when the request was parked until the apps are loaded."""
        agent = self._engine.agents.get(name)
        if agent is not None and agent.status != "stopped":
            return agent
        if self._engine.apps_pending:
            self._parked.append((request, sink))
            return None
        known = ", ".join(self._engine.agents) or "none"
        raise Refusal(failure("unknown_agent", f"there is no agent {name!r}", hint=f"agents here: {known}"))

    def _agent_info(self, name: str, agent: Agent) -> m.AgentInfo:
        coordinator = agent.coordinator
        nodes = [
            m.NodeInfo(
                name=slots.manifest.name,
                status="serving" if slots.unavailable is None else "failed",
                is_async=slots.manifest.is_async,
                concurrency=slots.manifest.concurrency,
                busy=slots.active,
            )
            for slots in coordinator.executions.slots.values()
        ]
        return m.AgentInfo(
            id=name,
            version=coordinator.manifest.version,
            app=agent.app,
            status=agent.status,
            nodes=nodes,
            running=coordinator.admission.running,
            queued=len(coordinator.admission.queue),
            error=agent.error,
        )

    def _stop_agent(self, request: m.StopAgent, sink: Sink) -> None:
        agent = self._agent(request.agent, request, sink)
        if agent is not None:
            agent.coordinator.drain()

            def stopped() -> None:
                agent.status = "stopped"
                sink.reply(m.Done())

            self._engine.workers.stop_agent(request.agent, stopped)

    def _stats(self) -> dict[str, float]:
        engine = self._engine
        coordinators = [agent.coordinator for agent in engine.agents.values()]
        return {
            "open_invocations": len(engine.open),
            "running_invocations": sum(each.admission.running for each in coordinators),
            "queued_invocations": sum(len(each.admission.queue) for each in coordinators),
            "late_messages": sum(each.late_messages for each in coordinators),
            "records": engine.committer.commits,
            "transactions": engine.committer.transactions,
            "store_full": float(engine.committer.full is not None),
        }

    # ---- run -------------------------------------------------------------------------------------------------------

    def _run(self, request: m.Run, sink: Sink) -> None:
        check_name("agent", request.agent)
        check_name("invocation_id", request.invocation_id)
        for what, name in (("session", request.session), ("key", request.key)):
            if name is not None:
                check_name(what, name)
        if self._engine.draining:
            raise Refusal(failure("daemon_unavailable", "the daemon is stopping"))
        agent = self._agent(request.agent, request, sink)
        if agent is None:
            return
        manifest = agent.coordinator.manifest
        session = request.session or manifest.default_session
        if session is None and manifest.conversation_memory:
            raise Refusal(
                failure("session_required", f"{request.agent} keeps conversations", hint="pass session=, one a user")
            )
        fresh = Invocation(
            id=self._ids.new(clock.unix_ms()),
            name=request.invocation_id,
            agent=request.agent,
            version=manifest.version,
            session=session or f"~{request.invocation_id}",
            own_session=session is None,
            stream=request.stream,
            key=request.key,
            digest=hashlib.sha256(bytes(request.input)).digest()[:16],
            created_at=clock.wall(),
            input=request.input,
        )
        store = self._engine.store

        def look_up() -> tuple[Header | None, Header | None, bytes | None]:
            by_key = store.find_key(fresh.agent, fresh.key) if fresh.key else None
            memory = store.memory(fresh.agent, fresh.session) if manifest.conversation_memory else None
            return store.find(fresh.name), by_key, memory

        memories, of = self._engine.memories, (fresh.agent, fresh.session)
        memories.hold(of)

        def accept(found: tuple[Header | None, Header | None, bytes | None]) -> None:
            by_name, by_key, memory = found
            self._accept(request, fresh, (by_name, by_key, memories.newest(of, memory)), sink)

        self._read(look_up, accept, sink, lambda: memories.release(of))

    def _accept(
        self, request: m.Run, fresh: Invocation, found: tuple[Header | None, Header | None, bytes | None], sink: Sink
    ) -> None:
        engine = self._engine
        agent = engine.agents[fresh.agent]
        coordinator = agent.coordinator
        by_name, by_key, memory = found
        live = engine.locate(fresh.name)
        if live is not None:
            _check_same(fresh, live[1].agent, live[1].digest, live[1].name, "invocation_exists")
            engine.committer.barrier(live[1].id, [_reply(sink, engine.overlay(fresh.agent, live[1].id, info(live[1])))])
            return
        if by_name is not None:
            _check_same(fresh, by_name.agent, by_name.digest, by_name.name, "invocation_exists")
            self._show(by_name, sink)
            return
        live_key = coordinator.keys.get(fresh.key) if fresh.key else None
        if live_key is not None:
            holder = coordinator.invocations[live_key]
            _check_same(fresh, holder.agent, holder.digest, holder.name, "key_reused")
            engine.committer.barrier(holder.id, [_reply(sink, engine.overlay(fresh.agent, holder.id, info(holder)))])
            return
        if by_key is not None:
            _check_same(fresh, by_key.agent, by_key.digest, by_key.name, "key_reused")
            self._show(by_key, sink)
            return
        if engine.committer.full is not None:
            full = engine.committer.full
            raise Refusal(m.ErrorInfo(full.code, full.message, full.hint))
        if engine.draining:
            raise Refusal(failure("daemon_unavailable", "the daemon is stopping"))
        engine.open.add(fresh.id)
        try:
            effects = coordinator.run(fresh, memory, queue=request.on_busy == "queue", token=sink, now=now())
        except Refusal:
            engine.open.discard(fresh.id)
            raise
        engine.perform(fresh.agent, effects)

    # ---- look ------------------------------------------------------------------------------------------------------

    def _read(
        self,
        query: Callable[[], T],
        answered: Callable[[T], None],
        sink: Sink,
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        """Ask the store; what goes wrong, there or in ``answered``, is the sink's answer. ``ended`` is called last."""

        def failed(error: BaseException) -> None:
            ended()
            if isinstance(error, HayataError):
                sink.reply(m.Refused(failure(error.code, error.message, hint=error.hint, **error.details)))
                return
            self._engine.read_failed(error)
            sink.reply(m.Refused(failure("store_corrupt", f"the store could not be read: {error}")))

        def guarded(found: T) -> None:
            try:
                answered(found)
            except Refusal as refusal:
                sink.reply(m.Refused(refusal.error))
            finally:
                ended()

        self._engine.reader.submit(query, guarded, failed)

    def _with_invocation(self, name: str, sink: Sink, found: Callable[[Header], None]) -> None:
        check_name("invocation_id", name)

        def answered(header: Header | None) -> None:
            if header is None:
                raise Refusal(failure("unknown_invocation", f"there is no invocation {name!r}", hint="hayata ps"))
            found(header)

        self._read(lambda: self._engine.store.find(name), answered, sink)

    def _look(self, header: Header, request: m.GetInvocation | m.ListTasks, sink: Sink) -> None:
        """Answer from the store; but after a restart, while that says ``running`` of what does not run, later."""
        engine = self._engine
        if engine.apps_pending and header.id in engine.open and header.agent not in engine.agents:
            self._parked.append((request, sink))
        elif isinstance(request, m.GetInvocation):
            self._show(header, sink)
        else:
            self._tasks(header, request.after, sink)

    def _look_when_recovered(self, request: m.GetInvocation | m.ListTasks, sink: Sink) -> None:
        """Answer when what recovery has found is in the store."""

        def found(header: Header) -> None:
            self._engine.committer.barrier(header.id, [Call(lambda: self._look(header, request, sink))])

        self._with_invocation(request.invocation_id, sink, found)

    def _show(self, header: Header, sink: Sink) -> None:
        self._read(lambda: self._engine.store.load(header.id), lambda loaded: self._shown(loaded, header, sink), sink)

    def _shown(self, loaded: Loaded | None, header: Header, sink: Sink) -> None:
        stored = info_of_header(header) if loaded is None else info(restored(loaded))
        sink.reply(self._engine.overlay(header.agent, header.id, stored))

    def _await(self, header: Header, sink: Sink) -> None:
        """Register first and look then: whatever settles meanwhile is told by one of the two."""
        hub = self._engine.hub
        hub.wait(header.id, sink)

        def answered(loaded: Loaded | None) -> None:
            shown = self._engine.overlay(
                header.agent, header.id, info(restored(loaded)) if loaded else info_of_header(header)
            )
            if shown.status in _SETTLED and hub.unwait(header.id, sink):
                sink.reply(shown)

        self._read(lambda: self._engine.store.load(header.id), answered, sink)

    def _list(self, request: m.ListInvocations, sink: Sink) -> None:
        limit = max(1, min(request.limit, 10_000))
        # Resting is derived: in the store these are running.
        status = "running" if request.status == "recovery_required" else request.status

        def answered(headers: list[Header]) -> None:
            shown = [self._engine.overlay(each.agent, each.id, info_of_header(each)) for each in headers]
            if request.status is not None:
                shown = [each for each in shown if each.status == request.status]
            sink.reply(m.InvocationList(shown[:limit]))

        self._read(
            lambda: self._engine.store.headers(
                agent=request.agent, status=status, session=request.session, limit=limit
            ),
            answered,
            sink,
        )

    def _tasks(self, header: Header, after: str, sink: Sink) -> None:
        def answered(found: list[m.TaskInfo]) -> None:
            sink.reply(_page(found, after, self._page_bytes))

        self._read(lambda: self._read_tasks(header.id), answered, sink)

    def _journal(self, header: Header, request: m.ReadJournal, sink: Sink) -> None:
        id, records = header.id, self._engine.store.records
        self._read(lambda: journal_page(id, records(id, 1), request.first, self._page_bytes), sink.reply, sink)

    def _read_tasks(self, id: bytes) -> list[m.TaskInfo]:
        return tasks(id, (record for _, record in self._engine.store.records(id, 1)))

    # ---- act -------------------------------------------------------------------------------------------------------

    def _recover(self, request: m.Recover, sink: Sink) -> None:
        agent = self._agent(request.agent, request, sink)
        if agent is None:
            return
        coordinator = agent.coordinator
        effects, touched = coordinator.recover(request.changed, now())
        self._engine.perform(request.agent, effects)
        again = [each for each in touched if request.changed == "restart" and each.status == "cancelled"]
        fresh = [self._restart(agent, each) for each in again]
        shown = [coordinator.overlay(each.id, info(each)) for each in touched]
        self._when_all_durable([*(each.id for each in touched), *fresh], m.InvocationList(shown), sink)

    def _restart(self, agent: Agent, old: Invocation) -> bytes:
        """Begin a dropped invocation anew, under a new name; one commit holds both. Returns the new id."""
        id = self._ids.new(clock.unix_ms())
        fresh = Invocation(
            id=id,
            name=id.hex(),
            agent=old.agent,
            version=agent.coordinator.manifest.version,
            session=f"~{id.hex()}" if old.own_session else old.session,
            own_session=old.own_session,
            stream=old.stream,
            key=None,
            digest=old.digest,
            created_at=clock.wall(),
            restarted_from=old.name,
            input=old.input,
        )
        self._engine.open.add(id)
        effects = agent.coordinator.run(fresh, None, queue=True, token=None, now=now())
        for effect in effects:
            if isinstance(effect, Persist) and effect.subject is fresh:
                effect.hold, effect.mate = False, old.id
        self._engine.perform(old.agent, effects)
        return id

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

    def _cancel(self, request: m.Cancel, sink: Sink) -> None:
        live = self._engine.locate(request.invocation_id)
        if live is not None:
            agent, invocation = live
            self._engine.perform(
                invocation.agent, agent.coordinator.cancel(invocation.id, "cancelled by a client", sink, now())
            )
            return

        def found(header: Header) -> None:
            if header.agent not in self._engine.agents and self._engine.apps_pending:
                self._parked.append((request, sink))
            elif header.id in self._engine.open and header.agent not in self._engine.agents:
                raise Refusal(failure("unknown_agent", f"no app defines agent {header.agent!r}"))
            else:
                self._engine.committer.barrier(header.id, [Call(lambda: self._show(header, sink))])

        self._with_invocation(request.invocation_id, sink, found)

    def _reconcile(self, request: m.Reconcile, sink: Sink) -> None:
        if isinstance(request.result, m.Value) + (request.error is not None) + request.retry != 1:
            raise Refusal(failure("invalid_options", "reconcile needs exactly one of result, error and retry"))
        execution = parse_execution_id(request.task_id)
        if execution is None:
            raise Refusal(
                failure("unknown_task", f"{request.task_id!r} is no task id", hint="hayata show ID lists them")
            )
        live = self._engine.locate(request.invocation_id)
        if live is None and self._engine.apps_pending:
            self._parked.append((request, sink))
            return
        task = None
        if live is not None and live[1].id == execution.invocation:
            task = live[0].coordinator.uncertain_task(live[1].id, execution.step, execution.attempt)
        if live is None or task is None:
            self._with_invocation(
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
            task = live[0].coordinator.uncertain_task(live[1].id, execution.step, execution.attempt)
        if live is None or task is None:
            self._with_invocation(
                request.invocation_id, sink, lambda header: self._not_uncertain(header, request, sink)
            )
            return
        agent, invocation = live
        merge = {} if update is None or invocation.parallel else relevant(update, agent.coordinator.manifest.merge)
        error = None
        if request.error is not None:
            error = failure("reconciled", request.error, by=request.by)
        fact = f.Reconciled(
            execution.step, execution.attempt, task.node, request.by, request.request_id, update, merge, error
        )
        try:
            effects = agent.coordinator.reconcile(invocation.id, fact, now())
        except MergeRefused as refused:
            raise Refusal(failure("invalid_state", str(refused), path=refused.path)) from None
        self._engine.perform(invocation.agent, effects)

        def durable() -> None:
            self._with_invocation(
                request.invocation_id, sink, lambda header: self._reply_task(header, request.task_id, sink)
            )

        self._engine.committer.barrier(invocation.id, [Call(durable)])

    def _reply_task(self, header: Header, task_id: str, sink: Sink) -> None:
        def answered(found: list[m.TaskInfo]) -> None:
            sink.reply(next(task for task in found if task.id == task_id))

        self._read(lambda: self._read_tasks(header.id), answered, sink)

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

        self._read(lambda: self._read_tasks(header.id), answered, sink)


_SETTLED = f.TERMINAL | {"uncertain", "recovery_required"}


def _check_same(fresh: Invocation, agent: str, digest: bytes, name: str, code: str) -> None:
    if agent != fresh.agent or digest != fresh.digest:
        what = f"key {fresh.key!r}" if code == "key_reused" else f"id {fresh.name!r}"
        raise Refusal(failure(code, f"{what} belongs to {name}, which has another input or agent", invocation_id=name))


def _page(found: list[m.TaskInfo], after: str, page_bytes: int) -> m.TaskList:
    """The tasks behind ``after``, as many as fit, one at least."""
    first = next((index + 1 for index, task in enumerate(found) if task.id == after), 0)
    end, size = first, 0
    while end < len(found):
        size += _size(found[end])
        if size > page_bytes and end > first:
            break
        end += 1
    return m.TaskList(found[first:end], more=end < len(found))


def _size(task: m.TaskInfo) -> int:
    """About how many bytes it takes in a message."""
    size = _TASK_BYTES + sum(memoryview(value).nbytes for value in (task.update or {}).values())
    return size if task.error is None else size + len(task.error.message) + memoryview(task.error.details).nbytes


def _reply(sink: Sink, answer: m.Answer) -> Call:
    return Call(lambda: sink.reply(answer))
