"""The log's thread, over real pipes."""

import json
import os
import pty
import select
import subprocess
import sys
import threading

import pytest

from hayata.messages import Output
from hayata_supervisor.logs import LogThread
from tests.support.eventually import eventually
from tests.support.guard_rig import ROOT


@pytest.fixture
def pipes():
    read, write = os.pipe()
    yield read, write
    for fd in (read, write):
        try:
            os.close(fd)
        except OSError:
            pass


def _lines(read, write):
    os.close(write)
    data = b""
    while chunk := os.read(read, 65536):
        data += chunk
    return data.decode().split("\n")[:-1]


def _fill(write):
    os.set_blocking(write, False)
    size = 0
    try:
        while True:
            size += os.write(write, b"x" * 4096)
    except BlockingIOError:
        os.set_blocking(write, True)
    return size


def _record(event, **fields):
    return "\x1e" + json.dumps({"level": "warning", "logger": "app", "event": event, **fields})


def test_json_lines_have_time_level_event_and_fields(pipes):
    log = LogThread("json", "info", stderr=pipes[1])
    log.info("started", pid=3, odd={1, 2}, text="a\nb")
    log.debug("left out")
    log.error("bad", error=ValueError("x"))
    log.close()
    first, second = map(json.loads, _lines(*pipes))
    assert first.pop("timestamp").endswith("Z")
    assert first == {"level": "info", "event": "started", "pid": 3, "odd": [1, 2], "text": "a\nb"}
    assert second["error"] == "ValueError('x')"


def test_user_lines_carry_the_ids_of_what_wrote_them(pipes):
    log = LogThread("json", "error", stderr=pipes[1])  # the level is for our own lines
    lines = ["hello", _record("careful", invocation_id="i", edge_id="forged")]
    log.output(Output("e1", "x.1", "stdout", lines, dropped=7), agent="a", node="n")
    log.close()
    dropped, hello, careful = map(json.loads, _lines(*pipes))
    ids = {"agent_id": "a", "node_id": "n", "edge_id": "e1", "execution_id": "x.1"}
    assert ids.items() <= dropped.items()
    assert (dropped["event"], dropped["count"]) == ("output dropped", 7)
    assert {**ids, "event": "hello", "stream": "stdout", "level": "info"}.items() <= hello.items()
    assert {**ids, "event": "careful", "level": "warning", "logger": "app"}.items() <= careful.items()
    assert careful["invocation_id"] == "i"


@pytest.mark.parametrize(
    "line", ["\x1e", "\x1e{", "\x1e[1]", '\x1e{"level":"loud","event":"x"}', '\x1e{"level":"info"}']
)
def test_line_that_only_looks_like_a_record_is_a_line(pipes, line):
    log = LogThread("json", "info", stderr=pipes[1])
    log.output(Output("e1", None, "stderr", [line]), agent="a", node="n")
    log.close()
    (only,) = map(json.loads, _lines(*pipes))
    assert (only["event"], only["stream"]) == (line, "stderr")
    assert "execution_id" not in only


def test_console_lines_are_single_and_can_not_move_the_cursor(pipes):
    log = LogThread("console", "info", stderr=pipes[1])
    hostile = "\x1b[2J\x9b1mboo\r\n\x07"
    log.info("started", text=hostile, odd=[hostile])
    log.output(Output("e1", "x.1", "stdout", [hostile, _record(hostile, exception="one\ntwo")]), agent="a", node="n")
    log.close()
    lines = _lines(*pipes)
    assert len(lines) == 3
    assert all(line.isprintable() for line in lines)
    assert "[app]" in lines[2]
    assert "one\\ntwo" in lines[2]


def test_plain_writes_what_user_code_wrote_where_it_wrote_it(pipes):
    out = os.pipe()
    log = LogThread("plain", "warning", stdout=out[1], stderr=pipes[1])
    log.info("left out")
    log.warning("ours")
    log.output(Output("e1", "x.1", "stdout", ["\x1b[1mbold", ""]), agent="a", node="n")
    lines = ["to stderr", _record("careful", exception="Traceback\n  there")]
    log.output(Output("e1", "x.1", "stderr", lines), agent="a", node="n")
    log.close()
    assert _lines(*out) == ["\x1b[1mbold", ""]
    os.close(out[0])
    ours, *theirs = _lines(*pipes)
    assert "ours" in ours
    assert theirs == ["to stderr", "WARNING:app:careful", "Traceback", "  there"]


def test_huge_line_is_cut(pipes):
    reader = []
    thread = threading.Thread(target=lambda: reader.extend(_lines(pipes[0], os.dup(pipes[1]))))
    log = LogThread("json", "info", stderr=pipes[1])
    thread.start()
    log.info("x" * 1_000_000, text="y" * 1_000_000)
    log.close()
    os.close(pipes[1])
    thread.join(20)
    (line,) = map(json.loads, reader)
    assert (len(line["event"]), len(line["text"])) == (65536, 65536)


def test_blocked_stderr_never_blocks_a_caller_and_the_loss_is_counted(pipes):
    read, write = pipes
    filled = _fill(write)
    log = LogThread("json", "info", stderr=write, queue_lines=100)
    for number in range(1000):
        log.info("line", number=number)  # would hang here for ever
    while filled:
        filled -= len(os.read(read, min(filled, 65536)))
    log.close(20.0)
    lines = [json.loads(line) for line in _lines(read, write)]
    kept = [line["number"] for line in lines if line["event"] == "line"]
    assert kept == list(range(len(kept)))
    assert len(kept) >= 100
    assert lines[-1]["event"] == "log lines dropped"
    assert lines[-1]["count"] == 1000 - len(kept)


def test_waiting_bytes_are_bounded(pipes):
    read, write = pipes
    filled = _fill(write)
    log = LogThread("json", "info", stderr=write, queue_bytes=1_000_000)
    for _ in range(100):
        log.output(Output("e1", None, "stdout", ["x" * 60_000]), agent="a", node="n")
    os.read(read, 4096 * (filled // 4096))
    reader = []
    thread = threading.Thread(target=lambda: reader.extend(_lines(read, os.dup(write))))
    thread.start()
    log.close(20.0)
    os.close(write)
    thread.join(20)
    count = json.loads(reader[-1])["count"]
    assert 80 <= count < 100


def test_stderr_that_is_gone_costs_nothing_but_the_lines(pipes):
    os.close(pipes[0])
    log = LogThread("json", "info", stderr=pipes[1], queue_lines=10)
    for _ in range(100):
        log.info("nobody reads this")
    log.close(20.0)
    assert not log._thread.is_alive()


def test_full_target_costs_the_lines_and_they_are_counted_when_there_is_room(pipes):
    target = os.open("/dev/full", os.O_WRONLY)
    try:
        log = LogThread("json", "info", stderr=target)
        for number in range(10):
            log.info("lost", number=number)
        eventually(lambda: log._lines == 0, "everything tried")
        os.dup2(pipes[1], target)
        log.info("kept")
        log.close(20.0)
    finally:
        os.close(target)
    kept, told = map(json.loads, _lines(*pipes))
    assert kept["event"] == "kept"
    assert (told["event"], told["count"]) == ("log lines dropped", 10)


_DISK_FULL_IN_A_LINE = """
import resource, sys
from hayata_supervisor.logs import LogThread
from tests.support.eventually import eventually
_, most = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, most))
log = LogThread("json", "info")
for number in range(5):
    log.info("x" * 300)
eventually(lambda: log._lines == 0, "everything tried")
resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
log.info("kept")
log.close(20.0)
"""


def test_line_that_a_full_disk_has_torn_spoils_no_other(tmp_path):
    path = os.pathsep.join([str(ROOT), str(ROOT / "supervisor")])
    with (tmp_path / "log").open("wb") as file:
        command = [sys.executable, "-c", _DISK_FULL_IN_A_LINE]
        subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, stderr=file, timeout=60, check=True)
    first, second, torn, kept, told = (tmp_path / "log").read_text().splitlines()
    assert json.loads(first)["event"] == json.loads(second)["event"] == "x" * 300
    with pytest.raises(ValueError):
        json.loads(torn)
    assert json.loads(kept)["event"] == "kept"
    assert json.loads(told)["count"] == 3


def test_terminal_that_somebody_made_non_blocking_gets_every_line():
    master, slave = pty.openpty()
    try:
        os.set_blocking(slave, False)
        log = LogThread("json", "info", stderr=slave)
        for number in range(500):
            log.info("line", number=number)
        data = b""
        while data.count(b"\n") < 500:
            assert select.select([master], [], [], 20)[0]
            data += os.read(master, 65536)
        log.close(20.0)
        assert json.loads(data.splitlines()[-1])["number"] == 499
    finally:
        os.close(master)
        os.close(slave)


def test_many_threads_may_log_at_once(pipes):
    reader = []
    collecting = threading.Thread(target=lambda: reader.extend(_lines(pipes[0], os.dup(pipes[1]))))
    collecting.start()
    log = LogThread("json", "info", stderr=pipes[1])
    threads = [threading.Thread(target=lambda: [log.info("x") for _ in range(500)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    log.close(20.0)
    os.close(pipes[1])
    collecting.join(20)
    assert len(reader) == 2000
    assert log._lines == log._bytes == 0


_HANDLER_THAT_LOGS = """
import os, signal
from hayata_supervisor.logs import LogThread
log = LogThread("json", "info", queue_lines=100_000)
signal.signal(signal.SIGALRM, lambda *_: log.info("in the handler"))
signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
for number in range(20_000):
    log.info("in the caller")
signal.setitimer(signal.ITIMER_REAL, 0)
log.close(20.0)
"""


def test_signal_handler_that_logs_does_not_deadlock_or_raise():
    """P7, gunicorn 2564: a handler that logs has interrupted a caller that logs."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "supervisor")])
    done = subprocess.run(
        [sys.executable, "-c", _HANDLER_THAT_LOGS],
        env={**os.environ, "PYTHONPATH": path},
        stderr=subprocess.PIPE,
        timeout=60,
        check=True,
    )
    assert done.stderr.count(b"in the caller") == 20_000
    assert done.stderr.count(b"in the handler") > 0
