"""The guard as process 1 of a pid namespace, as it is in a container."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hayata_supervisor.process.pidfd import children_of
from tests.support.crash_site import Daemon, Site
from tests.support.eventually import DEADLINE_S, eventually
from tests.support.readiness import wait_ready

_PLAIN = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
_AS_USER = [*_PLAIN, "--user", "--map-root-user"]


def _unshare() -> list[str]:
    """The way to a pid namespace that this machine allows."""
    for command in (_PLAIN, _AS_USER):
        if (
            shutil.which("unshare")
            and subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0
        ):
            return command
    pytest.skip("no pid namespaces here")


class Container:
    """A daemon in a pid namespace of its own."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.daemon: Daemon = site.daemon(agents="line,again")
        arguments = ["-m", "hayata_supervisor.main", self.daemon.app, "--data-dir", self.daemon.data_dir]
        ready_path = f"{site.home}/ready"
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready, open(site.log, "ab") as log:
            ready.bind(ready_path)
            self.process = subprocess.Popen(
                [*_unshare(), sys.executable, *arguments, "--socket", self.daemon.socket],
                cwd=site.home,
                env={**site.environ(), "NOTIFY_SOCKET": ready_path, "CRASH_AGENTS": "line,again"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
            site.started.append(self.process)
            assert wait_ready(ready, DEADLINE_S), site.log.read_text()
        (self.guard,) = children_of(self.process.pid)

    def states(self) -> dict[int, str]:
        """State of each child of the guard, zombies included."""
        found = {}
        for pid in children_of(self.guard):
            try:
                stat = Path(f"/proc/{pid}/stat").read_text()
            except OSError:
                continue
            found[pid] = stat.rpartition(")")[2].split()[0]
        return found


@pytest.fixture
def container() -> Iterator[Container]:
    site = Site()
    try:
        yield Container(site)
    finally:
        site.close()


def test_guard_as_process_1_serves_restarts_its_supervisor_and_stops(container: Container):
    daemon = container.daemon
    assert daemon.client.tree().pid == 1
    invocation = daemon.client.run("again", {"act_gate": "act"})
    container.site.ledger.wait("start", invocation=invocation.id, node="act")
    (supervisor,) = children_of(container.guard)
    os.kill(supervisor, signal.SIGKILL)
    container.site.open_gate("act")
    assert set(invocation.result(timeout=DEADLINE_S)) >= {"prepare", "act", "report"}
    assert list(container.states()) == children_of(container.guard) != [supervisor]
    assert "Z" not in container.states().values()
    os.kill(container.guard, signal.SIGTERM)
    assert container.process.wait(DEADLINE_S) == 0
    assert not os.path.lexists(daemon.socket)
    assert container.site.marked() == []


def test_process_1_reaps_what_others_have_left_to_it(container: Container):
    """What ``podman exec`` starts is no descendant of the guard, until its parent ends."""
    enter = ["nsenter", f"--target={container.guard}", "--pid", "--mount"]
    if os.geteuid() != 0 or not shutil.which("nsenter"):
        pytest.skip("can't enter the namespace")
    (supervisor,) = children_of(container.guard)
    subprocess.run([*enter, "sh", "-c", "sleep 0.5 & sleep 600 &"], check=True, timeout=DEADLINE_S)
    eventually(lambda: len(container.states()) == 2, "the adopted sleep that goes on, the other one reaped")
    assert "Z" not in container.states().values()
    os.kill(container.guard, signal.SIGTERM)
    assert container.process.wait(DEADLINE_S) == 0
    assert not os.path.exists(f"/proc/{supervisor}")


def test_other_signals_do_no_harm_to_process_1_and_interrupt_stops_it(container: Container):
    for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGINT):
        os.kill(container.guard, number)
    assert container.process.wait(DEADLINE_S) == 0


def test_hayata_stop_from_outside_the_namespace_waits_for_the_end(container: Container):
    """The guard's pid is 1 in there, and another process's out here."""
    stop = [sys.executable, "-m", "hayata.cli", "--socket", container.daemon.socket, "stop"]
    done = subprocess.run(stop, env=container.site.environ(), timeout=60, check=False)
    assert done.returncode == 0
    assert not os.path.lexists(container.daemon.socket)
    assert container.process.wait(DEADLINE_S) == 0
