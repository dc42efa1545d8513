"""A burial whose looks fail."""

from __future__ import annotations

import errno
import os
import subprocess

import pytest

from hayata_supervisor.process import burial
from hayata_supervisor.process.burial import Burial
from hayata_supervisor.process.pidfd import children_of, open_pidfd
from hayata_supervisor.process.reactor import Reactor

NO_DESCRIPTORS = OSError(errno.EMFILE, "Too many open files")
TURNS = 500


def bury(child: subprocess.Popen) -> int:
    """Bury one child, of all that this process has; return how often that was said to be done."""
    reactor = Reactor(forks=True)
    done: list[None] = []
    try:
        Burial(reactor, lambda pid: pid != child.pid, lambda: done.append(None)).start()
        for _ in range(TURNS):
            if done:
                break
            reactor.turn(0.02)
        reactor.turn(0.1)
    finally:
        reactor.close()
    return len(done)


@pytest.mark.parametrize("name", ["children_of", "open_pidfd"])
def test_burial_without_descriptors_ends_only_when_it_could_look(name: str, monkeypatch: pytest.MonkeyPatch):
    failures = [NO_DESCRIPTORS] * 2
    right = {"children_of": children_of, "open_pidfd": open_pidfd}[name]

    def sometimes(pid: int) -> object:
        if failures:
            raise failures.pop()
        return right(pid)

    monkeypatch.setattr(burial, name, sometimes)
    child = subprocess.Popen(["sleep", "600"])
    try:
        assert bury(child) == 1
        assert not failures
        with pytest.raises(ProcessLookupError):
            os.kill(child.pid, 0)
    finally:
        child.returncode = -9  # the burial has reaped it
