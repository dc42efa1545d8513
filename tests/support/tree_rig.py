"""Runs a worker tree in its own process, hears what that hears, kills its workers, leaves nothing behind."""

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
import time
import uuid
from pathlib import Path

from hayata import messages
from hayata.memfd import sealed_memfd
from hayata.messages import Launch
from hayata_supervisor.process.pidfd import children_of

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
DEADLINE_S = 20.0
APP = f"{HERE / 'tree_app.py'}:agents"
BROKEN_APP = f"{HERE / 'tree_broken_app.py'}:agent"


class TreeRig:
    """One tree. ``with TreeRig() as rig``."""

    def __init__(self, app=APP, *, limits=None, broken=None, value=None, **launch):
        self.home = Path(tempfile.mkdtemp(prefix="ht-"))
        self.broken = self.home / "broken"
        self.events = []
        self.loaded = None
        if broken is not None:
            self.broken.write_text(broken)
        self._limits = limits or {}
        self._mark = uuid.uuid4().hex
        self._value = value
        self._launch = launch
        self._app = app

    def __enter__(self):
        self._told = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._told.bind(str(self.home / "told"))
        fields = {
            "apps": [self._app],
            "data_dir": str(self.home),
            "socket": str(self.home / "s"),
            "sys_path": [],
        }
        inherited = []
        if self._value is not None:
            inherited = [sealed_memfd("value", self._value)]
            fields.update(apps=[], value_fd=inherited[0])
        launch_fd = sealed_memfd("launch", messages.encode(Launch(**{**fields, "cwd": "/", **self._launch})))
        self._stderr = (self.home / "stderr").open("wb")
        self._driver = subprocess.Popen(
            [sys.executable, str(HERE / "tree_driver.py"), str(launch_fd)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            pass_fds=[launch_fd, *inherited],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "supervisor")]),
                "TREE_RIG_SOCKET": str(self.home / "told"),
                "TREE_RIG_BROKEN": str(self.broken),
                "TREE_RIG_MARK": self._mark,
                "TREE_RIG_LIMITS": json.dumps(self._limits),
            },
        )
        for fd in (launch_fd, *inherited):
            os.close(fd)
        os.set_blocking(self._driver.stdout.fileno(), False)
        self._rest = b""
        return self

    def __exit__(self, kind, value, traceback):
        with contextlib.suppress(BrokenPipeError):
            self._driver.stdin.close()
        self._driver.kill()
        self._driver.wait(DEADLINE_S)
        self._driver.stdout.close()
        self._stderr.close()
        self._told.close()
        self._wait_for(lambda: not self.marked(), "the workers' end", quiet=True)
        left = [description(pid) for pid in self.marked()]
        for pid in self.marked():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        errors = (self.home / "stderr").read_text()
        shutil.rmtree(self.home)
        if kind is None:
            assert not left, f"processes outlived the driver: {left}"
            assert not errors, errors

    # Orders

    def order(self, do, **fields):
        self._driver.stdin.write(json.dumps({"do": do, **fields}).encode() + b"\n")
        self._driver.stdin.flush()

    def evaluate(self, number, agent="tree", **input):
        self.order("evaluate", agent=agent, number=number, input=input)

    def dispatch(self, execution, agent="tree", node="act", timeout_s=None, filler=0, **input):
        fields = {"agent": agent, "node": node, "execution": execution, "input": input}
        self.order("dispatch", **fields, timeout_s=timeout_s, filler=filler)

    # What the tree says

    def hear(self, event, timeout_s=DEADLINE_S, **fields):
        """Wait for the first unheard event that fits, and take it."""
        deadline = time.monotonic() + timeout_s
        while True:
            for heard in self.events:
                if heard["event"] == event and fits(heard, fields):
                    self.events.remove(heard)
                    return heard
            left = deadline - time.monotonic()
            assert left > 0, f"no {event} {fields} in\n{self._recent()}"
            self._read(left)

    def _recent(self):
        lines = [str(each)[:400] for each in self.events[-20:]]
        return "\n".join([*lines, (self.home / "stderr").read_text()[-4000:]])

    def heard(self, event, **fields):
        """What has been said so far and fits."""
        self._read(0, may_end=True)
        return [heard for heard in self.events if heard["event"] == event and fits(heard, fields)]

    def _read(self, timeout_s, *, may_end=False):
        stdout = self._driver.stdout.fileno()
        if not select.select([stdout], [], [], timeout_s)[0]:
            return
        data = os.read(stdout, 1 << 20)
        assert data or may_end, f"the driver ended\n{(self.home / 'stderr').read_text()}"
        *lines, self._rest = (self._rest + data).split(b"\n")
        self.events += [json.loads(line) for line in lines]

    def told(self, event, timeout_s=DEADLINE_S):
        """Wait for the next thing that a body or a policy tells, which must be ``event``."""
        self._told.settimeout(timeout_s)
        told = json.loads(self._told.recv(65536))
        assert told["event"] == event, told
        return told

    def told_nothing_more(self):
        """Assert that nothing else was told, up to now."""
        self._told.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            raise AssertionError(self._told.recv(65536))

    def serving(self, agent="tree", node=None):
        """Wait until a worker is ready; return its pid."""
        return self.hear("log", text="worker ready", agent=agent, node=node)["pid"]

    def all_serving(self):
        """Wait for the app's first start; return the pids by name."""
        if not self.loaded:
            self.loaded = self.hear("app_loaded")
        names = [
            ("tree", None),
            ("tree", "act"),
            ("tree", "act_async"),
            ("fragile", None),
            ("fragile", "act"),
        ]
        return {(agent, node): self.serving(agent, node) for agent, node in names}

    def process(self, role, name):
        """What the tree says of one process."""
        self.order("describe")
        processes = self.hear("tree")["processes"]
        (found,) = [each for each in processes if (each["role"], each["name"]) == (role, name)]
        return found

    def answer(self, number):
        """The answer to an evaluation."""
        return self.hear("answered", answer={"evaluation": number})["answer"]

    def report(self, execution, timeout_s=DEADLINE_S):
        """The next report about a task."""
        return self.hear("reported", timeout_s, report={"execution_id": execution})["report"]

    def descriptors(self):
        self.order("descriptors")
        return self.hear("descriptors")

    # Processes

    @property
    def driver(self):
        return self._driver.pid

    def children(self):
        return children_of(self.driver)

    def marked(self):
        """Pids of all living processes of this test but the driver, wherever they have got to."""
        mark = f"TREE_RIG_MARK={self._mark}".encode()
        found = []
        for name in os.listdir("/proc"):
            if not name.isdigit() or int(name) == self._driver.pid:
                continue
            with contextlib.suppress(OSError):
                if mark in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                    found.append(int(name))
        return found

    @staticmethod
    def turns(pid):
        """How often a process has gone to sleep; 0 while it is awake: it will once more when its work is done. One more
        than before: it has woken, done its work, and sleeps again.
        """
        status = Path(f"/proc/{pid}/status").read_text()
        asleep = status.partition("\nState:")[2].split()[0] == "S"
        return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0]) if asleep else 0

    def wait_asleep(self, pid):
        """Wait until a process has nothing to do; returns its `turns`."""
        return self._wait_for(lambda: self.turns(pid), f"{pid} asleep")

    def wait_turn(self, pid, turns):
        """Wait until a process has slept more than ``turns`` times."""
        self._wait_for(lambda: self.turns(pid) > turns, f"a turn of {pid}")

    def wait_unmarked(self, timeout_s):
        """Wait until no process of this test but the driver lives."""
        self._wait_for(lambda: not self.marked(), "the workers' end", timeout_s)

    def hears_nothing(self, event, for_s):
        """Assert that ``event`` does not come within ``for_s`` seconds."""
        assert not self._wait_for(lambda: self.heard(event), event, for_s, quiet=True), self.heard(event)

    def node_down(self, pid):
        """Kill a worker, and stop its forkserver so that it stays down until somebody continues that."""
        forkserver = self.process("forkserver", self._app)["pid"]
        os.kill(forkserver, signal.SIGSTOP)
        os.kill(pid, signal.SIGKILL)
        self.hear("log", text="worker died", pid=pid)
        return forkserver

    def wait_gone(self, *pids, timeout_s=DEADLINE_S):
        """Wait until none of the processes exists, not even as a zombie."""
        self._wait_for(
            lambda: not [pid for pid in pids if Path(f"/proc/{pid}").exists()],
            f"the end of {pids}",
            timeout_s,
        )

    def _wait_for(self, condition, what, timeout_s=DEADLINE_S, *, quiet=False):
        """For what sends no event: look, with a deadline. Returns what was found."""
        deadline = time.monotonic() + timeout_s
        while not (found := condition()):
            if time.monotonic() > deadline:
                assert quiet, f"waited {timeout_s} s for {what}"
                return False
            select.select([], [], [], 0.002)
        return found


def description(pid):
    """What is worth knowing of a process that should not be there."""
    with contextlib.suppress(OSError):
        wanted = ("Name", "State", "PPid", "SigPnd", "SigBlk", "SigIgn")
        return [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith(wanted)]
    return []


def fits(heard, fields):
    """Whether a mapping has these fields, nested ones too. None: it has no such field."""
    return all(
        fits(heard[name], value) if isinstance(value, dict) and name in heard else heard.get(name) == value
        for name, value in fields.items()
    )


def kill(pid, number=signal.SIGKILL):
    os.kill(pid, number)
