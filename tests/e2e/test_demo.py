"""The demo as its viewers run it, and its counts as a sceptic would check them."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import hayata
from examples.demo_parts.counts import count, problems
from examples.demo_parts.ledger import Body, Kill, Ledger, Story, note
from hayata import Task

DEMO = Path(hayata.__file__).parents[1] / "examples" / "demo.py"
DEADLINE_S = 120.0
ESCAPE = "\x1b["


class Viewing:
    """The demo, running, and what its viewer has seen of it."""

    def __init__(self, folder: str, *, terminal: bool, **environ: str) -> None:
        self.folder = folder
        mine, its = pty.openpty() if terminal else os.pipe()
        plain = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "CI")}
        path = os.pathsep.join(entry for entry in sys.path if entry)
        self.process = subprocess.Popen(
            [sys.executable, str(DEMO)],
            env={**plain, "PYTHONPATH": path, "TMPDIR": folder, "TERM": "xterm", "COLUMNS": "110", **environ},
            stdin=its if terminal else subprocess.DEVNULL,
            stdout=its,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        os.close(its)
        self.output = mine
        self.seen = ""
        self._raw = b""

    def watch(self, until: Callable[[str], object] = lambda seen: False) -> str:
        """Look on until what was seen is as wanted, or to the end."""
        due = time.monotonic() + DEADLINE_S
        while not until(self.seen):
            ready, _, _ = select.select([self.output], [], [], max(0.0, due - time.monotonic()))
            assert ready, f"this was all that came:\n{self.seen}"
            try:
                data = os.read(self.output, 1 << 16)
            except OSError:  # how a terminal ends
                break
            if not data:
                break
            self._raw += data
            self.seen = self._raw.decode(errors="ignore")
        return self.seen

    def end(self) -> int:
        """Wait for its end; nothing may be left in its folder."""
        code = self.process.wait(DEADLINE_S)
        assert os.listdir(self.folder) == [], self.seen
        return code

    def close(self) -> None:
        """Leave nothing, also when a test has failed."""
        if self.output >= 0:
            os.close(self.output)
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(DEADLINE_S)


@pytest.fixture
def view() -> Iterator[Callable[..., Viewing]]:
    viewings = []
    with tempfile.TemporaryDirectory() as folder:

        def start(*, terminal: bool, **environ: str) -> Viewing:
            viewings.append(Viewing(folder, terminal=terminal, **environ))
            return viewings[-1]

        yield start
        for viewing in viewings:
            viewing.close()


def test_demo_piped_kills_three_times_and_counts_no_task_twice(view):
    viewing = view(terminal=False)
    said = viewing.watch()
    assert viewing.end() == 0, said
    assert ESCAPE not in said
    killed = re.findall(r"kill -9 \d+: the (edge worker|node worker|supervisor)", said)
    assert killed == ["edge worker", "node worker", "supervisor"]
    assert len(re.findall(r"\d+ ms: attempt 2 begins in edge worker \d+; its result after \d+ ms", said)) == 2
    assert re.search(r"\d+ ms: supervisor \d+ answers", said)
    assert "it is uncertain, and the job rests" in said
    counts = dict(re.findall(r"^ +(\d+) (tasks, in|kills|results|tasks run|uncertain|completed).*$", said, re.M)[::-1])
    numbers = {what: int(number) for number, what in counts.items()}
    assert numbers["kills"] == 3
    assert numbers["uncertain"] == 1
    assert numbers["completed"] == 0
    assert numbers["results"] + numbers["tasks run"] + numbers["uncertain"] == numbers["tasks, in"]
    assert re.search(r"which cut off ([4-9]) running bodies", said)
    assert "the same as wc -w" in said


def test_demo_on_a_terminal_shows_tree_and_timeline_and_ctrl_c_leaves_nothing(view):
    viewing = view(terminal=True)
    viewing.watch(lambda seen: all(part in seen for part in ("supervisor", "edge", " batch 1", "▒")))
    assert ESCAPE in viewing.seen
    os.killpg(viewing.process.pid, signal.SIGINT)  # as a terminal does
    viewing.watch()
    assert viewing.end() == 130
    assert viewing.seen.endswith("stopped; nothing is left behind\r\n")
    assert viewing.seen.rindex(f"{ESCAPE}?25h") > viewing.seen.rindex(f"{ESCAPE}?25l")  # the cursor is back


@pytest.mark.parametrize("name", ["NO_COLOR", "CI"])
def test_demo_on_a_terminal_prints_plain_lines_when_asked(view, name):
    viewing = view(terminal=True, **{name: "1"})
    viewing.watch(lambda seen: "is accepted" in seen)
    viewing.process.terminate()
    assert ESCAPE not in viewing.watch()
    assert viewing.end() == 128 + signal.SIGTERM


def test_demo_whose_viewer_goes_away_ends_and_leaves_nothing(view):
    viewing = view(terminal=False)
    viewing.watch(lambda seen: "is accepted" in seen)
    os.close(viewing.output)
    viewing.output = -1
    assert viewing.end() == 128 + signal.SIGHUP


# What is counted


def body(execution: str, key: str, start: float, end: float | None, node: str = "count_0") -> Body:
    return Body(execution, key, node, 1, 0, 100, 99, start, end, None if end is None else 7)


def task(id: str, status: str = "completed") -> Task:
    return Task(id, "count_0", 0, 1, status, None, None, None, None, None, None)


KILL = Kill(10.0, "supervisor", 50, "")
STORY = Story(
    bodies=(
        body("a1", "a", 1.0, 2.0),
        body("b1", "b", 9.0, None, "count_1"),
        body("p1", "p", 9.5, None, "publish"),
        body("b2", "b", 11.0, 12.0, "count_1"),
        body("c1", "c", 13.0, 14.0),
    ),
    kills=(KILL,),
    settled={"p1": "result"},
)
TASKS = [task("a1"), task("b1", "failed"), task("p1"), task("b2"), task("c1")]
RESULT = {"words": 21, "receipts": ["r"]}


def test_counts_of_a_story_that_is_as_promised():
    counts = count(STORY, TASKS, told=["a1", "b2", "c1"])
    assert (counts.tasks, counts.bodies, counts.kills, counts.cut_off) == (4, 5, 1, 2)
    assert (counts.reused, counts.after_restart, counts.again, counts.settled) == (1, 2, 1, 1)
    assert counts.twice == 0
    assert problems(counts, RESULT, ["r"], 21) == problems(counts, RESULT, ["r"], None) == []


@pytest.mark.parametrize(
    "again",
    [body("a2", "a", 11.0, 12.0), body("a2", "a", 11.0, None), body("a1", "a", 3.0, 4.0)],
    ids=["after the restart", "without an end", "the same execution"],
)
def test_counts_a_completed_task_whose_body_began_again(again):
    counts = count(replace(STORY, bodies=(*STORY.bodies, again)), [*TASKS, task("a2")], told=["a1"])
    assert counts.twice == 1
    assert "1 completed tasks ran twice" in problems(counts, RESULT, ["r"], 21)


def test_counts_a_task_that_was_told_completed_and_ran_again():
    """The client was told of b1, but then the product says that it failed."""
    counts = count(STORY, TASKS, told=["b1"])
    assert counts.twice == 1
    assert any("b1" in problem for problem in counts.unexplained)


def test_counts_name_what_does_not_fit():
    unknown = count(replace(STORY, bodies=(*STORY.bodies, body("x1", "x", 1.0, 2.0))), TASKS, told=[])
    assert [problem for problem in unknown.unexplained if "x1" in problem]
    unsettled = count(replace(STORY, settled={}), TASKS, told=[])
    assert [problem for problem in unsettled.unexplained if "p1" in problem]
    counts = count(STORY, TASKS, told=[])
    assert problems(counts, RESULT, ["r"], 22)
    assert problems(counts, RESULT, ["r", "r"], 21)


def test_ledger_reads_what_was_written_and_leaves_out_half_a_line(tmp_path):
    ledger = Ledger(str(tmp_path / "ledger"))
    assert ledger.story().bodies == ()
    fields = {
        "execution": "e",
        "key": "k",
        "node": "count_0",
        "attempt": 1,
        "batch": 0,
        "pid": 1,
        "parent": 2,
    }
    note(ledger.path, "start", at=1.0, **fields)
    with open(ledger.path, "ab") as file:
        file.write(b'{"what": "end", "at": 2.0, ')
    assert [each.end for each in ledger.story().bodies] == [None]
    with open(ledger.path, "ab") as file:
        file.write(b'"execution": "e", "words": 3}\n')
    ledger.note("kill", at=1.5, role="node", pid=2, node="count_0")
    story = ledger.story()
    assert [(each.end, each.words) for each in story.bodies] == [(2.0, 3)]
    assert story.cut_at(story.bodies[0]) == 1.5
