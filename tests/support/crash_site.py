"""Real daemons for the crash tests: each test has a `Site`, in which nothing may be left when it ends.

A site is a temporary directory with a short path (a socket's may have 107 bytes), the outside ledger, and as
many daemons as the test needs. All processes that it brings about bear its mark in their environment, so that
those are found, too, which have left the process tree.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from hayata import Client
from hayata.client.records import Process
from tests.support.eventually import DEADLINE_S, eventually
from tests.support.ledger import Ledger
from tests.support.readiness import wait_ready

CRASH_APP = str(Path(__file__).with_name("apps") / "crash.py") + ":agents"
_PATIENT = Path(__file__).with_name("patient_daemon.py")
_MARK = "CRASH_MARK"
GONE_S = 1.0
"""After a kill, nothing of a dead incarnation may live longer."""


class Seen:
    """A process that was alive when it was looked up; its pidfd tells of it alone."""

    def __init__(self, pid: int, role: str = "", name: str = "") -> None:
        self.pid, self.role, self.name = pid, role, name
        self.pidfd = os.pidfd_open(pid)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send the signal, if it lives."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def dead(self, timeout_s: float = 0.0) -> bool:
        """Whether it has ended, or does in time."""
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(max(0.0, timeout_s) * 1000))

    def __repr__(self) -> str:
        return f"{self.role or 'process'} {self.name} ({self.pid})"


class Daemon:
    """One daemon of a site. `start` it, kill what you like, `start` it again."""

    def __init__(
        self,
        site: Site,
        app: str,
        agents: str,
        data_dir: str,
        sock: str,
        limits: dict[str, float] | None,
    ) -> None:
        self.site, self.app, self.data_dir, self.socket = site, app, data_dir, sock
        self.client = Client(sock)
        self._agents = agents
        self._limits = limits
        self._guard: subprocess.Popen | None = None

    @property
    def guard(self) -> subprocess.Popen:
        """The guard, which is what was started."""
        assert self._guard is not None
        return self._guard

    def launch(self, *, stderr: int | None = None, **environ: str) -> subprocess.Popen:
        """Start it and don't wait for anything; its log is the site's, if it has no ``stderr`` of its own."""
        module = ["-m", "hayata_supervisor.main"] if self._limits is None else [str(_PATIENT)]
        own = {"CRASH_AGENTS": self._agents, "CRASH_LIMITS": json.dumps(self._limits)}
        arguments = [self.app, "--data-dir", self.data_dir, "--socket", self.socket]
        with open(self.site.log, "ab") as log:
            self._guard = subprocess.Popen(
                [sys.executable, *module, *arguments],
                cwd=self.site.home,
                env={**self.site.environ(), **own, **environ},
                stdin=subprocess.DEVNULL,
                stdout=log if stderr is None else stderr,
                stderr=log if stderr is None else stderr,
            )
        self.site.started.append(self._guard)
        return self._guard

    def start(self, *, stderr: int | None = None, **environ: str) -> Daemon:
        """Start it, and return when it tells the service manager that it serves."""
        address = f"{self.site.home}/ready-{uuid.uuid4().hex[:8]}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready:
            ready.bind(address)
            pidfd = os.pidfd_open(self.launch(stderr=stderr, NOTIFY_SOCKET=address, **environ).pid)
            try:
                told = wait_ready(ready, DEADLINE_S, pidfd)
                assert told, f"the daemon did not get ready:\n{self.site.log.read_text()}"
            finally:
                os.close(pidfd)
                os.unlink(address)
        return self

    def stop(self) -> None:
        """Have it stop without a drain, and see that this is clean."""
        self.guard.send_signal(signal.SIGQUIT)
        assert self.guard.wait(DEADLINE_S) == 0

    def wait_lost(self) -> None:
        """Reap the guard that was killed."""
        assert self.guard.wait(DEADLINE_S) == -signal.SIGKILL

    def tree(self) -> list[Seen]:
        """All living processes of the supervision tree, the guard first."""
        found = []
        for process in flat(self.client.tree()):
            with suppress(ProcessLookupError):
                if process.pid:
                    found.append(self.site.see(process.pid, process.role, process.name))
        return found

    def supervisor(self) -> Seen:
        """The supervisor."""
        return next(seen for seen in self.tree() if seen.role == "supervisor")

    def kill_supervisor(self) -> Seen:
        """SIGKILL it, and return it dead."""
        victim = self.supervisor()
        victim.kill()
        assert victim.dead(GONE_S)
        return victim

    def wait_serving(self) -> None:
        """Wait until the apps are loaded."""
        eventually(self.client.agents, "agents")


class Site:
    """See the module."""

    def __init__(self) -> None:
        self.home = tempfile.mkdtemp(prefix="hd-")
        self.log = Path(self.home) / "log"
        self.ledger = Ledger(Path(self.home) / "ledger")
        self.started: list[subprocess.Popen] = []
        self._mark = uuid.uuid4().hex
        self._daemons: list[Daemon] = []
        self._seen: list[Seen] = []
        self._gates = Path(self.home) / "gates"
        self._gates.mkdir()
        (Path(self.home) / "locks").mkdir()

    def environ(self) -> dict[str, str]:
        """Environment of the site's processes."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("HAYATA_")}
        return {**inherited, "CRASH_HOME": self.home, _MARK: self._mark}

    def daemon(
        self,
        app: str = CRASH_APP,
        *,
        agents: str = "",
        data_dir: str = "d",
        sock: str = "s",
        limits: dict[str, float] | None = None,
    ) -> Daemon:
        """Make a daemon, not started.

        Args:
            app: What it serves.
            agents: Which of the agents of `tests.support.apps.crash`, where not all are needed.
            data_dir: Name in the site.
            sock: Name in the site.
            limits: The guard's `Limits`, where they are not the default.
        """
        daemon = Daemon(self, app, agents, f"{self.home}/{data_dir}", f"{self.home}/{sock}", limits)
        self._daemons.append(daemon)
        return daemon

    def open_gate(self, name: str) -> None:
        """Let those go on who wait for it, now and later."""
        (self._gates / name).touch()

    def see(self, pid: int, role: str = "", name: str = "") -> Seen:
        """Open a process; its descriptor is closed with the site."""
        self._seen.append(seen := Seen(pid, role, name))
        return seen

    def marked(self) -> list[Seen]:
        """All living processes that the site has brought about, in the tree or not."""
        wanted = f"{_MARK}={self._mark}".encode()
        found = []
        for name in os.listdir("/proc"):
            if name.isdigit():
                with suppress(OSError):
                    if wanted in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                        comm = Path(f"/proc/{name}/comm").read_text().strip()
                        found.append(self.see(int(name), name=comm))
        return [seen for seen in found if not seen.dead()]

    def close(self) -> None:
        """End everything; complain of what a daemon should have ended itself."""
        failures = []
        for guard in self.started:
            if guard.poll() is None:
                guard.send_signal(signal.SIGQUIT)
        for guard in self.started:
            try:
                guard.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                failures.append(f"guard {guard.pid} did not stop")
                guard.kill()
                guard.wait()
        left = [seen for seen in self.marked() if not seen.dead(GONE_S)]
        for seen in left:
            seen.kill()
            seen.dead(DEADLINE_S)
        for daemon in self._daemons:
            daemon.client.close()
            if os.path.lexists(daemon.socket) and daemon._guard and daemon._guard.returncode != -signal.SIGKILL:
                failures.append(f"socket {daemon.socket}")
        for seen in self._seen:
            os.close(seen.pidfd)
        sys.stderr.write(self.log.read_text() if self.log.exists() else "")  # pytest shows it when the test failed
        shutil.rmtree(self.home)
        failures += map(str, left)
        assert not failures, f"left behind: {failures}"


def flat(process: Process) -> Iterator[Process]:
    """A process and all below it."""
    yield process
    for child in process.children:
        yield from flat(child)


def check_gone(processes: Iterable[Seen], since: float, within_s: float = GONE_S) -> None:
    """Require that all these end by ``since`` (monotonic seconds) + ``within_s``."""
    left = [seen for seen in processes if not seen.dead(since + within_s - time.monotonic())]
    assert not left, f"{within_s} s after the kill these lived: {left}"
