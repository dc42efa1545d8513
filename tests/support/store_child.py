"""Programs that use a store in a process of their own: ``python -m tests.support.store_child COMMAND DIR``.

``batches N`` opens the store and writes until it holds N batches (0: without end), and tells of each
``nursery``   forks a child that does this for each line on stdin; starting an interpreter for each is slow
``careless N`` as ``batches``, with an LMDB that doesn't sync its meta page: what a test must catch
``hold``      opens the store, answers each line on stdin with a commit, ends at the end of stdin
``try``       opens the store and closes it again
``fork``      uses the store before and after a fork, and tells what the child could do
``full``      writes until there is no room, makes room, goes on
Each tells an error as ``error CODE``.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import lmdb

from hayata.errors import HayataError
from hayata_supervisor.process import prctl
from hayata_supervisor.store.interface import Commit, Store, StoreBroken
from hayata_supervisor.store.lmdb_store import LmdbStore, open_store
from tests.support.store_commits import first, header

IDS = [bytes(15) + bytes([index]) for index in range(4)]
SNAPSHOT_EVERY = 3


def tell(*words: object) -> None:
    os.write(1, (" ".join(str(word) for word in words) + "\n").encode())


def batch(number: int) -> list[Commit]:
    """The batch with this number: one commit for each of four invocations, of sizes that differ."""
    commits = []
    for index, invocation in enumerate(IDS):
        record = body(number, index)
        commits.append(
            Commit(
                invocation,
                number,
                record,
                header=header(invocation, f"n{index}", key=f"k{index}", step=number),
                open=True if number == 1 else None,
                snapshot=record * 3 if number % SNAPSHOT_EVERY == 0 else None,
                memory=("shared", record) if index == number % len(IDS) else None,
            )
        )
    return commits


def body(number: int, index: int) -> bytes:
    return f"{number}:{index};".encode() * (1 + (number * 7 + index * 31) % 120) * (1 + index)


def written(store: Store) -> int:
    """How many batches the store holds. Checks that each is there whole, to the byte.

    Raises:
        AssertionError: Something of a batch is missing, or too much, or different.
    """
    loaded = list(store.load_open())
    if not loaded:
        assert store.headers(agent=None, status=None, session=None, limit=9) == []
        return 0
    assert [each.header.id for each in loaded] == IDS
    count = loaded[0].header.step
    for index, each in enumerate(loaded):
        assert each.header == header(IDS[index], f"n{index}", key=f"k{index}", step=count)
        assert list(store.records(IDS[index], 1)) == [(number, body(number, index)) for number in range(1, count + 1)]
        assert each.snapshot_number == count - count % SNAPSHOT_EVERY
        assert each.snapshot == (body(each.snapshot_number, index) * 3 if each.snapshot_number else None)
        assert store.find(f"n{index}") == store.find_key("agent", f"k{index}") == each.header
    assert store.memory("agent", "shared") == body(count, count % len(IDS))
    return count


def batches(data_dir: Path, count: int) -> None:
    store = open_store(data_dir, ballast_bytes=0)
    number = written(store)
    tell("open", number)
    while count == 0 or number < count:
        number += 1
        assert store.write(batch(number)) == [None] * len(IDS)
        tell(number)
    store.close()


def careless(data_dir: Path, count: int) -> None:
    open_lmdb = lmdb.open
    lmdb.open = lambda path, **options: open_lmdb(path, **(options | {"metasync": False}))
    batches(data_dir, count)


def nursery(data_dir: Path) -> None:
    for _ in sys.stdin:
        pid = os.fork()
        if pid == 0:
            prctl.die_with_parent()
            batches(data_dir, 0)
            os._exit(0)
        tell("pid", pid)
        os.waitpid(pid, 0)
        tell("dead")


def hold(data_dir: Path) -> None:
    store = open_store(data_dir)
    tell("open")
    for _ in sys.stdin:
        number = written(store) + 1
        try:
            store.write(batch(number))
            tell("stored", number)
        except StoreBroken as problem:
            tell("broken", problem)
    store.close()


def fork(data_dir: Path) -> None:
    store = open_store(data_dir)
    store.write(batch(1))
    store.find("n0")
    for ending in (os._exit, sys.exit):
        pid = os.fork()
        if pid == 0:
            attempts: list[Callable[[], object]] = [
                lambda: store.find("n0"),
                lambda: list(store.load_open()),
                lambda: store.write(batch(2)),
            ]
            for attempt in attempts:
                try:
                    attempt()
                    tell("the child could", attempt)
                except RuntimeError:
                    tell("refused")
            store.close()
            ending(0)
        os.waitpid(pid, 0)
    number = written(store) + 1
    store.write(batch(number))
    tell("parent", written(store))
    store.close()


def full(data_dir: Path, limit: str) -> None:
    """Fill the disk, which is one of a few MiB with a file to remove, or a limit on the size of files."""
    if limit.isdigit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), resource.RLIM_INFINITY))
    store = open_store(data_dir, ballast_bytes=1 << 20)
    acknowledged = 0
    # Small ones first, then big ones: a large write is cut short where a small one is refused.
    for size in (300, 6000, 60_000):
        try:
            while True:
                acknowledged += 1
                _new(store, acknowledged, size)
        except HayataError as problem:
            acknowledged -= 1
            tell("error", problem.code, "from", type(problem.__cause__).__name__)
    _check_all(store, acknowledged)
    assert (data_dir / "ballast").exists()
    number = 1
    try:
        while True:  # what was accepted may go on into the ballast
            store.write([Commit(_id(1), number + 1, bytes(300))])
            number += 1
    except HayataError as problem:
        tell("error", problem.code)
    tell("went on", number - 1)
    if limit.isdigit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    else:
        os.unlink(limit)
    acknowledged += 1
    _new(store, acknowledged, 6000)
    for turn in ("same process", "next process"):
        _check_all(store, acknowledged)
        assert [each for each, _ in store.records(_id(1), 1)] == list(range(1, number + 1)), turn
        store.close()
        store = open_store(data_dir, ballast_bytes=0)
    store.close()
    tell("kept", acknowledged)


def _id(index: int) -> bytes:
    return index.to_bytes(16, "big")


def _new(store: LmdbStore, index: int, size: int) -> None:
    assert store.write([first(_id(index), f"n{index}", index.to_bytes(4, "big") * (size // 4))]) == [None]


def _check_all(store: LmdbStore, count: int) -> None:
    loaded = list(store.load_open())
    assert [each.header.id for each in loaded] == [_id(index + 1) for index in range(count)]
    for index, each in enumerate(loaded, 1):
        assert each.records[0][1][:4] == index.to_bytes(4, "big")


def main() -> None:
    command, directory, *rest = sys.argv[1:]
    data_dir = Path(directory)
    try:
        match command:
            case "nursery":
                nursery(data_dir)
            case "batches":
                batches(data_dir, int(rest[0]))
            case "careless":
                careless(data_dir, int(rest[0]))
            case "hold":
                hold(data_dir)
            case "fork":
                fork(data_dir)
            case "full":
                full(data_dir, rest[0])
            case "try":
                open_store(data_dir, ballast_bytes=0).close()
                tell("open")
    except HayataError as problem:
        tell("error", problem.code)
    except StoreBroken as problem:
        tell("broken", problem)


if __name__ == "__main__":
    main()
