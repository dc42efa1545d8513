"""The supervisor has no descriptors left: clients wait, and nothing else comes of it."""

from __future__ import annotations

import os
import resource
import socket
import time
from contextlib import ExitStack

from tests.support.crash_site import Daemon, flat
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
