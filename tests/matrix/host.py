"""The daemon of one trial: `tests.chaos.runtime.Runtime` with failpoints, started again whenever it has ended."""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from hayata.memfd import sealed_memfd
from hayata.messages import Fatal, FromGuard, Launch, StopRuntime, decoder, encode
from hayata_supervisor import failpoints
from hayata_supervisor.process.prctl import die_with_parent
from tests.chaos.runtime import ROOT, Runtime

APP = f"{Path(__file__).with_name('app.py')}:agents"
ODD_APP = f"{Path(__file__).with_name('odd_app.py')}:agent"
_PATIENT = ROOT / "tests" / "support" / "patient_daemon.py"
_START_S = 30.0
_END_S = 30.0
_decode = decoder(FromGuard).decode


class Host(Runtime):
    """See the module. It embeds the guard, which is faster than the command, and has messages of its own.

    Args:
        armed: ``HAYATA_FAILPOINTS``, or empty.
        template: A directory to begin with: what a killed daemon has left.
    """

    def __init__(self, armed: str = "", template: Path | None = None) -> None:
        super().__init__(APP)
        if template is not None:
            shutil.copytree(template, self.home, dirs_exist_ok=True, ignore=shutil.ignore_patterns("s", "ballast"))
        self.armed = armed
        self.starts = 0
        self.deaths: list[int] = []
        self._control: socket.socket | None = None

    def environ(self) -> dict[str, str]:
        """With the failpoints."""
        armed = {failpoints.VARIABLE: self.armed} if self.armed else {}
        return {**super().environ(), **armed}

    def start(self) -> subprocess.Popen[bytes]:
        """Start the guard; don't wait for anything."""
        self.close_control()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        launch = Launch(
            apps=[self.app],
            data_dir=str(self.data_dir),
            socket=self.socket,
            sys_path=[str(ROOT)],
            cwd=str(ROOT),
            control_fd=theirs.fileno(),
            drain_timeout_s=5.0,
            start_timeout_s=20.0,
            policy_timeout_s=5.0,
            node_retry_s=1.0,
            hang_timeout_s=4.0,
        )
        launch_fd = sealed_memfd("hayata-launch", encode(launch))
        with theirs, open(self.log, "ab") as log:
            try:
                self.guard = subprocess.Popen(
                    [sys.executable, "-P", str(_PATIENT), "--launch-fd", str(launch_fd)],
                    cwd=ROOT,
                    env=self.environ(),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[launch_fd, theirs.fileno()],
                    start_new_session=True,
                    preexec_fn=die_with_parent,
                )
            finally:
                os.close(launch_fd)
        self._control = ours
        self.starts += 1
        return self.guard

    def ended(self) -> bool:
        """Whether there is no guard; then `start` it again."""
        assert self.guard is not None
        return self.guard.poll() is not None

    def wait_ready(self) -> None:
        """Start, and start again, until the guard says that it serves."""
        due = time.monotonic() + _START_S
        while time.monotonic() < due:
            if self.guard is None or self.ended():
                self.start()
            if self._hear(1.0):
                return
        raise AssertionError(f"the daemon does not serve:\n{self.tail()}")

    def _hear(self, timeout_s: float) -> bool:
        """Wait for a word of the guard; whether it serves."""
        assert self._control is not None
        if not select.select([self._control], [], [], timeout_s)[0]:
            return False
        try:
            packet = self._control.recv(1 << 18)
        except ConnectionError:
            packet = b""
        if not packet:
            assert self.guard is not None
            self.guard.wait(_END_S)
            return False
        return not isinstance(_decode(packet), Fatal)

    def end(self) -> int:
        """Have it end without a drain; return the guard's exit code."""
        assert self.guard is not None
        if self._control is not None:
            try:
                self._control.send(encode(StopRuntime(0.0)))
            except OSError:
                pass
        try:
            return self.guard.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.guard.kill()
            self.guard.wait()
            raise

    def kill_guard(self) -> None:
        """SIGKILL it; everything below it follows."""
        assert self.guard is not None
        self.guard.send_signal(signal.SIGKILL)
        self.guard.wait()

    def close_control(self) -> None:
        """Close the control socket."""
        if self._control is not None:
            self._control.close()
            self._control = None
