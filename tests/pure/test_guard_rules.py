"""What the guard decides without doing anything: patience, platform, log lines."""

import json
import os

import msgspec
import pytest

from hayata.errors import HayataError
from hayata.messages import ErrorInfo
from hayata_supervisor.main import check_platform
from hayata_supervisor.process.stderr import Stderr
from hayata_supervisor.process.supervised import DeathTally, Limits


def test_backoff_doubles_up_to_its_bound():
    tally = DeathTally(Limits(deaths=1000))
    assert [tally.count(float(n), 1.0) for n in range(9)] == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0]


def test_backoff_begins_anew_after_a_stable_life():
    tally = DeathTally(Limits())
    assert [tally.count(0.0, 1.0), tally.count(1.0, 1.0)] == [0.1, 0.2]
    assert tally.count(61.0, 60.0) == 0.1


def test_fifth_death_in_the_period_is_the_last():
    tally = DeathTally(Limits())
    waits = [tally.count(at, 1.0) for at in (0.0, 10.0, 20.0, 30.0, 60.0)]
    assert None not in waits[:4]
    assert waits[4] is None


def test_deaths_that_are_long_ago_do_not_count():
    tally = DeathTally(Limits())
    assert None not in [tally.count(at * 15.1, 14.0) for at in range(50)]


OLDEST = ("linux", "5.4.0-generic", (3, 11, 0))


@pytest.mark.parametrize("release", ["5.4", "5.4.0-150-generic", "6.1.21+", "10.0", "6.18.44-fc-v657"])
def test_supported_kernels(release):
    check_platform("linux", release, (3, 11, 0), pidfds=True)


@pytest.mark.parametrize(
    ("system", "release", "python", "pidfds", "problem"),
    [
        ("darwin", "23.1.0", (3, 12, 0), False, "needs Linux, and this is darwin"),
        ("win32", "10", (3, 12, 0), False, "needs Linux"),
        ("linux", "5.3.18", (3, 12, 0), True, "needs Linux 5.4"),
        ("linux", "4.19.0", (3, 12, 0), True, "needs Linux 5.4"),
        ("linux", "6.1.0", (3, 10, 9), True, "needs Python 3.11 or later, and this is 3.10.9"),
        ("linux", "6.1.0", (3, 12, 0), False, "needs pidfds"),
    ],
)
def test_unsupported_platform_is_named_with_a_way_out(system, release, python, pidfds, problem):
    with pytest.raises(HayataError, match=problem) as caught:
        check_platform(system, release, python, pidfds=pidfds)
    assert caught.value.code == "unsupported_platform"
    assert caught.value.hint


def _error(code, message, traceback):
    return ErrorInfo(code, message, "", msgspec.Raw(msgspec.msgpack.encode({"traceback": traceback})))


@pytest.fixture
def pipe():
    read, write = os.pipe()
    os.set_blocking(read, False)
    yield read, write
    os.close(read)
    os.close(write)


def test_json_lines_are_one_object_each(pipe):
    log = Stderr("json", "info", fd=pipe[1])
    log.log("info", "supervisor started", pid=3, reason="a\nb")
    log.fatal(_error("store_corrupt", "bad", "one\ntwo"))
    lines = [json.loads(line) for line in os.read(pipe[0], 65536).splitlines()]
    assert lines[0]["event"] == "supervisor started"
    assert (lines[0]["level"], lines[0]["pid"], lines[0]["reason"]) == ("info", 3, "a\nb")
    assert (lines[1]["code"], lines[1]["traceback"]) == ("store_corrupt", "one\ntwo")
    assert "hint" not in lines[1]


def test_console_lines_are_single_and_below_the_level_left_out(pipe):
    log = Stderr("plain", "warning", fd=pipe[1])
    log.log("info", "no")
    log.log("warning", "yes", reason="a\nb")
    assert os.read(pipe[0], 65536).decode().endswith(" [warning  ] yes reason=a\\nb\n")


def test_full_pipe_loses_the_line_and_not_the_caller(pipe):
    os.set_blocking(pipe[1], False)
    try:
        while True:
            os.write(pipe[1], b"x" * 4096)
    except BlockingIOError:
        os.set_blocking(pipe[1], True)
    Stderr("console", "info", fd=pipe[1]).log("info", "lost")


def test_long_traceback_is_written_whole_when_it_is_read(pipe):
    log = Stderr("console", "info", fd=pipe[1])
    log.fatal(_error("agent_start_failed", "no", "t" * 30_000))
    assert os.read(pipe[0], 65536).count(b"t" * 1000) == 30
