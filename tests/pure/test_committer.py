"""The committer's batches, with a store and a thread that do nothing by themselves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hayata.errors import error_for
from hayata.ids import new_uuid7
from hayata_supervisor.committer import _MAX_COMMITS, Committer
from hayata_supervisor.core.effects import Persist
from hayata_supervisor.core.invocation import Invocation


class Rig:
    """A committer whose batches lie in ``batches`` until `written` or `failed`."""

    def __init__(self) -> None:
        self.turn: list[Any] = []
        self.timers: list[Any] = []
        self.batches: list[list[Any]] = []
        self.refused: list[tuple[Persist, object]] = []
        reactor = SimpleNamespace(call_at_turn_end=self.turn.append, call_at=self._call_at, call_later=self._call_at)
        store = SimpleNamespace(write=lambda commits: self.batches.append(commits) or [None] * len(commits))
        writer = SimpleNamespace(submit=self._submit)
        self.committer = Committer(
            reactor,
            store,
            writer,
            perform=lambda effects: None,
            refused=lambda *refusal: self.refused.append(refusal),
            broken=lambda error: None,
        )

    def _call_at(self, due: float, callback: Any) -> Any:
        self.timers.append(callback)
        return SimpleNamespace(cancel=lambda: self.timers.remove(callback) if callback in self.timers else None)

    def _submit(self, work: Any, done: Any, failed: Any) -> None:
        self.work, self.done, self.failed = work, done, failed

    def turn_end(self) -> None:
        turn, self.turn[:] = list(self.turn), []
        for callback in turn:
            callback()

    def write(self) -> None:
        self.done(self.work())
        self.turn_end()

    def ids(self, batch: int) -> list[bytes]:
        return [commit.invocation for commit in self.batches[batch]]


def record(number: int = 1, *, mate: bytes | None = None, hold: bool = False) -> Persist:
    id = new_uuid7(number)
    subject = Invocation(
        id=id,
        name=id.hex(),
        agent="a",
        version="1",
        session="s",
        own_session=True,
        stream=False,
        key=None,
        digest=b"",
        created_at=0.0,
    )
    return Persist(subject, number, b"record", None, None, None, None, hold, [], mate)


def test_record_is_written_with_its_mate_although_the_batch_is_full():
    rig = Rig()
    dropped = [record(2) for _ in range(_MAX_COMMITS)]
    fresh = [record(mate=each.subject.id) for each in dropped]
    late = record(2)
    for each in (*dropped, late, *fresh):
        rig.committer.persist(each)
    rig.turn_end()
    rig.write()
    assert rig.ids(0) == [each.subject.id for each in (*dropped, *fresh)]
    rig.write()
    assert rig.ids(1) == [late.subject.id]


def test_record_whose_mate_has_to_wait_waits_with_it():
    rig = Rig()
    first = [record(2) for _ in range(_MAX_COMMITS)]
    dropped = record(2)
    fresh = record(mate=dropped.subject.id)
    for each in (*first, dropped, fresh):
        rig.committer.persist(each)
    rig.turn_end()
    rig.write()
    rig.write()
    assert rig.ids(1) == [dropped.subject.id, fresh.subject.id]


def test_full_disk_refuses_a_new_invocation_but_not_one_that_replaces_another():
    rig = Rig()
    dropped, other = record(2), record()
    fresh = record(mate=dropped.subject.id)
    for each in (dropped, other, fresh):
        rig.committer.persist(each)
    rig.turn_end()
    rig.failed(error_for("store_full", "no room"))
    assert [persist for persist, _ in rig.refused] == [other]
    rig.timers.pop()()
    rig.turn_end()
    rig.write()
    assert rig.ids(0) == [dropped.subject.id, fresh.subject.id]
    assert rig.committer.idle
