"""Those who listen: followers of an invocation's events, and those who await its end.

A follower is pulled, not pushed: it has a cursor, and gets more when it can take more. What it gets comes from the
invocation's *tail* (recent events in bounded memory, the only home of partial results) or from the journal. Numbers
that are in neither are told as one ``gap`` event, so that each number is an event or lies in exactly one gap.

Events are published after their commit, so nobody hears of what could still be lost.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Literal, Protocol

import msgspec

from hayata.messages import Answer, Done, ErrorInfo, EventBatch, EventInfo, InvocationInfo, Refused
from hayata_supervisor.core.effects import Publish, PublishPartial
from hayata_supervisor.core.events import TERMINAL_EVENTS, events_of

PAGE = 500
_TAIL_EVENTS = 2_000
_TAIL_BYTES = 1024 * 1024
_TAILS_BYTES = 32 * 1024 * 1024

_encode = msgspec.msgpack.Encoder().encode


class Sink(Protocol):
    """Where a follower's or waiter's answers go: a client's connection."""

    def reply(self, answer: Answer) -> None:
        """Send one answer; does nothing when the client is gone."""

    def when_writable(self, callback: Callable[[], None]) -> bool:
        """True if more can be sent now. Else False, and ``callback`` is called when it can; never if it is gone."""


Until = Literal["now", "settled", "terminal"]
Page = Callable[
    [bytes, int, int, int | None, Callable[[tuple[list[EventInfo], int]], None], Callable[[ErrorInfo], None]], None
]


class _Tail:
    __slots__ = ("ended", "events", "size")

    def __init__(self) -> None:
        self.events: deque[EventInfo] = deque()
        self.size = 0
        self.ended = False

    def add(self, event: EventInfo) -> None:
        self.events.append(event)
        self.size += len(bytes(event.data)) + 64
        while len(self.events) > _TAIL_EVENTS or self.size > _TAIL_BYTES:
            self.size -= len(bytes(self.events.popleft().data)) + 64


class Follower:
    """One reader of one invocation's events."""

    def __init__(self, invocation: bytes, sink: Sink, after: int, until: Until) -> None:
        self.invocation = invocation
        self.sink = sink
        self.cursor = after
        self.next_record = 1
        self.until = until
        self.reading = False
        self.done = False


class Hub:
    """See the module.

    Args:
        page: Reads a page of the journal's events: (invocation, first record, after, before, callback, failed);
            the callback gets the events and the record from which to read on.
        is_open: Whether the invocation may still have events, as far as what is durable tells.
    """

    def __init__(self, page: Page, is_open: Callable[[bytes], bool]) -> None:
        self._page = page
        self._is_open = is_open
        self._followers: dict[bytes, list[Follower]] = {}
        self._waiters: dict[bytes, list[Sink]] = {}
        self._tails: OrderedDict[bytes, _Tail] = OrderedDict()
        self._tails_bytes = 0
        self._resting: set[bytes] = set()

    # ---- publishing ------------------------------------------------------------------------------------------------

    def publish(self, effect: Publish) -> None:
        """Tell of the events of a durable record."""
        subject = effect.subject
        self._resting.discard(subject.id)
        if not subject.stream and subject.id not in self._followers:
            # An earlier follower's tail would lack these; without partial results all of it is in the journal.
            self._drop_tail(subject.id)
            return
        events = events_of(subject.id, effect.record, subject.input)
        self._add(subject.id, events)
        if events[-1].type in TERMINAL_EVENTS:
            self._tails[subject.id].ended = True
        self._wake(subject.id)

    def publish_partial(self, effect: PublishPartial) -> None:
        """Tell of a chunk."""
        self._add(effect.invocation, [effect.event])
        self._wake(effect.invocation)

    def settled(self, invocation: bytes, info: InvocationInfo, *, terminal: bool) -> None:
        """Tell that the invocation has ended or rests."""
        if not terminal:
            self._resting.add(invocation)
        for sink in self._waiters.pop(invocation, ()):
            sink.reply(info)
        self._wake(invocation)

    def rests(self, invocation: bytes) -> None:
        """Tell that an invocation rested already when it was adopted: a client may follow it since before that."""
        self._resting.add(invocation)
        self._wake(invocation)

    def _add(self, invocation: bytes, events: list[EventInfo]) -> None:
        tail = self._tails.get(invocation)
        if tail is None:
            tail = self._tails[invocation] = _Tail()
        self._tails_bytes -= tail.size
        for event in events:
            tail.add(event)
        self._tails_bytes += tail.size
        while self._tails_bytes > _TAILS_BYTES and len(self._tails) > 1:
            _, oldest = self._tails.popitem(last=False)
            self._tails_bytes -= oldest.size

    def _drop_tail(self, invocation: bytes) -> None:
        tail = self._tails.pop(invocation, None)
        if tail is not None:
            self._tails_bytes -= tail.size

    # ---- listening -------------------------------------------------------------------------------------------------

    def wait(self, invocation: bytes, sink: Sink) -> None:
        """Have ``sink`` told by `settled`."""
        self._waiters.setdefault(invocation, []).append(sink)

    def unwait(self, invocation: bytes, sink: Sink) -> bool:
        """Forget a waiter; False when it was told already."""
        waiting = self._waiters.get(invocation, [])
        if sink not in waiting:
            return False
        waiting.remove(sink)
        if not waiting:
            del self._waiters[invocation]
        return True

    def follow(self, follower: Follower) -> None:
        """Begin to serve a follower."""
        self._followers.setdefault(follower.invocation, []).append(follower)
        self._pump(follower)

    def gone(self, sinks: Callable[[Sink], bool]) -> None:
        """A client is gone: forget the followers and waiters whose sink it was."""
        for followers in list(self._followers.values()):
            for follower in list(followers):
                if sinks(follower.sink):
                    self._finish(follower)
        for invocation, waiting in list(self._waiters.items()):
            left = [sink for sink in waiting if not sinks(sink)]
            if left:
                self._waiters[invocation] = left
            else:
                del self._waiters[invocation]

    def _wake(self, invocation: bytes) -> None:
        for follower in list(self._followers.get(invocation, ())):
            self._pump(follower)

    def _pump(self, follower: Follower) -> None:
        """Give a follower what there is; it stays when there is nothing and more may come."""
        while not follower.done and not follower.reading:
            if not follower.sink.when_writable(lambda: self._pump(follower)):
                return
            tail = self._tails.get(follower.invocation)
            first = tail.events[0].sequence if tail and tail.events else None
            if tail is None or first is None or follower.cursor + 1 < first:
                follower.reading = True
                self._page(
                    follower.invocation,
                    follower.next_record,
                    follower.cursor,
                    first,
                    lambda page, first=first: self._page_read(follower, page, first),  # type: ignore[misc]
                    lambda error: self._page_failed(follower, error),
                )
                return
            fresh = [event for event in tail.events if event.sequence > follower.cursor][:PAGE]
            if not fresh:
                self._exhausted(follower)
                return
            self._send(follower, fresh)

    def _page_read(self, follower: Follower, page: tuple[list[EventInfo], int], before: int | None) -> None:
        follower.reading = False
        if follower.done:
            return
        events, next_record = page
        follower.next_record = max(follower.next_record, next_record)
        if events:
            self._send(follower, events)
        elif before is not None:
            # Nothing is recorded below the tail: what is missing there was partial results.
            self._send_gap_to(follower, before - 1)
        else:
            tail = self._tails.get(follower.invocation)
            if tail is None or not tail.events or tail.events[-1].sequence <= follower.cursor:
                self._exhausted(follower)
                return
        self._pump(follower)

    def _page_failed(self, follower: Follower, error: ErrorInfo) -> None:
        if not follower.done:
            self._finish(follower)
            follower.sink.reply(Refused(error))

    def _send(self, follower: Follower, events: list[EventInfo]) -> None:
        batch: list[EventInfo] = []
        for event in events:
            if event.sequence > follower.cursor + 1:
                batch.append(_gap(follower.cursor + 1, event.sequence - 1, event.time))
            batch.append(event)
            follower.cursor = event.sequence
        follower.sink.reply(EventBatch(batch))
        if events[-1].type in TERMINAL_EVENTS:
            self._finish(follower)
            follower.sink.reply(Done())

    def _send_gap_to(self, follower: Follower, last: int) -> None:
        follower.sink.reply(EventBatch([_gap(follower.cursor + 1, last, 0.0)]))
        follower.cursor = last

    def _exhausted(self, follower: Follower) -> None:
        resting = follower.until == "settled" and follower.invocation in self._resting
        if follower.until == "now" or resting or not self._is_open(follower.invocation):
            self._finish(follower)
            follower.sink.reply(Done())

    def _finish(self, follower: Follower) -> None:
        follower.done = True
        followers = self._followers.get(follower.invocation, [])
        if follower in followers:
            followers.remove(follower)
        if not followers:
            self._followers.pop(follower.invocation, None)


def _gap(first: int, last: int, time: float) -> EventInfo:
    return EventInfo(last, "gap", time, msgspec.Raw(_encode({"from": first, "to": last})))
