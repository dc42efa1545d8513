"""The guard's start: locks, orphans, sweep, socket, and everything that may stand in its way."""

import os
import signal
import socket
import stat
import subprocess
import sys

import pytest

from hayata.messages import Fatal
from tests.support.guard_rig import control_pair, decode_from_guard, stderr_of, wait_gone

QUICK = {"orphan": 0.3, "check": 0.05}
_SLEEP = [sys.executable, "-c", "print(flush=True); import time; time.sleep(600)"]


def _tree_of(path):
    return {name: os.lstat(os.path.join(path, name)).st_mtime_ns for name in os.listdir(path)}


def test_second_daemon_on_a_data_directory_is_refused_and_touches_nothing(rig):
    """P16, supervisor 613."""
    first = rig.start()
    pid = rig.hear("start")["pid"]
    before = _tree_of(rig.data_dir)
    second = rig.start(rig.launch(socket=f"{rig.home}/other.sock"))
    assert second.wait(20) == 5
    assert f"data_dir_in_use: another runtime (process {first.pid})" in stderr_of(second)
    assert _tree_of(rig.data_dir) == before
    assert not os.path.exists(f"{rig.home}/other.sock")
    assert rig.command("serving") == pid


def test_second_daemon_on_a_socket_is_refused_and_the_first_still_serves(rig):
    """P16, supervisor 613: a second daemon removed the first one's socket."""
    rig.start()
    pid = rig.hear("start")["pid"]
    second = rig.start(rig.launch(data_dir=f"{rig.home}/data2"))
    assert second.wait(20) == 5
    assert "socket_in_use" in stderr_of(second)
    assert rig.command("serving") == pid


def test_what_a_lock_file_says_does_not_matter(rig):
    """P15, gunicorn 3383: locks count, not pids; 1 is a process that lives."""
    os.mkdir(rig.data_dir)
    for name in ("guard.lock", "store.lock"):
        with open(f"{rig.data_dir}/{name}", "w") as file:
            file.write("1")
    rig.start()
    rig.hear("start")


def test_data_directory_and_socket_are_private(rig):
    os.umask(umask := os.umask(0))
    rig.start(umask=0)
    rig.hear("start")
    assert os.stat(rig.data_dir).st_mode & 0o777 == 0o700
    assert os.stat(os.path.dirname(rig.socket)).st_mode & 0o777 == 0o700
    assert os.stat(rig.socket).st_mode & 0o777 == 0o600
    assert umask == os.umask(umask)


def test_killed_guard_leaves_an_orphan_that_ends_by_itself(rig):
    first = rig.start()
    old = rig.hear("start")
    first.kill()
    rig.hear("guard_gone")
    rig.start(limits={"orphan": 600.0})
    new = rig.hear("start")
    assert not os.path.exists(f"/proc/{old['pid']}") or new["pid"] != old["pid"]
    assert new["cookie"] != old["cookie"]
    assert new["cookie"].split("-")[:2] == old["cookie"].split("-")[:2]


def test_hanging_orphan_and_all_that_it_left_are_killed_before_the_new_supervisor_starts(rig):
    first = rig.start(rig.launch("serve stubborn"))
    old = rig.hear("start")["pid"]
    rig.command("children")
    left = [old, *rig.hear("children")["pids"]]
    first.kill()
    rig.hear("guard_gone")
    second = rig.start(limits=QUICK)
    new = rig.hear("start")["pid"]
    states = []
    for pid in left:
        if os.path.exists(f"/proc/{pid}"):  # a zombie, until its new parent reaps it
            with open(f"/proc/{pid}/stat") as file:
                states.append(file.read().rpartition(")")[2].split()[0])
    assert set(states) <= {"Z"}
    assert f"supervisor={old}" in stderr_of(second)
    assert rig.command("serving") == new


def test_sweep_kills_what_bears_the_cookie_of_this_directory_and_nothing_else(rig):
    os.mkdir(rig.data_dir)
    with open(f"{rig.data_dir}/guard.lock", "w") as file:
        found = os.fstat(file.fileno())
    ours = f"{found.st_dev}-{found.st_ino}-aaaa"
    copied = f"{found.st_dev}-{found.st_ino}1-aaaa"
    processes = []
    for cookie in (ours, copied):
        environ = rig.environ({}, HAYATA_INSTANCE=cookie)
        processes.append(subprocess.Popen(_SLEEP, env=environ, stdout=subprocess.PIPE))
        processes[-1].stdout.readline()
    try:
        rig.start()
        rig.hear("start")
        assert processes[0].wait(20) == -signal.SIGKILL
        assert processes[1].poll() is None
    finally:
        for process in processes:
            process.kill()
            process.wait(20)
            process.stdout.close()


def test_daemon_started_by_a_task_of_its_own_data_directory_spares_its_ancestors(rig):
    os.mkdir(rig.data_dir)
    with open(f"{rig.data_dir}/guard.lock", "w") as file:
        found = os.fstat(file.fileno())
    cookie = f"{found.st_dev}-{found.st_ino}-aaaa"
    rig.start(prefix=["sh", "-c", '"$@"; exit $?', "sh"], environ={"HAYATA_INSTANCE": cookie})
    start = rig.hear("start")
    assert start["cookie"] != cookie
    os.kill(start["guard"], signal.SIGTERM)
    rig.hear("stop")
    wait_gone(start["guard"])


_LOCKS = """
import fcntl, sys, time
lock = open(sys.argv[1], "w")
fcntl.lockf(lock, fcntl.LOCK_EX)
print(flush=True)
time.sleep(600)
"""


def test_store_that_a_stranger_has_locked_is_refused_and_the_stranger_lives(rig):
    """An offline tool that reads the store is no orphan."""
    os.mkdir(rig.data_dir)
    command = [sys.executable, "-c", _LOCKS, f"{rig.data_dir}/store.lock"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as stranger:
        try:
            stranger.stdout.readline()
            guard = rig.start(limits=QUICK)
            assert guard.wait(20) == 5
            assert f"process {stranger.pid} has" in stderr_of(guard)
            assert stranger.poll() is None
        finally:
            stranger.kill()


def test_stale_socket_is_replaced(rig):
    first = rig.start()
    rig.hear("start")
    first.kill()
    rig.hear("guard_gone")
    assert os.path.exists(rig.socket)
    rig.start()
    pid = rig.hear("start")["pid"]
    assert rig.command("serving") == pid


def test_file_that_is_no_socket_is_refused_and_kept(rig):
    os.mkdir(f"{rig.home}/run")
    with open(rig.socket, "w") as file:
        file.write("precious")
    guard = rig.start()
    assert guard.wait(20) == 2
    assert "is not a socket" in stderr_of(guard)
    with open(rig.socket) as file:
        assert file.read() == "precious"


def test_socket_of_another_kind_of_program_is_refused_and_kept(rig):
    os.mkdir(f"{rig.home}/run")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(rig.socket)
        guard = rig.start()
        assert guard.wait(20) == 5
        assert stat.S_ISSOCK(os.lstat(rig.socket).st_mode)


def test_socket_that_another_daemon_put_in_our_place_survives_our_exit(rig):
    guard = rig.start()
    rig.hear("start")
    os.unlink(rig.socket)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(rig.socket)
        guard.send_signal(signal.SIGTERM)
        assert guard.wait(20) == 0
        assert os.path.exists(rig.socket)


def test_too_long_socket_path_is_refused(rig):
    guard = rig.start(rig.launch(socket=f"{rig.home}/{'s' * 120}"))
    assert guard.wait(20) == 2
    assert "the system allows 1 to 107" in stderr_of(guard)


def test_data_directory_that_is_a_file_is_refused(rig):
    with open(rig.data_dir, "w"):
        pass
    guard = rig.start()
    assert guard.wait(20) == 2
    assert "is no directory" in stderr_of(guard)


def test_refusal_reaches_the_embedding_process(rig):
    ours, theirs = control_pair()
    with ours, theirs:
        # Not even root can make a directory there.
        launch = rig.launch(data_dir="/sys/hayata", control_fd=theirs.fileno())
        guard = rig.start(launch, fds=[theirs.fileno()])
        assert guard.wait(20) == 5
        told = decode_from_guard(ours.recv(65536))
        assert isinstance(told, Fatal)
        assert (told.error.code, told.exit_code) == ("permission_denied", 5)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a mount namespace")
def test_read_only_data_directory_is_refused(rig):
    os.mkdir(rig.data_dir)
    place = rig.data_dir
    script = f'mount --bind {place} {place} && mount -o remount,bind,ro {place} && exec "$@"'
    guard = rig.start(prefix=["unshare", "-m", "sh", "-c", script, "sh"])
    assert guard.wait(20) == 5
    assert "permission_denied" in stderr_of(guard)
    assert "Read-only" in stderr_of(guard)


def test_guard_imports_nothing_heavy(rig):
    heavy = {"pydantic", "structlog", "lmdb", "asyncio", "psutil", "click", "subprocess", "threading"}
    script = f"import hayata_supervisor.guard, sys; print(sorted({heavy!r} & set(sys.modules)))"
    found = subprocess.run(
        [sys.executable, "-c", script], env=rig.environ({}), stdout=subprocess.PIPE, text=True, check=True
    )
    assert found.stdout.strip() == "[]"


def test_launch_that_is_none_is_a_usage_error(rig):
    for arguments in ([], ["--launch-fd", "x"], ["--launch-fd", "999"]):
        done = subprocess.run(
            [sys.executable, "-m", "hayata_supervisor.guard", *arguments],
            env=rig.environ({}),
            stderr=subprocess.PIPE,
            text=True,
        )
        assert done.returncode == 2
        assert "invalid_options: no launch" in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a pid namespace")
def test_guard_is_a_good_process_1(rig):
    """It stops on TERM, reaps strangers, and restarts its supervisor."""
    unshare = rig.start(prefix=["unshare", "--pid", "--fork", "--mount-proc"])
    first = rig.hear("start")
    assert first["guard"] == 1
    with open(f"/proc/{unshare.pid}/task/{unshare.pid}/children") as file:
        guard = int(file.read())
    rig.command("children")
    rig.hear("children")
    with open(f"/proc/{guard}/task/{guard}/children") as file:
        supervisor = int(file.read().split()[0])
    os.kill(supervisor, signal.SIGKILL)
    assert rig.hear("start")["pid"] != first["pid"]
    with open(f"/proc/{guard}/task/{guard}/children") as file:
        assert len(file.read().split()) == 1
    os.kill(guard, signal.SIGTERM)
    rig.hear("stop")
    assert unshare.wait(20) == 0
