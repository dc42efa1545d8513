"""One daemon for all tests of a module, and what every one of them must leave as it was."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hayata import HayataError, InvocationFailed
from hayata.client import Invocation
from hayata.client.records import Process
from tests.support.crash_site import Daemon, Site
from tests.support.ledger import check_events

WAIT_S = 20.0


def app(name: str, attribute: str = "agents") -> str:
    """The reference of an app in `tests.support.apps`."""
    return str(Path(__file__).with_name("apps") / f"{name}.py") + f":{attribute}"


@contextmanager
def serving(app: str, **environ: str) -> Iterator[Daemon]:
    """A daemon on a site of its own, started with these settings; at the end nothing is open or left."""
    site = Site()
    try:
        daemon = site.daemon(app).start(**environ)
        yield daemon
        stats = daemon.client.stats()
        assert [stats[f"{what}_invocations"] for what in ("open", "running", "queued")] == [0, 0, 0]
    finally:
        site.close()


@contextmanager
def undisturbed(daemon: Daemon, agent: str) -> Iterator[Daemon]:
    """The daemon, that must be the same afterwards, and serve ``agent`` as before."""
    before = supervisor(daemon).pid
    yield daemon
    assert supervisor(daemon).pid == before
    assert daemon.client.call(agent, {"still": "there"}, timeout=WAIT_S)


@contextmanager
def holding(daemon: Daemon) -> Iterator[None]:
    """Beside all tests the invocation ``held`` waits at its gate; it must come to its end untouched."""
    held = daemon.client.run("hold", {"gate": "end"}, invocation_id="held")
    daemon.site.ledger.wait("holding", invocation=held.id)
    yield
    assert held.status() == "running"
    daemon.site.open_gate("end")
    assert held.result(timeout=WAIT_S) == {"held": True}
    assert [task.attempt for task in held.tasks()] == [1]


def supervisor(daemon: Daemon) -> Process:
    """The supervisor as the tree shows it."""
    return daemon.client.tree().children[0]


def descriptors(daemon: Daemon) -> int:
    """How many descriptors the supervisor has open."""
    return len(os.listdir(f"/proc/{supervisor(daemon).pid}/fd"))


def failed(invocation: Invocation) -> InvocationFailed:
    """How the invocation has failed; its events say the same."""
    with pytest.raises(InvocationFailed) as failure:
        invocation.result(timeout=WAIT_S)
    events = list(invocation.events())
    check_events(events, "failed")
    assert events[-1].data["reason"]["code"] == failure.value.code
    return failure.value


def refused(code: str, call: Callable[[], object]) -> HayataError:
    """The error with which the call was refused."""
    with pytest.raises(HayataError) as refusal:
        call()
    assert refusal.value.code == code
    return refusal.value
