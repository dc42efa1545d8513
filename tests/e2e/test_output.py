"""What user code prints, from its process to the daemon's log; and a log that nobody takes any more."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator

import pytest

from tests.support.crash_site import Daemon, Site
from tests.support.eventually import eventually
from tests.support.shared_daemon import WAIT_S, app, failed, serving, undisturbed

MIB = 1024 * 1024
LONG_S = 60.0


@pytest.fixture(scope="module")
def shared() -> Iterator[Daemon]:
    with serving(app("loud"), HAYATA_LOG_FORMAT="json") as daemon:
        yield daemon


@pytest.fixture
def daemon(shared: Daemon) -> Iterator[Daemon]:
    """The shared daemon, that must be the same afterwards, and serve."""
    with undisturbed(shared, "echo"):
        yield shared


def lines(daemon: Daemon, **wanted: object) -> list[dict]:
    """The log's lines with these fields. Each of them is JSON, or this raises."""
    *whole, _ = daemon.site.log.read_bytes().split(b"\n")
    found = [json.loads(line) for line in whole]
    return [line for line in found if wanted.items() <= line.items()]


def wait(daemon: Daemon, **wanted: object) -> list[dict]:
    return eventually(lambda: lines(daemon, **wanted), f"a line with {wanted}")


def said(daemon: Daemon, what: str) -> str:
    """Have a task say that; its execution id."""
    invocation = daemon.client.run("say", {"what": what})
    assert invocation.result(timeout=WAIT_S)["said"] == what
    return invocation.tasks()[0].id


@pytest.mark.parametrize(
    ("what", "stream", "events"),
    [
        ("long", "stdout", ["x" * 65_536] * 3 + ["x" * (200_000 - 3 * 65_536) + "end"]),
        ("unended", "stdout", ["no end of line"]),
        ("invalid", "stdout", ["caf\ufffd \ufffd"]),
        ("child", "stdout", ["from a child"]),
        ("child", "stderr", ["and its stderr"]),
    ],
)
def test_what_a_task_prints_is_in_the_log_line_by_line_with_its_ids(
    daemon: Daemon, what: str, stream: str, events: list[str]
):
    execution = said(daemon, what)
    found = eventually(
        lambda: (seen := lines(daemon, execution_id=execution, stream=stream))[len(events) - 1 :] and seen, "the lines"
    )
    assert [line["event"] for line in found] == events
    assert {(line["agent_id"], line["node_id"]) for line in found} == {("say", "say")}
    assert all(line["edge_id"] for line in found)


def test_task_that_closes_its_stdout_ends_well_and_its_process_goes_on(daemon: Daemon):
    said(daemon, "gone")
    said(daemon, "long")


def test_policy_that_prints_is_heard_on_both_streams(daemon: Daemon):
    said(daemon, "unended")
    for event, stream in (("a policy prints", "stdout"), ("a policy complains", "stderr")):
        line = wait(daemon, event=event, stream=stream)[0]
        assert line["agent_id"] == "say"
        assert "node_id" not in line


def test_output_after_the_end_of_its_task_is_logged_and_not_as_another_ones(daemon: Daemon):
    invocation = daemon.client.run("linger")
    invocation.result(timeout=WAIT_S)
    (late,) = wait(daemon, event="said too late")
    assert late["node_id"] == "linger"
    assert late.get("execution_id") in (None, invocation.tasks()[0].id)


def test_flood_is_slowed_to_its_rate_and_counted_and_others_do_not_notice(daemon: Daemon):
    began = time.monotonic()
    flood = daemon.client.run("pour", {"mib": 11})
    daemon.site.ledger.wait("pouring", invocation=flood.id)
    answers = []
    while flood.status() == "running":
        asked = time.monotonic()
        daemon.client.call("echo", timeout=WAIT_S)
        answers.append(time.monotonic() - asked)
    took = flood.result(timeout=LONG_S)["took"]
    assert 2.5 < took < time.monotonic() - began  # 8 MiB at once, then 1 MiB a second; a pipe holds something, too
    assert sorted(answers)[len(answers) // 2] < 2.5  # the flood takes longer
    execution = flood.tasks()[0].id
    slowed = wait(daemon, event="output slowed", execution_id=execution)
    assert 2.0 < sum(line["seconds"] for line in slowed) <= took + 1.0
    assert len(slowed) <= 4
    eventually(lambda: accounted(daemon, execution) >= 11 * 1024, "all lines, or that they were dropped")


def accounted(daemon: Daemon, execution: str) -> int:
    """Lines of a flood that are in the log, or that somebody there says are not. Ours are among the dropped ones."""
    whole = len(lines(daemon, event="y" * 1023, execution_id=execution))
    dropped = lines(daemon, event="output dropped", execution_id=execution) + lines(daemon, event="log lines dropped")
    return whole + sum(line["count"] for line in dropped)


def test_flood_does_not_outlive_its_deadline(daemon: Daemon):
    began = time.monotonic()
    error = failed(daemon.client.run("endless", {"mib": 1_000}))
    assert error.code == "execution_timeout"
    assert time.monotonic() - began < 15.0


def test_flood_of_noise_spoils_no_line_of_the_log(daemon: Daemon):
    daemon.client.call("pour", {"mib": 4, "noise": True}, timeout=LONG_S)
    said(daemon, "unended")
    assert lines(daemon, node_id="pour")  # each of them was JSON


# ---- nobody takes the log ----------------------------------------------------------------------------------------


def full_pipe() -> tuple[int, int]:
    read, write = os.pipe()
    os.set_blocking(write, False)
    try:
        while True:
            os.write(write, b"\n" * 4096)
    except BlockingIOError:
        os.set_blocking(write, True)
    return read, write


def works(daemon: Daemon) -> None:
    """A flood and many steps, kills included, as if somebody listened."""
    began = time.monotonic()
    runs = [daemon.client.run("pour", {"mib": 6}) for _ in range(2)]
    for _ in range(20):
        daemon.client.call("echo", timeout=WAIT_S)
    for each in daemon.tree():
        if each.role in ("agent", "node") and each.name.startswith("say"):
            each.kill()
    assert [run.result(timeout=LONG_S)["took"] < 20.0 for run in runs] == [True, True]
    daemon.client.call("say", {"what": "long"}, timeout=WAIT_S)
    assert time.monotonic() - began < LONG_S


def test_log_that_nobody_reads_holds_nobody_up_and_tells_its_loss_when_it_is_read(site: Site):
    read, write = full_pipe()
    try:
        daemon = site.daemon(app("loud")).start(stderr=write, HAYATA_LOG_FORMAT="json")
        os.close(write)
        write = -1
        works(daemon)
        seen: list[dict] = []
        reader = threading.Thread(target=collect, args=(read, seen))
        reader.start()
        eventually(lambda: [line for line in seen if line["event"] == "log lines dropped"], "the count", LONG_S)
        daemon.stop()
        reader.join(WAIT_S)
    finally:
        os.close(read)
        if write >= 0:
            os.close(write)
    poured = sum(line["event"] == "y" * 1023 for line in seen)
    lost = sum(line["count"] for line in seen if line["event"] in ("log lines dropped", "output dropped"))
    assert poured < 2 * 6 * 1024 <= poured + lost
    assert seen[-1]["event"] == "stopped"


def collect(read: int, seen: list[dict]) -> None:
    """Read to the end."""
    with os.fdopen(os.dup(read), "rb") as file:
        for line in file:
            if line.strip():
                seen.append(json.loads(line))


@pytest.mark.parametrize("target", ["closed", "/dev/full"])
def test_log_that_is_gone_or_full_holds_nobody_up(site: Site, target: str):
    if target == "closed":
        read, write = os.pipe()
        os.close(read)
    else:
        write = os.open(target, os.O_WRONLY)
    try:
        daemon = site.daemon(app("loud")).start(stderr=write)
        works(daemon)
        supervisor = daemon.kill_supervisor()  # who has nobody to tell starts another one all the same
        eventually(lambda: daemon.supervisor().pid != supervisor.pid, "the next supervisor", LONG_S)
        daemon.client.call("echo", timeout=WAIT_S)
        daemon.stop()
    finally:
        os.close(write)
