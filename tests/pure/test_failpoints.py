"""Failpoints: what the variable may say, and that what is armed happens where, when and as often as it says."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import time
import timeit
from pathlib import Path

import msgspec
import pytest

from hayata.messages import Ask, Beat, Done, GetStats, Tell, encode
from hayata_supervisor import failpoints
from hayata_supervisor.failpoints import Armed, Failpoints, parse

MOST_NS = 50
SUPERVISOR = Path(failpoints.__file__).parents[1]


def points(text: str) -> Failpoints:
    return Failpoints(parse(text))


def test_variable_is_read():
    text = "store.after_commit=kill@3; node.before_send_ready=delay(0.2)@once:/tmp/x ;*=trace(/t);"
    assert parse(text + "a.b=error(ENOSPC);a.b=orphan") == {
        "store.after_commit": [Armed("kill", "", 3, "")],
        "node.before_send_ready": [Armed("delay", "0.2", 0, "/tmp/x")],
        "*": [Armed("trace", "/t", 0, "")],
        "a.b": [Armed("error", "ENOSPC", 0, ""), Armed("orphan", "", 0, "")],
    }
    assert parse("") == parse(";") == {}


@pytest.mark.parametrize(
    "text",
    [
        "store.after_commit",
        "a.b=die",
        "a.b=kill(9)",
        "a.b=kill@0",
        "a.b=kill@x",
        "a.b=delay",
        "a.b=delay(-1)",
        "a.b=delay(soon)",
        "a.b=error(ENOSUCHTHING)",
        "a.b=trace",
        "a.b=raise@once:",
        "*=kill",
        "a b=kill",
    ],
)
def test_variable_that_cannot_be_read_is_refused(text: str):
    with pytest.raises(ValueError, match="can't read"):
        parse(text)


def test_process_with_a_variable_that_cannot_be_read_does_not_start():
    ended = in_process("print('imported')", HAYATA_FAILPOINTS="store.after_commit=kil")
    assert ended.returncode == 1
    assert "can't read 'store.after_commit=kil'" in ended.stderr


def test_nth_hit_strikes_and_no_other():
    armed = points("a.b=raise@3")
    for number in range(1, 6):
        if number == 3:
            with pytest.raises(RuntimeError, match=r"a\.b"):
                armed.hit("a.b")
        else:
            armed.hit("a.b")
        armed.hit("a.c")


def test_without_a_number_each_hit_strikes():
    armed = points("a.b=raise")
    for _ in range(2):
        with pytest.raises(RuntimeError):
            armed.hit("a.b")


def test_marker_lets_one_process_strike_and_names_it(tmp_path: Path):
    marker = tmp_path / "marker"
    armed, later = (points(f"a.b=raise@2@once:{marker}") for _ in range(2))
    armed.hit("a.b")
    assert not marker.exists()
    with pytest.raises(RuntimeError):
        armed.hit("a.b")
    assert marker.read_text() == f"a.b in {failpoints.role} {os.getpid()}\n"
    later.hit("a.b")
    later.hit("a.b")


@pytest.mark.parametrize(
    ("name", "number"),
    [("a.before_commit", errno.EIO), ("a.before_fork", errno.EAGAIN), ("a.before_accept", errno.EMFILE)],
)
def test_error_is_the_likely_one(name: str, number: int):
    with pytest.raises(OSError, match="failpoint") as raised:
        points(f"{name}=error").hit(name)
    assert raised.value.errno == number


def test_error_is_made_by_the_place_where_that_knows_better():
    with pytest.raises(ZeroDivisionError, match=str(errno.ENOSPC)):
        points("a.b=error(ENOSPC)").hit("a.b", lambda number: ZeroDivisionError(str(number)))


def test_error_at_a_connection_breaks_it():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        points("a.b=error").hit("a.b", ours)
        assert theirs.recv(1) == b""
        with pytest.raises(BrokenPipeError):
            ours.send(b"x")
    points("a.b=error").hit("a.b", ours)  # closed: it is broken already


def test_delay_sleeps():
    began = time.monotonic()
    points("a.b=delay(0.05)").hit("a.b")
    assert time.monotonic() - began >= 0.05


def test_messages_are_named_by_role_and_tag(tmp_path: Path):
    trace = tmp_path / "trace"
    armed = points(f"*=trace({trace})")
    armed.message("before_send", encode(Beat()))
    armed.message("after_send", b"1234" + encode(Beat()), None, 4)
    armed.message("before_receive", encode(Ask(1, GetStats())))
    armed.message("before_send", encode(Tell(1, Done())))
    armed.message("before_receive", msgspec.msgpack.encode({"type": "hello"}))
    armed.message("before_receive", b"\xc1")
    armed.message("before_receive", None)
    armed.hit(".before_fork")
    armed.hit("store.after_commit")
    assert trace.read_text().split() == [
        word
        for name in (
            "inline.before_send_beat",
            "inline.after_send_beat",
            "inline.before_receive_ask_get_stats",
            "inline.before_send_tell_done",
            "inline.before_receive_hello",
            "inline.before_receive_unreadable",
            "inline.before_fork",
            "store.after_commit",
        )
        for word in (str(os.getpid()), name)
    ]


def in_process(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run code with ``failpoints`` imported."""
    path = os.pathsep.join([str(SUPERVISOR), *sys.path])
    return subprocess.run(
        [sys.executable, "-c", f"import os\nfrom hayata_supervisor import failpoints\n{code}"],
        env={**os.environ, "PYTHONPATH": path, **environ},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_process_is_killed_at_once():
    ended = in_process("failpoints.hit('a.b'); print('alive')", HAYATA_FAILPOINTS="a.b=kill")
    assert (ended.returncode, ended.stdout) == (-signal.SIGKILL, "")


def test_parent_is_killed_and_the_process_goes_on(tmp_path: Path):
    code = f"""
pid = os.fork()
if pid == 0:
    failpoints.hit('a.b')
    open({str(tmp_path / "child")!r}, 'w').close()
    os._exit(0)
os.waitpid(pid, 0)
print('alive')
"""
    ended = in_process(code, HAYATA_FAILPOINTS="a.b=orphan")
    assert (ended.returncode, ended.stdout) == (-signal.SIGKILL, "")
    due = time.monotonic() + 10
    while not (tmp_path / "child").exists():
        assert time.monotonic() < due
        time.sleep(0.01)


def test_forked_child_counts_from_one():
    code = """
failpoints.hit('a.b')
pid = os.fork()
if pid == 0:
    failpoints.hit('a.b')
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
failpoints.hit('a.b')
"""
    ended = in_process(code, HAYATA_FAILPOINTS="a.b=kill@2")
    assert (ended.returncode, ended.stdout) == (-signal.SIGKILL, "7\n")


def test_role_is_that_of_the_process():
    code = "failpoints.enter('node'); failpoints.hit('.before_fork')"
    assert in_process(code, HAYATA_FAILPOINTS="node.before_fork=kill").returncode == -signal.SIGKILL
    assert in_process(code, HAYATA_FAILPOINTS="edge.before_fork=kill").returncode == 0


@pytest.mark.parametrize("call", ["hit('store.after_commit')", "message('before_send', body, None, 4)"])
def test_point_costs_next_to_nothing_while_nothing_is_armed(call: str):
    assert "HAYATA_FAILPOINTS" not in os.environ
    names = {"failpoints": failpoints, "body": b"12345"}
    seconds = min(timeit.repeat(f"failpoints.{call}", globals=names, number=100_000, repeat=20))
    assert seconds / 100_000 * 1e9 < MOST_NS
