"""The tree of workers as the engine holds it."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping

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
    ProcessInfo,
    TaskOrder,
    encode,
)
from hayata_supervisor.process.reactor import Callback, Reactor
from hayata_supervisor.process.vigil import Vigil
from hayata_supervisor.process.watcher import EdgeWatcher
from hayata_supervisor.tree.agent_group import AgentGroup
from hayata_supervisor.tree.agent_link import AgentLink
from hayata_supervisor.tree.forkserver_link import App, ForkserverLink
from hayata_supervisor.tree.graveyard import Graveyard
from hayata_supervisor.tree.node_link import NodeLink
from hayata_supervisor.tree.port import Log, WorkerListener, failure
from hayata_supervisor.tree.worker_link import Ground, WorkerLink

VALUE_INDEX = -1
"""Index and launch index of the app that came by value."""

VALUE_REFERENCE = "<value>"

LOOK_S = 0.25
"""How long a node may take to say what its edges do; a tree is shown without that of one that hangs."""


class _Agent:
    """One agent's links, and the app that it came from."""

    def __init__(self, ground: Ground, forkserver: ForkserverLink, manifest: AgentManifest) -> None:
        self.forkserver = forkserver
        self.manifest = manifest
        self.group = AgentGroup(ground, manifest.id)
        self.worker = AgentLink(ground, forkserver, self.group, manifest)
        self.nodes: dict[str, NodeLink] = {}
        self.stopping = False

    @property
    def links(self) -> list[WorkerLink]:
        return [self.worker, *self.nodes.values()]


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
    """

    def __init__(
        self,
        reactor: Reactor,
        launch: Launch,
        launch_fd: int,
        listener: WorkerListener,
        log: Log,
        environ: Mapping[str, str],
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
        self._agents: dict[str, _Agent] = {}
        self._next_index = len(launch.apps)
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
        link = self._forkservers[app.index] = ForkserverLink(self._ground, app, self)
        self._ground.reactor.call_soon(link.start)

    def loaded(self, link: ForkserverLink, manifests: list[AgentManifest]) -> ErrorInfo | None:
        """Tell the listener, and start what does not run yet. Called by the forkserver's link."""
        manifests = [manifest for manifest in manifests if manifest.id not in link.stopped_agents]
        for manifest in manifests:
            other = self._agents.get(manifest.id)
            if other is not None and other.stopping:
                return failure(
                    "agent_start_failed",
                    f"agent {manifest.id!r} is still being stopped",
                    hint="try again in a moment",
                    agent=manifest.id,
                )
            if other is not None and other.forkserver is not link:
                owner = other.forkserver.app.reference
                return failure(
                    "invalid_definition",
                    f"agent {manifest.id!r} of {link.app.reference} is defined by {owner} too",
                    hint="give one of them another id, or stop the other one first",
                    agent=manifest.id,
                )
        agents = [self._take(link, manifest) for manifest in manifests]
        self._ground.listener.app_loaded(link.app.index, link.app.reference, manifests)
        for agent in agents:
            if not (agent.stopping or self._stopping):  # the listener may have stopped it
                agent.group.define(agent.manifest, agent.links)
        return None

    def _take(self, link: ForkserverLink, manifest: AgentManifest) -> _Agent:
        """Note an agent's definition. A node that is gone keeps its worker: tasks of the old definition may still be
        its.
        """
        agent = self._agents.get(manifest.id)
        if agent is None:
            agent = self._agents[manifest.id] = _Agent(self._ground, link, manifest)
        agent.manifest = manifest
        for node in manifest.nodes:
            if node.name in agent.nodes:
                agent.nodes[node.name].manifest = node
            else:
                agent.nodes[node.name] = NodeLink(self._ground, link, agent.group, manifest, node)
        return agent

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
        else:
            agent.worker.ask(request)

    def dispatch(self, agent_id: str, node: str, task: TaskOrder) -> None:
        """Run a task, now or when the node's worker is up; the listener hears its end, exactly once. Of a
        stopped agent nothing is heard.
        """
        link = self._node(agent_id, node)
        if link is None:
            self._ground.log.warning("task for a node that does not run", agent=agent_id, node=node)
        else:
            link.dispatch(task)

    def kill(self, agent_id: str, node: str, execution_id: str, reason: str) -> None:
        """End a task. Its report follows, and is a result if that was already on its way. Harmless for one
        that has ended.
        """
        link = self._node(agent_id, node)
        if link is not None:
            link.kill(execution_id, reason)

    def ack_partial(self, agent_id: str, node: str, ack: PartialAck) -> None:
        """Answer a chunk. Harmless when its task has ended."""
        link = self._node(agent_id, node)
        if link is not None:
            link.ack_partial(ack)

    def _node(self, agent_id: str, node: str) -> NodeLink | None:
        agent = self._agents.get(agent_id)
        return agent.nodes.get(node) if agent is not None else None

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
        forkserver = agent.forkserver
        forkserver.stopped_agents.add(agent_id)

        def workers_stopped() -> None:
            self._agents.pop(agent_id, None)
            if any(other.forkserver is forkserver for other in self._agents.values()):
                done()
            else:
                forkserver.stop(forkserver_stopped)

        def forkserver_stopped() -> None:
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
        for agent in self._agents.values():
            agent.group.stop()
        links = [part for agent in self._agents.values() for part in agent.links]
        waiting = 1 + len(self._forkservers)

        def one_less() -> None:
            nonlocal waiting
            waiting -= 1
            if waiting == 0:
                self._ground.graveyard.sweep(lambda: self._all_stopped(done))

        for forkserver in list(self._forkservers.values()):
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
            asked += sum(node.look(one_less) for node in agent.nodes.values())
        one_less()

    @property
    def restarts(self) -> int:
        """How often a worker was started again."""
        workers = sum(link.restarts for agent in self._agents.values() for link in agent.links)
        return workers + sum(link.restarts for link in self._forkservers.values())

    def tree(self) -> list[ProcessInfo]:
        """Describe forkservers, agent workers, and node workers with their edges."""
        links = [part for agent in self._agents.values() for part in agent.links]
        return [link.info() for link in self._forkservers.values()] + [link.info() for link in links]


def _nothing() -> None:
    """Nobody waits."""
