"""The workers of one agent as a group: the shell of `core.supervision`, with a clock, dice and timers.

Links tell it that their worker is up or has ended; it tells them to start, to terminate, to refuse what waits for them
and to be back. It is the only one that starts a worker again.
"""

from __future__ import annotations

from collections.abc import Iterable

from hayata.messages import AgentManifest, ErrorInfo, Strategy
from hayata_supervisor.core.supervision import (
    Back,
    ChildSpec,
    Escalate,
    ExitClass,
    GaveUp,
    Outcome,
    Rest,
    Rule,
    Start,
    State,
    Stopped,
    Terminate,
    child_exited,
    child_ready,
    define,
    edge_failed,
    try_again,
)
from hayata_supervisor.process import clock
from hayata_supervisor.process.reactor import Timer
from hayata_supervisor.tree import reasons
from hayata_supervisor.tree.restarter import LONGEST_REST
from hayata_supervisor.tree.worker_link import Ground, WorkerLink

_AGENT = ""
"""Id of the agent worker; nodes have their names."""


class AgentGroup:
    """See the module. Implements `worker_link.Superior`.

    Args:
        ground: What all links stand on.
        agent: Id of the agent.
    """

    def __init__(self, ground: Ground, agent: str) -> None:
        self._ground = ground
        self._agent = agent
        self._links: dict[str, WorkerLink] = {}
        self._timers: dict[str | None, Timer] = {}
        self._state = State(Rule("one_for_one", 0, 1.0, 0.0, 0.0, 1.0, 1.0), ())
        self._cause: ErrorInfo | None = None  # why the agent has failed, or would
        self._stopped = False

    def define(self, manifest: AgentManifest, links: Iterable[WorkerLink]) -> None:
        """Take a definition, the first or another; workers that are new are started."""
        self._links = {link.node or _AGENT: link for link in links}
        supervision = manifest.supervision
        rule = Rule(
            strategy=supervision.strategy,
            intensity=supervision.intensity,
            period_s=supervision.period_s,
            backoff_s=supervision.backoff_s,
            max_backoff_s=supervision.max_backoff_s,
            first_rest_s=self._ground.launch.node_retry_s,
            longest_rest_s=LONGEST_REST * self._ground.launch.node_retry_s,
        )
        known = {child.spec.id for child in self._state.children}
        specs = [ChildSpec(_AGENT), *(ChildSpec(node.name, node.restart) for node in manifest.nodes)]
        self._state, effects = define(self._state, rule, specs)
        for effect in effects:
            if isinstance(effect, Start):
                for id in effect.children:
                    self._links[id].start()
        if self._state.phase in ("failing", "failed") and self._cause is not None:
            for id, link in self._links.items():
                if id not in known:
                    link.status = "failed"
                    link.refuse(reasons.agent_failed(link, self.strategy, self._cause))

    def stop(self) -> None:
        """Start nothing any more; the links are stopped by whoever stops the group."""
        self._stopped = True
        for timer in self._timers.values():
            timer.cancel()

    # What the links say

    @property
    def strategy(self) -> Strategy:
        """With whom a worker is restarted."""
        return self._state.rule.strategy

    @property
    def intensity(self) -> int:
        """Most restarts of a period."""
        return self._state.rule.intensity

    def ready(self, link: WorkerLink) -> None:
        """The worker is up."""
        self._do(child_ready(self._state, _id(link), clock.monotonic()))

    def ended(self, link: WorkerLink, exit: ExitClass, *, blameless: bool, hopeless: bool) -> None:
        """The worker is dead, buried and judged, or could not be started."""
        if self._state.phase not in ("failing", "failed"):
            self._cause = reasons.given_up(link)
        now, jitter = clock.monotonic(), self._ground.jitter()
        outcome = child_exited(self._state, _id(link), exit, now, jitter, blameless=blameless, hopeless=hopeless)
        self._do(outcome)

    def edge_failed(self, link: WorkerLink) -> bool:
        """An edge could not start; True: nothing comes of its node."""
        self._state, hopeless = edge_failed(self._state, _id(link), clock.monotonic())
        return hopeless

    # What is done

    def _do(self, outcome: Outcome) -> None:
        self._state, effects = outcome
        for effect in effects:
            if self._stopped:  # the listener may have stopped the agent
                return
            match effect:
                case Start():
                    for id in effect.children:
                        self._start_in(id, effect.delay_s)
                case Terminate():
                    self._terminate(effect.child)
                case GaveUp():
                    link = self._links[effect.child]
                    link.status = "failed"
                    link.refuse(reasons.given_up(link))
                    self._try_again_in(effect.child, effect.rest_s)
                case Stopped():
                    link = self._links[effect.child]
                    link.status = "stopped"
                    link.refuse(reasons.stopped(link), stopped=True)
                case Escalate():
                    self._fail()
                case Rest():
                    for link in self._links.values():
                        link.status = "failed"
                    self._try_again_in(None, effect.rest_s)
                case Back():
                    for id in effect.children:
                        self._links[id].come_back()

    def _start_in(self, id: str, delay_s: float) -> None:
        link = self._links[id]
        link.status = "restarting"
        link.restarts += 1
        self._timers[id] = self._ground.reactor.call_later(delay_s, link.start)

    def _terminate(self, id: str) -> None:
        timer = self._timers.pop(id, None)
        if timer is not None:
            timer.cancel()
        failing = self._state.phase == "failing"
        self._links[id].terminate("agent_failed" if failing else "sibling_restart")

    def _try_again_in(self, id: str | None, rest_s: float) -> None:
        self._timers[id] = self._ground.reactor.call_later(rest_s, lambda: self._do(try_again(self._state, id)))

    def _fail(self) -> None:
        """Refuse at once what waits for the agent; what its workers have in hand may end within their grace."""
        cause = self._cause
        assert cause is not None
        self._ground.log.error("agent failed", agent=self._agent, strategy=self.strategy, error=cause.message)
        for link in self._links.values():
            link.refuse(reasons.agent_failed(link, self.strategy, cause))


def _id(link: WorkerLink) -> str:
    return link.node or _AGENT
