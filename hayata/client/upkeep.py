"""What a client can ask of the store as a whole, and all that is stored of an invocation.

Operations like those of `hayata.client.operations`, and made into methods in the same way.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

from hayata import messages as m
from hayata.client import operations, records
from hayata.client.core import Operation
from hayata.client.operations import ask
from hayata.client.options import (
    FOREVER,
    check_age,
    check_choice,
    check_count,
    check_optional_name,
    new_id,
)


def verify() -> Operation[records.StoreReport]:
    """Verify the daemon's store: a snapshot of it is copied beside, and read in a process of its own.

    Returns:
        What was looked at, and what is wrong with it.

    Raises:
        HayataError: ``store_full``: there is no room for the copy.
    """
    return records.store_report((yield from ask(m.VerifyStore(), m.StoreReport, FOREVER)))


def backup(directory: str | os.PathLike[str]) -> Operation[records.StoreReport]:
    """Copy the daemon's store, while it runs, to a directory that a daemon can be started on.

    Nothing is there before the copy is complete, verified and on the disk.

    Args:
        directory: Where nothing is yet, or an empty directory; as the daemon's host sees it.

    Returns:
        What is in the copy.

    Raises:
        HayataError: ``invalid_options``: something is there. ``store_full``, ``store_corrupt``,
            ``permission_denied``.
    """
    target = os.path.abspath(os.path.expanduser(os.fspath(directory)))
    request = m.BackupStore(target, new_id())
    return records.store_report((yield from ask(request, m.StoreReport, FOREVER)))


def prune(
    older_than: str | float | timedelta,
    *,
    keep: int = 0,
    status: str | Sequence[str] = (),
    agent: str | None = None,
) -> Operation[records.Pruned]:
    """Remove invocations that have ended, with their tasks, events and results; their ids can be used again.

    Open invocations, and so uncertain ones, stay, and so do the messages of sessions. The space is used
    again; the file itself gets smaller by ``hayata prune --compact``.

    Args:
        older_than: How long ago they must have ended: ``"30d"``, seconds, or a timedelta.
        keep: So many of each agent stay in any case, those that ended last.
        status: Only those that are ``completed``, ``failed`` or ``cancelled``, or several of these.
        agent: Only those of this agent.

    Returns:
        How much was removed.

    Raises:
        HayataError: ``invalid_options``, ``store_full``, ``store_corrupt``.
    """
    statuses = [status] if isinstance(status, str) else list(status)
    for each in statuses:
        check_choice("status", each, tuple(sorted(records.TERMINAL)))
    check_optional_name("agent", agent)
    age_s, kept = check_age("older_than", older_than), check_count("keep", keep, 0, 2**31)
    request = m.PruneStore(age_s, kept, statuses, agent)
    return records.pruned((yield from ask(request, m.Pruned, FOREVER)))


def export(invocation_id: str) -> Operation[list[dict[str, Any]]]:
    """Read all that is stored of an invocation.

    Args:
        invocation_id: Its id.

    Returns:
        Mappings with a ``kind`` each: one ``header``, then every ``record`` of the journal with its facts,
        every ``task`` and every ``event``. Values are what was stored.

    Raises:
        HayataError: ``unknown_invocation``.
    """
    info = yield from operations.invocation(invocation_id)
    journal: list[m.RecordInfo] = []
    page = m.JournalPage([], more=True)
    while page.more:
        page = yield from ask(m.ReadJournal(invocation_id, journal[-1].number + 1 if journal else 1), m.JournalPage)
        journal += page.records
    return export_lines(info, journal, (yield from operations.tasks(invocation_id)))


def export_lines(
    info: m.InvocationInfo, journal: Iterable[m.RecordInfo], tasks: Iterable[records.Task]
) -> list[dict[str, Any]]:
    """Make the lines of `export`."""
    lines: list[dict[str, Any]] = [{"kind": "header", **records.as_mapping(records.invocation_record(info))}]
    events: list[dict[str, Any]] = []
    for record in journal:
        lines.append({"kind": "record", **records.journal_record(record)})
        told = [records.event(info.id, each) for each in record.events]
        events += [{"kind": "event", **records.as_mapping(each)} for each in told]
    lines += [{"kind": "task", **records.as_mapping(task)} for task in tasks]
    return lines + events
