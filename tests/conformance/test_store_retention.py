"""Removing what has ended, on LMDB and in memory alike."""

from __future__ import annotations

import pytest

from hayata_supervisor.store.interface import Commit, Ended, OutOfOrder, Removal, Store
from hayata_supervisor.store.lmdb_store import open_store
from hayata_supervisor.store.memory_store import MemoryStore
from hayata_supervisor.store.retention import Pruned, Rule, prune, run
from tests.support.store_commits import first, header, last, new_id

EVER = 1e12
A, B, C = new_id(1000), new_id(2000), new_id(3000)


@pytest.fixture(params=["lmdb", "memory"])
def store(request, tmp_path):
    made = open_store(tmp_path / "data", ballast_bytes=0) if request.param == "lmdb" else MemoryStore()
    yield made
    made.close()


def stored(store: Store, *commits: Commit) -> None:
    assert store.write(commits) == [None] * len(commits)


def ended(store: Store, invocation: bytes, name: str, ended_at: float, **fields) -> None:
    """Store an invocation of three records that has ended."""
    stored(
        store,
        first(invocation, name, **fields),
        Commit(invocation, 2, b"2", snapshot=b"at 2"),
        last(invocation, name, 3, ended_at=ended_at, **fields),
    )


def names(store: Store) -> list[str]:
    return sorted(each.name for each in store.headers(agent=None, status=None, session=None, limit=10_000))


def key(store: Store, name: str) -> bytes:
    return next(each.key for each in store.ended(b"", EVER, 10_000) if each.header and each.header.name == name)


# ------------------------------------------------------------------------------------------------------ ended


def test_ended_invocations_come_in_the_order_of_their_ends(store):
    ended(store, A, "one", 30.0)
    ended(store, B, "two", 10.0)
    stored(store, first(C, "three"))
    found = store.ended(b"", EVER, 9)
    assert [each.header and each.header.name for each in found] == ["two", "one"]
    assert found[1] == Ended(found[1].key, header(A, "one", status="completed", ended_at=30.0))
    assert store.ended(b"", EVER, 1) == found[:1]
    assert store.ended(found[0].key, EVER, 9) == found[1:]
    assert store.ended(found[1].key, EVER, 9) == []
    assert store.ended(b"", 30.0, 9) == found[:1]
    assert store.ended(b"", 10.0, 9) == store.ended(b"", 0.0, 9) == store.ended(b"", -5.0, 9) == []


# ----------------------------------------------------------------------------------------------------- remove


def test_removed_invocation_is_gone_with_all_that_was_of_it(store):
    ended(store, A, "one", 10.0, key="k")
    ended(store, B, "two", 20.0)
    assert store.remove([key(store, "one")], 200) == Removal(1, 3, [])
    assert store.find("one") is None
    assert store.find_key("agent", "k") is None
    assert store.header(A) is None
    assert store.load(A) is None
    assert list(store.records(A, 1)) == []
    assert [each.header and each.header.name for each in store.ended(b"", EVER, 9)] == ["two"]
    assert names(store) == ["two"]
    assert list(store.records(B, 1)) == [(1, b"first"), (2, b"2"), (3, b"last")]


def test_name_and_key_of_a_removed_invocation_begin_a_fresh_one_d12(store):
    """D12, dbos 769: an interrupted cleanup, and an id that is used again."""
    ended(store, A, "one", 10.0, key="k")
    store.remove([key(store, "one")], 200)
    stored(store, first(B, "one", b"fresh", key="k"))
    assert store.find("one").id == store.find_key("agent", "k").id == B
    assert store.find("one").status == "running"
    assert list(store.records(B, 1)) == [(1, b"fresh")]
    assert [each.header.id for each in store.load_open()] == [B]
    assert store.write([Commit(A, 4, b"late")]) == [OutOfOrder(1)]


def test_open_invocation_is_never_removed(store):
    ended(store, A, "one", 10.0)
    stored(store, first(B, "two"))
    place = key(store, "one")
    of_open = place[: -len(A)] + B
    assert store.remove([of_open], 200) == Removal(0, 0, [])
    assert names(store) == ["one", "two"]
    assert list(store.records(B, 1)) == [(1, b"first")]


def test_removing_twice_or_what_never_was_does_nothing(store):
    ended(store, A, "one", 10.0)
    place = key(store, "one")
    assert store.remove([place, place], 200) == Removal(1, 3, [])
    assert store.remove([place, bytes(24)], 200) == Removal(0, 0, [])
    assert store.remove([], 200) == Removal(0, 0, [])


def test_memory_of_a_session_outlives_its_invocations(store):
    stored(store, first(A, "one"), Commit(A, 2, b"2", memory=("session-one", b"messages")))
    stored(store, last(A, "one", 3))
    store.remove([key(store, "one")], 200)
    assert store.memory("agent", "session-one") == b"messages"


@pytest.mark.parametrize("most", [4, 5, 7, 50])
def test_removal_in_many_transactions_ends_with_nothing_left(store, most):
    for index in range(6):
        ended(store, new_id(1000 + index), f"n{index}", 10.0 + index)
    left = [each.key for each in store.ended(b"", EVER, 99)]
    invocations = records = turns = 0
    while left:
        removal = store.remove(left, most)
        assert removal.invocations + removal.records > 0 or len(removal.left) < len(left)
        invocations += removal.invocations
        records += removal.records
        left = removal.left
        turns += 1
    assert (invocations, records) == (6, 18)
    assert turns >= 36 // (most + 4)
    assert names(store) == []
    assert store.ended(b"", EVER, 99) == []


# ------------------------------------------------------------------------------------------------------ prune


def pruned(store: Store, **rule) -> Pruned:
    return run(prune(store, Rule(**rule)))


def test_prune_removes_what_ended_before_and_nothing_else(store):
    for index in range(10):
        ended(store, new_id(1000 + index), f"n{index}", 10.0 + index)
    stored(store, first(A, "open"))
    assert pruned(store, ended_before=14.0) == Pruned(4, 12)
    assert names(store) == ["n4", "n5", "n6", "n7", "n8", "n9", "open"]
    assert pruned(store, ended_before=14.0) == Pruned(0, 0)
    assert pruned(store, ended_before=EVER) == Pruned(6, 18)
    assert names(store) == ["open"]


def test_prune_of_thousands_looks_at_each_once(store):
    ids = [new_id(1000 + index) for index in range(1300)]
    stored(store, *(first(each, each.hex(), agent="ab"[index % 2]) for index, each in enumerate(ids)))
    ends = [last(each, each.hex(), 2, agent="ab"[index % 2], ended_at=5.0 + index) for index, each in enumerate(ids)]
    stored(store, *ends)
    assert pruned(store, ended_before=EVER, agent="a") == Pruned(650, 1300)
    assert pruned(store, ended_before=EVER, agent="b", keep=600) == Pruned(50, 100)
    assert pruned(store, ended_before=EVER) == Pruned(600, 1200)


def test_prune_by_status_and_agent_leaves_the_others(store):
    ended(store, A, "one", 10.0, status="failed")
    ended(store, B, "two", 10.0, status="cancelled")
    ended(store, C, "three", 10.0, agent="other", status="failed")
    assert pruned(store, ended_before=EVER, statuses=frozenset({"completed"})) == Pruned(0, 0)
    assert pruned(store, ended_before=EVER, statuses=frozenset({"failed"}), agent="agent") == Pruned(1, 3)
    assert names(store) == ["three", "two"]
    assert pruned(store, ended_before=EVER, statuses=frozenset({"failed", "cancelled"})) == Pruned(2, 6)


def test_prune_keeps_the_newest_of_each_agent(store):
    for index in range(8):
        agent = "ab"[index % 2]
        ended(store, new_id(9000 - index), f"{agent}{index}", 10.0 + index, agent=agent)
    assert pruned(store, ended_before=12.5, keep=3) == Pruned(2, 6)  # a0 and b1, but not a2: it is one of three
    assert names(store) == ["a2", "a4", "a6", "b3", "b5", "b7"]
    assert pruned(store, ended_before=EVER, keep=1) == Pruned(4, 12)
    assert names(store) == ["a6", "b7"]
    assert pruned(store, ended_before=EVER, keep=1) == Pruned(0, 0)


def test_prune_of_an_invocation_with_a_long_journal_takes_it_all(store):
    stored(store, first(A, "one"))
    stored(store, *(Commit(A, number, bytes(number)) for number in range(2, 1501)))
    stored(store, last(A, "one", 1501))
    assert pruned(store, ended_before=EVER) == Pruned(1, 1501)
    assert list(store.records(A, 1)) == []
    stored(store, first(B, "one"))
