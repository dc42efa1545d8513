"""No descriptors are left: clients wait, and nobody is overlooked who must die."""

from __future__ import annotations

import itertools
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from hayata.errors import InvocationFailed
from tests.support.crash_site import Daemon, Seen, Site, check_gone, flat
from tests.support.daemon import ROOT, environment
from tests.support.eventually import eventually

_LOOKS = 4


@contextmanager
def squeezed(supervisor: Seen, spare: int = 0) -> Iterator[None]:
    """The supervisor may open ``spare`` descriptors more."""
    used = {int(name) for name in os.listdir(f"/proc/{supervisor.pid}/fd")}
    free = (number for number in itertools.count() if number not in used)
    limit = next(itertools.islice(free, spare, None))
    before = resource.prlimit(supervisor.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(supervisor.pid, resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield
    finally:
        if not supervisor.dead():
            resource.prlimit(supervisor.pid, resource.RLIMIT_NOFILE, before)


def serving(daemon: Daemon) -> Seen:
    """The supervisor, when all workers serve."""
    eventually(lambda: all(each.status == "serving" for each in flat(daemon.client.tree())), "all workers")
    return daemon.supervisor()


def test_client_that_can_not_be_accepted_is_served_later_and_the_log_stays_small(daemon: Daemon):
    supervisor = serving(daemon)
    with squeezed(supervisor), ExitStack() as clients:
        eventually(lambda: connect(daemon, clients) or refusals(daemon), "refused connections")
        began = time.monotonic()
        eventually(lambda: refusals(daemon) >= _LOOKS, "refused connections")
        assert refusals(daemon) <= _LOOKS + 10 * (time.monotonic() - began)
        assert not supervisor.dead()
    assert daemon.client.invocations() == []
    assert not supervisor.dead()


@pytest.mark.parametrize("role", ["node", "agent"])
def test_worker_that_can_not_be_watched_costs_its_start_and_not_the_tree(site: Site, role: str):
    daemon = site.daemon(agents="line").start()
    supervisor = serving(daemon)
    roles = {each.role: each for each in daemon.tree()}
    victim, forkserver = roles[role], roles["forkserver"]
    forkserver.kill(signal.SIGSTOP)
    victim.kill()
    name = victim.name
    eventually(
        lambda: "starting" in {each.status for each in flat(daemon.client.tree()) if each.name == name}, "a fork"
    )
    with squeezed(supervisor):
        forkserver.kill(signal.SIGCONT)  # the worker is there, and there is nothing to hold it by
        eventually(lambda: "Too many open files" in told(daemon, "worker not started"), "a refused worker")
        assert not supervisor.dead()
    assert serving(daemon).pid == supervisor.pid
    assert daemon.client.call("line", timeout=60.0)["act"]


@pytest.mark.parametrize("spare", [0, 1])
def test_edge_that_can_not_be_watched_works_and_dies_with_its_node(site: Site, spare: int):
    """With one descriptor to spare there is room for the edge's, and none to watch its node by."""
    daemon = site.daemon(agents="line").start()
    supervisor = serving(daemon)
    node = next(each for each in daemon.tree() if each.name == "line/act")
    with squeezed(supervisor, spare):
        invocation = daemon.client.run("line", {"act_gate": "never"})
        pid = site.ledger.wait("start", invocation=invocation.id, node="act")["pid"]
        edge, since = site.see(pid), time.monotonic()
        node.kill()
        check_gone([edge], since)
        with pytest.raises(InvocationFailed, match="node_crashed"):
            invocation.result(timeout=20.0)
    assert serving(daemon).pid == supervisor.pid


def test_guard_lost_without_a_descriptor_left_takes_what_tasks_started_with_it(daemon: Daemon):
    supervisor = serving(daemon)
    invocation = daemon.client.run("line", {"act_family": True, "act_gate": "never"})
    daemon.site.ledger.wait("family")
    assert invocation.id
    with squeezed(supervisor):
        left = daemon.site.marked()
        since = time.monotonic()
        daemon.guard.kill()
        check_gone(left, since)
    daemon.wait_lost()


def connect(daemon: Daemon, clients: ExitStack) -> None:
    """One more client, if there is room for it in the kernel's queue."""
    sock = clients.enter_context(socket.socket(socket.AF_UNIX))
    sock.setblocking(False)
    sock.connect_ex(daemon.socket)


def told(daemon: Daemon, event: str) -> str:
    """The first line of the log with that event; empty when there is none."""
    return next((line for line in daemon.site.log.read_text().splitlines() if event in line), "")


def refusals(daemon: Daemon) -> int:
    """How often the log complains."""
    return daemon.site.log.read_text().count("accept failed")


SQUEEZED = """
import itertools
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
