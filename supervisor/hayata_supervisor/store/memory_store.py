"""The store without a disk: for tests, and for inline runs without a directory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hayata_supervisor.store import layout
from hayata_supervisor.store.interface import (
    Commit,
    Ended,
    Header,
    Loaded,
    OutOfOrder,
    Refusal,
    Removal,
    Taken,
    unstorable,
)


@dataclass
class _Kept:
    header: Header
    records: list[bytes] = field(default_factory=list)
    snapshot_number: int = 0
    snapshot: bytes | None = None


class MemoryStore:
    """See `hayata_supervisor.store.interface.Store`. For one thread."""

    def __init__(self) -> None:
        """Make an empty store."""
        self._invocations: dict[bytes, _Kept] = {}
        self._open: set[bytes] = set()
        self._names: dict[bytes, bytes] = {}
        self._keys: dict[bytes, bytes] = {}
        self._memories: dict[bytes, bytes] = {}
        self._ends: dict[bytes, bytes] = {}
        self._closed = False

    def write(self, commits: Sequence[Commit]) -> list[Refusal | None]:
        """Store the commits; see the interface."""
        self._check_usable()
        return [self._write(commit) for commit in commits]

    def _write(self, commit: Commit) -> Refusal | None:
        if len(commit.invocation) != layout.ID_BYTES:
            return unstorable(commit, ValueError(f"an invocation's id has {layout.ID_BYTES} bytes"))
        kept = self._invocations.get(commit.invocation)
        expected = 1 if kept is None else len(kept.records) + 1
        if commit.number != expected:
            return OutOfOrder(expected)
        try:
            header = self._check_storable(commit, kept)
        except (ValueError, TypeError, OverflowError) as problem:
            return unstorable(commit, problem)
        if kept is None:
            taken = self._claim(header)
            if taken is not None:
                return taken
            kept = self._invocations[commit.invocation] = _Kept(header)
        kept.header = header
        kept.records.append(bytes(commit.record))
        if commit.snapshot is not None:
            kept.snapshot_number, kept.snapshot = commit.number, bytes(commit.snapshot)
        if commit.memory is not None:
            session, messages = commit.memory
            self._memories[layout.session_key(header.agent, session)] = bytes(messages)
        if commit.open is not None:
            (self._open.add if commit.open else self._open.discard)(commit.invocation)
        if commit.open is False:
            self._ends[layout.gc_key(header.ended_at, header.id)] = header.id
        return None

    def _check_storable(self, commit: Commit, kept: _Kept | None) -> Header:
        """The invocation's header with this commit, if LMDB would take all of it."""
        header = commit.header
        if header is None:
            if kept is None:
                raise ValueError("the first commit of an invocation needs its header")
            header = kept.header
        layout.encode_header(header)
        keys = [layout.journal_key(commit.invocation, commit.number)]
        for body in (commit.record, commit.snapshot):
            if body is not None:
                layout.seal(keys[0], body)
        if kept is None:
            if header.id != commit.invocation:
                raise ValueError("the first commit of an invocation needs its header")
            keys.append(header.name.encode())
            if header.key is not None:
                keys.append(layout.key_key(header.agent, header.key))
        if commit.memory is not None:
            session, messages = commit.memory
            keys.append(layout.session_key(header.agent, session))
            layout.seal(keys[-1], messages)
        if commit.open is False:
            layout.gc_key(header.ended_at, commit.invocation)
        if not all(0 < len(key) <= layout.MAX_KEY_BYTES for key in keys):
            raise ValueError(f"a name has more than {layout.MAX_KEY_BYTES} bytes, or none")
        return header

    def _claim(self, header: Header) -> Taken | None:
        name = header.name.encode()
        key = None if header.key is None else layout.key_key(header.agent, header.key)
        holder = self._names.get(name) or (None if key is None else self._keys.get(key))
        if holder is not None:
            return Taken(self._invocations[holder].header)
        self._names[name] = header.id
        if key is not None:
            self._keys[key] = header.id
        return None

    def remove(self, keys: Sequence[bytes], most: int) -> Removal:
        """Remove ended invocations, each of them whole; see the interface."""
        self._check_usable()
        invocations = records = 0
        left = list(keys)
        while left and most >= 4:  # as many as the other store needs for one
            invocation = self._ends.pop(left.pop(0), None)
            if invocation is not None and invocation not in self._open:
                kept = self._invocations.pop(invocation)
                del self._names[kept.header.name.encode()]
                if kept.header.key is not None:
                    del self._keys[layout.key_key(kept.header.agent, kept.header.key)]
                invocations += 1
                records += len(kept.records)
                most -= 5 + len(kept.records)
        return Removal(invocations, records, left)

    def ended(self, after: bytes, before_s: float, most: int) -> list[Ended]:
        """Ended invocations, those that ended first first; see the interface."""
        self._check_usable()
        end = layout.gc_key(max(before_s, 0.0), b"")
        keys = [key for key in sorted(self._ends) if after < key < end]
        return [Ended(key, self._invocations[self._ends[key]].header) for key in keys[: max(most, 0)]]

    def tidy(self) -> None:
        """Nothing to do: nobody else can read it."""

    def load_open(self) -> Iterator[Loaded]:
        """All open invocations, oldest first."""
        self._check_usable()
        for invocation in sorted(self._open):
            if invocation in self._open:
                yield self._load(self._invocations[invocation])

    def load(self, invocation: bytes) -> Loaded | None:
        """One invocation, open or not."""
        self._check_usable()
        kept = self._invocations.get(invocation)
        return None if kept is None else self._load(kept)

    def _load(self, kept: _Kept) -> Loaded:
        header, number = kept.header, kept.snapshot_number
        records = list(enumerate(kept.records[number:], number + 1))
        return Loaded(header, number, kept.snapshot, records, self.memory(header.agent, header.session))

    def header(self, invocation: bytes) -> Header | None:
        """One header."""
        self._check_usable()
        kept = self._invocations.get(invocation)
        return None if kept is None else kept.header

    def find(self, name: str) -> Header | None:
        """The invocation of that name."""
        self._check_usable()
        holder = self._names.get(name.encode())
        return None if holder is None else self._invocations[holder].header

    def find_key(self, agent: str, key: str) -> Header | None:
        """The invocation that holds the key."""
        self._check_usable()
        holder = self._keys.get(layout.key_key(agent, key))
        return None if holder is None else self._invocations[holder].header

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
        self._check_usable()
        matching = [
            kept.header
            for _, kept in sorted(self._invocations.items(), reverse=True)
            if agent in (None, kept.header.agent)
            and status in (None, kept.header.status)
            and session in (None, kept.header.session)
            and (before is None or kept.header.id < before)
        ]
        return matching[: max(limit, 0)]

    def records(self, invocation: bytes, first: int) -> Iterator[tuple[int, bytes]]:
        """The journal from commit number ``first`` on, in order."""
        self._check_usable()
        kept = self._invocations.get(invocation)
        if kept is not None:
            yield from list(enumerate(kept.records[max(first, 1) - 1 :], max(first, 1)))

    def memory(self, agent: str, session: str) -> bytes | None:
        """Encoded messages that the session's last invocation left."""
        self._check_usable()
        return self._memories.get(layout.session_key(agent, session))

    def close(self) -> None:
        """Forget everything."""
        self._closed = True

    def _check_usable(self) -> None:
        if self._closed:
            raise RuntimeError("the store is closed")
