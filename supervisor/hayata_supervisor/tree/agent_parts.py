"""The workers of one agent: those of the generation that serves, and those of older ones that still end something."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from hayata.messages import AgentManifest, CheckUpdate
from hayata_supervisor.tree.agent_group import AgentGroup
from hayata_supervisor.tree.agent_link import AgentLink
from hayata_supervisor.tree.forkserver_link import ForkserverLink
from hayata_supervisor.tree.node_link import NodeLink
from hayata_supervisor.tree.worker_link import Ground, WorkerLink

Left: TypeAlias = Callable[[WorkerLink], None]


class AgentParts:
    """See the module.

    Args:
        ground: What the links stand on.
        left: Called with each link of an older generation when it has ended.

    Attributes:
        group: Decides about restarts of the generation that serves.
        worker: The agent worker; None when the app does not define the agent any more.
        nodes: The node workers.
        leaving: Links of older generations.
        stopping: Whether somebody has stopped the agent.
    """

    def __init__(self, ground: Ground, forkserver: ForkserverLink, manifest: AgentManifest, left: Left) -> None:
        self.forkserver = forkserver
        self.manifest = manifest
        self.group = AgentGroup(ground, manifest.id)
        self.worker: AgentLink | None = None
        self.nodes: dict[str, NodeLink] = {}
        self.leaving: list[WorkerLink] = []
        self.stopping = False
        self._ground = ground
        self._left = left

    @property
    def links(self) -> list[WorkerLink]:
        """All of them, the serving ones first."""
        return [*([self.worker] if self.worker is not None else []), *self.nodes.values(), *self.leaving]

    def switch(self, forkserver: ForkserverLink, manifest: AgentManifest) -> None:
        """Have workers of the forkserver's generation take over; `start` follows.

        What was not written to an old worker yet goes to its successor, unless the version is another: then its
        invocations rest. Questions about updates are asked again; decisions are up to whoever wants them.
        """
        same = manifest.version == self.manifest.version
        before, nodes = self.worker, self.nodes
        self.forkserver, self.manifest = forkserver, manifest
        self.group.stop()
        group = self.group = AgentGroup(self._ground, manifest.id)
        self.worker = AgentLink(self._ground, forkserver, group, manifest)
        self.nodes = {node.name: NodeLink(self._ground, forkserver, group, manifest, node) for node in manifest.nodes}
        for check in self._retire_worker(before):
            self.worker.ask(check)
        for name, link in nodes.items():
            self._retire_node(link, self.nodes.get(name) if same else None)

    def start(self) -> None:
        """Start the workers, unless somebody has stopped the agent meanwhile."""
        if self.worker is not None and not self.stopping:
            self.group.define(self.manifest, [self.worker, *self.nodes.values()])

    def retire(self) -> list[CheckUpdate]:
        """The app does not define the agent any more: end its workers as they get free. Returns the questions."""
        self.group.stop()
        before, nodes = self.worker, self.nodes
        self.worker, self.nodes = None, {}
        for link in nodes.values():
            self._retire_node(link, None)
        return self._retire_worker(before)

    def _retire_worker(self, link: AgentLink | None) -> list[CheckUpdate]:
        if link is None:
            return []
        self.leaving.append(link)
        checks = link.retire()
        link.stop(lambda: self._gone(link), link.grace_s)
        return checks

    def _retire_node(self, link: NodeLink, successor: NodeLink | None) -> None:
        self.leaving.append(link)
        link.retire(successor, lambda: self._gone(link))

    def _gone(self, link: WorkerLink) -> None:
        if link in self.leaving:
            self.leaving.remove(link)
            self._left(link)

    def node_of(self, node: str, execution_id: str) -> NodeLink | None:
        """The link that a running task is at."""
        for link in self.leaving:
            if isinstance(link, NodeLink) and link.node == node and link.holds(execution_id):
                return link
        return self.nodes.get(node)
