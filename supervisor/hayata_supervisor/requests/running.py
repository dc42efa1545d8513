"""Running: new invocations, and the same one again for who asks twice."""

from __future__ import annotations

import hashlib

from hayata import messages as m
from hayata.ids import RisingIds, check_name
from hayata_supervisor.core.coordinator import Refusal
from hayata_supervisor.core.effects import Persist
from hayata_supervisor.core.invocation import Invocation, info
from hayata_supervisor.engine import Agent
from hayata_supervisor.hub import Sink
from hayata_supervisor.process import clock
from hayata_supervisor.requests.desk import Desk, reply
from hayata_supervisor.requests.looking import Looking
from hayata_supervisor.store.interface import Header
from hayata_supervisor.tree.port import failure


class Running:
    """Begins invocations."""

    def __init__(self, desk: Desk, looking: Looking) -> None:
        self._desk = desk
        self._engine = desk.engine
        self._looking = looking
        self._ids = RisingIds()

    def run(self, request: m.Run, sink: Sink) -> None:
        """Begin an invocation, or find the one that this request or its key has begun."""
        check_name("agent", request.agent)
        check_name("invocation_id", request.invocation_id)
        for what, name in (("session", request.session), ("key", request.key)):
            if name is not None:
                check_name(what, name)
        if self._engine.draining:
            raise Refusal(failure("daemon_unavailable", "the daemon is stopping"))
        agent = self._desk.agent(request.agent, request, sink)
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

        self._desk.read(look_up, accept, sink, lambda: memories.release(of))

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
            engine.committer.barrier(live[1].id, [reply(sink, engine.overlay(fresh.agent, live[1].id, info(live[1])))])
            return
        if by_name is not None:
            _check_same(fresh, by_name.agent, by_name.digest, by_name.name, "invocation_exists")
            self._looking.show(by_name, sink)
            return
        live_key = coordinator.keys.get(fresh.key) if fresh.key else None
        if live_key is not None:
            holder = coordinator.invocations[live_key]
            _check_same(fresh, holder.agent, holder.digest, holder.name, "key_reused")
            engine.committer.barrier(holder.id, [reply(sink, engine.overlay(fresh.agent, holder.id, info(holder)))])
            return
        if by_key is not None:
            _check_same(fresh, by_key.agent, by_key.digest, by_key.name, "key_reused")
            self._looking.show(by_key, sink)
            return
        if engine.committer.full is not None:
            full = engine.committer.full
            raise Refusal(m.ErrorInfo(full.code, full.message, full.hint))
        if engine.draining:
            raise Refusal(failure("daemon_unavailable", "the daemon is stopping"))
        engine.open.add(fresh.id)
        try:
            effects = coordinator.run(
                fresh, memory, queue=request.on_busy == "queue", token=sink, now=self._engine.now()
            )
        except Refusal:
            engine.open.discard(fresh.id)
            raise
        engine.perform(fresh.agent, effects)

    def restart(self, agent: Agent, old: Invocation) -> bytes:
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
        effects = agent.coordinator.run(fresh, None, queue=True, token=None, now=self._engine.now())
        for effect in effects:
            if isinstance(effect, Persist) and effect.subject is fresh:
                effect.hold, effect.mate = False, old.id
        self._engine.perform(old.agent, effects)
        return id


def _check_same(fresh: Invocation, agent: str, digest: bytes, name: str, code: str) -> None:
    if agent != fresh.agent or digest != fresh.digest:
        what = f"key {fresh.key!r}" if code == "key_reused" else f"id {fresh.name!r}"
        raise Refusal(failure(code, f"{what} belongs to {name}, which has another input or agent", invocation_id=name))
