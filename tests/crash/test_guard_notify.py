"""What the service manager hears, by its real socket; and that nobody but the guard speaks."""

import os
import signal
import socket
import time

import pytest

from hayata_supervisor.process.notify import ServiceManager
from tests.support.guard_rig import control_pair

QUICK = {"check": 0.05}
DEADLINE_S = 20.0


class Manager:
    """The service manager's end. ``address`` as it stands in ``$NOTIFY_SOCKET``."""

    def __init__(self, home, *, abstract):
        self.address = f"@hayata-test-{os.path.basename(home)}" if abstract else f"{home}/notify"
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.sock.bind(self.address.replace("@", "\0") if abstract else self.address)
        self.sock.settimeout(DEADLINE_S)
        self.heard = []

    def hear(self, wanted):
        """Wait for a line that begins so; return it."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            lines = self.sock.recv(4096).decode().split("\n")
            self.heard += lines
            for line in lines:
                if line.startswith(wanted):
                    return line
        raise AssertionError(f"never heard {wanted}: {self.heard[-20:]}")

    def rest(self):
        """What was said and not heard yet."""
        lines = []
        self.sock.setblocking(False)
        try:
            while True:
                lines += self.sock.recv(4096).decode().split("\n")
        except BlockingIOError:
            self.sock.settimeout(DEADLINE_S)
            return lines


@pytest.fixture(params=["path", "abstract"])
def manager(rig, request):
    manager = Manager(rig.home, abstract=request.param == "abstract")
    yield manager
    manager.sock.close()


def environ(manager, **more):
    return {"NOTIFY_SOCKET": manager.address, **more}


def test_service_manager_hears_when_we_serve_and_stop(rig, manager):
    guard = rig.start(rig.launch("serve slow 600 1.0"), limits=QUICK, environ=environ(manager))
    assert rig.hear("start")["manager"] == []
    assert manager.hear("EXTEND_TIMEOUT_USEC=")
    assert "STATUS=starting" in manager.heard
    assert "READY=1" not in manager.heard
    rig.command("serving")
    manager.hear("READY=1")
    rig.command("status serving 2 agents, 3 invocations running")
    manager.hear("STATUS=serving 2 agents, 3 invocations running")
    assert not [line for line in manager.rest() if line.startswith("EXTEND")]
    guard.send_signal(signal.SIGTERM)
    manager.hear("STOPPING=1")
    manager.hear("EXTEND_TIMEOUT_USEC=15000000")
    assert guard.wait(20) == 0
    said = manager.heard + manager.rest()
    assert (said.count("READY=1"), said.count("STOPPING=1")) == (1, 1)
    assert not [line for line in said if line.startswith("WATCHDOG")]


def test_status_says_that_the_supervisor_is_restarted_and_readiness_is_told_once(rig, manager):
    rig.start(environ=environ(manager), limits=QUICK)
    pid = rig.hear("start")["pid"]
    rig.command("serving")
    manager.hear("READY=1")
    os.kill(pid, signal.SIGKILL)
    manager.hear("STATUS=restarting the supervisor, which died: signal SIGKILL")
    rig.hear("start")
    rig.command("status serving again")
    manager.hear("STATUS=serving again")
    assert manager.heard.count("READY=1") == 1


def monotonic_s(line):
    return int(line.removeprefix("MONOTONIC_USEC=")) / 1e6


def test_reload_is_told_to_the_supervisor_and_to_the_manager_until_it_is_over(rig, manager):
    guard = rig.start(environ=environ(manager), limits=QUICK)
    rig.hear("start")
    rig.command("serving")
    manager.hear("READY=1")
    asked_s = time.monotonic()
    guard.send_signal(signal.SIGHUP)
    rig.hear("reload")
    assert asked_s <= monotonic_s(manager.hear("MONOTONIC_USEC=")) <= time.monotonic()
    assert manager.heard[-2] == "RELOADING=1", "in one packet with its time, as systemd wants it"
    rig.command("reloading")
    manager.hear("RELOADING=1")
    assert manager.heard.count("READY=1") == 1
    rig.command("reloaded")
    manager.hear("READY=1")
    rig.command("reloaded")
    guard.send_signal(signal.SIGTERM)
    manager.hear("STOPPING=1")
    assert manager.heard.count("READY=1") == 2


def test_reload_that_a_client_has_asked_for_is_told_to_the_manager(rig, manager):
    rig.start(environ=environ(manager), limits=QUICK)
    rig.hear("start")
    rig.command("serving")
    manager.hear("READY=1")
    rig.command("reloading")
    manager.hear("RELOADING=1")
    rig.command("reloaded")
    manager.hear("READY=1")


def test_supervisor_that_dies_while_it_reloads_is_ready_when_the_next_one_serves(rig, manager):
    guard = rig.start(environ=environ(manager), limits=QUICK)
    pid = rig.hear("start")["pid"]
    rig.command("serving")
    manager.hear("READY=1")
    guard.send_signal(signal.SIGHUP)
    rig.hear("reload")
    manager.hear("RELOADING=1")
    os.kill(pid, signal.SIGKILL)
    rig.hear("start")
    assert manager.heard.count("READY=1") == 1
    rig.command("serving")
    manager.hear("READY=1")


def test_stop_ends_a_reload_and_nothing_is_ready_after_it(rig, manager):
    guard = rig.start(rig.launch("serve stubborn"), environ=environ(manager), limits={**QUICK, "stop_grace": 1.0})
    rig.hear("start")
    rig.command("serving")
    manager.hear("READY=1")
    guard.send_signal(signal.SIGHUP)
    rig.hear("reload")
    guard.send_signal(signal.SIGQUIT)
    manager.hear("STOPPING=1")
    guard.send_signal(signal.SIGHUP)
    rig.command("reloaded")
    assert guard.wait(20) == 0
    said = manager.heard + manager.rest()
    assert said.count("READY=1") == 1
    assert "RELOADING=1" not in said[said.index("STOPPING=1") :]


def test_watchdog_is_fed_by_a_guard_that_turns_and_not_by_one_that_hangs(rig, manager):
    guard = rig.start(environ=environ(manager, WATCHDOG_USEC="200000"), limits=QUICK)
    assert rig.hear("start")["manager"] == []
    rig.command("serving")
    for _ in range(3):
        manager.hear("WATCHDOG=1")
    guard.send_signal(signal.SIGSTOP)
    _wait_stopped(guard.pid)
    manager.rest()
    manager.sock.settimeout(1.0)
    with pytest.raises(TimeoutError):
        manager.sock.recv(4096)
    guard.send_signal(signal.SIGCONT)
    manager.sock.settimeout(DEADLINE_S)
    manager.hear("WATCHDOG=1")


def _wait_stopped(pid):
    deadline = time.monotonic() + DEADLINE_S
    while True:
        with open(f"/proc/{pid}/stat") as stat:
            if stat.read().rpartition(")")[2].split()[0] == "T":
                return
        assert time.monotonic() < deadline


def test_hung_supervisor_is_the_guards_matter_and_the_watchdog_stays_fed(rig, manager):
    limits = {**QUICK, "silence": 0.5}
    rig.start(environ=environ(manager, WATCHDOG_USEC="200000"), limits=limits)
    rig.hear("start")
    pid = rig.command("serving")
    os.kill(pid, signal.SIGSTOP)
    manager.hear("STATUS=restarting the supervisor, which died: signal SIGKILL, killed: silent")
    manager.hear("WATCHDOG=1")
    assert rig.hear("start")["pid"] != pid


def test_watchdog_of_another_process_is_not_fed(rig, manager):
    guard = rig.start(environ=environ(manager, WATCHDOG_USEC="100000", WATCHDOG_PID="1"), limits=QUICK)
    assert rig.hear("start")["manager"] == []
    rig.command("serving")
    manager.hear("READY=1")
    guard.send_signal(signal.SIGTERM)
    assert guard.wait(20) == 0
    assert "WATCHDOG=1" not in manager.heard + manager.rest()


def test_embedded_guard_does_not_speak_for_the_program_that_embeds_it(rig, manager):
    """A service that uses hayata.start tells itself when it is ready."""
    ours, theirs = control_pair()
    with ours:
        launch = rig.launch(control_fd=theirs.fileno())
        guard = rig.start(launch, fds=[theirs.fileno()], environ=environ(manager, WATCHDOG_USEC="100000"))
        theirs.close()
        assert rig.hear("start")["manager"] == []
        rig.command("serving")
        ours.recv(65536)
    assert guard.wait(20) == 0
    assert manager.rest() == []


@pytest.mark.parametrize(
    ("variables", "limit_s"),
    [
        ({"WATCHDOG_USEC": "30000000"}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "-1"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({}, None),
    ],
)
def test_watchdog_limit_is_read_as_systemd_says(variables, limit_s):
    environ = {"NOTIFY_SOCKET": "/nowhere", "HOME": "/", **variables}
    assert ServiceManager(environ).watchdog_s == limit_s
    assert environ == {"HOME": "/"}


def test_manager_that_is_gone_or_behind_does_not_stop_us_and_misses_nothing(tmp_path):
    ServiceManager({"NOTIFY_SOCKET": "/nowhere/at/all"}).tell("READY=1")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "n"))
        sock.settimeout(DEADLINE_S)
        manager = ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "n")})
        sent = 0
        while not manager._owed:
            manager.tell(f"X={sent}")
            sent += 1
        manager.tell("READY=1")
        manager.status("one")
        manager.status("two")
        for number in range(sent - 1):
            assert sock.recv(4096) == f"X={number}".encode()
        manager.tell("WATCHDOG=1")
        assert sock.recv(4096).decode().split("\n") == [f"X={sent - 1}", "READY=1", "STATUS=two", "WATCHDOG=1"]
