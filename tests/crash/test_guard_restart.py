"""The guard and a supervisor that dies, hangs or can't go on."""

import os
import signal

import pytest

from hayata.messages import Fatal
from tests.support.guard_rig import control_pair, decode_from_guard, stderr_of, wait_gone

QUICK = {"silence": 0.6, "check": 0.05, "stop_grace": 0.5}


def test_killed_supervisor_is_restarted_in_a_session_of_its_own(rig):
    guard = rig.start()
    first = rig.hear("start")
    assert first["guard"] == guard.pid
    assert first["session"] == first["pid"]
    assert "--restart" not in first["argv"]
    os.kill(first["pid"], signal.SIGKILL)
    second = rig.hear("start")
    assert second["argv"][second["argv"].index("--restart") + 1] == "1"
    assert second["argv"][second["argv"].index("--last-exit") + 1] == "signal SIGKILL"
    assert second["cookie"] == first["cookie"]
    assert guard.poll() is None


def test_all_descendants_of_a_dead_supervisor_are_dead_before_the_next_starts(rig):
    """P1, P2: a child that lives on, and a daemon that a double fork hid."""
    rig.start()
    first = rig.hear("start")
    rig.command("children")
    left = rig.hear("children")["pids"]
    os.kill(first["pid"], signal.SIGKILL)
    rig.hear("start")
    assert [pid for pid in left if os.path.exists(f"/proc/{pid}")] == []  # not even as zombies


def test_clients_that_connect_between_two_supervisors_are_served_by_the_second(rig):
    rig.start(limits={"backoff": 0.5})
    first = rig.hear("start")
    os.kill(first["pid"], signal.SIGKILL)
    wait_gone(first["pid"])
    assert rig.command("serving") == rig.hear("start")["pid"]


@pytest.mark.parametrize("how", ["stopped", "in a loop without end"])
def test_supervisor_that_hangs_is_killed_with_all_below_it_and_the_next_serves(rig, how):
    guard = rig.start(limits=QUICK)
    first = rig.hear("start")
    rig.command("children")
    left = rig.hear("children")["pids"]
    if how == "stopped":
        os.kill(first["pid"], signal.SIGSTOP)
    else:
        rig.command("spin")
    second = rig.hear("start")
    assert second["pid"] != first["pid"]
    assert [pid for pid in left if os.path.exists(f"/proc/{pid}")] == []
    assert rig.command("serving") == second["pid"]
    assert "killed: silent" in stderr_of(guard)


def test_supervisor_that_never_speaks_has_the_start_timeout(rig):
    rig.start(rig.launch("mute", start_timeout_s=0.5), limits={**QUICK, "silence": 60.0})
    first = rig.hear("start")
    assert rig.hear("start")["pid"] != first["pid"]


def test_silence_is_not_counted_while_the_guard_was_stopped_as_well(rig):
    guard = rig.start(limits={**QUICK, "silence": 2.0})
    first = rig.hear("start")
    rig.command("serving")
    os.kill(first["pid"], signal.SIGSTOP)
    with pytest.raises(AssertionError):
        wait_gone(first["pid"], timeout_s=0.2)  # until its last word is heard
    guard.send_signal(signal.SIGSTOP)
    with pytest.raises(AssertionError):
        wait_gone(first["pid"], timeout_s=2.2)
    guard.send_signal(signal.SIGCONT)
    with pytest.raises(AssertionError):
        wait_gone(first["pid"], timeout_s=0.5)
    os.kill(first["pid"], signal.SIGCONT)
    assert rig.command("serving") == first["pid"]


def test_five_deaths_in_a_minute_end_the_guard_with_70(rig):
    """P14."""
    ours, theirs = control_pair()
    with ours, theirs:
        launch = rig.launch("exit 1", control_fd=theirs.fileno())
        guard = rig.start(launch, limits={"backoff": 0.01}, fds=[theirs.fileno()])
        assert guard.wait(20) == 70
        assert len(rig.heard_all()) == 5
        told = decode_from_guard(ours.recv(65536))
        assert isinstance(told, Fatal)
        assert told.error.code == "supervisor_lost"
        assert "5 times" in told.error.message
        assert "5 times" not in stderr_of(guard)  # whoever embeds it raises it
        assert rig.marked() == []


@pytest.mark.parametrize(
    ("code", "exit_code"), [("agent_start_failed", 2), ("data_dir_in_use", 5), ("store_corrupt", 65)]
)
def test_fatal_error_is_printed_with_its_traceback_and_not_retried(rig, code, exit_code):
    guard = rig.start(rig.launch(f"fatal {code} {exit_code}"))
    assert guard.wait(20) == exit_code
    assert len(rig.heard_all()) == 1
    text = stderr_of(guard)
    assert f"{code}: it can't be" in text
    assert "Traceback: here" in text
    assert "hint: a hint" in text
    assert not os.path.exists(rig.socket)


def test_exit_code_that_is_final_needs_no_fatal_message(rig):
    guard = rig.start(rig.launch("exit 65"))
    assert guard.wait(20) == 65
    assert len(rig.heard_all()) == 1


def test_unasked_clean_exit_is_a_death(rig):
    rig.start()
    rig.hear("start")
    # The connection closes before the answer: the process is gone.
    try:
        rig.command("exit 0")
    except (ConnectionError, ValueError):
        pass
    assert "--restart" in rig.hear("start")["argv"]


def test_twenty_restarts_leave_no_descriptor_and_no_zombie(rig):
    """P4, rq 1193, and P8, circus 315, one level up."""
    guard = rig.start(limits={"deaths": 1000, "backoff": 0.001, "max_backoff": 0.001})
    counts = []
    for _ in range(20):
        pid = rig.hear("start")["pid"]
        rig.command("children")
        rig.hear("children")
        counts.append(len(os.listdir(f"/proc/{guard.pid}/fd")))
        os.kill(pid, signal.SIGKILL)
    last = rig.hear("start")["pid"]
    assert len(set(counts)) == 1
    assert sorted(rig.marked()) == sorted([guard.pid, last])
    with open(f"/proc/{guard.pid}/task/{guard.pid}/children") as children:
        assert [int(pid) for pid in children.read().split()] == [last]


def test_children_from_before_the_guard_are_left_alone_and_reaped(rig):
    """A shell may start something in the background and then exec the daemon."""
    script = 'sleep 600 & echo $! && exec "$@"'
    guard = rig.start(prefix=["sh", "-c", script, "sh"], stdout=-1)
    stranger = int(guard.stdout.readline())
    guard.stdout.close()
    first = rig.hear("start")
    os.kill(first["pid"], signal.SIGKILL)
    rig.hear("start")
    assert os.path.exists(f"/proc/{stranger}")
    os.kill(stranger, signal.SIGKILL)
    wait_gone(stranger)
    guard.send_signal(signal.SIGTERM)
    assert guard.wait(20) == 0


def test_guard_with_a_full_stderr_still_restarts(rig):
    """A pipe that nobody reads any more must not stop the guard: it leaves the lines out."""
    read, write = os.pipe()
    try:
        os.set_blocking(write, False)
        try:
            while True:
                os.write(write, b"x" * 4096)
        except BlockingIOError:
            os.set_blocking(write, True)
        rig.start(stderr=write)
        os.kill(rig.hear("start")["pid"], signal.SIGKILL)
        rig.hear("start")
    finally:
        os.close(read)
        os.close(write)


def test_descriptors_that_were_leaked_to_the_guard_stay_there(rig):
    read, write = os.pipe()
    try:
        rig.start(fds=[write])
        assert write not in rig.hear("start")["fds"]
    finally:
        os.close(read)
        os.close(write)
