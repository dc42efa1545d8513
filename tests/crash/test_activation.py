"""Socket activation: descriptors 3 and following are really passed, as a service manager does it."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from hayata import Client
from tests.support.crash_site import Site
from tests.support.eventually import DEADLINE_S
from tests.support.readiness import wait_ready

APP = """
import os
from hayata import Agent

def look(state, ctx):
    return {"passed": sorted(name for name in os.environ if name.startswith("LISTEN_"))}

agent = Agent(id="looker", nodes=[look])
"""

_MANAGER = """
import fcntl, os, sys
whose, *fds = map(int, sys.argv[1].split(","))
spare = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 100) for fd in fds]
for number, fd in enumerate(spare, 3):
    os.dup2(fd, number)
os.environ["LISTEN_PID"] = str(whose or os.getpid())
os.execv(sys.argv[2], sys.argv[2:])
"""


class Manager:
    """What systemd does for a ``.socket`` unit."""

    def __init__(self, site: Site, opened: ExitStack) -> None:
        self.site, self._opened = site, opened
        self.path = f"{site.home}/run/hayata.sock"
        os.mkdir(f"{site.home}/run")
        (Path(site.home) / "app.py").write_text(APP)
        self.daemon = site.daemon(sock="run/hayata.sock")  # for its client

    def listen(self, path: str) -> socket.socket:
        sock = self.open(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind(path)
        os.chmod(path, 0o660)
        sock.listen(64)
        return sock

    def open(self, family: int, kind: int) -> socket.socket:
        return self._opened.enter_context(socket.socket(family, kind))

    def spawn(
        self, fds: Sequence[int], *options: str, names: str = "", whose: int = 0, **environ: str
    ) -> subprocess.Popen:
        command = [sys.executable, "-m", "hayata_supervisor.main", "app.py", "--data-dir", "d", *options]
        passed = {"LISTEN_FDS": str(len(fds)), "LISTEN_FDNAMES": names}
        with open(self.site.log, "ab") as log:
            guard = subprocess.Popen(
                [sys.executable, "-c", _MANAGER, ",".join(map(str, [whose, *fds])), *command],
                cwd=self.site.home,
                env={**self.site.environ(), **passed, **environ},
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.site.started.append(guard)
        return guard

    def start(self, fds: Sequence[int], *options: str, **more: str) -> subprocess.Popen:
        """Start it, and wait until it serves."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready:
            ready.bind(f"{self.site.home}/ready")
            guard = self.spawn(fds, *options, NOTIFY_SOCKET=f"{self.site.home}/ready", **more)
            assert wait_ready(ready, DEADLINE_S), self.site.log.read_text()
            os.unlink(f"{self.site.home}/ready")
        return guard


@pytest.fixture
def manager() -> Iterator[Manager]:
    site = Site()
    with ExitStack() as opened:
        yield Manager(site, opened)
        os.path.lexists(f"{site.home}/run/hayata.sock") and os.unlink(f"{site.home}/run/hayata.sock")
        site.close()


def test_passed_socket_is_served_and_stays_the_managers(manager: Manager):
    listening = manager.listen(manager.path)
    guard = manager.start([listening.fileno()])
    with Client(manager.path) as client:
        assert client.call("looker", timeout=DEADLINE_S) == {"passed": []}
    guard.send_signal(signal.SIGTERM)
    assert guard.wait(DEADLINE_S) == 0
    assert stat.S_IMODE(os.stat(manager.path).st_mode) == 0o660
    assert os.listdir(os.path.dirname(manager.path)) == ["hayata.sock"], "no lock beside it"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client_socket:
        client_socket.connect(manager.path)  # the manager still listens


def test_client_that_came_before_the_daemon_is_served_and_so_after_a_restart_of_the_supervisor(manager: Manager):
    listening = manager.listen(manager.path)
    manager.start([listening.fileno()], "--socket", manager.path)
    assert manager.daemon.client.call("looker", timeout=DEADLINE_S) == {"passed": []}
    manager.daemon.kill_supervisor()
    assert manager.daemon.client.call("looker", timeout=DEADLINE_S) == {"passed": []}


def test_hayata_stop_ends_and_does_not_wake_the_next_daemon(manager: Manager):
    listening = manager.listen(manager.path)
    guard = manager.start([listening.fileno()])
    stop = [sys.executable, "-m", "hayata.cli", "--socket", manager.path, "stop"]
    assert subprocess.run(stop, env=manager.site.environ(), timeout=60, check=False).returncode == 0
    assert guard.wait(DEADLINE_S) == 0
    listening.setblocking(False)
    with pytest.raises(BlockingIOError):
        listening.accept()


def test_of_several_sockets_the_one_named_hayata_is_ours(manager: Manager):
    other = manager.listen(f"{manager.site.home}/other")
    ours = manager.listen(manager.path)
    manager.start([other.fileno(), ours.fileno()], names="web:hayata")
    assert manager.daemon.client.call("looker", timeout=DEADLINE_S) == {"passed": []}


def test_another_user_whom_the_mode_lets_in_is_refused(manager: Manager):
    """The mode is the manager's, and says who may connect; the daemon serves its own user and root."""
    if os.geteuid() != 0:
        pytest.skip("can't be another user")
    with tempfile.TemporaryDirectory(dir="/tmp") as open_to_all:
        os.chmod(open_to_all, 0o755)
        path = f"{open_to_all}/s"
        listening = manager.listen(path)
        os.chmod(path, 0o666)
        manager.start([listening.fileno()])
        os.seteuid(65534)
        try:
            stranger = manager.open(socket.AF_UNIX, socket.SOCK_STREAM)
            stranger.settimeout(DEADLINE_S)
            stranger.connect(path)
        finally:
            os.seteuid(0)
        assert b"permission_denied" in stranger.recv(4096)
        with Client(path) as client:
            assert client.call("looker", timeout=DEADLINE_S) == {"passed": []}


def test_socket_that_was_passed_to_another_process_is_not_taken(manager: Manager):
    listening = manager.listen(manager.path)
    guard = manager.start([listening.fileno()], "--socket", f"{manager.site.home}/own", whose=1)
    with Client(f"{manager.site.home}/own") as client:
        assert client.call("looker", timeout=DEADLINE_S) == {"passed": []}
    guard.send_signal(signal.SIGTERM)
    assert guard.wait(DEADLINE_S) == 0
    assert not os.path.lexists(f"{manager.site.home}/own")


def test_what_was_passed_and_does_not_fit_is_a_usage_error(manager: Manager):
    listening = manager.listen(manager.path)
    bound = manager.open(socket.AF_UNIX, socket.SOCK_STREAM)
    bound.bind(f"{manager.site.home}/bound")
    datagram = manager.open(socket.AF_UNIX, socket.SOCK_DGRAM)
    tcp = manager.open(socket.AF_INET, socket.SOCK_STREAM)
    tcp.bind(("127.0.0.1", 0))
    tcp.listen()
    abstract = manager.open(socket.AF_UNIX, socket.SOCK_STREAM)
    abstract.bind(f"\0{manager.site.home}")
    abstract.listen()
    with open(os.devnull) as file:
        cases = [
            ([file.fileno()], [], "", "is no socket"),
            ([bound.fileno()], [], "", "does not listen"),
            ([datagram.fileno()], [], "", "kind AF_UNIX, SOCK_DGRAM"),
            ([tcp.fileno()], [], "", "kind AF_INET, SOCK_STREAM"),
            ([abstract.fileno()], [], "", "no absolute path"),
            ([listening.fileno(), abstract.fileno()], [], "a:b", "2 sockets are passed, and 0 of them"),
            ([listening.fileno(), abstract.fileno()], [], "hayata:hayata", "2 sockets are passed, and 2 of them"),
            ([listening.fileno()], ["--socket", "elsewhere"], "", "has passed one at"),
        ]
        for fds, options, names, said in cases:
            guard = manager.spawn(fds, *options, names=names)
            assert guard.wait(DEADLINE_S) == 2, said
            text = manager.site.log.read_text()
            assert "hayata-supervisor: invalid_options: " in text, said
            assert said in text
            manager.site.log.write_text("")
    assert not os.path.exists(manager.daemon.data_dir)
