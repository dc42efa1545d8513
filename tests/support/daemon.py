"""A real daemon for tests of clients, that leaves no process and no file behind."""

from __future__ import annotations

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
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support.readiness import wait_ready

ROOT = Path(__file__).parents[2]
APP = "tests.support.client_app:agents"
DEADLINE_S = 30.0
MARK = "HAYATA_TEST_MARK"


def environment(mark: str, **more: str) -> dict[str, str]:
    """An environment in which our packages can be imported, and whose processes can be found."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "supervisor")])
    return {**os.environ, "PYTHONPATH": path, MARK: mark, "PYTHONWARNINGS": "", **more}


def marked(mark: str) -> list[int]:
    """Living processes that were started in such an environment, and their descendants."""
    found = []
    wanted = f"{MARK}={mark}".encode()
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            try:
                environ = Path(f"/proc/{entry}/environ").read_bytes()
                state = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if wanted in environ.split(b"\0") and state != "Z":
                found.append(int(entry))
    return found


def assert_all_gone(mark: str, timeout_s: float = 5.0, *, but: int = 0) -> None:
    """Wait until no process with the mark is left; ``but`` may live."""
    deadline = time.monotonic() + timeout_s
    while left := [pid for pid in marked(mark) if pid != but]:
        if time.monotonic() > deadline:
            names = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in left if _lives(pid)}
            for pid in left:
                _kill(pid)
            raise AssertionError(f"processes are left: {names}")
        fds = [fd for pid in left if (fd := _pidfd(pid)) is not None]
        try:
            select.select(fds, [], [], 0.2)
        finally:
            for fd in fds:
                os.close(fd)


def _lives(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}/cmdline")


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


class Daemon:
    """``hayata-supervisor`` on a directory of its own, serving when the constructor returns."""

    def __init__(self, app: str = APP) -> None:
        self.app = app
        self.home = tempfile.mkdtemp(prefix="hd-")
        self.data_dir = f"{self.home}/data"
        self.socket = f"{self.home}/s"
        self.mark = uuid.uuid4().hex
        self.environ = environment(self.mark, HAYATA_SOCKET=self.socket)
        try:
            self.process = self._start()
        except BaseException:
            shutil.rmtree(self.home)
            raise

    def _start(self) -> subprocess.Popen[bytes]:
        ready = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        with ready, open(f"{self.home}/log", "ab") as log:
            ready.bind(f"{self.home}/ready")
            process = subprocess.Popen(
                [sys.executable, "-m", "hayata_supervisor.main", self.app, "--data-dir", self.data_dir],
                env={**self.environ, "NOTIFY_SOCKET": f"{self.home}/ready"},
                cwd=ROOT,
                stdout=log,
                stderr=log,
            )
            try:
                self._await_ready(ready, process)
            except BaseException:
                process.kill()
                process.wait()
                raise
            finally:
                os.unlink(f"{self.home}/ready")
        return process

    def _await_ready(self, ready: socket.socket, process: subprocess.Popen[bytes]) -> None:
        pidfd = os.pidfd_open(process.pid)
        try:
            if not wait_ready(ready, DEADLINE_S, pidfd):
                raise AssertionError(f"the daemon does not get ready:\n{self.log()}")
        finally:
            os.close(pidfd)

    def log(self) -> str:
        return Path(f"{self.home}/log").read_text()

    def restart(self) -> None:
        """Start it again on the same directory, after it has ended."""
        self.process.wait(DEADLINE_S)
        self.process = self._start()

    def kill(self) -> None:
        """Kill the guard; the rest dies by itself."""
        self.process.kill()
        self.process.wait(DEADLINE_S)
        assert_all_gone(self.mark)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGQUIT)  # no drain
            try:
                self.process.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        try:
            assert_all_gone(self.mark)
        finally:
            shutil.rmtree(self.home)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()
