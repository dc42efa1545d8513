"""Stands where the supervisor stands: says what it sees on the rig's socket, does what its clients ask.

The launch's first app says how it behaves: words of ``serve`` (beat, take commands), ``mute`` (never beat),
``stubborn`` (ignore a stop and the guard's death), ``slow GRACE S`` (say at a stop that workers have GRACE seconds,
and end after S), ``exit N``, ``fatal CODE N``.
"""

import contextlib
import fcntl
import json
import math
import os
import selectors
import signal
import socket
import subprocess
import sys
import time

from hayata import messages
from hayata.memfd import read_memfd
from hayata.messages import (
    Beat,
    ErrorInfo,
    Fatal,
    Launch,
    Reloaded,
    Reloading,
    ReloadRuntime,
    Serving,
    Stopping,
    StopRuntime,
)

_FORKS_AND_LEAVES = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.write(1, b"%d" % os.getpid())
        os.close(1)
        time.sleep(600)
    os._exit(0)
os.wait()
"""


def _option(name):
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else None


class FakeSupervisor:
    def __init__(self):
        self.launch = messages.decoder(Launch).decode(read_memfd(int(_option("--launch-fd"))))
        self.words = self.launch.apps[0].split()
        self.rig = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.rig.connect(os.environ["GUARD_RIG_SOCKET"])
        self.guard = socket.socket(fileno=int(_option("--guard-fd")))
        self.listener = socket.socket(fileno=int(_option("--listen-fd")))
        self.decode = messages.decoder(messages.ToSupervisor).decode
        self.selector = selectors.DefaultSelector()
        self.status = ""
        self.end_s = math.inf
        self.lock = open(os.path.join(self.launch.data_dir, "store.lock"), "w")  # noqa: SIM115  for life
        fcntl.lockf(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def say(self, event, **fields):
        self.rig.send(json.dumps({"event": event, "pid": os.getpid(), **fields}).encode())

    def tell(self, message):
        with contextlib.suppress(OSError):
            self.guard.send(messages.encode(message))

    def run(self):
        self.say(
            "start",
            guard=os.getppid(),
            session=os.getsid(0),
            argv=sys.argv[1:],
            cookie=os.environ.get("HAYATA_INSTANCE"),
            manager=sorted({"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"} & os.environ.keys()),
            fds=sorted(int(fd) for fd in os.listdir("/proc/self/fd")),
            blocked=[int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
            value=read_memfd(self.launch.value_fd).decode() if self.launch.value_fd is not None else None,
        )
        self.do(self.words)
        self.selector.register(self.listener, selectors.EVENT_READ, self.accept)
        self.selector.register(self.guard, selectors.EVENT_READ, self.heard)
        while time.monotonic() < self.end_s:
            if "mute" not in self.words:
                self.tell(Beat(self.status))
            for key, _ in self.selector.select(0.1):
                key.data(key.fileobj)

    def do(self, words):
        match words:
            case ["exit", code]:
                os._exit(int(code))
            case ["fatal", code, exit_code]:
                details = messages.msgspec.Raw(messages.msgspec.msgpack.encode({"traceback": "Traceback: here"}))
                self.tell(Fatal(ErrorInfo(code, "it can't be", "a hint", details), int(exit_code)))
                os._exit(int(exit_code))
            case ["serving"]:
                self.tell(Serving())
            case ["reloading"]:
                self.tell(Reloading())
            case ["reloaded"]:
                self.tell(Reloaded())
            case ["status", *text]:
                self.status = " ".join(text)
            case ["ask_stop", drain_s]:
                self.tell(StopRuntime(float(drain_s)))
            case ["spin"]:
                while True:  # a loop without end, which no signal but SIGKILL ends
                    pass
            case ["mute"]:
                self.words.append("mute")
            case ["children"]:
                command = [sys.executable, "-c", _FORKS_AND_LEAVES]
                daemon = int(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
                child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
                self.say("children", pids=[child.pid, daemon])

    def accept(self, listener):
        connection, _ = listener.accept()
        self.selector.register(connection, selectors.EVENT_READ, self.command)

    def command(self, connection):
        words = connection.recv(4096).decode().split()
        if not words:
            self.selector.unregister(connection)
            connection.close()
            return
        connection.send(str(os.getpid()).encode())
        self.do(words)

    def heard(self, guard):
        try:
            packet = guard.recv(65536)
        except ConnectionResetError:  # it died without having read our last beat
            packet = b""
        stubborn = "stubborn" in self.words
        if not packet:
            self.selector.unregister(guard)
            self.say("guard_gone")
            if not stubborn:
                os._exit(0)
            return
        message = self.decode(packet)
        if isinstance(message, ReloadRuntime):
            self.say("reload")
            return
        self.say("stop", drain_s=message.drain_s)
        if "slow" in self.words:
            grace_s, after_s = map(float, self.words[self.words.index("slow") + 1 :][:2])
            self.tell(Stopping(grace_s))
            self.end_s = time.monotonic() + after_s
        elif not stubborn:
            os._exit(0)


if __name__ == "__main__":
    FakeSupervisor().run()
