"""The daemon under test, in a directory of its own; and the end of all that it has brought about."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from contextlib import suppress
from pathlib import Path

from hayata import Client
from hayata.errors import HayataError
from hayata_supervisor.process.prctl import die_with_parent

ROOT = Path(__file__).parents[2]
APP = f"{Path(__file__).with_name('app.py')}:agents"
_PATIENT = ROOT / "tests" / "support" / "patient_daemon.py"
_LIMITS = {"backoff": 0.02, "max_backoff": 0.1, "deaths": 1_000_000}
"""The guard's: its supervisor is killed more often than it would put up with."""

_MARK = "CHAOS_MARK"
_DEADLINE_S = 60.0


class Runtime:
    """One data directory, its daemon, and everything else that runs for the test.

    Attributes:
        home: A temporary directory: data, socket, ledgers, log.
    """

    def __init__(self, app: str = APP) -> None:
        self.app = app
        self.home = Path(tempfile.mkdtemp(prefix="hchaos-"))
        self.data_dir = self.home / "data"
        self.backup = self.home / "backup"
        self.socket = str(self.home / "s")
        self.log = self.home / "log"
        self.guard: subprocess.Popen[bytes] | None = None
        self._mark = uuid.uuid4().hex

    def environ(self) -> dict[str, str]:
        """Environment of all processes of the test."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("HAYATA_")}
        path = os.pathsep.join([str(ROOT), str(ROOT / "supervisor")])
        return {
            **inherited,
            "PYTHONPATH": path,
            "CHAOS_HOME": str(self.home),
            "CRASH_LIMITS": json.dumps(_LIMITS),
            "HAYATA_SOCKET": self.socket,
            _MARK: self._mark,
        }

    def start(self) -> subprocess.Popen[bytes]:
        """Start the daemon; don't wait for anything."""
        self.guard = self.spawn([str(_PATIENT), self.app, "--data-dir", str(self.data_dir), "--socket", self.socket])
        return self.guard

    def spawn(self, arguments: list[str]) -> subprocess.Popen[bytes]:
        """Start a Python program of the test, in a session of its own: Ctrl-C is for us alone."""
        with open(self.log, "ab") as log:
            return subprocess.Popen(
                [sys.executable, *arguments],
                cwd=ROOT,
                env=self.environ(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    def wait_serving(self) -> list[str]:
        """Wait until the app is loaded; return the ids of its agents."""
        due = time.monotonic() + _DEADLINE_S
        with Client(self.socket) as client:
            while time.monotonic() < due and self.guard is not None and self.guard.poll() is None:
                with suppress(HayataError):
                    if agents := client.agents():
                        return [agent.id for agent in agents]
                time.sleep(0.02)
        raise RuntimeError(f"the daemon does not serve:\n{self.tail()}")

    def tail(self, lines: int = 40) -> str:
        """The end of the log."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])

    def stop(self, number: int = signal.SIGTERM) -> int | None:
        """Have the daemon stop; return its exit code, None if it had to be killed."""
        assert self.guard is not None
        if self.guard.poll() is None:
            self.guard.send_signal(number)
        try:
            return self.guard.wait(_DEADLINE_S)
        except subprocess.TimeoutExpired:
            return None

    def left(self) -> dict[int, str]:
        """Living processes that the test has brought about: pid → command line."""
        wanted = f"{_MARK}={self._mark}".encode()
        found = {}
        for name in os.listdir("/proc"):
            if name.isdigit() and int(name) != os.getpid():
                with suppress(OSError):
                    if wanted in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                        command = Path(f"/proc/{name}/cmdline").read_bytes()
                        found[int(name)] = command.replace(b"\0", b" ").decode(errors="replace").strip()
        return found

    def destroy(self, *, keep: bool) -> None:
        """Kill what is left, and remove the directory unless it is to be kept."""
        due = time.monotonic() + _DEADLINE_S
        while (left := self.left()) and time.monotonic() < due:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if self.guard is not None:
                self.guard.poll()
            time.sleep(0.01)
        if self.guard is not None:
            self.guard.wait(_DEADLINE_S)
        if not keep:
            shutil.rmtree(self.home, ignore_errors=True)
