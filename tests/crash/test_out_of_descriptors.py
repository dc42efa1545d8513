"""No descriptors are left: clients wait, and nobody is overlooked who must die."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest

from tests.support.crash_site import Daemon, flat
from tests.support.daemon import ROOT, environment
from tests.support.eventually import eventually

_LOOKS = 4


def test_client_that_can_not_be_accepted_is_served_later_and_the_log_stays_small(daemon: Daemon):
    eventually(lambda: all(each.status == "serving" for each in flat(daemon.client.tree())), "all workers")
    supervisor = daemon.supervisor()
    greatest = max(map(int, os.listdir(f"/proc/{supervisor.pid}/fd")))
    before = resource.prlimit(supervisor.pid, resource.RLIMIT_NOFILE)
    with ExitStack() as clients:
        resource.prlimit(supervisor.pid, resource.RLIMIT_NOFILE, (greatest + 1, before[1]))
        eventually(lambda: connect(daemon, clients) or refusals(daemon), "refused connections")
        began = time.monotonic()
        eventually(lambda: refusals(daemon) >= _LOOKS, "refused connections")
        assert refusals(daemon) <= _LOOKS + 10 * (time.monotonic() - began)
        assert not supervisor.dead()
        resource.prlimit(supervisor.pid, resource.RLIMIT_NOFILE, before)
    assert daemon.client.invocations() == []
    assert not supervisor.dead()


def connect(daemon: Daemon, clients: ExitStack) -> None:
    """One more client, if there is room for it in the kernel's queue."""
    sock = clients.enter_context(socket.socket(socket.AF_UNIX))
    sock.setblocking(False)
    sock.connect_ex(daemon.socket)


def refusals(daemon: Daemon) -> int:
    """How often the log complains."""
    return daemon.site.log.read_text().count("accept failed")


SQUEEZED = """
import os
import resource
import subprocess

from hayata_supervisor.process.pidfd import children_of
from hayata_supervisor.process.sweep import kill_children

children = [subprocess.Popen(["sleep", "600"]) for _ in range(5)]
try:
    resource.setrlimit(resource.RLIMIT_NOFILE, (3 + SPARE, 100))
    print(kill_children((), timeout_s=10.0), children_of(os.getpid()))
except OSError as error:
    print(error.strerror)
finally:
    for child in children:
        child.kill()
"""


@pytest.mark.parametrize(("spare", "told"), [(1, "[] []"), (0, "Too many open files")])
def test_children_are_ended_with_one_descriptor_and_never_overlooked(spare: int, told: str):
    program = [sys.executable, "-c", SQUEEZED.replace("SPARE", str(spare))]
    output = subprocess.run(program, cwd=ROOT, env=environment("squeezed"), stdout=subprocess.PIPE, timeout=60.0)
    assert output.stdout.decode() == told + "\n"
