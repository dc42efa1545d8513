"""What every store owes, on LMDB and in memory alike."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from hayata.messages import ErrorInfo
from hayata_supervisor.store.interface import (
    Commit,
    Header,
    Loaded,
    OutOfOrder,
    Refusal,
    Store,
    Taken,
    Unstorable,
)
from hayata_supervisor.store.lmdb_store import open_store
from hayata_supervisor.store.memory_store import MemoryStore
from tests.support.store_commits import first, header, last, new_id

A, B, C = new_id(1000), new_id(2000), new_id(3000)
EVERY = {"agent": None, "status": None, "session": None}


@pytest.fixture(params=["lmdb", "memory"])
def store(request, tmp_path):
    made = open_store(tmp_path / "data", ballast_bytes=0) if request.param == "lmdb" else MemoryStore()
    yield made
    made.close()


def stored(store: Store, *commits: Commit) -> None:
    assert store.write(commits) == [None] * len(commits)


def loaded(store: Store, invocation: bytes) -> Loaded:
    found = store.load(invocation)
    assert found is not None
    return found


# ---------------------------------------------------------------------------------------- writing and reading


def test_commit_when_first_creates_an_open_invocation(store):
    stored(store, first(A, "one", b"record"))
    expected = Loaded(header(A, "one"), 0, None, [(1, b"record")], None)
    assert list(store.load_open()) == [expected]
    assert store.load(A) == expected
    assert store.header(A) == store.find("one") == expected.header


def test_header_of_every_field_is_kept(store):
    full = header(
        A, "n" * 128, agent="é" * 64, version="2", session="s", status="failed", stream=True, key="k",
        digest=bytes(32), own_session=True, step=7, started_at=2.5, ended_at=3.5,
        error=ErrorInfo("node_exception", "it raised", hint="look"), restarted_from="zero",
    )  # fmt: skip
    stored(store, Commit(A, 1, b"", header=full, open=False))
    assert store.header(A) == full


def test_unknown_invocation_is_none_everywhere(store):
    stored(store, first(A, "one"))
    assert store.load(B) is None
    assert store.header(B) is None
    assert store.find("two") is None
    assert store.find("") is None
    assert store.find_key("agent", "key") is None
    assert store.memory("agent", "session") is None
    assert list(store.records(B, 1)) == []
    assert store.header(b"short") is None
    assert store.load(b"") is None
    assert list(store.records(b"short", 1)) == []


def test_records_from_any_number_come_in_order(store):
    stored(store, first(A, "one", b"1"), first(B, "two", b"other"))
    stored(store, *(Commit(A, number, b"%d" % number) for number in range(2, 701)))
    everything = [(number, b"%d" % number) for number in range(1, 701)]
    assert list(store.records(A, 1)) == everything
    assert list(store.records(A, 0)) == everything
    assert list(store.records(A, 400)) == everything[399:]
    assert list(store.records(A, 701)) == []
    assert list(store.records(A, 2**40)) == []
    assert list(store.records(B, 1)) == [(1, b"other")]


@pytest.mark.parametrize("size", [0, 1, 1900, 2100, 4096, 100_000, 3_000_000])
def test_record_snapshot_and_memory_of_any_size_come_back_whole(store, size):
    body = (bytes(range(256)) * (size // 256 + 1))[:size]
    stored(store, first(A, "one", body))
    stored(store, Commit(A, 2, body, snapshot=body, memory=("session-one", body)))
    stored(store, Commit(A, 3, body))
    assert loaded(store, A) == Loaded(header(A, "one"), 2, body, [(3, body)], body)
    assert list(store.records(A, 1)) == [(1, body), (2, body), (3, body)]


def test_snapshot_when_newer_replaces_the_earlier(store):
    stored(store, first(A, "one"), Commit(A, 2, b"2", snapshot=b"at 2"), Commit(A, 3, b"3"))
    assert loaded(store, A).snapshot == b"at 2"
    assert loaded(store, A).records == [(3, b"3")]
    stored(store, Commit(A, 4, b"4", snapshot=b"at 4"))
    assert (loaded(store, A).snapshot_number, loaded(store, A).snapshot) == (4, b"at 4")
    assert loaded(store, A).records == []


def test_header_when_absent_stays_as_it_was(store):
    stored(store, first(A, "one", step=0), Commit(A, 2, b"2", header=header(A, "one", step=1)))
    stored(store, Commit(A, 3, b"3"))
    assert store.header(A) == header(A, "one", step=1)


def test_memory_belongs_to_agent_and_session(store):
    stored(store, first(A, "one", agent="x"), first(B, "two", agent="y"))
    stored(store, Commit(A, 2, b"", memory=("s", b"of x")), Commit(B, 2, b"", memory=("s", b"of y")))
    assert store.memory("x", "s") == b"of x"
    assert store.memory("y", "s") == b"of y"
    assert store.memory("x", "other") is None
    stored(store, first(C, "three", agent="x", session="s"))
    assert loaded(store, C).memory == b"of x"
    stored(store, Commit(C, 2, b"", memory=("s", b"newer")))
    assert store.memory("x", "s") == b"newer"


def test_invocation_when_ended_leaves_the_open_set_and_stays_readable(store):
    stored(store, first(A, "one", key="k"), first(B, "two"))
    stored(store, last(A, "one", 2))
    assert [each.header.id for each in store.load_open()] == [B]
    assert loaded(store, A).records == [(1, b"first"), (2, b"last")]
    assert store.find("one").status == "completed"
    stored(store, Commit(A, 3, b"afterwards"))
    assert [each.header.id for each in store.load_open()] == [B]


def test_invocation_when_created_and_ended_in_one_batch_is_not_open(store):
    stored(store, first(A, "one"), last(A, "one", 2))
    assert list(store.load_open()) == []
    assert store.find("one").ended_at == 9.25


def test_open_invocations_of_more_than_one_chunk_come_oldest_first(store):
    ids = [new_id(1000 + index) for index in range(600)]
    stored(store, *(first(each, each.hex()) for each in reversed(ids)))
    assert [each.header.id for each in store.load_open()] == sorted(ids)


def test_load_open_while_others_end_gives_what_is_still_open(store):
    ids = [new_id(1000 + index) for index in range(600)]
    stored(store, *(first(each, each.hex()) for each in ids))
    walk = store.load_open()
    assert next(walk).header.id == ids[0]
    stored(store, *(last(each, each.hex(), 2) for each in ids[1:]))
    seen = {each.header.id for each in walk}
    assert not seen & set(ids[500:])


def test_batch_of_nothing_is_nothing(store):
    assert store.write([]) == []


# --------------------------------------------------------------------------------------------------- refusals


def test_name_when_taken_refuses_with_its_holder(store):
    stored(store, first(A, "one", key="k"))
    assert store.write([first(B, "one")]) == [Taken(header(A, "one", key="k"))]
    assert store.header(B) is None
    assert store.find("one").id == A


def test_key_when_taken_refuses_with_its_holder_and_leaves_the_name_free(store):
    stored(store, first(A, "one", key="k"))
    assert store.write([first(B, "two", key="k")]) == [Taken(header(A, "one", key="k"))]
    assert store.find("two") is None
    stored(store, first(C, "two"))
    assert store.find("two").id == C


def test_name_and_key_when_held_by_two_names_the_holder_of_the_name(store):
    stored(store, first(A, "one", key="a"), first(B, "two", key="b"))
    assert store.write([first(C, "one", key="b")]) == [Taken(header(A, "one", key="a"))]


def test_key_is_of_its_agent_alone(store):
    stored(store, first(A, "one", agent="x", key="k"), first(B, "two", agent="y", key="k"))
    assert store.find_key("x", "k").id == A
    assert store.find_key("y", "k").id == B
    assert store.find_key("z", "k") is None


def test_key_of_any_length_is_kept(store):
    long, other = "k" * 5000, "k" * 4999 + "l"
    stored(store, first(A, "one", key=long), first(B, "two", key=other))
    assert store.find_key("agent", long).id == A
    assert store.find_key("agent", other).id == B
    assert store.write([first(C, "three", key=long)]) == [Taken(header(A, "one", key=long))]


def test_name_when_taken_within_the_batch_refuses_with_the_newest_header(store):
    newer = Commit(A, 2, b"", header=header(A, "one", step=5))
    outcome = store.write([first(A, "one"), newer, first(B, "one")])
    assert outcome == [None, None, Taken(header(A, "one", step=5))]


def test_commit_out_of_order_says_what_is_expected(store):
    stored(store, first(A, "one"))
    assert store.write([Commit(A, 3, b"")]) == [OutOfOrder(2)]
    assert store.write([Commit(A, 1, b"", header=header(A, "one"), open=True)]) == [OutOfOrder(2)]
    assert store.write([Commit(A, 0, b"")]) == [OutOfOrder(2)]
    assert store.write([Commit(B, 2, b"")]) == [OutOfOrder(1)]
    assert list(store.records(A, 1)) == [(1, b"first")]


def test_commit_after_a_refused_one_is_out_of_order_and_others_are_stored(store):
    stored(store, first(A, "one"))
    outcome = store.write(
        [first(B, "one"), Commit(B, 2, b""), Commit(A, 2, b"2"), first(C, "three"), Commit(B, 3, b"")]
    )
    assert outcome == [Taken(header(A, "one")), OutOfOrder(1), None, None, OutOfOrder(1)]
    assert list(store.records(A, 1)) == [(1, b"first"), (2, b"2")]
    assert store.header(B) is None
    assert store.header(C) is not None


UNSTORABLE = {
    "name of 600 bytes": first(C, "n" * 600),
    "name of 0 bytes": first(C, ""),
    "name with a lone surrogate": first(C, "\ud800"),
    "session of 600 bytes": Commit(A, 2, b"", memory=("s" * 600, b"")),
    "id of 15 bytes": first(C[:15], "three"),
    "no header": Commit(C, 1, b"", open=True),
    "header of another": Commit(C, 1, b"", header=header(A, "three"), open=True),
    "ended without a time": Commit(A, 2, b"", open=False),
    "record that isn't bytes": Commit(A, 2, "text"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("why", UNSTORABLE)
def test_commit_that_cannot_be_stored_fails_alone(store, why):
    stored(store, first(A, "one"))
    bad = UNSTORABLE[why]
    before, bad_one, follower, after = store.write(
        [first(B, "two", key="k"), bad, Commit(bad.invocation, bad.number + 1, b""), Commit(B, 2, b"2")]
    )
    assert (before, after) == (None, None)
    assert isinstance(bad_one, Unstorable)
    assert bad.invocation.hex() in bad_one.error.message
    assert follower == OutOfOrder(bad.number) or len(bad.invocation) != 16
    assert list(store.records(A, 1)) == [(1, b"first")]
    assert list(store.records(B, 1)) == [(1, b"first"), (2, b"2")]
    assert store.find_key("agent", "k").id == B
    assert store.header(C) is None
    stored(store, first(C, "three"))


# ---------------------------------------------------------------------------------------------------- listing


def test_headers_come_newest_first_filtered_and_limited(store):
    ids = [new_id(1000 + index) for index in range(2500)]
    stored(
        store,
        *(
            first(each, f"n{index}", agent="ab"[index % 2], status="running" if index % 100 else "failed")
            for index, each in enumerate(ids)
        ),
    )
    assert [each.name for each in store.headers(**EVERY, limit=3)] == ["n2499", "n2498", "n2497"]
    assert len(store.headers(**EVERY, limit=10_000)) == 2500
    of_a = store.headers(agent="a", status=None, session=None, limit=2)
    assert [each.name for each in of_a] == ["n2498", "n2496"]
    failed = store.headers(agent="a", status="failed", session=None, limit=100)
    assert [each.name for each in failed] == [f"n{index}" for index in range(2400, -1, -100)]
    assert store.headers(agent="b", status="failed", session=None, limit=5) == []
    one = store.headers(agent=None, status=None, session="session-n7", limit=5)
    assert [each.name for each in one] == ["n7"]
    assert store.headers(**EVERY, limit=0) == []
    older = store.headers(agent="b", status=None, session=None, limit=2, before=ids[7])
    assert [each.name for each in older] == ["n5", "n3"]
    assert store.headers(**EVERY, limit=5, before=ids[0]) == []


def test_headers_with_a_word_in_another_field_do_not_match(store):
    stored(store, first(A, "failed", session="agent-x"))
    assert store.headers(agent=None, status="failed", session=None, limit=5) == []
    assert store.headers(agent="agent-x", status=None, session=None, limit=5) == []


# -------------------------------------------------------------------------------------------------- lifecycle


def test_store_when_closed_refuses_every_call(store):
    stored(store, first(A, "one"))
    records = store.records(A, 1)
    store.close()
    store.close()
    for call in (
        lambda: store.write([first(B, "two")]),
        lambda: store.header(A),
        lambda: store.find("one"),
        lambda: list(store.load_open()),
        lambda: list(records),
    ):
        with pytest.raises(RuntimeError, match="closed"):
            call()


# ------------------------------------------------------------------------------------ any history, and reopen


class Histories(RuleBasedStateMachine):
    """Any sequence of batches: LMDB, closed and opened at any time, says what the one in memory says."""

    directory: Path

    @initialize()
    def begin(self) -> None:
        self.count = getattr(type(self), "runs", 0)
        type(self).runs = self.count + 1
        self.path = self.directory / str(self.count)
        self.lmdb = open_store(self.path, ballast_bytes=0, map_size_bytes=1 << 17)
        self.memory = MemoryStore()

    commits = st.lists(
        st.tuples(
            st.integers(0, 5),  # which invocation
            st.integers(-1, 1),  # added to its next number: mostly right, sometimes not
            st.integers(0, 4),  # which name, 4: one that can't be
            st.sampled_from([None, None, "k", "l" * 400]),  # key
            st.sampled_from([0, 3, 300, 3000, 30_000]),  # size
            st.booleans(),  # header
            st.booleans(),  # snapshot
            st.booleans(),  # memory
            st.sampled_from([None, None, None, False]),  # open
        ),
        max_size=8,
    )

    @rule(batch=commits)
    def write(self, batch: list[tuple]) -> None:
        numbers: dict[bytes, int] = {}
        commits = []
        for which, off, name, key, size, with_header, with_snapshot, with_memory, opened in batch:
            invocation = bytes(15) + bytes([which])
            kept = self.memory.load(invocation)
            newest = 0 if kept is None else len(list(self.memory.records(invocation, 1)))
            number = max(0, numbers.get(invocation, newest) + 1 + (off if size == 3 else 0))
            numbers[invocation] = number
            text = "n" * 600 if name == 4 else f"name-{name}"
            made: Header | None = None
            if number == 1 or with_header or opened is False:
                # Name and key never change.
                if kept is not None:
                    text, key = kept.header.name, kept.header.key
                made = header(invocation, text, key=key, step=number, ended_at=None if opened is None else 5.0)
            body = bytes([number % 256]) * size
            commits.append(
                Commit(
                    invocation,
                    number,
                    body,
                    header=made,
                    open=True if number == 1 and opened is None else opened,
                    snapshot=body + b"s" if with_snapshot else None,
                    memory=("shared" if name % 2 else f"s{which}", body + b"m") if with_memory else None,
                )
            )
        assert _kinds(self.lmdb.write(commits)) == _kinds(self.memory.write(commits))

    @rule()
    def reopen(self) -> None:
        self.lmdb.close()
        self.lmdb = open_store(self.path, ballast_bytes=0, map_size_bytes=1 << 17)

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "lmdb"):
            return
        assert list(self.lmdb.load_open()) == list(self.memory.load_open())
        assert self.lmdb.headers(**EVERY, limit=50) == self.memory.headers(**EVERY, limit=50)
        for which in range(6):
            invocation = bytes(15) + bytes([which])
            assert self.lmdb.load(invocation) == self.memory.load(invocation)
            assert list(self.lmdb.records(invocation, 1)) == list(self.memory.records(invocation, 1))
            assert self.lmdb.find(f"name-{which}") == self.memory.find(f"name-{which}")
        for key in ("k", "l" * 400):
            assert self.lmdb.find_key("agent", key) == self.memory.find_key("agent", key)

    def teardown(self) -> None:
        if hasattr(self, "lmdb"):
            self.lmdb.close()


def _kinds(refusals: list[Refusal | None]) -> list[object]:
    """What can be compared: the words of an `Unstorable` are each store's own."""
    return [Unstorable if isinstance(refusal, Unstorable) else refusal for refusal in refusals]


def test_any_history_gives_the_same_answers_from_both_stores(tmp_path):
    machine = type("Histories", (Histories,), {"directory": tmp_path})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=120,
            stateful_step_count=12,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
