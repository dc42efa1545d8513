"""Loading the apps anew: the shell of `core.reload`, with forkservers.

A reload takes all apps or none: they share modules, and half a deployment is a third version that nobody has tested.
While the new forkservers import, nothing of the old generation is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol, TypeAlias, assert_never, cast

import msgspec

from hayata.messages import AgentManifest, ErrorInfo, ReloadedAgent, ReloadReport
from hayata_supervisor import failpoints
from hayata_supervisor.core.definitions import changes, encode_definition
from hayata_supervisor.core.reload import Abandon, Answer, Begin, Reloads, Rest, Step, Switch
from hayata_supervisor.tree.agent_parts import AgentParts
from hayata_supervisor.tree.forkserver_link import App, ForkserverLink
from hayata_supervisor.tree.port import failure
from hayata_supervisor.tree.worker_link import Ground

Answered: TypeAlias = Callable[[ReloadReport | ErrorInfo], None]
Loaded: TypeAlias = tuple[ForkserverLink, list[AgentManifest]]


class Switchable(Protocol):
    """The part of the tree of workers that a reload needs."""

    def apps(self) -> list[App]:
        """What is loaded now."""

    def clash(self, loaded: list[Loaded]) -> ErrorInfo | None:
        """Why these can't serve together with the others."""

    def switch(self, loaded: list[Loaded]) -> list[ReloadedAgent]:
        """Have them take over from their apps' forkservers, with all that follows."""

    def leave(self, link: ForkserverLink) -> None:
        """End a forkserver that nobody wants."""

    @property
    def drains(self) -> bool:
        """Whether a worker of an older generation lives."""


class Reloading:
    """See the module. Implements `forkserver_link.Apps` for forkservers that do not serve yet.

    Args:
        ground: What the links stand on.
        tree: The workers.
        busy: Hears when a reload begins, and when none is under way or waits.
    """

    def __init__(self, ground: Ground, tree: Switchable, busy: Callable[[bool], None]) -> None:
        self._ground = ground
        self._tree = tree
        self._busy = busy
        self._reloads: Reloads[Answered] = Reloads()
        self._links: dict[int, ForkserverLink] = {}
        self._manifests: dict[int, list[AgentManifest]] = {}
        self._agents: list[ReloadedAgent] = []

    @property
    def generation(self) -> int:
        """Of the code that serves."""
        return self._reloads.generation

    def ask(self, answered: Answered) -> None:
        """Load all apps anew, now or after what is under way; one answer follows."""
        if self._reloads.state == "closed":
            answered(_stopping())
            return
        by_value = [app.reference for app in self._tree.apps() if app.launch_index < 0]
        if by_value:
            hint = "define the agents as globals of a module or script, and start the runtime with those"
            answered(failure("agent_start_failed", "agents by value have no file to be read from again", hint=hint))
            self._busy(False)
            return
        self._do(self._reloads.ask(answered))

    def open(self) -> None:
        """The apps of the launch are loaded, or given up."""
        self._do(self._reloads.opened())

    def replaced(self) -> int:
        """A forkserver came back with other code, and takes over for its app; returns the generation."""
        return self._reloads.replaced()

    def look(self) -> None:
        """Something of an older generation may have ended: go on if it was the last."""
        if self._reloads.state == "draining" and not self._tree.drains:
            self._do(self._reloads.drained())

    def close(self) -> None:
        """The runtime ends."""
        if self._reloads.state != "closed":
            self._do(self._reloads.close(_stopping()))

    def without(self, app: int) -> None:
        """Somebody has stopped the app while it is loaded anew."""
        link = self._links.pop(app, None)
        if link is not None:
            self._manifests.pop(app, None)
            self._tree.leave(link)
            self._do(self._reloads.imported(app))

    # What the new forkservers say

    def loaded(self, link: ForkserverLink, manifests: list[AgentManifest], changed: bool) -> ErrorInfo | None:
        """One has imported its app."""
        if self._links.get(link.app.index) is link:
            self._manifests[link.app.index] = manifests
            self._ground.reactor.call_soon(lambda: self._imported(link))
        return None

    def _imported(self, link: ForkserverLink) -> None:
        if self._links.get(link.app.index) is link and link.status == "serving":
            self._do(self._reloads.imported(link.app.index))

    def failed(self, link: ForkserverLink, error: ErrorInfo) -> None:
        """One can't."""
        if self._links.get(link.app.index) is link:
            self._do(self._reloads.refused(error))

    # What is to be done

    def _do(self, steps: Iterable[Step]) -> None:
        for step in steps:
            match step:
                case Begin():
                    self._begin(step.generation)
                case Switch():
                    self._switch()
                case Abandon():
                    links, self._links = self._links, {}
                    for link in links.values():
                        self._tree.leave(link)
                case Answer():
                    self._answer(step)
                case Rest():
                    self._busy(False)
                case _:
                    assert_never(step)

    def _begin(self, generation: int) -> None:
        self._ground.log.info("reloading", generation=generation)
        self._busy(True)
        self._manifests.clear()
        for app in self._tree.apps():
            once = msgspec.structs.replace(app, keep=False)
            self._links[app.index] = ForkserverLink(self._ground, once, self, generation)
        for link in list(self._links.values()):
            self._ground.reactor.call_soon(link.start)
        self._do(self._reloads.begun(self._links))

    def _switch(self) -> None:
        failpoints.hit("supervisor.before_switch")
        loaded = [(link, self._manifests[index]) for index, link in self._links.items()]
        refused = self._tree.clash(loaded)
        if refused is not None:
            self._do(self._reloads.refused(refused))
            return
        self._links = {}
        self._agents = self._tree.switch(loaded)
        self._do(self._reloads.switched())
        failpoints.hit("supervisor.after_switch")

    def _answer(self, step: Answer) -> None:
        log, generation = self._ground.log, self._reloads.generation
        answer: ReloadReport | ErrorInfo
        if step.error is None:
            answer = ReloadReport(generation, self._agents)
            log.info("reloaded", generation=generation, agents=[each.id for each in self._agents])
        else:
            message = f"the code that was loaded before goes on serving: {step.error.message}"
            answer = msgspec.structs.replace(step.error, message=message)
            if step.askers:
                log.error("reload failed", code=step.error.code, error=step.error.message, generation=generation)
        for asker in step.askers:
            cast(Answered, asker)(answer)
        self._ground.reactor.call_soon(self.look)


def clash(loaded: list[Loaded], agents: Mapping[str, AgentParts]) -> ErrorInfo | None:
    """Say why what these apps define can't serve together with the other apps' agents."""
    apps = {link.app.index for link, _ in loaded}
    owners: dict[str, App] = {}
    for link, manifests in loaded:
        for manifest in manifests:
            other = agents.get(manifest.id)
            if other is not None and other.stopping:
                return failure(
                    "agent_start_failed",
                    f"agent {manifest.id!r} is still being stopped",
                    hint="try again in a moment",
                    agent=manifest.id,
                )
            if other is not None and other.worker is not None and other.forkserver.app.index not in apps:
                owners.setdefault(manifest.id, other.forkserver.app)
            owner = owners.setdefault(manifest.id, link.app)
            if owner.index != link.app.index:
                return failure(
                    "invalid_definition",
                    f"agent {manifest.id!r} of {link.app.reference} is defined by {owner.reference} too",
                    hint="give one of them another id, or stop the other one first",
                    agent=manifest.id,
                )
    return None


def compared(loaded: list[Loaded], agents: Mapping[str, AgentParts]) -> list[ReloadedAgent]:
    """Say what becomes of each agent of these apps."""
    apps = {link.app.index for link, _ in loaded}
    before = {id: parts for id, parts in agents.items() if parts.worker is not None and not parts.stopping}
    found = []
    for link, manifests in loaded:
        for manifest in manifests:
            app, version = link.app.reference, manifest.version
            if manifest.id not in before:
                found.append(ReloadedAgent(manifest.id, app, "new", version))
                continue
            old = before.pop(manifest.id).manifest
            changed = changes(encode_definition(old.definition), encode_definition(manifest.definition))
            was = old.version if old.version != version else ""
            found.append(ReloadedAgent(manifest.id, app, "kept", version, was, changed))
    for id, parts in before.items():
        if parts.forkserver.app.index in apps:
            found.append(ReloadedAgent(id, parts.forkserver.app.reference, "gone", parts.manifest.version))
    return found


def _stopping() -> ErrorInfo:
    return failure("daemon_unavailable", "the daemon is stopping")
