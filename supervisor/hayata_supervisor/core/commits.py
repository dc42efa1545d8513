"""From facts to a record: numbers them, folds them into the invocation, and says what the store must write."""

from __future__ import annotations

import msgspec

from hayata_supervisor.core import facts as f
from hayata_supervisor.core.effects import Effect, Persist, Publish
from hayata_supervisor.core.events import event_type
from hayata_supervisor.core.invocation import Invocation, apply, info

PARTIALS_AHEAD = 256
"""Event numbers reserved with each commit of a streaming invocation, so that few chunks need a commit of their own."""

_SNAPSHOT_MIN_BYTES = 64 * 1024

_encode = msgspec.msgpack.Encoder().encode


class Growth(msgspec.Struct):
    """Bytes of journal since the last snapshot, and that snapshot's size: a snapshot is due when the first exceeds the
    second, so that what is written for a state of n bytes stays within twice the sum of its updates.
    """

    journal: int = 0
    snapshot: int = 0


def make_record(
    invocation: Invocation,
    facts: list[f.Fact],
    at: float,
    growth: Growth,
    *,
    hold: bool = False,
    memory: tuple[str, bytes] | None = None,
    extra_reserve: int = 0,
) -> Persist:
    """Fold ``facts`` into ``invocation`` and return the record to store, with its events to publish afterwards."""
    status, version = invocation.status, invocation.version
    first = invocation.sequence + 1
    for fact in facts:
        apply(invocation, fact, at)
        if event_type(fact):
            invocation.sequence += 1
    ahead = PARTIALS_AHEAD if invocation.stream and not invocation.terminal else 0
    invocation.reserved = max(invocation.reserved, invocation.sequence + max(ahead, extra_reserve))
    if invocation.terminal:
        invocation.reserved = invocation.sequence
    invocation.number += 1
    record = f.Record(at, first, invocation.reserved, facts)
    encoded = f.encode_record(record)
    changed = invocation.number == 1 or status != invocation.status or version != invocation.version
    after: list[Effect] = []
    if invocation.sequence >= first:
        after.append(Publish(invocation, record))
    return Persist(
        subject=invocation,
        number=invocation.number,
        record=encoded,
        header=info(invocation) if changed else None,
        open=True if invocation.number == 1 else (False if invocation.terminal else None),
        snapshot=_snapshot(invocation, growth, len(encoded)),
        memory=memory,
        hold=hold,
        after=after,
    )


def _snapshot(invocation: Invocation, growth: Growth, record_bytes: int) -> bytes | None:
    growth.journal += record_bytes
    if invocation.terminal or growth.journal <= max(growth.snapshot, _SNAPSHOT_MIN_BYTES):
        return None
    encoded = _encode(invocation)
    growth.snapshot = len(encoded)
    growth.journal = 0
    return encoded
