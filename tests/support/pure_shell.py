"""A shell around the coordinator without processes, store or clock: effects become lists that a test looks at.

Commits wait in ``unsaved`` until `save`; what a crash would lose is what is there. `reopen` makes a new coordinator
from the journal, as a restart does.
"""

from __future__ import annotations

from typing import Any

import msgspec

from hayata.messages import (
    AgentManifest,
    Answer,
    DecidedFail,
    DecidedFinish,
    DecidedNext,
    ErrorInfo,
    NodeManifest,
    ReduceManifest,
    RetryManifest,
    RunTask,
    Substep,
    SubstepDone,
    SupervisionManifest,
    TaskCompleted,
    TaskFailed,
    TaskInterrupted,
    TaskOrder,
    TaskProbed,
)
from hayata_supervisor.core import facts as f
from hayata_supervisor.core.cells import CELLS, Cells
from hayata_supervisor.core.coordinator import Coordinator, Now
from hayata_supervisor.core.effects import (
    Acknowledge,
    AskPolicy,
    Barrier,
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
from hayata_supervisor.core.events import events_of
from hayata_supervisor.core.invocation import Invocation
from hayata_supervisor.core.views import restore

encode = msgspec.msgpack.encode
decode = msgspec.msgpack.decode


def raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(encode(value))


def node(
    name: str,
    *,
    concurrency: int = 2,
    rerun: int = 0,
    retry: RetryManifest | None = None,
    probe: int = 0,
    reduce: ReduceManifest | None = None,
) -> NodeManifest:
    return NodeManifest(name, False, concurrency, None, retry, rerun, False, 1000, 5.0, probe, reduce=reduce)


def agent(*nodes: NodeManifest, **changes: Any) -> AgentManifest:
    manifest = AgentManifest(
        id="agent",
        version="1",
        nodes=list(nodes),
        state={},
        merge={},
        max_steps=100,
        invocation_timeout_s=None,
        conversation_memory=False,
        default_session=None,
        resume="auto",
        max_concurrency=64,
        on_failure="fail",
        supervision=SupervisionManifest(10, 60.0, 0.1, 5.0),
    )
    return msgspec.structs.replace(manifest, **changes)


def is_probe(task: TaskOrder) -> bool:
    return isinstance(task, RunTask) and task.probe


class Answers:
    """A request's token that keeps what it is answered."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []

    def reply(self, answer: Answer) -> None:
        self.answers.append(answer)


class PureShell:
    def __init__(self, manifest: AgentManifest, cells: int = CELLS) -> None:
        self.manifest = manifest
        self.cells = cells
        self.notes: dict[int, str] = {}  # cell → who has begun; "" where nobody has; without an entry: unknown
        self.coordinator = Coordinator(manifest, Cells(cells, self._clear))
        self.time = 1000.0
        self.clock_set_by = 0.0
        self.journals: dict[bytes, list[bytes]] = {}
        self.snapshots: dict[bytes, tuple[int, bytes]] = {}
        self.fresh: dict[bytes, Invocation] = {}
        self.versions: dict[bytes, str] = {}
        self.memories: dict[str, bytes] = {}
        self.open: dict[bytes, None] = {}
        self.unsaved: list[Persist] = []
        self.asked: list[AskPolicy] = []
        self.dispatched: dict[str, TaskOrder] = {}
        self.nodes: dict[str, str] = {}
        self.kills: list[Kill] = []
        self.acks: list[Acknowledge] = []
        self.events: dict[bytes, list[tuple[int, str]]] = {}
        self.settled: list[Settled] = []
        self.warnings: list[dict[str, str | int]] = []

    @property
    def now(self) -> Now:
        return Now(self.time + self.clock_set_by, self.time, self.time)

    def new(self, name: str, input: object = None, **changes: Any) -> Invocation:
        id = len(self.fresh).to_bytes(16, "big")
        values: dict[str, Any] = {
            "id": id,
            "name": name,
            "agent": "agent",
            "version": "1",
            "session": f"~{name}",
            "own_session": True,
            "stream": False,
            "key": None,
            "digest": b"",
            "created_at": self.time,
            "input": raw(input),
        }
        invocation = Invocation(**{**values, **changes})
        self.fresh[id] = msgspec.msgpack.decode(encode(invocation), type=Invocation)
        return invocation

    def run(self, name: str, input: object = None, *, queue: bool = False, **changes: Any) -> Answers:
        token = Answers()
        invocation = self.new(name, input, **changes)
        memory = self.memories.get(invocation.session)
        self.do(self.coordinator.run(invocation, memory, queue=queue, token=token, now=self.now))
        return token

    def do(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Persist():
                    self.unsaved.append(effect)
                case Ready():
                    self.do(self.coordinator.ready(effect.execution_id, self.now))
                case AskPolicy():
                    self.asked.append(effect)
                case Dispatch():
                    assert effect.task.execution_id not in self.dispatched, "two live attempts"
                    self.dispatched[effect.task.execution_id] = effect.task
                    self.nodes[effect.task.execution_id] = effect.node
                case Kill():
                    self.kills.append(effect)
                case Acknowledge():
                    self.acks.append(effect)
                case Publish():
                    subject = effect.subject
                    told = events_of(subject.id, effect.record, subject.input)
                    self.events.setdefault(subject.id, []).extend((each.sequence, each.type) for each in told)
                case PublishPartial():
                    event = effect.event
                    self.events.setdefault(effect.invocation, []).append((event.sequence, event.type))
                case Warn():
                    self.warnings.append(effect.fields)
                case Settled():
                    self.settled.append(effect)
                case Reply():
                    effect.token.reply(effect.answer)
                case Barrier():
                    behind = [each for each in self.unsaved if each.subject.id == effect.invocation]
                    if behind:
                        behind[-1].after.extend(effect.after)
                    else:
                        self.do(effect.after)

    def save(self, count: int | None = None) -> None:
        """Make the oldest ``count`` records durable; None: everything, and what follows from it."""
        left = len(self.unsaved) if count is None else count
        while self.unsaved and left:
            left -= 1
            persist = self.unsaved.pop(0)
            id = persist.subject.id
            journal = self.journals.setdefault(id, [])
            journal.append(persist.record)
            assert len(journal) == persist.number
            if persist.header is not None:
                self.versions[id] = persist.header.version
            if persist.snapshot is not None:
                self.snapshots[id] = (persist.number, persist.snapshot)
            if persist.memory is not None:
                self.memories[persist.memory[0]] = persist.memory[1]
            if persist.open is True:
                self.open[id] = None
            elif persist.open is False:
                del self.open[id]
            self.do(persist.after)
            if count is None and not left:
                left = len(self.unsaved)

    def restored(self, id: bytes) -> Invocation:
        number, snapshot = self.snapshots.get(id, (0, None))
        fresh = decode(encode(self.fresh[id]), type=Invocation)
        fresh.version = self.versions.get(id, fresh.version)
        records = list(enumerate(self.journals[id], 1))[number:]
        return restore(fresh, snapshot, records)

    def reopen(self, manifest: AgentManifest | None = None, *, proofs: bool = False) -> None:
        """Lose everything that is not durable, and recover; without ``proofs`` the start notes are lost, too."""
        self.manifest = manifest or self.manifest
        self.unsaved, self.asked, self.kills = [], [], []
        self.dispatched = {}
        if not proofs:
            self.notes.clear()
        before = dict(self.notes)
        cells = Cells(self.cells, self._clear)
        self.coordinator = Coordinator(self.manifest, cells, lambda cell, execution: before.get(cell) != "")
        for id in self.open:
            invocation = self.restored(id)
            for task in invocation.tasks:
                if task.status == "running":
                    cells.hold(task.cell)
            self.coordinator.adopt(invocation, self.memories.get(invocation.session))
        self.do(self.coordinator.begin(self.now))

    def reload(self, manifest: AgentManifest | None) -> None:
        """Another generation takes over, and the questions to the old one are not answered; None: it has no agent."""
        self.asked = []
        if manifest is None:
            self.do(self.coordinator.retire(ErrorInfo("unknown_agent", "gone"), self.now))
        else:
            self.manifest = manifest
            self.do(self.coordinator.take_manifest(manifest, self.now))

    def _clear(self, cell: int) -> None:
        self.notes[cell] = ""

    # what the outside says

    def begin_body(self, execution: str) -> None:
        """The worker notes that the body begins."""
        if self.dispatched[execution].cell >= 0:
            self.notes[self.dispatched[execution].cell] = execution

    def decide(
        self,
        decision: list[str] | str | None,
        value: object = None,
        *,
        fail: bool = False,
        edges: dict[str, list[Any]] | None = None,
    ) -> None:
        """Answer the oldest question: a list or a name is Next, None is Finish; ``edges`` are those of its nodes."""
        number = self.asked.pop(0).request.evaluation
        answer: DecidedNext | DecidedFinish | DecidedFail
        if fail:
            answer = DecidedFail(number, ErrorInfo("policy_failed", "no"))
        elif decision is None:
            answer = DecidedFinish(number, raw(value))
        else:
            names = decision if isinstance(decision, list) else [decision]
            values = {name: [raw(each) for each in given] for name, given in (edges or {}).items()}
            answer = DecidedNext(number, names, isinstance(decision, list), raw(value), values)
        self.do(self.coordinator.policy_answered(answer, self.now))

    def complete(self, execution: str, **update: object) -> None:
        self.dispatched.pop(execution, None)
        report = TaskCompleted(execution, "edge", {key: raw(value) for key, value in update.items()})
        self.do(self.coordinator.reported(report, self.now))

    def fail(self, execution: str, *, retryable: bool = False) -> None:
        self.dispatched.pop(execution, None)
        report = TaskFailed(execution, "edge", ErrorInfo("node_exception", "boom"), retryable)
        self.do(self.coordinator.reported(report, self.now))

    def interrupt(self, execution: str, code: str = "edge_crashed", *, started: bool = True) -> None:
        self.dispatched.pop(execution, None)
        report = TaskInterrupted(execution, "edge", ErrorInfo(code, "gone"), started)
        self.do(self.coordinator.reported(report, self.now))

    def probed(self, execution: str, *, not_done: bool) -> None:
        """The probe says that the body had no effect, or that it can't tell."""
        assert is_probe(self.dispatched.pop(execution))
        self.do(self.coordinator.reported(TaskProbed(execution, "edge", not_done), self.now))

    def substep(self, execution: str, number: int, key: int | str, value: object = None) -> None:
        """The body has called a function with ``ctx.step``."""
        done = SubstepDone(execution, "edge", number, Substep(key, "fetch", raw(value)))
        self.do(self.coordinator.substep_done(done, self.now))

    def advance(self, seconds: float) -> None:
        self.time += seconds
        self.do(self.coordinator.tick(self.now))

    def only(self) -> str:
        """The one execution that is out."""
        (execution,) = self.dispatched
        return execution

    def facts(self, id: bytes) -> list[f.Fact]:
        return [fact for record in self.journals.get(id, []) for fact in f.decode_record(record).facts]
