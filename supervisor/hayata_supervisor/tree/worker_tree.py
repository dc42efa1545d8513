"""The tree of workers as the engine holds it."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping

import msgspec

from hayata.errors import error_for
from hayata.memfd import sealed_memfd
from hayata.messages import (
    AgentManifest,
    CheckUpdate,
    ErrorInfo,
    Evaluate,
    Launch,
    PartialAck,
    PolicyFailed,
    ProcessInfo,
    ReloadedAgent,
    TaskInterrupted,
    TaskOrder,
    UpdateChecked,
    encode,
)
from hayata_supervisor.process.reactor import Callback, Reactor
from hayata_supervisor.process.vigil import Vigil
from hayata_supervisor.process.watcher import EdgeWatcher
from hayata_supervisor.tree.agent_parts import AgentParts
from hayata_supervisor.tree.forkserver_link import App, ForkserverLink
from hayata_supervisor.tree.graveyard import Graveyard
from hayata_supervisor.tree.node_link import NodeLink
from hayata_supervisor.tree.port import Log, WorkerListener, failure
from hayata_supervisor.tree.reloading import Answered, Loaded, Reloading, clash, compared
from hayata_supervisor.tree.worker_link import Ground, WorkerLink

VALUE_INDEX = -1
"""Index and launch index of the app that came by value."""

VALUE_REFERENCE = "<value>"

LOOK_S = 0.25
"""How long a node may take to say what its edges do; a tree is shown without that of one that hangs."""


class WorkerTree:
    """Starts, feeds, watches, replaces and ends all workers. All methods are for the loop's thread, and
    return at once.

    The process must be a subreaper, and this its main thread: the workers die with it.

    Args:
        reactor: The loop.
        launch: What the runtime was started with.
        launch_fd: The memory file that ``launch`` came from, for the forkservers.
        listener: Hears everything.
        log: Where to write.
        environ: The forkservers' whole environment.
        reloading: Hears when a reload begins (True), and when none is under way or waits.
    """

    def __init__(
        self,
        reactor: Reactor,
        launch: Launch,
        launch_fd: int,
        listener: WorkerListener,
        log: Log,
        environ: Mapping[str, str],
        reloading: Callable[[bool], None] = lambda busy: None,
    ) -> None:
        self._ground = Ground(
            reactor=reactor,
            launch=launch,
            environ=environ,
            listener=listener,
            log=log,
            graveyard=Graveyard(reactor, self._forks_allowed),
            watcher=EdgeWatcher(reactor.call_from_thread),
            vigil=Vigil(reactor, hang_s=launch.hang_timeout_s, stopped_s=launch.stopped_timeout_s),
            jitter=random.random,
        )
        self._launch_fd = launch_fd
        self._forkservers: dict[int, ForkserverLink] = {}
        self._leaving: set[ForkserverLink] = set()
        self._agents: dict[str, AgentParts] = {}
        self._reloading = Reloading(self._ground, self, reloading)
        self._next_index = len(launch.apps)
        self._past_restarts = 0  # of workers that are gone
        self._stopping = False

    # Apps

    def start(self) -> None:
        """Start a forkserver for each app of the launch; workers follow as their apps are imported."""
        launch = self._ground.launch
        self._ground.watcher.start()
        for index, reference in enumerate(launch.apps):
            self._add(App(index, reference, self._launch_fd, index, (), keep=True))
        if launch.value_fd is not None:
            self._add(App(VALUE_INDEX, VALUE_REFERENCE, self._launch_fd, VALUE_INDEX, (launch.value_fd,), keep=True))

    def load_app(self, reference: str) -> int:
        """Import one more app; the listener hears `app_loaded` or, with nothing left of it, `app_failed`.

        Returns:
            The app's index.

        Raises:
            OSError: No descriptors are left.
            Unavailable: The tree is being stopped.
        """
        if self._stopping:
            raise error_for("daemon_unavailable", "the daemon is stopping")
        launch = msgspec.structs.replace(self._ground.launch, apps=[reference], value_fd=None)
        index, self._next_index = self._next_index, self._next_index + 1
        fd = sealed_memfd("hayata-launch", encode(launch))
        self._add(App(index, reference, fd, 0, (), keep=False))
        return index

    def _add(self, app: App) -> None:
        generation = self._reloading.generation
        link = self._forkservers[app.index] = ForkserverLink(self._ground, app, self, generation)
        self._ground.reactor.call_soon(link.start)

    def loaded(self, link: ForkserverLink, manifests: list[AgentManifest], changed: bool) -> ErrorInfo | None:
        """Tell the listener, and start what does not run yet. Called by the forkserver's link."""
        refused = self.clash([(link, manifests)])
        if refused is not None:
            return refused
        if changed:
            link.generation = self._reloading.replaced()
            self._ground.log.warning("app has changed, reloaded", app=link.app.reference, generation=link.generation)
            self.switch([(link, manifests)])
            return None
        link, manifests = self._wanted(link, manifests)
        fresh = [self._switched(link, manifest) for manifest in manifests if not self._runs(manifest.id)]
        self._ground.listener.app_loaded(link.app.index, link.app.reference, manifests)
        self._start(fresh)
        return None

    def _runs(self, agent_id: str) -> bool:
        return agent_id in self._agents and self._agents[agent_id].worker is not None

    def _start(self, agents: list[AgentParts]) -> None:
        if not self._stopping:  # the listener may have stopped everything
            for parts in agents:
                parts.start()

    def _switched(self, link: ForkserverLink, manifest: AgentManifest) -> AgentParts:
        """The agent, with workers of the forkserver's generation, not started."""
        parts = self._agents.get(manifest.id)
        if parts is None:
            parts = AgentParts(self._ground, link, manifest, lambda ended: self._left(manifest.id, ended))
            self._agents[manifest.id] = parts
        parts.switch(link, manifest)
        return parts

    def _left(self, agent_id: str, link: WorkerLink) -> None:
        """A worker of an older generation has ended."""
        self._past_restarts += link.restarts
        parts = self._agents.get(agent_id)
        if parts is not None and parts.worker is None and not parts.leaving and not parts.stopping:
            del self._agents[agent_id]
        self._ground.reactor.call_soon(self._reloading.look)

    def failed(self, link: ForkserverLink, error: ErrorInfo) -> None:
        """Tell the listener. Called by the forkserver's link."""
        if link.status == "stopped":
            self._drop(link)
        self._ground.listener.app_failed(link.app.index, link.app.reference, error)

    def _drop(self, link: ForkserverLink) -> None:
        """Forget an app that has no process any more."""
        self._forkservers.pop(link.app.index, None)
        if link.app.launch_fd != self._launch_fd:
            os.close(link.app.launch_fd)

    def _forks_allowed(self) -> None:
        for link in self._forkservers.values():
            link.pump()

    # Reloads

    def reload(self, answered: Answered) -> None:
        """Load all apps anew; ``answered`` gets what came of it, or why nothing did."""
        self._reloading.ask(answered)

    def open_reloads(self) -> None:
        """The apps of the launch are loaded or given up: reloads may begin."""
        self._reloading.open()

    def close_reloads(self) -> None:
        """Begin none any more, and give up the one under way."""
        self._reloading.close()

    def apps(self) -> list[App]:
        """What is loaded."""
        return [link.app for link in self._forkservers.values() if link.status not in ("stopping", "stopped")]

    def clash(self, loaded: list[Loaded]) -> ErrorInfo | None:
        """Say why these can't serve together with the others."""
        return clash([self._wanted(link, manifests) for link, manifests in loaded], self._agents)

    def _wanted(self, link: ForkserverLink, manifests: list[AgentManifest]) -> Loaded:
        """Without the agents that somebody has stopped."""
        stopped = self._forkservers.get(link.app.index, link).stopped_agents | link.stopped_agents
        return link, [each for each in manifests if each.id not in stopped]

    def switch(self, loaded: list[Loaded]) -> list[ReloadedAgent]:
        """Have these forkservers take over for their apps: their workers, and their definitions at the listener."""
        loaded = [self._wanted(link, manifests) for link, manifests in loaded]
        outcomes = compared(loaded, self._agents)
        gone = [each.id for each in outcomes if each.outcome == "gone"]
        for link, _ in loaded:
            self._take_over(link)
        for id in gone:
            for check in self._agents[id].retire():
                self._refuse(id, check)
        started = [self._switched(link, manifest) for link, manifests in loaded for manifest in manifests]
        self._ground.listener.apps_switched([(link.app.reference, manifests) for link, manifests in loaded], gone)
        self._start(started)
        return outcomes

    def _take_over(self, link: ForkserverLink) -> None:
        old = self._forkservers[link.app.index]
        if old is link:
            return
        link.stopped_agents |= old.stopped_agents
        link.apps = self
        self._forkservers[link.app.index] = link
        for parts in self._agents.values():
            if parts.forkserver is old:
                parts.forkserver = link
        self.leave(old)

    def leave(self, link: ForkserverLink) -> None:
        """End a forkserver that nobody wants; its app stays."""
        self._leaving.add(link)
        self._past_restarts += link.restarts
        link.stop(lambda: self._leaving.discard(link))

    @property
    def drains(self) -> bool:
        """Whether a worker of an older generation lives."""
        return any(parts.leaving for parts in self._agents.values())

    # Work

    def evaluate(self, agent_id: str, request: Evaluate) -> None:
        """Ask an agent's policy; the listener hears one `agent_answered`. Of a stopped agent nothing is
        heard.
        """
        self._ask(agent_id, request)

    def check_update(self, agent_id: str, request: CheckUpdate) -> None:
        """Ask whether an update could be a node's result; answered like `evaluate`."""
        self._ask(agent_id, request)

    def _ask(self, agent_id: str, request: Evaluate | CheckUpdate) -> None:
        agent = self._agents.get(agent_id)
        if agent is None:
            self._ground.log.warning("question to an agent that does not run", agent=agent_id)
        elif agent.worker is None:
            self._refuse(agent_id, request)
        else:
            agent.worker.ask(request)

    def _refuse(self, agent_id: str, request: Evaluate | CheckUpdate) -> None:
        error = failure("unknown_agent", f"its app does not define agent {agent_id!r} any more")
        answer: PolicyFailed | UpdateChecked
        if isinstance(request, Evaluate):
            answer = PolicyFailed(request.evaluation, error)
        else:
            answer = UpdateChecked(request.check, None, error)
        self._ground.reactor.call_soon(lambda: self._ground.listener.agent_answered(agent_id, answer))

    def dispatch(self, agent_id: str, node: str, task: TaskOrder) -> None:
        """Run a task, now or when the node's worker is up; the listener hears its end, exactly once. Of a
        stopped agent nothing is heard.
        """
        agent = self._agents.get(agent_id)
        if agent is None:
            self._ground.log.warning("task for a node that does not run", agent=agent_id, node=node)
        elif node in agent.nodes:
            agent.nodes[node].dispatch(task)
        else:
            error = failure("unknown_node", f"agent {agent_id!r} has no node {node!r} any more")
            report = TaskInterrupted(task.execution_id, "", error, started=False)
            self._ground.reactor.call_soon(lambda: self._ground.listener.task_reported(agent_id, node, report))

    def kill(self, agent_id: str, node: str, execution_id: str, reason: str) -> None:
        """End a task. Its report follows, and is a result if that was already on its way. Harmless for one
        that has ended.
        """
        link = self._node(agent_id, node, execution_id)
        if link is not None:
            link.kill(execution_id, reason)

    def ack_partial(self, agent_id: str, node: str, ack: PartialAck) -> None:
        """Answer a chunk. Harmless when its task has ended."""
        link = self._node(agent_id, node, ack.execution_id)
        if link is not None:
            link.ack_partial(ack)

    def _node(self, agent_id: str, node: str, execution_id: str) -> NodeLink | None:
        agent = self._agents.get(agent_id)
        return agent.node_of(node, execution_id) if agent is not None else None

    # End

    def stop_agent(self, agent_id: str, stopped: Callback | None = None) -> None:
        """End an agent's workers, and its app's forkserver with the last of its agents. What they were busy
        with is not reported.

        Args:
            agent_id: The agent; one that does not run is stopped already.
            stopped: Called when nothing of them lives.
        """
        agent = self._agents.get(agent_id)
        done = stopped or _nothing
        if agent is None:
            self._ground.reactor.call_soon(done)
            return
        agent.stopping = True
        agent.group.stop()
        agent.forkserver.stopped_agents.add(agent_id)

        def workers_stopped() -> None:
            self._agents.pop(agent_id, None)
            self._reloading.look()
            forkserver = agent.forkserver  # a reload may have put another one in its place
            if any(other.forkserver is forkserver and other.worker is not None for other in self._agents.values()):
                done()
                return
            self._reloading.without(forkserver.app.index)
            forkserver.stop(lambda: forkserver_stopped(forkserver))

        def forkserver_stopped(forkserver: ForkserverLink) -> None:
            self._drop(forkserver)
            done()

        self._stop_links(agent.links, drain=True, done=workers_stopped)

    def stop(self, drain: bool, done: Callback) -> None:
        """End everything, for good.

        Args:
            drain: Let workers end what they have in hand, within their grace; else they are killed at once.
            done: Called when no descendant of this process is left, and no descriptor of the tree is open.
        """
        self._stopping = True
        self._reloading.close()
        for agent in self._agents.values():
            agent.group.stop()
        links = [part for agent in self._agents.values() for part in agent.links]
        forkservers = [*self._forkservers.values(), *self._leaving]
        waiting = 1 + len(forkservers)

        def one_less() -> None:
            nonlocal waiting
            waiting -= 1
            if waiting == 0:
                self._ground.graveyard.sweep(lambda: self._all_stopped(done))

        for forkserver in forkservers:
            forkserver.stop(one_less)
        self._stop_links(links, drain=drain, done=one_less)

    @property
    def longest_grace_s(self) -> float:
        """Most seconds that a worker may take to end after `stop` with ``drain``."""
        return max((link.grace_s for agent in self._agents.values() for link in agent.links), default=0.0)

    def hurry(self) -> None:
        """Kill what a `stop` that is under way still gives time."""
        for agent in self._agents.values():
            for link in agent.links:
                link.stop(_nothing, 0.0)

    def _all_stopped(self, done: Callback) -> None:
        self._ground.watcher.stop()
        for forkserver in list(self._forkservers.values()):
            self._drop(forkserver)
        self._agents.clear()
        done()

    def _stop_links(self, links: list[WorkerLink], *, drain: bool, done: Callback) -> None:
        waiting = len(links)

        def one_less() -> None:
            nonlocal waiting
            waiting -= 1
            if waiting == 0:
                done()

        for link in links:
            link.stop(one_less, link.grace_s if drain else 0.0)
        if not links:
            self._ground.reactor.call_soon(done)

    # Children

    def children_changed(self) -> None:
        """SIGCHLD has come: a worker may have been stopped, or goes on."""
        self._ground.vigil.children_changed()

    def spare(self, pid: int) -> None:
        """Let a child live that is no worker, from its birth on; whoever started it reaps it."""
        self._ground.graveyard.register(pid)

    def forget(self, pid: int) -> None:
        """That child has been reaped."""
        self._ground.graveyard.strike_out(pid)

    # Description

    def look(self, looked: Callback) -> None:
        """Ask the nodes what their edges have; call ``looked`` when all have said so, or one takes too long."""
        asked = 1

        def one_less() -> None:
            nonlocal asked
            asked -= 1
            if asked == 0:
                timer.cancel()
                looked()

        def too_late() -> None:
            nonlocal asked
            asked = -1
            looked()

        timer = self._ground.reactor.call_later(LOOK_S, too_late)
        for agent in self._agents.values():
            asked += sum(link.look(one_less) for link in agent.links if isinstance(link, NodeLink))
        one_less()

    @property
    def restarts(self) -> int:
        """How often a worker was started again."""
        workers = sum(link.restarts for agent in self._agents.values() for link in agent.links)
        return self._past_restarts + workers + sum(link.restarts for link in self._forkservers.values())

    def tree(self) -> list[ProcessInfo]:
        """Describe forkservers, agent workers, and node workers with their edges."""
        links = [part for agent in self._agents.values() for part in agent.links]
        return [link.info() for link in self._forkservers.values()] + [link.info() for link in links]


def _nothing() -> None:
    """Nobody waits."""
