"""What a store is: commits go in, in batches; headers, journals and snapshots come out.

`hayata_supervisor.store.lmdb_store` is the real one, `hayata_supervisor.store.memory_store` the one for tests
and inline runs without a directory. One conformance suite runs against both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import msgspec

from hayata.messages import ErrorInfo


class StoreBroken(Exception):
    """Nobody knows whether the batch is stored: the process must end, and the next one reads the truth.

    Also raised when the store isn't ours any more: its file was removed, or another process has opened it.
    """


class StoreRemoved(StoreBroken):
    """Its file was removed while it was in use. The next process would find nothing, and must not begin anew."""


class Header(msgspec.Struct, frozen=True, array_like=True):
    """What is worth knowing of an invocation without reading its journal. Times are wall seconds.

    Attributes:
        id: Internal id, 16 bytes; sorts by creation.
        name: The id that clients use; unique in the store.
        status: As of the last commit that changed it.
        key: Idempotency key, unique for each agent while the invocation exists.
        digest: Digest of the input, to compare a second `run` with the same key.
        restarted_from: Name of the invocation that this one replaces.
    """

    id: bytes
    name: str
    agent: str
    version: str
    session: str
    status: str
    stream: bool
    created_at: float
    key: str | None
    digest: bytes
    own_session: bool = False
    step: int = 0
    started_at: float | None = None
    ended_at: float | None = None
    error: ErrorInfo | None = None
    restarted_from: str | None = None


class Commit(msgspec.Struct):
    """One invocation's part of a transaction.

    Attributes:
        invocation: Internal id.
        number: 1, 2, 3 … without a gap for each invocation; the first one creates it.
        record: Encoded facts, appended to the journal under this number.
        header: The new header, when it differs from the stored one; always with number 1. A terminal
            ``header.ended_at`` is what retention counts from.
        open: True: enters the set of open invocations (number 1). False: leaves it, for ever; the header then
            has ``ended_at``. None: as it was.
        snapshot: Encoded state of the invocation after this record, replacing the earlier snapshot.
        memory: (session, encoded messages) to keep for the session's next invocation.
    """

    invocation: bytes
    number: int
    record: bytes
    header: Header | None = None
    open: bool | None = None
    snapshot: bytes | None = None
    memory: tuple[str, bytes] | None = None


class Taken(msgspec.Struct, frozen=True):
    """Refusal of a commit number 1: its name or its key belongs to another invocation already."""

    header: Header


class OutOfOrder(msgspec.Struct, frozen=True):
    """Refusal: not the invocation's next commit; its previous one was refused, say."""

    expected: int


class Unstorable(msgspec.Struct, frozen=True):
    """Refusal: this commit can't be stored as it is; the others of the batch were."""

    error: ErrorInfo


Refusal = Taken | OutOfOrder | Unstorable


def unstorable(commit: Commit, problem: BaseException) -> Unstorable:
    """Make the refusal of a commit that can't be stored."""
    return Unstorable(
        ErrorInfo(
            "unserializable_value",
            f"commit {commit.number} of invocation {commit.invocation.hex()} can't be stored: {problem}",
        )
    )


class Loaded(msgspec.Struct, frozen=True):
    """One invocation for recovery; ``records`` are those after ``snapshot_number`` (0: no snapshot)."""

    header: Header
    snapshot_number: int
    snapshot: bytes | None
    records: list[tuple[int, bytes]]
    memory: bytes | None


class Ended(msgspec.Struct, frozen=True):
    """An invocation that has ended, as retention sees it.

    Attributes:
        key: Its place in the order of ends; opaque.
        header: None when its removal was begun and cut off.
    """

    key: bytes
    header: Header | None


class Removal(msgspec.Struct, frozen=True):
    """What one transaction has removed.

    Attributes:
        invocations: How many have gone by name; of some of these records may be left.
        records: How many records of journals have gone.
        left: Keys to go on with, in the next transaction.
    """

    invocations: int
    records: int
    left: list[bytes]


class Store(Protocol):
    """See the module. One thread calls `write` and `remove`; others may read at any time and see only what is
    committed.

    Raises (any method): `hayata.errors.Unavailable` with code ``store_full`` (nothing of the batch is stored,
    and it may be tried again when there is room) or ``store_corrupt`` (a record that can't be trusted, named
    in details). `write` and `remove` raise `StoreBroken` when the outcome is unknown, and any other exception
    of them means the same: the process must end and read the truth anew.
    """

    def write(self, commits: Sequence[Commit]) -> list[Refusal | None]:
        """Store the commits in one durable transaction, in order.

        Returns:
            For each commit None when it is stored, else why not. When one is refused, later ones of the same
            invocation are refused as `OutOfOrder`; the others are stored.
        """
        ...

    def remove(self, keys: Sequence[bytes], most: int) -> Removal:
        """Remove ended invocations in one durable transaction of about ``most`` deletes.

        Each one's header, name and key go first and together: from then on it does not exist, its name and
        key can be used again, and what is left of it is found by `ended` and goes in later transactions. Open
        invocations are left alone, and so is the memory of sessions.

        Args:
            keys: As `ended` or an earlier removal gave them; what doesn't exist any more is skipped.
            most: At least 4; one invocation's header, name, key and place go in one transaction.
        """
        ...

    def ended(self, after: bytes, before_s: float, most: int) -> list[Ended]:
        """Ended invocations, those that ended first first, and before these the removals that were cut off.

        Args:
            after: Key to go on behind; empty: from the first.
            before_s: Only those that ended before, wall seconds.
            most: At most so many; fewer are all there are.
        """
        ...

    def tidy(self) -> None:
        """Free what processes that have read the store beside us, and died of it, have left taken."""
        ...

    def load_open(self) -> Iterator[Loaded]:
        """All open invocations, oldest first."""
        ...

    def load(self, invocation: bytes) -> Loaded | None:
        """One invocation, open or not."""
        ...

    def header(self, invocation: bytes) -> Header | None:
        """One header."""
        ...

    def find(self, name: str) -> Header | None:
        """The invocation of that name."""
        ...

    def find_key(self, agent: str, key: str) -> Header | None:
        """The invocation that holds the key."""
        ...

    def headers(
        self,
        *,
        agent: str | None,
        status: str | None,
        session: str | None,
        limit: int,
        before: bytes | None = None,
    ) -> list[Header]:
        """Headers that match, newest first, at most ``limit``; ``before``: only those with smaller internal ids."""
        ...

    def records(self, invocation: bytes, first: int) -> Iterator[tuple[int, bytes]]:
        """The journal from commit number ``first`` on, in order."""
        ...

    def memory(self, agent: str, session: str) -> bytes | None:
        """Encoded messages that the session's last invocation left."""
        ...

    def close(self) -> None:
        """Give everything back. The store must not be used any more."""
        ...
