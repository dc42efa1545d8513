"""Between what the store has and what the core makes of it: neither knows the other."""

from __future__ import annotations

from collections.abc import Iterable

from hayata.messages import InvocationInfo
from hayata_supervisor.core.audit import audit
from hayata_supervisor.core.invocation import Invocation
from hayata_supervisor.core.views import restore
from hayata_supervisor.store.interface import Header, Loaded


def restored(loaded: Loaded) -> Invocation:
    """Make an invocation from what the store has of it."""
    return restore(fresh(loaded.header), loaded.snapshot, loaded.records)


def fresh(header: Header) -> Invocation:
    """The invocation as it was before its first record, but for its version, which is today's."""
    return Invocation(
        id=header.id,
        name=header.name,
        agent=header.agent,
        version=header.version,
        session=header.session,
        own_session=header.own_session,
        stream=header.stream,
        key=header.key,
        digest=header.digest,
        created_at=header.created_at,
        restarted_from=header.restarted_from,
    )


def info_of_header(header: Header) -> InvocationInfo:
    """What a header tells of an invocation; its result is in the journal."""
    return InvocationInfo(
        id=header.name,
        agent=header.agent,
        status=header.status,
        version=header.version,
        created_at=header.created_at,
        session=None if header.own_session else header.session,
        key=header.key,
        stream=header.stream,
        step=header.step,
        started_at=header.started_at,
        ended_at=header.ended_at,
        error=header.error,
        restarted_from=header.restarted_from,
    )


def check_stored(
    header: Header, snapshot_number: int, snapshot: bytes | None, records: Iterable[tuple[int, bytes]]
) -> list[str]:
    """What is wrong between an invocation's header, snapshot and journal, in words; see `store.verifying`."""
    invocation, problems = audit(fresh(header), snapshot_number, snapshot, records)
    if invocation is None:
        return problems
    for field in ("status", "version", "started_at", "ended_at"):
        said, folded = getattr(header, field), getattr(invocation, field)
        if said != folded:
            problems.append(f"its header says {field} {said!r}, its journal {folded!r}")
    return problems
