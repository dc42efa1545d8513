"""Growing, closing and overwriting under load: what bindings of LMDB have hung, crashed or leaked in."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import lmdb
import pytest
from lmdb.verify import verify

from hayata_supervisor.store.interface import Commit
from hayata_supervisor.store.lmdb_store import LmdbStore, open_store
from tests.support.store_commits import first, new_id

DEADLINE_S = 20.0


class Threads:
    """Functions called over and over in threads of their own, while a ``with`` lasts; what they raised."""

    def __init__(self, *calls: Callable[[], object]) -> None:
        self.turns = [0] * len(calls)
        self.raised: list[BaseException] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(index, call)) for index, call in enumerate(calls)]
        for thread in self._threads:
            thread.start()

    def _run(self, index: int, call: Callable[[], object]) -> None:
        try:
            while not self._stop.is_set():
                call()
                self.turns[index] += 1
        except BaseException as problem:
            self.raised.append(problem)

    def __enter__(self) -> Threads:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self.join()

    def join(self) -> None:
        deadline = time.monotonic() + DEADLINE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            assert not thread.is_alive(), "it hangs"


def reads(store: LmdbStore, invocation: bytes) -> list[Callable[[], object]]:
    def whole() -> None:
        for number, record in store.records(invocation, 1):
            assert record == number.to_bytes(4, "big") * 500

    return [whole, lambda: list(store.load_open()), lambda: store.find("one")]


def test_twenty_growths_in_a_row_under_load_lose_nothing_s3(tmp_path, monkeypatch):
    """S3, py-lmdb 379, 475: twenty map growths in a row under load."""
    store = open_store(tmp_path, map_size_bytes=1 << 17, ballast_bytes=0)
    sizes = [store._env.info()["map_size"]]
    resize = store._env.set_mapsize

    class Resized:
        """The environment, but its map grows by a little only, so that it must grow often."""

        def __getattr__(self, name: str) -> object:
            return getattr(environment, name)

        def set_mapsize(self, size: int) -> None:
            assert size == 2 * sizes[-1]
            sizes.append(sizes[-1] + (1 << 17))
            resize(sizes[-1])

    environment = store._env
    monkeypatch.setattr(store, "_env", Resized())
    one = new_id(1)
    store.write([first(one, "one", (1).to_bytes(4, "big") * 500)])
    number = 1
    with Threads(*reads(store, one)) as threads:
        while len(sizes) <= 20:
            numbers = range(number + 1, number + 9)
            batch = [Commit(one, each, each.to_bytes(4, "big") * 500) for each in numbers]
            assert store.write(batch) == [None] * 8
            number += 8
    assert threads.raised == []
    assert all(threads.turns)
    assert [each for each, _ in store.records(one, 1)] == list(range(1, number + 1))
    store.close()
    assert verify(str(tmp_path / "store")) == []


def test_growth_doubles_the_map_until_the_batch_fits(tmp_path):
    store = open_store(tmp_path, map_size_bytes=1 << 17, ballast_bytes=0)
    one = new_id(1)
    bad = Commit(one, 2, b"", memory=("s" * 600, b""))
    assert store.write([first(one, "one", bytes(5_000_000)), bad])[0] is None
    size = store._env.info()["map_size"]
    assert size >= 5_000_000
    assert size & (size - 1) == 0
    store.close()


def test_close_with_a_waiting_writer_and_readers_does_not_hang_s2(tmp_path):
    """S2, py-lmdb 495, 465, 471: abort, close and resize beside a waiting writer."""
    for turn in range(8):
        store = open_store(tmp_path / str(turn), map_size_bytes=1 << 17, ballast_bytes=0)
        one = new_id(1)
        store.write([first(one, "one", (1).to_bytes(4, "big") * 500)])
        numbers = iter(range(2, 10**9))
        acknowledged = [1]

        def write(store=store, one=one, numbers=numbers, acknowledged=acknowledged) -> None:
            number = next(numbers)
            store.write([Commit(one, number, number.to_bytes(4, "big") * 500)])
            acknowledged[0] = number

        with Threads(write, *reads(store, one)) as threads:
            deadline = time.monotonic() + DEADLINE_S
            while min(threads.turns) < 3 and time.monotonic() < deadline:
                store.find("one")
            store.close()
            threads.join()
        assert [str(problem) for problem in threads.raised] == ["the store is closed"] * 4
        store = open_store(tmp_path / str(turn))
        assert [each for each, _ in store.records(one, 1)] == list(range(1, acknowledged[0] + 1))
        store.close()


@pytest.mark.parametrize("ending", ["abort", "commit"])
def test_write_transaction_ends_beside_a_waiting_writer_s2(tmp_path, ending):
    """S2, py-lmdb 495, 465, 471: the binding itself; 2.3.0 hung in `abort` here."""
    env = lmdb.open(str(tmp_path), lib_version=0, map_size=1 << 20, max_spare_txns=0)
    waiting = threading.Event()
    got: list[str] = []

    def wait() -> None:
        waiting.set()
        with env.begin(write=True) as txn:
            txn.put(b"key", b"value")
        got.append("written")

    txn = env.begin(write=True)
    other = threading.Thread(target=wait)
    other.start()
    waiting.wait(DEADLINE_S)
    getattr(txn, ending)()
    other.join(DEADLINE_S)
    assert not other.is_alive(), "it hangs"
    assert got == ["written"]
    env.close()


def test_values_of_2_to_100_kb_overwritten_many_times_stay_whole_and_in_place_s4(tmp_path):
    """S4, py-lmdb 431: values of 2 to 100 KB, overwritten many times."""
    store = open_store(tmp_path, ballast_bytes=0)
    chance = random.Random(4)
    ids = [new_id(index + 1) for index in range(6)]
    store.write([first(each, f"n{index}", session="s") for index, each in enumerate(ids)])
    newest: dict[bytes, tuple[int, bytes]] = {}
    sizes: list[int] = []
    for number in range(2, 202):
        batch = []
        for index, each in enumerate(ids):
            value = chance.randbytes(chance.randrange(2_000, 100_000))
            newest[each] = (number, value)
            batch.append(Commit(each, number, b"r", snapshot=value, memory=(f"s{index}", value)))
        assert store.write(batch) == [None] * 6
        if number % 20 == 0:
            sizes.append((tmp_path / "store" / "data.mdb").stat().st_size)
            for index, each in enumerate(ids):
                loaded = store.load(each)
                assert (loaded.snapshot_number, loaded.snapshot) == newest[each]
                assert store.memory("agent", f"s{index}") == newest[each][1]
    store.close()
    assert verify(str(tmp_path / "store")) == []
    assert sizes[-1] < 12 << 20, "old values aren't used again"
    assert sizes[-1] < sizes[3] * 1.5


def test_reads_of_a_long_journal_leave_no_old_page_behind(tmp_path):
    """A reader that stands still must not keep old pages from being used again."""
    store = open_store(tmp_path, ballast_bytes=0)
    one = new_id(1)
    store.write([first(one, "one"), *(Commit(one, number, bytes(100)) for number in range(2, 1000))])
    walk, opens = store.records(one, 1), store.load_open()
    next(walk), next(opens)
    before = (tmp_path / "store" / "data.mdb").stat().st_size
    for number in range(1000, 1300):
        store.write([Commit(one, number, b"", snapshot=bytes(20_000))])
    assert (tmp_path / "store" / "data.mdb").stat().st_size < before + 300_000
    assert [number for number, _ in walk] == list(range(2, 1300))
    store.close()


def test_store_larger_than_the_map_it_is_opened_with_goes_on(tmp_path):
    one = new_id(1)
    number = 1
    store = open_store(tmp_path, map_size_bytes=1 << 17, ballast_bytes=0)
    store.write([first(one, "one")])
    for _ in range(30):
        store.close()
        store = open_store(tmp_path, map_size_bytes=1 << 17, ballast_bytes=0)
        number += 1
        assert store.write([Commit(one, number, bytes(20_000))]) == [None]
    assert len(list(store.records(one, 1))) == number
    store.close()
