"""Which ended invocations go, and how: a generator of short jobs, so that it never holds up loop or writer.

The same generator is driven in two ways: the daemon gives its reading jobs to the reader's thread and its
writing ones to the writer's, between two commits; without a daemon `run` does one after the other.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Generator
from typing import Any, Final, NamedTuple

import msgspec

from hayata_supervisor.store.interface import Ended, Header, Removal, Store

DELETES: Final = 200
"""Most deletes of one transaction: a commit that waits for it waits a few milliseconds."""

_LOOKED_AT_ONCE = 500


class Rule(msgspec.Struct, frozen=True):
    """What goes. Open invocations never do, and of these are the uncertain ones.

    Attributes:
        ended_before: Those that ended before, wall seconds.
        statuses: Only those that ended so; empty: all.
        agent: Only those of this agent.
        keep: So many of each agent stay, those that ended last, of all that the rest of the rule fits.
    """

    ended_before: float
    statuses: frozenset[str] = frozenset()
    agent: str | None = None
    keep: int = 0

    def fits(self, header: Header) -> bool:
        """Whether the invocation may go, but for ``ended_before`` and ``keep``."""
        return self.agent in (None, header.agent) and (not self.statuses or header.status in self.statuses)


class Pruned(NamedTuple):
    """How much has gone."""

    invocations: int
    records: int


class Job(NamedTuple):
    """One short piece of work; ``writes``: it belongs to the writer's thread."""

    writes: bool
    work: Callable[[], Any]


Jobs = Generator[Job, Any, Pruned]


def prune(store: Store, rule: Rule) -> Jobs:
    """Remove what fits the rule, and finish removals that were cut off; is sent the outcome of each job."""
    kept: frozenset[bytes] = frozenset()
    if rule.keep > 0:
        kept = yield from _newest(store, rule)
    invocations = records = 0
    after = b""
    while True:
        found: list[Ended] = yield _look(store, after, rule.ended_before)
        left = [
            each.key for each in found if each.header is None or (rule.fits(each.header) and each.header.id not in kept)
        ]
        while left:
            removal: Removal = yield _removal(store, left)
            invocations += removal.invocations
            records += removal.records
            left = removal.left
        if len(found) < _LOOKED_AT_ONCE:
            return Pruned(invocations, records)
        after = found[-1].key


def run(jobs: Jobs) -> Pruned:
    """Do all jobs here and now."""
    try:
        job = next(jobs)
        while True:
            job = jobs.send(job.work())
    except StopIteration as stop:
        pruned: Pruned = stop.value
        return pruned


def _newest(store: Store, rule: Rule) -> Generator[Job, Any, frozenset[bytes]]:
    """Ids of those that ``keep`` keeps."""
    newest: defaultdict[str, deque[bytes]] = defaultdict(lambda: deque(maxlen=rule.keep))
    after = b""
    while True:
        found: list[Ended] = yield _look(store, after, _EVER)
        for each in found:
            if each.header is not None and rule.fits(each.header):
                newest[each.header.agent].append(each.header.id)
        if len(found) < _LOOKED_AT_ONCE:
            return frozenset(id for ids in newest.values() for id in ids)
        after = found[-1].key


_EVER = 1e12  # seconds; more milliseconds than a clock will show fit into a key


def _look(store: Store, after: bytes, before_s: float) -> Job:
    return Job(False, lambda: store.ended(after, before_s, _LOOKED_AT_ONCE))


def _removal(store: Store, keys: list[bytes]) -> Job:
    return Job(True, lambda: store.remove(keys, DELETES))
