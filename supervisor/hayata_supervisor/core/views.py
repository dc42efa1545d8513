"""What people see of a journal: an invocation's tasks, and its events."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from hayata.ids import execution_id
from hayata.messages import (
    NIL,
    EventInfo,
    InvocationInfo,
    JournalPage,
    Reconciliation,
    RecordInfo,
    TaskInfo,
    Value,
)
from hayata_supervisor.core import facts as f
from hayata_supervisor.core.events import events_of, how
from hayata_supervisor.core.invocation import Invocation, decided_tasks, info, replay

_encode = msgspec.msgpack.Encoder().encode
_decode_snapshot = msgspec.msgpack.Decoder(Invocation).decode


def restore(fresh: Invocation, snapshot: bytes | None, records: Iterable[tuple[int, bytes]]) -> Invocation:
    """Fold a snapshot (or ``fresh``, where there is none) and the records after it into the invocation."""
    invocation = fresh if snapshot is None else _decode_snapshot(snapshot)
    for number, encoded in records:
        replay(invocation, number, f.decode_record(encoded))
    return invocation


def summary(invocation: Invocation) -> InvocationInfo:
    """What clients see of a restored invocation."""
    return info(invocation)


def tasks(invocation: bytes, records: Iterable[bytes]) -> list[TaskInfo]:
    """All tasks of a journal, by step and attempt; of a step with edges first those of its edges, then its own."""
    found: dict[tuple[int, int, int], TaskInfo] = {}
    pending: dict[int, set[int]] = {}

    def new(step: int, attempt: int, node: str, at: float, edge: int, status: str = "scheduled") -> None:
        name = execution_id(invocation, step, attempt, edge)
        found[step, edge, attempt] = TaskInfo(name, node, step, attempt, status, scheduled_at=at, edge=edge)

    def change(fact: f.TaskFact, **values: object) -> None:
        key = fact.step, fact.edge, fact.attempt
        found[key] = msgspec.structs.replace(found[key], **values)

    def over(fact: f.TaskFact) -> None:
        """With its last edge, an execution is no longer collecting."""
        left = pending.get(fact.step)
        if left and fact.edge >= 0:
            left.discard(fact.edge)
            if not left and found[fact.step, -1, 1].status == "collecting":
                found[fact.step, -1, 1] = msgspec.structs.replace(found[fact.step, -1, 1], status="scheduled")

    for encoded in records:
        record = f.decode_record(encoded)
        at = record.at
        for fact in record.facts:
            match fact:
                case f.Decided():
                    for task in decided_tasks(fact):
                        new(task.step, 1, task.node, at, task.edge, task.status)
                        if task.edge >= 0:
                            pending.setdefault(task.step, set()).add(task.edge)
                case f.Marked():
                    change(fact, status="running", started_at=at)
                case f.Unmarked():
                    change(fact, status="scheduled", started_at=None)
                case f.Completed():
                    change(fact, status="completed", ended_at=at, update=fact.update)
                    over(fact)
                case f.SubstepDone():
                    stored = found[fact.step, fact.edge, fact.attempt].substeps
                    key = fact.substep.key
                    change(fact, substeps=[*stored, key if isinstance(key, str) else fact.substep.name])
                case f.Failed():
                    change(fact, status="failed", ended_at=at, error=fact.error)
                    if fact.retry_at is None:
                        over(fact)
                    else:
                        new(fact.step, fact.attempt + 1, fact.node, at, fact.edge)
                case f.Cancelled():
                    change(fact, status="cancelled", ended_at=at)
                    over(fact)
                case f.Uncertain():
                    change(fact, status="uncertain", error=fact.error)
                case f.Reconciled():
                    settled = Reconciliation(fact.by, at, how(fact), fact.request_id)
                    if fact.update is not None:
                        change(
                            fact, status="completed", ended_at=at, update=fact.update, error=None, reconciled=settled
                        )
                    else:
                        change(fact, status="failed", ended_at=at, error=fact.error, reconciled=settled)
                        if fact.error is None:
                            new(fact.step, fact.attempt + 1, fact.node, at, fact.edge)
                    if fact.update is not None or fact.error is not None:
                        over(fact)
                case _:
                    pass
    return [found[key] for key in sorted(found, key=lambda key: (key[0], key[1] < 0, *key[1:]))]


def journal_page(invocation: bytes, records: Iterable[tuple[int, bytes]], first: int, page_bytes: int) -> JournalPage:
    """Records of a journal with their facts by name and their events.

    Args:
        invocation: Internal id.
        records: The whole journal, from its first record.
        first: Number of the first record that is wanted.
        page_bytes: About how much; one record is given at least.
    """
    page: list[RecordInfo] = []
    size = 0
    input: Value | None = None
    for number, encoded in records:
        size += len(encoded) if number >= first else 0
        if page and size > page_bytes:
            return JournalPage(page, more=True)
        if number < first and input is not None:
            continue
        record = f.decode_record(encoded)
        for fact in record.facts:
            if isinstance(fact, f.Accepted):
                input = fact.input
        if number >= first:
            events = events_of(invocation, record, input)
            facts = [_named(fact) for fact in record.facts]
            page.append(RecordInfo(number, record.at, record.sequence, record.reserved, facts, events))
    return JournalPage(page)


def _named(fact: f.Fact) -> msgspec.Raw:
    return msgspec.Raw(_encode({"fact": fact.__struct_config__.tag, **msgspec.structs.asdict(fact)}))


def events(
    invocation: bytes, records: Iterable[tuple[int, bytes]], after: int, before: int | None, limit: int
) -> tuple[list[EventInfo], int]:
    """The lifecycle events with numbers in (``after``, ``before``), at most about ``limit``.

    Returns:
        The events, and the number of the record from which to read on.
    """
    found: list[EventInfo] = []
    input: Value = NIL
    next_number = 1
    for number, encoded in records:
        record = f.decode_record(encoded)
        if before is not None and record.sequence >= before:
            return found, number
        next_number = number + 1
        for fact in record.facts:
            if isinstance(fact, f.Accepted):
                input = fact.input
        found += [event for event in events_of(invocation, record, input) if event.sequence > after]
        if len(found) >= limit:
            break
    return found, next_number
