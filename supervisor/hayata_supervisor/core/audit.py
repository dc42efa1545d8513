"""Whether a journal says what its snapshot and its header say: the fold, as recovery does it, and then some.

Pure like the fold itself; `hayata verify` calls it for every invocation.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from hayata_supervisor.core import facts as f
from hayata_supervisor.core.events import event_type
from hayata_supervisor.core.invocation import Invocation, replay

_encode = msgspec.msgpack.Encoder().encode
_decode_snapshot = msgspec.msgpack.Decoder(Invocation).decode


def audit(
    fresh: Invocation, snapshot_number: int, snapshot: bytes | None, records: Iterable[tuple[int, bytes]]
) -> tuple[Invocation | None, list[str]]:
    """Fold a whole journal.

    Args:
        fresh: The invocation before its first record.
        snapshot_number: After which record the snapshot was taken; 0 for none.
        snapshot: The snapshot.
        records: Number and bytes of each record, from 1.

    Returns:
        The invocation after its last record, None when it can't be folded, and what is wrong, in words.
    """
    problems: list[str] = []
    invocation = fresh
    for number, encoded in records:
        try:
            record = f.decode_record(encoded)
            problems += _misplaced(invocation, number, record)
            replay(invocation, number, record)
        except Exception as error:  # noqa: BLE001 - whatever a wrong journal does to the fold is what is wanted
            problems.append(f"record {number} can't be folded: {error}")
            return None, problems
        if number == snapshot_number and snapshot is not None:
            problems += _differs(invocation, snapshot)
    return invocation, problems


def _misplaced(invocation: Invocation, number: int, record: f.Record) -> list[str]:
    """What a record must not say after those before it."""
    problems = []
    events = sum(1 for fact in record.facts if event_type(fact))
    if events and record.sequence <= invocation.sequence:
        problems.append(f"record {number} gives event number {record.sequence} out again")
    if events and record.reserved < record.sequence + events - 1:
        problems.append(f"record {number} reserves event numbers up to {record.reserved} and gives out more")
    if invocation.terminal and record.facts:
        problems.append(f"record {number} comes after the end")
    if (number == 1) is not any(isinstance(fact, f.Accepted) for fact in record.facts):
        problems.append(f"record {number} {'does not accept' if number == 1 else 'accepts'} the invocation")
    return problems


def _differs(folded: Invocation, snapshot: bytes) -> list[str]:
    """How a snapshot differs from what the journal folds to at its number.

    Partial results take event numbers without a record, so the snapshot's may be ahead, within what is
    reserved. A version is changed by the start of a queued invocation, too, of which only the header tells.
    """
    try:
        taken = _decode_snapshot(snapshot)
    except (msgspec.DecodeError, RecursionError) as error:
        return [f"its snapshot can't be read: {error}"]
    if not folded.sequence <= taken.sequence <= folded.reserved:
        return [f"its snapshot is at event {taken.sequence}, the journal at {folded.sequence}"]
    alike = msgspec.structs.replace(folded, sequence=taken.sequence, version=taken.version)
    # Each field encoded anew: an older version may have left out what was added since.
    fields = [
        field
        for field in Invocation.__struct_fields__
        if _encode(getattr(alike, field)) != _encode(getattr(taken, field))
    ]
    if not fields:
        return []
    return [f"its snapshot at record {folded.number} is not what the journal folds to: {', '.join(fields)}"]
