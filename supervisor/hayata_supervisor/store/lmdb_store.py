"""The store on LMDB: every acknowledged commit survives kill -9 and a power cut.

One thread writes, in one transaction for each batch; LMDB makes it durable with one fdatasync and one write
to the meta page on an O_DSYNC descriptor. Reads are short transactions of their own: a long one would keep
old pages from being used again, and the map can only grow when there is none.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Final, TypeVar

import lmdb

from hayata.errors import Unavailable
from hayata_supervisor import failpoints
from hayata_supervisor.store.directory import (
    DATA,
    FULL,
    STORE,
    Ballast,
    StoreLock,
    has_room,
    lengthen,
    prepare,
)
from hayata_supervisor.store.interface import (
    Commit,
    Ended,
    Header,
    Loaded,
    Refusal,
    Removal,
    StoreBroken,
    StoreRemoved,
    unstorable,
)
from hayata_supervisor.store.layout import KEY, META, NAME, key_key
from hayata_supervisor.store.opening import DEFAULT_MAP_BYTES, Opened, open_environment
from hayata_supervisor.store.reading import Reader
from hayata_supervisor.store.removal import Eraser
from hayata_supervisor.store.transaction import Batch

T = TypeVar("T")

DEFAULT_BALLAST_BYTES: Final = 8 << 20

_MOST_CACHED_NUMBERS = 100_000
_LOADED_AT_ONCE = 256
_RECORDS_AT_ONCE = 256
_HEADERS_AT_ONCE = 1000

_UNSTORABLE = (lmdb.BadValsizeError, lmdb.KeyExistsError, ValueError, TypeError, OverflowError)
_DAMAGED = (
    lmdb.CorruptedError,
    lmdb.PageNotFoundError,
    lmdb.InvalidError,
    lmdb.IncompatibleError,
    lmdb.CursorFullError,
    lmdb.PageFullError,
    lmdb.BadTxnError,
)


def open_store(
    data_dir: Path,
    *,
    map_size_bytes: int = DEFAULT_MAP_BYTES,
    ballast_bytes: int = DEFAULT_BALLAST_BYTES,
) -> LmdbStore:
    """Take a data directory, create its store if there is none, and check it before use.

    Args:
        data_dir: Made, with mode 0700, if it is missing.
        map_size_bytes: Address space for the file; doubles when it is full.
        ballast_bytes: Size of a file that is given back when the disk is full, so that what runs can end;
            0 for none.

    Raises:
        Unavailable: ``data_dir_in_use``, ``permission_denied``, ``store_corrupt``, ``store_full``,
            ``unsupported_platform``.
        CallerError: ``invalid_options``: not a Hayata data directory.
    """
    data_dir = prepare(data_dir)
    lock = StoreLock(data_dir)
    try:
        opened = open_environment(data_dir, map_size_bytes)
        return LmdbStore(data_dir, lock, opened, ballast_bytes)
    except BaseException:
        lock.release()
        raise


class LmdbStore:
    """See `hayata_supervisor.store.interface.Store`.

    Only for the process that opened it: in a forked child every call raises RuntimeError, since LMDB would
    accept it, and commit, without a lock. `close` does nothing there.
    """

    def __init__(self, data_dir: Path, lock: StoreLock, opened: Opened, ballast_bytes: int) -> None:
        """Made by `open_store`."""
        self._data_dir = data_dir
        self._lock = lock
        self._env = opened.env
        self._tables = opened.tables
        self._epoch = opened.epoch
        self._data_fd = opened.data_fd
        self._page_bytes = opened.env.stat()["psize"]
        self.uuid = opened.uuid
        self.schema_before = opened.schema_before
        self._pid = os.getpid()
        self._closed = False
        self._last: dict[bytes, int] = {}
        # Held for each read transaction: the map may only be moved when there is none. Reads are short.
        self._reading = Lock()
        self._writing = Lock()
        self._ballast = Ballast(data_dir, ballast_bytes)

    # -------------------------------------------------------------------------------------------------- write

    def write(self, commits: Sequence[Commit]) -> list[Refusal | None]:
        """Store the commits in one durable transaction; see the interface."""
        # The ballast is given back once, and only for what was accepted before: a new one can't eat it.
        new = any(commit.number == 1 for commit in commits)
        return self._durably(lambda: self._transact(commits), may_drop_ballast=not new)

    def remove(self, keys: Sequence[bytes], most: int) -> Removal:
        """Remove ended invocations in one durable transaction; see the interface."""
        return self._durably(lambda: self._erase(keys, most), may_drop_ballast=True)

    def _durably(self, transact: Callable[[], T], *, may_drop_ballast: bool) -> T:
        """Run a transaction until it has room in the map and on the disk."""
        self._check_process()
        with self._writing:
            self._check_open()
            while True:
                try:
                    outcome = transact()
                    self._check_data_file()
                    return outcome
                except lmdb.MapFullError:
                    self._grow()
                except lmdb.Error as problem:
                    self._check_full(problem)
                    if not (may_drop_ballast and self._ballast.drop()):
                        raise _store_full(self._data_dir, problem) from problem

    def _check_epoch(self, txn: lmdb.Transaction[bytes]) -> None:
        if txn.get(b"epoch", db=self._tables[META]) != self._epoch:
            raise StoreBroken(f"another process has opened the store in {self._data_dir}")

    def _transact(self, commits: Sequence[Commit]) -> list[Refusal | None]:
        """One transaction, ended in any case when this returns or raises."""
        txn = self._env.begin(write=True)
        try:
            self._check_epoch(txn)
            batch = Batch(txn, self._tables, self._last)
            refusals = batch.add(commits)
            batch.put()
        except _UNSTORABLE:
            txn.abort()
            return self._transact_without_bad(commits)
        except BaseException as problem:
            _abort(txn, problem)
            raise
        if not batch.numbers:
            txn.abort()
            return refusals
        failpoints.hit("store.before_commit", _lmdb_error)
        txn.commit()
        failpoints.hit("store.after_commit", _lmdb_error)
        self._note(batch)
        return refusals

    def _transact_without_bad(self, commits: Sequence[Commit]) -> list[Refusal | None]:
        """The same without those that can't be stored, so that a bad one fails alone.

        They are found by trying each one in a transaction that is then thrown away. Storing the good ones by
        nested transactions would write one key twice in a transaction, and LMDB leaks pages when a large
        value is overwritten by a smaller one in the transaction that wrote it.
        """
        bad: dict[int, Refusal] = {}
        last = dict(self._last)
        trial = self._env.begin(write=True)
        try:
            for index, commit in enumerate(commits):
                nested = self._env.begin(parent=trial, write=True)
                batch = Batch(nested, self._tables, last)
                try:
                    batch.add([commit])
                    batch.put()
                except _UNSTORABLE as problem:
                    nested.abort()
                    bad[index] = unstorable(commit, problem)
                except BaseException:
                    nested.abort()
                    raise
                else:
                    nested.commit()
                    last.update(batch.numbers)
        finally:
            trial.abort()
        if not bad:
            raise StoreBroken("a batch can't be stored, and each of its commits can")
        stored = iter(self._transact([commit for index, commit in enumerate(commits) if index not in bad]))
        return [bad[index] if index in bad else next(stored) for index in range(len(commits))]

    def _erase(self, keys: Sequence[bytes], most: int) -> Removal:
        """One transaction, ended in any case when this returns or raises."""
        txn = self._env.begin(write=True)
        try:
            self._check_epoch(txn)
            eraser = Eraser(txn, self._tables, most)
            removal = eraser.remove(keys)
        except BaseException as problem:
            _abort(txn, problem)
            raise
        failpoints.hit("store.before_remove", _lmdb_error)
        txn.commit()
        failpoints.hit("store.after_remove", _lmdb_error)
        for invocation in eraser.gone:
            self._last.pop(invocation, None)
        return removal

    def _note(self, batch: Batch) -> None:
        """Remember the newest numbers, now that they are durable."""
        if len(self._last) > _MOST_CACHED_NUMBERS:
            self._last.clear()
        self._last.update(batch.numbers)
        for invocation in batch.closed:
            self._last.pop(invocation, None)

    def _check_data_file(self) -> None:
        """See, before anybody is told of a commit, that the file it went to is still there, and long enough.

        Pages that one transaction took and gave back are never written: LMDB itself can leave the file
        shorter than its count of pages, which the next opening would take for a file that was cut off.
        """
        status = os.fstat(self._data_fd)
        if status.st_nlink == 0:
            raise StoreRemoved(f"the store in {self._data_dir} was removed while it was in use")
        needed = (self._env.info()["last_pgno"] + 1) * self._page_bytes
        if status.st_size < needed:
            failpoints.hit("store.before_lengthen")
            lengthen(self._data_dir / STORE / DATA, needed)
            failpoints.hit("store.after_lengthen")

    def _grow(self) -> None:
        """Double the map. No transaction may be open: the writer's is aborted, and readers are held off."""
        with self._reading:
            size = self._env.info()["map_size"] * 2
            try:
                failpoints.hit("store.before_grow", _lmdb_error)
                self._env.set_mapsize(size)
                failpoints.hit("store.after_grow", _lmdb_error)
            except (lmdb.Error, OverflowError) as problem:
                raise StoreBroken(f"the store's map can't grow to {size} bytes: {problem}") from problem

    def _check_full(self, problem: lmdb.Error) -> None:
        """Return when the disk is full, and nothing worse: then the state before the transaction stands.

        Raises:
            StoreBroken: It is something else, or the meta page itself could not be written.
        """
        full = problem.code in FULL
        if problem.code == errno.EIO:
            # A short write comes as EIO, and so does a broken disk.
            full = not has_room(self._data_dir, os.fstat(self._data_fd).st_size)
        if full:
            try:
                self._env.begin(write=True).abort()
            except lmdb.Error as fatal:
                problem = fatal
            else:
                return
        raise StoreBroken(f"a commit failed, and may or may not be stored: {problem}") from problem

    # --------------------------------------------------------------------------------------------------- read

    def load_open(self) -> Iterator[Loaded]:
        """All open invocations, oldest first; a transaction for each few of them."""
        after = b""
        while True:
            with self._reader() as reader:
                loaded = reader.load_open(after, _LOADED_AT_ONCE)
            yield from loaded
            if len(loaded) < _LOADED_AT_ONCE:
                return
            after = loaded[-1].header.id

    def load(self, invocation: bytes) -> Loaded | None:
        """One invocation, open or not."""
        with self._reader() as reader:
            header = reader.header(invocation)
            return None if header is None else reader.load(header)

    def header(self, invocation: bytes) -> Header | None:
        """One header."""
        with self._reader() as reader:
            return reader.header(invocation)

    def find(self, name: str) -> Header | None:
        """The invocation of that name."""
        with self._reader() as reader:
            return reader.holder(NAME, name.encode())

    def find_key(self, agent: str, key: str) -> Header | None:
        """The invocation that holds the key."""
        with self._reader() as reader:
            return reader.holder(KEY, key_key(agent, key))

    def memory(self, agent: str, session: str) -> bytes | None:
        """Encoded messages that the session's last invocation left."""
        with self._reader() as reader:
            return reader.memory(agent, session)

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
        fields = {"agent": agent, "status": status, "session": session}
        wanted = {field: text for field, text in fields.items() if text is not None}
        matching: list[Header] = []
        while len(matching) < limit:
            with self._reader() as reader:
                some, before = reader.headers(before, _HEADERS_AT_ONCE, wanted)
            matching += some
            if before is None:
                break
        return matching[:limit]

    def records(self, invocation: bytes, first: int) -> Iterator[tuple[int, bytes]]:
        """The journal from commit number ``first`` on, in order."""
        while True:
            with self._reader() as reader:
                records = reader.records(invocation, first, _RECORDS_AT_ONCE)
            yield from records
            if len(records) < _RECORDS_AT_ONCE:
                return
            first = records[-1][0] + 1

    def ended(self, after: bytes, before_s: float, most: int) -> list[Ended]:
        """Ended invocations, those that ended first first; see the interface."""
        with self._reader() as reader:
            return reader.ended(after, before_s, most)

    def tidy(self) -> None:
        """Free the places of readers in other processes that have died; see the interface."""
        self._check_process()
        with self._reading:
            self._check_open()
            self._env.reader_check()

    @contextmanager
    def _reader(self) -> Iterator[Reader]:
        self._check_process()
        with self._reading:
            self._check_open()
            try:
                failpoints.hit("store.before_read", _lmdb_error)
                with self._env.begin() as txn:
                    yield Reader(txn, self._tables)
            except _DAMAGED as problem:
                raise _damaged(problem) from problem

    # ---------------------------------------------------------------------------------------------- lifecycle

    def close(self) -> None:
        """Give everything back, after the transactions that are under way. Twice does no harm."""
        if self._pid != os.getpid():
            return
        with self._writing, self._reading:
            if self._closed:
                return
            self._closed = True
            self._env.close()
            os.close(self._data_fd)
            self._lock.release()

    def _check_process(self) -> None:
        # Before any lock: one that a thread of the parent held at the fork is held here for ever.
        if self._pid != os.getpid():
            raise RuntimeError("the store belongs to the process that opened it, not to its forked child")

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the store is closed")


def _abort(txn: lmdb.Transaction[bytes], problem: BaseException) -> None:
    """End a transaction that has failed; raise what is known better than ``problem``."""
    txn.abort()
    if isinstance(problem, _DAMAGED):
        raise _damaged(problem) from problem


def _store_full(data_dir: Path, problem: lmdb.Error) -> Unavailable:
    return Unavailable(
        "store_full",
        f"the disk is full: {problem}",
        details={"data_dir": str(data_dir)},
        hint="make room on the disk; nothing that was acknowledged is lost, and work goes on by itself",
    )


def _lmdb_error(number: int) -> lmdb.Error:
    """What LMDB raises when the system gives that errno; for failpoints."""
    problem = lmdb.Error(f"failpoint: {os.strerror(number)}")
    vars(problem)["code"] = number
    return problem


def _damaged(problem: lmdb.Error) -> Unavailable:
    return Unavailable(
        "store_corrupt",
        f"the store's structure is damaged: {problem}",
        details={"record": "data.mdb"},
        hint="restore a backup, or copy the data directory away before anything else",
    )
