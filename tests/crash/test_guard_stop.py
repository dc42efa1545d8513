"""The guard and those who ask it to stop: signals, clients, the process that embeds it."""

import os
import signal
import subprocess
import sys

import pytest

from hayata import messages
from hayata.memfd import sealed_memfd
from hayata.messages import Serving, Stopping, StopRuntime
from tests.support.guard_rig import control_pair, decode_from_guard, stderr_of, wait_gone

QUICK = {"stop_grace": 0.3, "check": 0.05}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_drains_the_supervisor_and_ends_clean(rig, number):
    guard = rig.start(rig.launch(drain_timeout_s=7.0))
    rig.hear("start")
    guard.send_signal(number)
    assert rig.hear("stop")["drain_s"] == 7.0
    assert guard.wait(20) == 0
    assert rig.marked() == []
    assert os.listdir(os.path.dirname(rig.socket)) == []


def test_second_signal_ends_the_drain(rig):
    guard = rig.start(rig.launch("serve stubborn", drain_timeout_s=600.0), limits=QUICK)
    rig.hear("start")
    guard.send_signal(signal.SIGTERM)
    assert rig.hear("stop")["drain_s"] == 600.0
    guard.send_signal(signal.SIGTERM)
    assert rig.hear("stop")["drain_s"] == 0.0
    assert guard.wait(20) == 0


def test_whatever_does_not_stop_is_killed_after_drain_and_grace(rig):
    """P3, circus 1044: neither the supervisor nor what it started pays attention."""
    guard = rig.start(rig.launch("serve stubborn", drain_timeout_s=0.2), limits=QUICK)
    rig.hear("start")
    rig.command("children")
    children = rig.hear("children")["pids"]
    guard.send_signal(signal.SIGTERM)
    assert guard.wait(20) == 0
    assert "killed=did not stop" in stderr_of(guard)
    assert [pid for pid in children if os.path.exists(f"/proc/{pid}")] == []


def test_stop_while_waiting_to_restart_starts_nothing(rig):
    guard = rig.start(rig.launch("exit 1"), limits={"backoff": 600.0, "max_backoff": 600.0})
    wait_gone(rig.hear("start")["pid"])
    guard.send_signal(signal.SIGTERM)
    assert guard.wait(20) == 0
    assert rig.heard_all() == []


def test_signal_from_before_the_handlers_is_not_lost(rig):
    """What `hayata-supervisor` blocks while it configures is the guard's first event."""
    script = (
        "import os, signal, sys;"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]);"
        "os.kill(os.getpid(), signal.SIGTERM);"
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    prefix = [sys.executable, "-c", script]
    guard = rig.start(prefix=prefix)
    assert guard.wait(20) == 0
    assert rig.heard_all() == []


def test_supervisor_that_a_client_asked_to_stop_is_told_to_and_not_restarted(rig):
    guard = rig.start()
    rig.hear("start")
    rig.command("ask_stop 3.5")
    assert rig.hear("stop")["drain_s"] == 3.5
    assert guard.wait(20) == 0
    assert rig.heard_all() == []


def test_death_of_a_supervisor_that_is_stopping_is_no_restart(rig):
    guard = rig.start(rig.launch("serve stubborn"))
    pid = rig.hear("start")["pid"]
    guard.send_signal(signal.SIGTERM)
    rig.hear("stop")
    os.kill(pid, signal.SIGKILL)
    assert guard.wait(20) == 0
    assert rig.heard_all() == []


def test_other_signals_do_no_harm(rig):
    guard = rig.start()
    pid = rig.hear("start")["pid"]
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        guard.send_signal(number)
    assert rig.command("serving") == pid
    guard.send_signal(signal.SIGTERM)
    assert guard.wait(20) == 0
    assert "signal=SIGUSR1" in stderr_of(guard)


def test_signals_of_the_supervisor_are_as_in_a_fresh_process(rig):
    guard = rig.start(prefix=["sh", "-c", "trap '' HUP TERM; exec \"$@\"", "sh"])
    start = rig.hear("start")
    assert start["blocked"] == []
    with open(f"/proc/{start['pid']}/status") as status:
        ignored = int(next(line for line in status if line.startswith("SigIgn:")).split()[1], 16)
    assert not ignored & (1 << (signal.SIGHUP - 1) | 1 << (signal.SIGTERM - 1))
    guard.send_signal(signal.SIGTERM)
    assert guard.wait(20) == 0


def test_third_signal_and_those_after_it_are_harmless(rig):
    guard = rig.start(rig.launch("serve stubborn", drain_timeout_s=600.0), limits={**QUICK, "stop_grace": 1.0})
    rig.hear("start")
    guard.send_signal(signal.SIGTERM)
    assert rig.hear("stop")["drain_s"] == 600.0
    guard.send_signal(signal.SIGINT)
    assert rig.hear("stop")["drain_s"] == 0.0
    for _ in range(5):
        guard.send_signal(signal.SIGTERM)
    assert guard.wait(20) == 0
    assert rig.heard_all() == []


@pytest.mark.parametrize("grace_s", ["600", "inf"])
def test_workers_that_may_take_longer_than_the_guards_own_grace_are_waited_for(rig, grace_s):
    guard = rig.start(rig.launch(f"serve slow {grace_s} 1.5", drain_timeout_s=0.1), limits=QUICK)
    rig.hear("start")
    guard.send_signal(signal.SIGTERM)
    rig.hear("stop")
    assert guard.wait(20) == 0
    assert "killed" not in stderr_of(guard)


@pytest.mark.parametrize("grace_s", ["600", "inf"])
def test_second_signal_does_not_wait_for_them(rig, grace_s):
    guard = rig.start(rig.launch(f"serve slow {grace_s} 600", drain_timeout_s=0.1), limits=QUICK)
    rig.hear("start")
    guard.send_signal(signal.SIGTERM)
    assert rig.hear("stop")["drain_s"] == 0.1
    guard.send_signal(signal.SIGTERM)
    assert rig.hear("stop")["drain_s"] == 0.0
    assert guard.wait(20) == 0
    assert "killed=did not stop" in stderr_of(guard)


def test_longer_drain_that_is_asked_for_later_takes_no_grace_away(rig):
    """`hayata stop` while the workers end: their time was announced before, and holds."""
    guard = rig.start(rig.launch("serve slow 600 2.0", drain_timeout_s=100.0), limits=QUICK)
    rig.hear("start")
    guard.send_signal(signal.SIGTERM)
    assert rig.hear("stop")["drain_s"] == 100.0
    rig.command("ask_stop 0.1")
    assert rig.hear("stop")["drain_s"] == 0.1
    assert guard.wait(20) == 0
    assert "killed" not in stderr_of(guard)


def test_supervisor_that_hangs_in_its_workers_grace_is_killed(rig):
    """However long they may take: it must beat."""
    limits = {**QUICK, "silence": 0.5}
    guard = rig.start(rig.launch("serve slow inf 600", drain_timeout_s=0.1), limits=limits)
    rig.hear("start")
    rig.command("mute")
    guard.send_signal(signal.SIGTERM)
    assert guard.wait(20) == 0
    assert "killed=silent" in stderr_of(guard)


# embedded


def test_embedding_process_hears_serving_once_and_can_stop(rig):
    ours, theirs = control_pair()
    with ours:
        guard = rig.start(rig.launch(control_fd=theirs.fileno()), fds=[theirs.fileno()])
        theirs.close()
        rig.hear("start")
        rig.command("serving")
        rig.command("serving")
        assert decode_from_guard(ours.recv(65536)) == Serving()
        ours.send(messages.encode(StopRuntime(2.0)))
        assert rig.hear("stop")["drain_s"] == 2.0
        assert guard.wait(20) == 0
        assert ours.recv(65536) == b""


def test_embedding_process_hears_how_long_workers_may_take(rig):
    ours, theirs = control_pair()
    with ours:
        launch = rig.launch("serve slow inf 0.5", control_fd=theirs.fileno())
        guard = rig.start(launch, fds=[theirs.fileno()])
        theirs.close()
        rig.hear("start")
        ours.send(messages.encode(StopRuntime(2.0)))
        assert decode_from_guard(ours.recv(65536)) == Stopping(float("inf"))
        assert guard.wait(20) == 0


def test_closed_control_socket_stops_without_drain(rig):
    ours, theirs = control_pair()
    with theirs:
        guard = rig.start(rig.launch(control_fd=theirs.fileno()), fds=[theirs.fileno()])
        rig.hear("start")
    ours.close()
    assert rig.hear("stop")["drain_s"] == 0.0
    assert guard.wait(20) == 0


_EMBEDDER = """
import os, subprocess, sys
from hayata import messages
from hayata.memfd import sealed_memfd
launch = messages.decoder(messages.Launch).decode(bytes.fromhex(sys.argv[1]))
launch = messages.msgspec.structs.replace(launch, parent_pid=os.getpid())
fd = sealed_memfd("launch", messages.encode(launch))
command = [sys.executable, sys.argv[2], "--launch-fd", str(fd)]
guard = subprocess.Popen(command, pass_fds=[fd], start_new_session=True)
print(guard.pid, flush=True)
guard.wait()
"""


def test_death_of_the_embedding_process_ends_everything(rig):
    from tests.support.guard_rig import DRIVER

    arguments = [messages.encode(rig.launch()).hex(), str(DRIVER)]
    with subprocess.Popen(
        [sys.executable, "-c", _EMBEDDER, *arguments], env=rig.environ({}), stdout=subprocess.PIPE, text=True
    ) as embedder:
        guard = int(embedder.stdout.readline())
        rig.hear("start")
        embedder.kill()
        assert rig.hear("stop")["drain_s"] == 0.0
        wait_gone(guard)
    assert rig.marked() == []


def test_embedding_process_that_died_first_has_nothing_started(rig):
    """Its pid may be another's by now: init's, here."""
    guard = rig.start(rig.launch(parent_pid=1))
    assert guard.wait(20) == 0
    assert rig.heard_all() == []
    assert not os.path.exists(rig.data_dir)


def test_embedded_data_directory_may_have_any_length(rig):
    ours, theirs = control_pair()
    deep = os.path.join(rig.home, *["d" * 60] * 3)
    rig.socket = f"{deep}/hayata.sock"
    with ours:
        launch = rig.launch(control_fd=theirs.fileno(), data_dir=deep)
        guard = rig.start(launch, fds=[theirs.fileno()])
        theirs.close()
        pid = rig.hear("start")["pid"]
        assert rig.command("serving") == pid
        assert os.stat(deep).st_mode & 0o777 == 0o700
    assert guard.wait(20) == 0
    assert not os.path.exists(rig.socket)


def test_agents_by_value_reach_every_supervisor(rig):
    value = sealed_memfd("value", b"pickled")
    try:
        rig.start(rig.launch(value_fd=value), fds=[value])
    finally:
        os.close(value)
    first = rig.hear("start")
    os.kill(first["pid"], signal.SIGKILL)
    assert [first["value"], rig.hear("start")["value"]] == ["pickled", "pickled"]
