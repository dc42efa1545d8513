"""Another definition after a restart: a warning where the version is the same, a rest where the state doesn't fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import hayata
from hayata import Agent, Finish, InvocationCancelled, Next, Node, RecoveryNeeded, Retry
from hayata_supervisor import inline
from tests.support.crash_site import Site
from tests.support.eventually import eventually

APP = str(Path(__file__).parents[1] / "support" / "apps" / "changing.py") + ":agent"
WAIT_S = 20.0


def test_definition_that_changed_without_its_version_is_named_and_a_state_that_does_not_fit_rests(site: Site):
    daemon = site.daemon(APP).start()
    invocation = daemon.client.run("changing", {"act_gate": "act"})
    site.ledger.wait("start", invocation=invocation.id)
    daemon.stop()

    daemon.start(CHANGED="yes")
    changes = "node more is gone; state.count was int, is str"
    with pytest.raises(RecoveryNeeded) as needed:
        invocation.result(timeout=WAIT_S)
    assert (needed.value.code, needed.value.details["path"]) == ("invalid_state", "state.count")
    assert changes in needed.value.message
    assert invocation.status() == "recovery_required"
    assert [task.status for task in invocation.tasks()] == ["failed", "scheduled"]
    told = f"definition changed, its version did not agent=changing version=1 invocations=1 changes='{changes}'"
    eventually(lambda: told in site.log.read_text(), "the warning")
    daemon.client.recover("changing")  # it is tried again, and doesn't fit any better
    with pytest.raises(RecoveryNeeded):
        invocation.result(timeout=WAIT_S)
    daemon.stop()

    site.open_gate("act")
    daemon.start()
    assert invocation.result(timeout=WAIT_S) == {"count": 2}
    assert site.ledger.attempts(invocation.id, "act") == [1, 2, 1]


def fail_for_now(state):
    raise ConnectionError("try again in an hour")


class Spy:
    """A store that remembers which invocations share a transaction."""

    def __init__(self, store: Any, batches: list[list[Any]]) -> None:
        self._store = store
        self._batches = batches

    def write(self, commits: Any) -> Any:
        self._batches.append(list(commits))
        return self._store.write(commits)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_restart_drops_and_begins_anew_in_one_commit(tmp_path, monkeypatch):
    retry = Retry(max_attempts=2, backoff=3600.0)

    def agent(version: str) -> Agent:
        def policy(context: Any) -> Any:
            return Next("wait", None) if version == "1" else Finish("done")

        nodes = {"wait": Node(fail_for_now, retry=retry)}
        return Agent("a", nodes, policy, version=version, max_concurrency=1000)

    with hayata.start(agent("1"), data_dir=tmp_path, inline=True) as runtime:
        started = [runtime.run("a", {"n": n}, invocation_id=f"old{n}") for n in range(300)]
        old = [each.id for each in started]
        eventually(lambda: started[-1].tasks()[-1:] and started[-1].tasks()[-1].attempt == 2, "all wait")
    batches: list[list[Any]] = []
    monkeypatch.setattr(inline, "open_store", lambda path, real=inline.open_store: Spy(real(path), batches))
    with hayata.start(agent("2"), data_dir=tmp_path, inline=True) as runtime:
        touched = runtime.recover("a", "restart")
        assert [each.status() for each in touched] == ["cancelled"] * len(old)
        fresh = {each.record.restarted_from: each for each in runtime.invocations("a", limit=1000)}
        for name in old:
            assert fresh[name].result(timeout=WAIT_S) == "done"
        with pytest.raises(InvocationCancelled):
            touched[0].result(timeout=WAIT_S)
    begun = {commit.invocation: index for index, batch in enumerate(batches) for commit in batch if commit.number == 1}
    names = {c.header.restarted_from: c.invocation for b in batches for c in b if c.number == 1 and c.header}
    ended = [
        (commit.header.name, index)
        for index, batch in enumerate(batches)
        for commit in batch
        if commit.open is False and commit.header.name in names
    ]
    assert len(ended) == len(old)
    assert all(begun[names[name]] == index for name, index in ended)
