"""Starts guards over the fake supervisor, hears what that says, and leaves nothing behind."""

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

from hayata import address, messages
from hayata.memfd import sealed_memfd
from hayata.messages import Launch

ROOT = Path(__file__).parents[2]
DRIVER = Path(__file__).with_name("guard_driver.py")
DEADLINE_S = 20.0
_MARK = "GUARD_RIG_MARK"


class Rig:
    """One test's guards, in a directory of its own."""

    def __init__(self):
        self.home = tempfile.mkdtemp(prefix="hg-")
        self.mark = uuid.uuid4().hex
        self.data_dir = f"{self.home}/data"
        self.socket = f"{self.home}/run/hayata.sock"
        self._heard = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._heard.bind(f"{self.home}/rig")
        self._guards = []

    def launch(self, behaviour="serve", **fields):
        defaults = {"apps": [behaviour], "data_dir": self.data_dir, "socket": self.socket}
        return Launch(**{**defaults, "sys_path": [], "cwd": "/", "log_level": "debug", **fields})

    def environ(self, limits, **more):
        path = os.pathsep.join([str(ROOT), str(ROOT / "supervisor")])
        return {
            **os.environ,
            "PYTHONPATH": path,
            "GUARD_RIG_SOCKET": f"{self.home}/rig",
            "GUARD_RIG_LIMITS": json.dumps(limits),
            _MARK: self.mark,
            **more,
        }

    def start(self, launch=None, *, limits=None, fds=(), prefix=(), environ=None, stderr=None, **popen):
        """Start a guard; its stderr is a file, so that nobody has to drain it."""
        launch_fd = sealed_memfd("launch", messages.encode(launch or self.launch()))
        with open(f"{self.home}/stderr-{len(self._guards)}", "wb") as file:
            guard = subprocess.Popen(
                [*prefix, sys.executable, str(DRIVER), "--launch-fd", str(launch_fd)],
                pass_fds=[launch_fd, *fds],
                env=self.environ(limits or {}, **(environ or {})),
                stderr=file if stderr is None else stderr,
                **popen,
            )
        os.close(launch_fd)
        guard.stderr_path = Path(file.name)
        self._guards.append(guard)
        return guard

    def hear(self, event, timeout_s=DEADLINE_S):
        """Wait for the next thing that a fake supervisor says, which must be ``event``."""
        self._heard.settimeout(timeout_s)
        said = json.loads(self._heard.recv(65536))
        assert said["event"] == event, said
        return said

    def heard_all(self):
        """What was said and not heard yet."""
        said = []
        self._heard.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                said.append(json.loads(self._heard.recv(65536)))
        return said

    def command(self, words):
        """Have the supervisor do something; return its pid."""
        with address.connect(self.socket, timeout_s=DEADLINE_S) as connection:
            connection.send(words.encode())
            return int(connection.recv(4096))

    def close(self):
        """End everything, and complain of what a guard should have ended."""
        for guard in self._guards:
            if guard.poll() is None:
                guard.send_signal(signal.SIGCONT)
                guard.kill()
            guard.wait(DEADLINE_S)
        left = self.marked()
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in left:
            wait_gone(pid)
        self._heard.close()
        shutil.rmtree(self.home)

    def marked(self):
        """Pids of all processes that a guard of this rig brought about, itself included, zombies not."""
        wanted = f"{_MARK}={self.mark}".encode()
        found = []
        for name in os.listdir("/proc"):
            if name.isdigit():
                with contextlib.suppress(OSError):
                    if wanted in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                        found.append(int(name))
        return found


def wait_gone(pid, timeout_s=DEADLINE_S):
    """Wait until the process has ended."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        assert poll.poll(timeout_s * 1000), f"{pid} still lives"
    finally:
        os.close(pidfd)


def stderr_of(guard):
    return guard.stderr_path.read_text()


def control_pair():
    """Our end of a control socket, with a deadline, and the guard's."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(DEADLINE_S)
    return ours, theirs


decode_from_guard = messages.decoder(messages.FromGuard).decode
