"""The shell around the coordinators: carries effects out, and turns what workers say into events.

Everything here runs in the loop's thread and waits for nothing. One coordinator for each agent that an app defines;
open invocations whose agent no app defines rest in `unclaimed` until one does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Protocol

import msgspec

from hayata.errors import HayataError
from hayata.messages import (
    AgentManifest,
    CheckUpdate,
    ErrorInfo,
    Evaluate,
    EventInfo,
    InvocationInfo,
    Partial,
    PartialAck,
    PolicyFailed,
    ProcessInfo,
    Refused,
    SubstepDone,
    TaskInterrupted,
    TaskOrder,
    UpdateChecked,
)
from hayata_supervisor import failpoints
from hayata_supervisor.committer import Committer
from hayata_supervisor.core.cells import Cells
from hayata_supervisor.core.coordinator import Coordinator, Now
from hayata_supervisor.core.effects import (
    Acknowledge,
    AskPolicy,
    Barrier,
    Call,
    Dispatch,
    Effect,
    Kill,
    Persist,
    Publish,
    PublishPartial,
    Ready,
    Reply,
    Settled,
    Warn,
)
from hayata_supervisor.core.facts import TERMINAL
from hayata_supervisor.core.invocation import Invocation, info
from hayata_supervisor.core.views import events
from hayata_supervisor.hub import PAGE, Hub
from hayata_supervisor.memories import Memories
from hayata_supervisor.process import clock
from hayata_supervisor.process.background import Background
from hayata_supervisor.process.reactor import Reactor, Timer
from hayata_supervisor.process.start_notes import StartNotes
from hayata_supervisor.store.interface import Header, Loaded, OutOfOrder, Refusal, Store, Taken, Unstorable
from hayata_supervisor.stored import info_of_header, restored
from hayata_supervisor.tree.port import AgentAnswer, Log, TaskReport, failure

_LOOK_S = 0.02


class Workers(Protocol):
    """The processes, as the engine sees them; `tree.WorkerTree` runs them, `inline` calls them in place."""

    def evaluate(self, agent_id: str, request: Evaluate) -> None:
        """Ask the policy."""

    def check_update(self, agent_id: str, request: CheckUpdate) -> None:
        """Ask whether an update fits."""

    def dispatch(self, agent_id: str, node: str, task: TaskOrder) -> None:
        """Run a task."""

    def kill(self, agent_id: str, node: str, execution_id: str, reason: str) -> None:
        """End a task."""

    def ack_partial(self, agent_id: str, node: str, ack: PartialAck) -> None:
        """Answer a chunk."""

    def load_app(self, reference: str) -> int:
        """Start to load one more app; returns its index."""

    def stop_agent(self, agent_id: str, stopped: Callable[[], None]) -> None:
        """End an agent's workers; ``stopped`` is called when none of them lives."""

    def tree(self) -> list[ProcessInfo]:
        """What runs."""


class Agent:
    """One agent that an app defines.

    ``status``: serving, failed, stopped, or gone: its app does not define it any more.
    """

    def __init__(self, app: str, coordinator: Coordinator) -> None:
        self.app = app
        self.coordinator = coordinator
        self.status = "serving"
        self.error: ErrorInfo | None = None


class Engine:
    """See the module. Implements `tree.port.WorkerListener`; ``workers`` is set before the first event.

    Args:
        app_events: Hears that an app was loaded (error None) or could not be: (index, reference, error).
        broken: Ends the process: the outcome of a commit is unknown.
    """

    workers: Workers

    def __init__(
        self,
        reactor: Reactor,
        store: Store,
        log: Log,
        *,
        writer: Background,
        reader: Background,
        notes: StartNotes,
        app_events: Callable[[int, str, ErrorInfo | None], None],
        broken: Callable[[BaseException], None],
    ) -> None:
        self.reactor = reactor
        self.store = store
        self.log = log
        self.reader = reader
        self.writer = writer
        self.broken = broken
        self.committer = Committer(
            reactor, store, writer, perform=self._perform_durable, refused=self._refused, broken=broken
        )
        self.hub = Hub(self._page, self._is_open)
        self.agents: dict[str, Agent] = {}
        self.unclaimed: dict[str, dict[bytes, Invocation]] = {}
        self.lost_apps: dict[str, ErrorInfo] = {}
        self.open: set[bytes] = set()
        self._cells = Cells(clear=notes.clear)
        self._notes = notes
        self._memories: dict[bytes, bytes | None] = {}
        self.memories = Memories()
        self._app_events = app_events
        self.reports: Counter[type] = Counter()
        self.invocations_ended = 0
        self._checks: dict[int, Callable[[UpdateChecked], None]] = {}
        self._timer: Timer | None = None
        self._timer_due = float("inf")
        self.draining = False
        self.apps_pending = True

    # ---- start -----------------------------------------------------------------------------------------------------

    def load(self, loaded: Iterable[Loaded]) -> int:
        """Take open invocations from the store, oldest first, for the agents to adopt. Returns how many."""
        count = 0
        for each in loaded:
            invocation = restored(each)
            self.unclaimed.setdefault(invocation.agent, {})[invocation.id] = invocation
            self._memories[invocation.id] = each.memory
            self.open.add(invocation.id)
            for task in invocation.tasks:
                if task.status == "running":
                    self._cells.hold(task.cell)
            count += 1
        return count

    # ---- workers say -----------------------------------------------------------------------------------------------

    def app_loaded(self, index: int, reference: str, manifests: list[AgentManifest]) -> None:
        """An app's definitions are here: adopt and recover what waits for its agents."""
        stopped = [each for each in manifests if each.id in self.agents and self.agents[each.id].status == "stopped"]
        if stopped:
            self._reopen(stopped, lambda: self.app_loaded(index, reference, manifests))
            return
        for manifest in manifests:
            agent = self.agents.get(manifest.id)
            if agent is None or agent.status == "gone":
                self._switch(reference, manifest)
            elif agent.status == "serving":
                agent.error = None
        self.lost_apps.pop(reference, None)
        self._app_events(index, reference, None)

    def _adopt(self, reference: str, manifest: AgentManifest) -> None:
        self.agents[manifest.id] = agent = Agent(reference, Coordinator(manifest, self._cells, self._notes.began))
        for invocation in self.unclaimed.pop(manifest.id, {}).values():
            agent.coordinator.adopt(invocation, self._memories.pop(invocation.id, None))
            if invocation.status == "uncertain":
                self.hub.rests(invocation.id)
        if self.draining:
            agent.coordinator.drain()
        else:
            failpoints.hit("engine.before_begin")
            self.perform(manifest.id, agent.coordinator.begin(self.now()))
            failpoints.hit("engine.after_begin")

    def apps_switched(self, loaded: list[tuple[str, list[AgentManifest]]], gone: list[str]) -> None:
        """Another generation serves: go on with its definitions, and let rest what it has none for."""
        for reference, manifests in loaded:
            self.lost_apps.pop(reference, None)
            for manifest in manifests:
                self._switch(reference, manifest)
        for agent_id in gone:
            agent = self.agents[agent_id]
            error = failure(
                "unknown_agent",
                f"{agent.app} does not define agent {agent_id!r} any more",
                hint="bring it back and reload, or cancel what rests",
            )
            agent.status, agent.error = "gone", error
            self.perform(agent_id, agent.coordinator.retire(error, self.now()))

    def _switch(self, reference: str, manifest: AgentManifest) -> None:
        agent = self.agents.get(manifest.id)
        if agent is None:
            self._adopt(reference, manifest)
        elif agent.status == "stopped":
            self._reopen([manifest], lambda: self._adopt(reference, manifest))
        else:
            agent.app, agent.status, agent.error = reference, "serving", None
            self.perform(manifest.id, agent.coordinator.take_manifest(manifest, self.now()))

    def _reopen(self, manifests: list[AgentManifest], reopened: Callable[[], None]) -> None:
        """Agents that were stopped are wanted again: what they had open is read anew, as after a restart."""
        ids = {each.id: list(self.agents[each.id].coordinator.invocations) for each in manifests}

        if not self.committer.idle:
            self.reactor.call_later(_LOOK_S, lambda: self._reopen(manifests, reopened))
            return

        def read() -> list[Loaded | None]:
            return [self.store.load(id) for each in ids.values() for id in each]

        def take(found: list[Loaded | None]) -> None:
            for agent_id in ids:
                del self.agents[agent_id]
            self.load(each for each in found if each is not None and each.header.status not in TERMINAL)
            reopened()

        self.reader.submit(read, take, self.broken)

    def apps_ready(self) -> None:
        """All apps of the launch are loaded or given up: what no app has claimed rests, and those who wait hear it."""
        self.apps_pending = False
        for agent_id, invocations in self.unclaimed.items():
            for invocation in invocations.values():
                shown = self.overlay(agent_id, invocation.id, info(invocation))
                self.hub.settled(invocation.id, shown, terminal=False)

    def app_lost(self, reference: str, error: ErrorInfo) -> None:
        """An app of the launch can't be imported, and nobody knows which agents it defined; it is tried again."""
        self.lost_apps[reference] = error

    def why_missing(self, agent_id: str) -> ErrorInfo:
        """Why there is no such agent: its app may be one that can't be imported."""
        if not self.lost_apps:
            return ErrorInfo("unknown_agent", f"no app defines agent {agent_id!r}", "start the daemon with its app")
        [(reference, first), *others] = self.lost_apps.items()
        if not others:
            return first
        also = ", ".join(name for name, _ in others)
        return msgspec.structs.replace(first, message=f"{reference}: {first.message}; nor can be loaded: {also}")

    def app_failed(self, index: int, reference: str, error: ErrorInfo) -> None:
        """An app can't be imported; what its agents do with workers they have goes on."""
        if reference in self.lost_apps:
            self.lost_apps[reference] = error
        for agent in self.agents.values():
            if agent.app == reference:
                agent.error = error
        self._app_events(index, reference, error)

    def agent_answered(self, agent_id: str, answer: AgentAnswer) -> None:
        """A decision, or the answer to a check."""
        if isinstance(answer, UpdateChecked):
            checked = self._checks.pop(answer.check, None)
            if checked is not None:
                checked(answer)
            return
        self.perform(agent_id, self.agents[agent_id].coordinator.policy_answered(answer, self.now()))

    def task_reported(self, agent_id: str, node: str, report: TaskReport) -> None:
        """The end of a task, or a chunk or a sub-step of it."""
        coordinator = self.agents[agent_id].coordinator
        if isinstance(report, Partial):
            self.perform(agent_id, coordinator.partial(report, self.now()))
        elif isinstance(report, SubstepDone):
            self.perform(agent_id, coordinator.substep_done(report, self.now()))
        elif self.draining and isinstance(report, TaskInterrupted):
            # Drain writes nothing: what it cuts off stays running in the store, and the next start classifies it.
            return
        else:
            self.reports[type(report)] += 1
            self.perform(agent_id, coordinator.reported(report, self.now()))

    def node_given_up(self, agent_id: str, node: str, error: ErrorInfo) -> None:
        """A node does not stay up."""
        self.log.error("node given up", agent=agent_id, node=node, error=error.message)
        self.perform(agent_id, self.agents[agent_id].coordinator.node_given_up(node, error, self.now()))

    def node_stopped(self, agent_id: str, node: str, error: ErrorInfo) -> None:
        """A node has ended, and is not started again."""
        self.log.warning("node stopped", agent=agent_id, node=node, error=error.message)
        self.perform(agent_id, self.agents[agent_id].coordinator.node_stopped(node, error, self.now()))

    def node_back(self, agent_id: str, node: str) -> None:
        """A node is up again."""
        self.log.info("node back", agent=agent_id, node=node)
        self.perform(agent_id, self.agents[agent_id].coordinator.node_back(node, self.now()))

    def agent_given_up(self, agent_id: str, error: ErrorInfo) -> None:
        """An agent worker does not stay up."""
        self.log.error("agent given up", agent=agent_id, error=error.message)
        agent = self.agents[agent_id]
        agent.status, agent.error = "failed", error
        self.perform(agent_id, agent.coordinator.agent_given_up(error, self.now()))

    def agent_back(self, agent_id: str) -> None:
        """An agent worker is up again."""
        self.log.info("agent back", agent=agent_id)
        agent = self.agents[agent_id]
        agent.status, agent.error = "serving", None
        self.perform(agent_id, agent.coordinator.agent_back(self.now()))

    def check(
        self,
        agent_id: str,
        node: str,
        update: msgspec.Raw,
        parallel: bool,
        edge: bool,
        checked: Callable[[UpdateChecked], None],
    ) -> None:
        """Have an agent's worker say whether ``update`` could be the result of ``node``, a branch or an edge of it."""
        number = max(self._checks, default=0) + 1
        self._checks[number] = checked
        self.workers.check_update(agent_id, CheckUpdate(number, node, update, parallel, edge))

    def now(self) -> Now:
        """The time, for an event."""
        return Now(clock.wall(), clock.monotonic(), self._notes.anchor + clock.since_boot())

    # ---- effects ---------------------------------------------------------------------------------------------------

    def perform(self, agent_id: str, effects: list[Effect]) -> None:
        """Carry out a coordinator's effects, and have it called when it is due."""
        self._perform_durable(effects)
        due = self.agents[agent_id].coordinator.next_due()
        if due is not None and due < self._timer_due:
            self._arm(due)

    def _perform_durable(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Persist():
                    self._leave_memory(effect)
                    self.committer.persist(effect)
                case Dispatch():
                    self._dispatch(effect)
                case Ready():
                    agent = self.agents[effect.agent]
                    self._perform_durable(agent.coordinator.ready(effect.execution_id, self.now()))
                case AskPolicy():
                    self._ask(effect)
                case Publish():
                    self.hub.publish(effect)
                case Reply():
                    effect.token.reply(effect.answer)
                case Settled():
                    self._settled(effect)
                case Barrier():
                    self.committer.barrier(effect.invocation, effect.after)
                case Warn():
                    self.log.warning(effect.event, **effect.fields)
                case Call():
                    effect.callback()
                case PublishPartial():
                    self.hub.publish_partial(effect)
                case Acknowledge():
                    self.workers.ack_partial(effect.agent, effect.node, effect.ack)
                case Kill():
                    self.workers.kill(effect.agent, effect.node, effect.execution_id, effect.reason)

    def _leave_memory(self, effect: Persist) -> None:
        """Until the record is durable, the store has an older memory of its session."""
        if effect.memory is not None:
            name, memory = effect.memory
            session = (effect.subject.agent, name)
            self.memories.hold(session)
            self.memories.keep(session, memory)
            effect.after.append(Call(lambda: self.memories.release(session)))

    def _dispatch(self, effect: Dispatch) -> None:
        try:
            self.workers.dispatch(effect.agent, effect.node, effect.task)
        except HayataError as error:  # the frame cap: the state has grown too large to travel
            self._never_ran(effect, ErrorInfo(error.code, error.message, error.hint))

    def _never_ran(self, effect: Dispatch, error: ErrorInfo) -> None:
        report = TaskInterrupted(effect.task.execution_id, "", error, started=False)
        self.reactor.call_soon(lambda: self.task_reported(effect.agent, effect.node, report))

    def _ask(self, effect: AskPolicy) -> None:
        try:
            self.workers.evaluate(effect.agent, effect.request)
        except HayataError as error:
            answer = PolicyFailed(effect.request.evaluation, ErrorInfo(error.code, error.message, error.hint))
            self.reactor.call_soon(lambda: self.agent_answered(effect.agent, answer))

    def _settled(self, effect: Settled) -> None:
        terminal = effect.info.status in TERMINAL
        if terminal:
            self.open.discard(effect.invocation)
            self.invocations_ended += 1
        self.hub.settled(effect.invocation, effect.info, terminal=terminal)

    def _arm(self, due: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_due = due
        self._timer = self.reactor.call_at(due, self._tick)

    def _tick(self) -> None:
        self._timer, self._timer_due = None, float("inf")
        for agent_id, agent in list(self.agents.items()):
            self.perform(agent_id, agent.coordinator.tick(self.now()))

    def _refused(self, persist: Persist, refusal: Refusal | HayataError) -> None:
        """A record isn't stored: its invocation is dropped here, and read from the store anew."""
        subject = persist.subject
        agent = self.agents.get(subject.agent)
        if agent is not None:
            agent.coordinator.forget(subject.id)
        if persist.memory is not None:
            self.memories.lose((subject.agent, persist.memory[0]))
        replies = [effect for effect in persist.after if isinstance(effect, Reply)]
        match refusal:
            case Taken():
                holder = refusal.header
                for reply in replies:
                    self._reply_holder(reply, subject, holder)
            case HayataError():
                self.open.discard(subject.id)
                for reply in replies:
                    reply.token.reply(Refused(ErrorInfo(refusal.code, refusal.message, refusal.hint)))
            case Unstorable():
                for reply in replies:
                    reply.token.reply(Refused(refusal.error))
                self._read_anew(subject)
            case OutOfOrder():
                if persist.number > 1:
                    self._read_anew(subject)

    def _reply_holder(self, reply: Reply, subject: Invocation, holder: Header) -> None:
        self.open.discard(subject.id)
        if holder.agent == subject.agent and holder.digest == subject.digest:
            reply.token.reply(info_of_header(holder))
        else:
            code = "key_reused" if holder.name != subject.name else "invocation_exists"
            reply.token.reply(Refused(failure(code, f"it belongs to invocation {holder.name}")))

    def _read_anew(self, subject: Invocation) -> None:
        self.log.error("record refused, reading the invocation anew", invocation_id=subject.name)

        def take(loaded: Loaded | None) -> None:
            agent = self.agents.get(subject.agent)
            if agent is None or loaded is None or loaded.header.status in TERMINAL:
                return
            if subject.id not in agent.coordinator.invocations:
                agent.coordinator.adopt(restored(loaded), loaded.memory)
                self.perform(subject.agent, agent.coordinator.begin(self.now()))

        self.reader.submit(lambda: self.store.load(subject.id), take, self.broken)

    # ---- reads -----------------------------------------------------------------------------------------------------

    def read_failed(self, error: BaseException) -> None:
        """A read that nobody answers for failed."""
        self.log.error("store read failed", error=str(error))

    def _page(
        self,
        invocation: bytes,
        first_record: int,
        after: int,
        before: int | None,
        answered: Callable[[tuple[list[EventInfo], int]], None],
        failed: Callable[[ErrorInfo], None],
    ) -> None:
        def unread(error: BaseException) -> None:
            self.read_failed(error)
            failed(failure("store_corrupt", f"the store could not be read: {error}"))

        self.reader.submit(
            lambda: events(invocation, self.store.records(invocation, first_record), after, before, PAGE),
            answered,
            unread,
        )

    def _is_open(self, invocation: bytes) -> bool:
        return invocation in self.open

    def locate(self, name: str) -> tuple[Agent, Invocation] | None:
        """The open invocation of that name, among those whose agent is here."""
        for agent in self.agents.values():
            id = agent.coordinator.names.get(name)
            if id is not None:
                return agent, agent.coordinator.invocations[id]
        return None

    def overlay(self, agent_id: str, id: bytes, stored: InvocationInfo) -> InvocationInfo:
        """What is stored of an invocation, with what is derived."""
        agent = self.agents.get(agent_id)
        if agent is not None:
            return agent.coordinator.overlay(id, stored)
        if stored.status in TERMINAL or self.apps_pending:
            return stored  # what it is, is known when its app is loaded
        return msgspec.structs.replace(stored, status="recovery_required", error=self.why_missing(agent_id))

    # ---- end -------------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Start nothing any more."""
        self.draining = True
        for agent in self.agents.values():
            agent.coordinator.drain()

    @property
    def idle(self) -> bool:
        """Whether nothing runs and everything is durable."""
        return self.committer.idle and not any(agent.coordinator.executions.busy for agent in self.agents.values())

    def close(self) -> None:
        """End the threads and give the store back."""
        self.writer.close()
        self.reader.close()
        self.store.close()
