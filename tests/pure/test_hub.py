"""What followers are told, with a journal that is a list."""

from __future__ import annotations

from typing import Any

import msgspec

from hayata.messages import Answer, Done, ErrorInfo, EventBatch, EventInfo, Refused
from hayata_supervisor.core import facts as f
from hayata_supervisor.core.effects import Publish
from hayata_supervisor.core.events import events_of
from hayata_supervisor.core.invocation import Invocation
from hayata_supervisor.hub import Follower, Hub, Until

ID = bytes(16)


class Reader:
    """A follower's client."""

    def __init__(self) -> None:
        self.told: list[EventInfo] = []
        self.done = False
        self.refused: ErrorInfo | None = None

    def reply(self, answer: Answer) -> None:
        if isinstance(answer, EventBatch):
            self.told += answer.events
        self.done = self.done or isinstance(answer, Done)
        self.refused = answer.error if isinstance(answer, Refused) else self.refused

    def when_writable(self, callback: object) -> bool:
        return True

    @property
    def numbers(self) -> list[tuple[int, str]]:
        return [(event.sequence, event.type) for event in self.told]


class Rig:
    """A hub, and what was committed."""

    def __init__(self, *, stream: bool = False) -> None:
        self.invocation = Invocation(ID, "i", "agent", "1", "s", True, stream, None, b"", 1.0)
        self.journal: list[EventInfo] = []
        self.ended = False
        self.unreadable = False
        self.hub = Hub(self._page, lambda id: not self.ended)

    def _page(self, id: bytes, first: int, after: int, before: int | None, answered: Any, failed: Any) -> None:
        if self.unreadable:
            failed(UNREADABLE)
            return
        events = [each for each in self.journal if each.sequence > after]
        answered(([each for each in events if before is None or each.sequence < before], 1))

    def publish(self, *facts: f.Fact) -> None:
        record = f.Record(1.0, len(self.journal) + 1, 0, list(facts))
        self.journal += events_of(ID, record, None)
        self.ended = isinstance(facts[-1], f.Finished)
        self.hub.publish(Publish(self.invocation, record))

    def follow(self, after: int = 0, until: Until = "terminal") -> Reader:
        reader = Reader()
        self.hub.follow(Follower(ID, reader, after, until))
        return reader

    def leave(self, reader: Reader) -> None:
        self.hub.gone(lambda sink: sink is reader)


UNREADABLE = ErrorInfo("store_corrupt", "no")
STARTED = f.Started({})
MARKED = f.Marked(0, 1, "node", 0)
COMPLETED = f.Completed(0, 1, "node", {}, {})
FINISHED = f.Finished(msgspec.Raw(b"\xc0"))
ALL = [(1, "invocation_started"), (2, "node_started"), (3, "node_completed"), (4, "invocation_completed")]


def test_follower_that_comes_back_is_told_what_happened_while_nobody_followed():
    rig = Rig()
    first = rig.follow()
    rig.publish(STARTED)
    rig.leave(first)
    rig.publish(MARKED)
    second = rig.follow(after=1)
    rig.publish(COMPLETED)
    rig.publish(FINISHED)
    assert first.numbers + second.numbers == ALL
    assert second.done


def test_follower_after_the_end_is_told_all_though_an_earlier_one_left():
    rig = Rig()
    first = rig.follow()
    rig.publish(STARTED)
    rig.leave(first)
    for fact in (MARKED, COMPLETED, FINISHED):
        rig.publish(fact)
    late = rig.follow()
    assert late.numbers == ALL
    assert late.done


def test_connection_that_follows_twice_and_goes_is_forgotten_twice():
    rig = Rig()
    reader = Reader()
    for _ in range(2):
        rig.hub.follow(Follower(ID, reader, 0, "terminal"))
    rig.leave(reader)
    rig.publish(STARTED)
    assert reader.told == []


def test_follower_whose_events_cannot_be_read_is_told():
    """Else it would wait for ever: nothing wakes one that reads."""
    rig = Rig()
    rig.publish(STARTED)
    rig.unreadable = True
    reader = rig.follow()
    assert reader.refused == UNREADABLE
    rig.unreadable = False
    rig.publish(MARKED)
    assert reader.told == []


def test_follower_from_before_the_apps_were_loaded_is_told_that_an_invocation_rests():
    """Found by the failpoint matrix: after two restarts in a row nobody woke it."""
    rig = Rig()
    rig.journal = events_of(ID, f.Record(1.0, 1, 0, [STARTED, MARKED]), None)
    reader = rig.follow(until="settled")
    patient = rig.follow()
    assert not reader.done
    rig.hub.rests(ID)
    assert reader.numbers == ALL[:2]
    assert (reader.done, patient.done) == (True, False)
