"""Invocations as the core makes them, stored: what `hayata verify` must find whole."""

from __future__ import annotations

import msgspec

from hayata.ids import new_uuid7
from hayata.messages import ErrorInfo, Update
from hayata_supervisor.committer import _commit
from hayata_supervisor.core import facts as f
from hayata_supervisor.core.commits import Growth, make_record
from hayata_supervisor.core.invocation import Invocation
from hayata_supervisor.store.interface import Commit, Store

encode = msgspec.msgpack.encode


class History:
    """One invocation, told fact by fact.

    Attributes:
        commits: What the store gets.
    """

    def __init__(self, name: str, *, key: str | None = None, agent: str = "agent", ms: int = 1000) -> None:
        self.invocation = Invocation(
            id=new_uuid7(ms),
            name=name,
            agent=agent,
            version="1",
            session=f"session-{name}",
            own_session=False,
            stream=False,
            key=key,
            digest=b"digest",
            created_at=ms / 1000,
        )
        self.commits: list[Commit] = []
        self._growth = Growth()
        self._at = ms / 1000

    @property
    def id(self) -> bytes:
        return self.invocation.id

    def tell(self, *facts: f.Fact, memory: object = None) -> History:
        """One more record."""
        self._at += 1.0
        kept = None if memory is None else (self.invocation.session, encode(memory))
        persist = make_record(self.invocation, list(facts), self._at, self._growth, memory=kept)
        self.commits.append(_commit(persist))
        return self

    def begin(self) -> History:
        return self.tell(f.Accepted(raw({"go": True})), f.Started({"log": raw([])}))

    def step(self, size: int = 10) -> History:
        """A step that appends ``size`` bytes, in two records."""
        step = self.invocation.step
        self.tell(f.Decided(step, ["node"], False, raw(None)), f.Marked(step, 1, "node", step % 7))
        update: Update = {"log": raw("x" * size)}
        return self.tell(f.Completed(step, 1, "node", update, {"log": "append"}))

    def finish(self) -> History:
        return self.tell(f.Finished(raw("done")), memory=[{"role": "user", "content": "hi"}])

    def doubt(self) -> History:
        step = self.invocation.step
        self.tell(f.Decided(step, ["node"], False, raw(None)), f.Marked(step, 1, "node", 1))
        return self.tell(f.Uncertain(step, 1, "node"))

    def fail(self) -> History:
        return self.tell(f.Aborted(ErrorInfo("node_exception", "no luck")))

    def store(self, store: Store) -> History:
        assert store.write(self.commits) == [None] * len(self.commits)
        self.commits = []
        return self


def raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(encode(value))


def every_kind() -> list[History]:
    """One of each: ended in each way, open, uncertain, long enough for a snapshot, of one record."""
    return [
        History("done", key="k", ms=1000).begin().step().step().finish(),
        History("failed", ms=2000).begin().step().fail(),
        History("dropped", ms=3000).begin().tell(f.Dropped("not wanted")),
        History("open", key="k2", ms=4000).begin().step(),
        History("uncertain", ms=5000).begin().step().doubt(),
        _long("long", 6000),
        History("queued", ms=7000).tell(f.Accepted(raw(1))),
    ]


def _long(name: str, ms: int) -> History:
    history = History(name, ms=ms).begin()
    for _ in range(40):
        history.step(5000)
    assert any(commit.snapshot for commit in history.commits)
    return history
