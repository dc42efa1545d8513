"""The end of the load: no faults any more, and everything must end, by itself or because a person decides."""

from __future__ import annotations

import random
import time
from collections import Counter
from contextlib import suppress

from hayata import Client
from hayata.client.records import InvocationRecord
from hayata.errors import HayataError
from tests.chaos.jobs import settlement
from tests.chaos.ledger import Ledger

_OPEN = ("queued", "running", "waiting", "uncertain", "recovery_required")
_LOOK_S = 0.05
_ROUND_S = 60.0


def settle(client: Client, ledger: Ledger, bases: dict[str, int], seed: int) -> list[str]:
    """Reconcile and recover until nothing is open.

    Args:
        client: Asks and decides.
        ledger: Where each decision is noted.
        bases: Invocation → ``base`` of its input.
        seed: Of the dice that decide.

    Returns:
        What did not move for a minute, in words: invariant 10 is broken.
    """
    dice = random.Random(f"{seed}:settle")
    due = time.monotonic() + _ROUND_S
    before: Counter[str] = Counter()
    while still := open_invocations(client):
        for invocation in still:
            if invocation.status == "uncertain":
                _reconcile(client, ledger, invocation, bases.get(invocation.id), dice)
        for agent in {each.agent for each in still if each.status == "recovery_required"}:
            client.recover(agent)
            ledger.note("recover", agent=agent)
        now = Counter(f"{each.status} {each.step}" for each in still)
        if now != before:
            before, due = now, time.monotonic() + _ROUND_S
        if time.monotonic() > due:
            return [f"invocation {each.id} of {each.agent} stays {each.status}" for each in still]
        time.sleep(_LOOK_S)
    return []


def open_invocations(client: Client) -> list[InvocationRecord]:
    """All that have not ended."""
    return [each.record for status in _OPEN for each in client.invocations(status=status, limit=10_000)]


def _reconcile(
    client: Client, ledger: Ledger, invocation: InvocationRecord, base: int | None, dice: random.Random
) -> None:
    for task in client.invocation(invocation.id).tasks():
        if task.status != "uncertain":
            continue
        verdict = settlement(dice, task, base)
        with suppress(HayataError):
            client.reconcile(invocation.id, task.id, by="settle", **verdict)
            ledger.note("settled", id=invocation.id, task=task.id, verdict=verdict)
