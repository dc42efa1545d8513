"""Group commit: records come in from the loop, one thread makes them durable, what waited for them goes on.

While a transaction is under way the next one gathers, so that under load many invocations share an fsync and alone
nobody waits for company. A held record (a result whose policy has been asked) waits up to `HOLD_S` for the decision;
while the thread is busy that costs nothing.

If the disk is full nothing is lost: the batch is parked and tried again, only new invocations are refused. After any
other failure to commit the outcome is unknown, and the one honest thing is to end and read the store anew.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from hayata.errors import HayataError
from hayata_supervisor import failpoints
from hayata_supervisor.core.effects import HOLD_S, Effect, Persist
from hayata_supervisor.process import clock
from hayata_supervisor.process.background import Background
from hayata_supervisor.process.reactor import Reactor, Timer
from hayata_supervisor.store.interface import Commit, Header, OutOfOrder, Refusal, Store

_MAX_COMMITS = 256
_MAX_BYTES = 4 * 1024 * 1024
_FULL_RETRY_S = 1.0
_RECENT = 1024  # transactions whose times are kept


class _Entry:
    __slots__ = ("after", "hold_until", "persist")

    def __init__(self, persist: Persist, hold_until: float) -> None:
        self.persist = persist
        self.after = persist.after
        self.hold_until = hold_until


class Committer:
    """See the module. All methods belong to the loop's thread.

    Args:
        writer: The thread in which every write transaction begins and ends.
        perform: Carries out effects whose record is durable.
        refused: Hears of a record that the store refused.
        broken: Hears that the outcome of a commit is unknown; the process must end.
    """

    def __init__(
        self,
        reactor: Reactor,
        store: Store,
        writer: Background,
        *,
        perform: Callable[[list[Effect]], None],
        refused: Callable[[Persist, Refusal | HayataError], None],
        broken: Callable[[BaseException], None],
    ) -> None:
        self._reactor = reactor
        self._store = store
        self._perform = perform
        self._refused = refused
        self._broken = broken
        self._queue: list[_Entry] = []
        self._last: dict[bytes, _Entry] = {}
        self._in_flight: list[_Entry] = []
        self._kick_due = False
        self._timer: Timer | None = None
        self.full: HayataError | None = None
        self.commits = 0
        self.transactions = 0
        self.recent_s: deque[float] = deque(maxlen=_RECENT)
        self._writer = writer

    def persist(self, persist: Persist) -> None:
        """Store a record as soon as may be."""
        before = self._last.get(persist.subject.id)
        if before is not None:
            before.hold_until = 0.0
        entry = _Entry(persist, clock.monotonic() + HOLD_S if persist.hold else 0.0)
        self._last[persist.subject.id] = entry
        self._queue.append(entry)
        self._kick_later()

    def barrier(self, invocation: bytes, after: list[Effect]) -> None:
        """Carry out ``after`` when all that was given for the invocation is durable: at once, if it is."""
        entry = self._last.get(invocation)
        if entry is None:
            self._perform(after)
        else:
            entry.after.extend(after)

    @property
    def idle(self) -> bool:
        """Whether everything is durable."""
        return not self._queue and not self._in_flight

    @property
    def waiting(self) -> int:
        """Records that are not durable yet."""
        return len(self._queue) + len(self._in_flight)

    def _kick_later(self) -> None:
        if not self._kick_due and not self._in_flight:
            self._kick_due = True
            self._reactor.call_at_turn_end(self._kick)

    def _kick(self) -> None:
        """Hand the next batch to the thread."""
        self._kick_due = False
        if self._in_flight or not self._queue or (self.full and self._timer):
            return
        batch: list[_Entry] = []
        rest: list[_Entry] = []
        size = 0
        now = clock.monotonic()
        for entry in self._queue:
            mate = entry.persist.mate
            if mate is not None and _is_of(mate, batch):
                batch.append(entry)  # whatever the limits say
            elif entry.hold_until > now or len(batch) >= _MAX_COMMITS or size > _MAX_BYTES:
                rest.append(entry)
            else:
                batch.append(entry)
                size += len(entry.persist.record) + len(entry.persist.snapshot or b"")
        self._queue = rest
        if not rest and self._timer is not None:  # a decision has come: nobody is held any more
            self._timer.cancel()
            self._timer = None
        if batch:
            self._in_flight = batch
            commits = [_commit(entry.persist) for entry in batch]
            failpoints.hit("committer.before_submit")
            self._writer.submit(lambda: self._write(commits), self._written, self._failed)
        elif self._timer is None:
            due = min(entry.hold_until for entry in rest)
            self._timer = self._reactor.call_at(due, self._timer_due)

    def _timer_due(self) -> None:
        self._timer = None
        self._kick_later()

    def _write(self, commits: list[Commit]) -> list[Refusal | None]:
        """In the writer's thread: one transaction, and how long it took."""
        began = clock.monotonic()
        outcome = self._store.write(commits)
        self.recent_s.append(clock.monotonic() - began)
        return outcome

    def _failed(self, error: BaseException) -> None:
        if isinstance(error, HayataError) and error.code == "store_full":
            batch, self._in_flight = self._in_flight, []
            self._park(batch, error)
        else:
            self._broken(error)

    def _written(self, outcome: list[Refusal | None]) -> None:
        failpoints.hit("committer.before_perform")
        batch, self._in_flight = self._in_flight, []
        self.full = None
        self.transactions += 1
        self.commits += len(batch)
        for entry, refusal in zip(batch, outcome, strict=True):
            self._forget(entry)
            if refusal is None:
                self._perform(entry.after)
            else:
                self._refused(entry.persist, refusal)
        failpoints.hit("committer.after_perform")
        if self._queue:
            self._kick_later()

    def _forget(self, entry: _Entry) -> None:
        if self._last.get(entry.persist.subject.id) is entry:
            del self._last[entry.persist.subject.id]

    def _park(self, batch: list[_Entry], error: HayataError) -> None:
        """Put the batch back and try again later, without what would make new invocations."""
        self.full = error
        refused = {
            entry.persist.subject.id for entry in batch if entry.persist.number == 1 and entry.persist.mate is None
        }
        queue = batch + self._queue
        self._queue = [entry for entry in queue if entry.persist.subject.id not in refused]
        for entry in queue:
            if entry.persist.subject.id in refused:
                self._forget(entry)
                self._refused(entry.persist, error if entry.persist.number == 1 else OutOfOrder(0))
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._reactor.call_later(_FULL_RETRY_S, self._timer_due)


def _is_of(invocation: bytes, entries: list[_Entry]) -> bool:
    return any(entry.persist.subject.id == invocation for entry in entries)


def _commit(persist: Persist) -> Commit:
    subject, shown = persist.subject, persist.header
    header = None
    if shown is not None:
        header = Header(
            id=subject.id,
            name=subject.name,
            agent=subject.agent,
            version=shown.version,
            session=subject.session,
            status=shown.status,
            stream=subject.stream,
            created_at=subject.created_at,
            key=subject.key,
            digest=subject.digest,
            own_session=subject.own_session,
            step=shown.step,
            started_at=shown.started_at,
            ended_at=shown.ended_at,
            error=shown.error,
            restarted_from=subject.restarted_from,
        )
    return Commit(
        invocation=subject.id,
        number=persist.number,
        record=persist.record,
        header=header,
        open=persist.open,
        snapshot=persist.snapshot,
        memory=persist.memory,
    )
