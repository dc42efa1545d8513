"""Agents and apps: what there is, one more, one less."""

from __future__ import annotations

from hayata import messages as m
from hayata_supervisor.core.coordinator import Refusal
from hayata_supervisor.engine import Agent
from hayata_supervisor.hub import Sink
from hayata_supervisor.requests.desk import Desk
from hayata_supervisor.store.interface import Header
from hayata_supervisor.tree.port import failure

_HEADERS = 500  # the newest, in which agents of an app are looked for that can't tell them itself


class Agents:
    """Lists, starts and stops them."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._engine = desk.engine
        self._loading: dict[int, Sink | None] = {}

    def list_agents(self, request: m.ListAgents, sink: Sink) -> None:
        """All agents, when the apps are loaded."""
        if self._engine.apps_pending:
            self._desk.park(request, sink)
            return
        agents = {
            name: agent
            for name, agent in self._engine.agents.items()
            if agent.status != "gone" or agent.coordinator.invocations
        }
        here = [_agent_info(name, each) for name, each in agents.items()]
        if not self._engine.lost_apps:
            sink.reply(m.AgentList(here))
            return
        store = self._engine.store
        self._desk.read(
            lambda: store.headers(agent=None, status=None, session=None, limit=_HEADERS),
            lambda headers: sink.reply(m.AgentList([*here, *self._lost_agents(headers)])),
            sink,
        )

    def _lost_agents(self, headers: list[Header]) -> list[m.AgentInfo]:
        """Agents that the store tells of and that no app defines: those of an app that can't be imported any more.

        Which agents it defined, only the app knows. What is open counts, and what was run last.
        """
        engine = self._engine
        versions = {header.agent: header.version for header in reversed(headers)}
        for name, invocations in engine.unclaimed.items():
            versions.setdefault(name, next(iter(invocations.values())).version)
        return [
            m.AgentInfo(
                id=name,
                version=version,
                app=", ".join(engine.lost_apps),
                status="failed",
                nodes=[],
                queued=sum(each.status == "queued" for each in engine.unclaimed.get(name, {}).values()),
                error=engine.why_missing(name),
            )
            for name, version in sorted(versions.items())
            if name not in engine.agents
        ]

    def start(self, request: m.StartAgent, sink: Sink) -> None:
        """Load one more app."""
        try:
            index = self._engine.workers.load_app(request.app)
        except OSError as error:
            raise Refusal(failure("overloaded", f"the system refused to start it: {error}")) from None
        self._loading[index] = sink

    def stop(self, request: m.StopAgent, sink: Sink) -> None:
        """End an agent's workers; what is open rests until the agent is started again."""
        agent = self._desk.agent(request.agent, request, sink)
        if agent is not None:
            agent.coordinator.drain()

            def stopped() -> None:
                agent.status = "stopped"
                sink.reply(m.Done())

            self._engine.workers.stop_agent(request.agent, stopped)

    def app_settled(self, index: int, reference: str, error: m.ErrorInfo | None) -> None:
        """An app that `StartAgent` asked for is here, or can't be."""
        sink = self._loading.pop(index, None)
        if sink is None:
            return
        if error is not None:
            sink.reply(m.Refused(error))
            return
        mine = [(name, agent) for name, agent in self._engine.agents.items() if agent.app == reference]
        sink.reply(m.AgentList([_agent_info(name, agent) for name, agent in mine]))


def _agent_info(name: str, agent: Agent) -> m.AgentInfo:
    coordinator = agent.coordinator
    nodes = [
        m.NodeInfo(
            name=slots.manifest.name,
            status="serving" if slots.unavailable is None else "stopped" if slots.stopped else "failed",
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
