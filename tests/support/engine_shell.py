"""`PureShell` with all of the supervisor but its processes and its clock: engine, committer, hub, LMDB, start notes.

A crash drops everything and opens the store again: what the writer was given and has not written is lost, what it has
written and nobody was told of is not.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec

from hayata.messages import AgentManifest, Answer, Evaluate, EventBatch, PartialAck, RunTask
from hayata_supervisor.core import facts as f
from hayata_supervisor.core.coordinator import Refusal
from hayata_supervisor.core.effects import HOLD_S, Acknowledge, AskPolicy, Dispatch, Effect, Kill, Persist
from hayata_supervisor.core.invocation import Invocation
from hayata_supervisor.engine import Engine, restored
from hayata_supervisor.hub import Follower
from hayata_supervisor.process import clock
from hayata_supervisor.process.background import Foreground
from hayata_supervisor.process.reactor import Reactor
from hayata_supervisor.process.start_notes import FILE, NoteWriter, StartNotes
from hayata_supervisor.store.lmdb_store import open_store
from tests.support.pure_shell import Answers, PureShell

AGENT = "agent"
_MAP_BYTES = 64 << 20


class Writer:
    """A `Background` that does its work when it is told to."""

    def __init__(self) -> None:
        self._given: list[tuple[Callable[[], Any], Callable[[Any], None]]] = []
        self._written: list[Callable[[], None]] = []

    def submit(
        self, work: Callable[[], Any], done: Callable[[Any], None], failed: Callable[[BaseException], None]
    ) -> None:
        self._given.append((work, done))

    def write(self) -> bool:
        """Do what was given first; whether there was something."""
        if not self._given:
            return False
        work, done = self._given.pop(0)
        outcome = work()
        self._written.append(lambda: done(outcome))
        return True

    def tell(self) -> bool:
        """Tell that it is done."""
        if not self._written:
            return False
        self._written.pop(0)()
        return True

    def close(self) -> None:
        """Nothing to end."""


class Reader:
    """A client that follows an invocation's events, over all restarts."""

    def __init__(self) -> None:
        self.last = 0
        self.events: list[tuple[int, str]] = []

    def reply(self, answer: Answer) -> None:
        for event in answer.events if isinstance(answer, EventBatch) else ():
            first = event.sequence
            if event.type == "gap":
                first = msgspec.msgpack.decode(event.data)["from"]
            else:
                self.events.append((event.sequence, event.type))
            assert first == self.last + 1, "each number is an event or in one gap, and comes in order"
            self.last = event.sequence

    def when_writable(self, callback: Callable[[], None]) -> bool:
        return True


class Quiet:
    """A log that nobody reads."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **fields: None


class EngineShell(PureShell):
    """See the module. `close` it."""

    def __init__(self, manifest: AgentManifest) -> None:
        super().__init__(manifest)
        self.home = Path(tempfile.mkdtemp(prefix="hmodel-"))
        self.readers: dict[bytes, Reader] = {}
        self._patches = [mock.patch.object(clock, name, self._now) for name in ("monotonic", "wall")]
        for patch in self._patches:
            patch.start()
        self._open()

    def _now(self) -> float:
        return self.time

    def close(self) -> None:
        for patch in self._patches:
            patch.stop()
        self.store.close()
        self.reactor.close()
        shutil.rmtree(self.home)

    def _open(self) -> None:
        self.reactor = Reactor()
        self.store = open_store(self.home, map_size_bytes=_MAP_BYTES, ballast_bytes=0)
        self.writer = Writer()
        self.engine = Engine(
            self.reactor,
            self.store,
            Quiet(),
            writer=self.writer,
            reader=Foreground(self.reactor),
            notes=StartNotes(self.home),
            app_events=lambda index, reference, error: None,
            broken=_raise,
        )
        self.engine.workers = self  # type: ignore[assignment]
        self.edge = NoteWriter(self.home)
        self.engine.load(self.store.load_open())
        self.engine.app_loaded(0, "app", [self.manifest])
        self.engine.apps_ready()
        self.coordinator = self.engine.agents[AGENT].coordinator
        for id in [id for id in self.fresh if self.store.header(id) is not None]:
            self._follow(id)
        self._turn()

    def _turn(self) -> None:
        for _ in range(3):
            self.reactor.turn(0)

    def _follow(self, id: bytes) -> None:
        reader = self.readers.setdefault(id, Reader())
        self.events[id] = reader.events
        self.engine.hub.follow(Follower(id, reader, reader.last, "terminal"))

    # what the machine does

    def run(self, name: str, input: object = None, *, queue: bool = False, **changes: Any) -> Answers:
        id = len(self.fresh).to_bytes(16, "big")
        self.engine.open.add(id)
        try:
            token = super().run(name, input, queue=queue, **changes)
        except Refusal:
            self.engine.open.discard(id)
            raise
        self._follow(id)
        self._turn()
        return token

    def do(self, effects: list[Effect]) -> None:
        self.engine.perform(AGENT, effects)
        self._turn()

    def save(self, count: int | None = None) -> None:
        """1: write a batch and tell of it. 2: write a batch, and tell of what was written before. None: all."""
        if count is None:
            while not self.engine.committer.idle:
                if not self.writer.write() | self.writer.tell():
                    self.time += 2 * HOLD_S
                self._turn()
            return
        if count == 1:
            self.writer.write()
        self.writer.tell()
        if count == 2:
            self.writer.write()
        self._turn()

    def reopen(self, manifest: AgentManifest | None = None, *, proofs: bool = False) -> None:
        self.manifest = manifest or self.manifest
        self.asked, self.kills, self.dispatched = [], [], {}
        self.store.close()
        self.reactor.close()
        if not proofs:
            (self.home / FILE).unlink()
        self._open()

    def begin_body(self, execution: str) -> None:
        self.edge.begins(self.dispatched[execution].cell, execution)

    def advance(self, seconds: float) -> None:
        self.time += seconds
        self._turn()

    # what it looks at

    @property
    def unsaved(self) -> list[Persist]:
        committer = self.engine.committer
        return [entry.persist for entry in committer._in_flight + committer._queue]

    @unsaved.setter
    def unsaved(self, value: list[Persist]) -> None:
        assert not value

    @property
    def journals(self) -> dict[bytes, list[bytes]]:
        found = {id: [record for _, record in self.store.records(id, 1)] for id in self.fresh}
        return {id: records for id, records in found.items() if records}

    @journals.setter
    def journals(self, value: dict[bytes, list[bytes]]) -> None:
        assert not value

    def facts(self, id: bytes) -> list[f.Fact]:
        return [fact for _, record in self.store.records(id, 1) for fact in f.decode_record(record).facts]

    def restored(self, id: bytes) -> Invocation:
        loaded = self.store.load(id)
        assert loaded is not None
        return restored(loaded)

    # the workers, for the engine

    def evaluate(self, agent_id: str, request: Evaluate) -> None:
        self.asked.append(AskPolicy(agent_id, request))

    def dispatch(self, agent_id: str, node: str, task: RunTask) -> None:
        super().do([Dispatch(agent_id, node, task)])

    def kill(self, agent_id: str, node: str, execution_id: str, reason: str) -> None:
        self.kills.append(Kill(agent_id, node, execution_id, reason))

    def ack_partial(self, agent_id: str, node: str, ack: PartialAck) -> None:
        self.acks.append(Acknowledge(agent_id, node, ack))


def _raise(error: BaseException) -> None:
    raise error
