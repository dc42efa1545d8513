"""What user code prints: lines, batches, the allowance; and that a reader which can't keep up loses lines."""

from __future__ import annotations

import itertools
import os
import select
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hayata_supervisor.process import output
from hayata_supervisor.process.output import Allowance, LineSplitter, WorkerOutput, batches
from hayata_supervisor.process.reactor import Reactor


@given(st.lists(st.binary(max_size=40)))
def test_splitter_any_chunks_give_the_same_lines(chunks: list[bytes]):
    splitter = LineSplitter()
    lines = [line for chunk in chunks for line in splitter.feed(chunk)] + splitter.flush()
    whole = b"".join(chunks).split(b"\n")
    if whole[-1] == b"":
        whole.pop()
    assert lines == [line.removesuffix(b"\r").decode("utf-8", "replace") for line in whole]


def test_splitter_long_line_is_cut_and_never_held():
    splitter = LineSplitter()
    lines = [line for _ in range(10) for line in splitter.feed(b"x" * 50_000)]
    assert {len(line) for line in lines} == {output.LINE_BYTES}
    lines += splitter.feed(b"y\n")
    assert "".join(lines) == "x" * 500_000 + "y"


@given(st.lists(st.text(max_size=50_000), max_size=30))
def test_batches_keep_order_and_size(lines: list[str]):
    grouped = list(batches(lines))
    assert [line for batch in grouped for line in batch] == lines
    assert all(len(batch) == 1 or sum(map(len, batch)) <= output.BATCH_BYTES for batch in grouped)


def test_allowance_burst_then_rate():
    allowance = Allowance(0.0)
    assert allowance.spend(output.BURST_BYTES, 0.0) == 0.0
    wait = allowance.spend(1, 0.0)
    assert wait > 0
    assert allowance.spend(1, wait) == 0.0
    read = 0
    now = wait
    while now < 100.0:
        now += allowance.spend(64 * 1024, now)
        read += 64 * 1024
    assert read == pytest.approx(output.RATE_BYTES_PER_S * 100.0, rel=0.02)


class _Reader:
    """Two pipes, and whoever takes the lines."""

    def __init__(self) -> None:
        self.reactor = Reactor()
        self.out, self.stdout = os.pipe()
        err, self.stderr = os.pipe()
        self.taken: list[tuple[str, list[str], int]] = []
        self.slowed: list[float] = []
        self.willing = True
        self.output = WorkerOutput(self.reactor, self.out, err, self._take)

    def _take(self, name: str, lines: list[str], dropped: int, slowed_s: float) -> bool:
        if self.willing and slowed_s:
            self.slowed.append(slowed_s)
        elif self.willing:
            self.taken.append((name, lines, dropped))
        return self.willing

    def close(self) -> None:
        for fd in (self.stdout, self.stderr):
            os.close(fd)
        self.output.end()
        self.reactor.close()


@pytest.fixture
def reader() -> Iterator[_Reader]:
    made = _Reader()
    yield made
    made.close()


def test_boundary_delivers_a_partial_line(reader: _Reader):
    os.write(reader.stdout, b"whole\npart")
    os.write(reader.stderr, b"warn")
    reader.output.boundary()
    assert reader.taken == [("stdout", ["whole"], 0), ("stdout", ["part"], 0), ("stderr", ["warn"], 0)]
    reader.output.boundary()
    assert len(reader.taken) == 3


def test_lines_that_nobody_takes_are_counted_and_told(reader: _Reader):
    reader.willing = False
    os.write(reader.stdout, b"1\n2\n3\n")
    reader.reactor.turn(0)
    reader.willing = True
    os.write(reader.stdout, b"4\n")
    reader.reactor.turn(0)
    assert reader.taken == [("stdout", ["4"], 3)]


def test_end_of_one_pipe_leaves_the_other(reader: _Reader):
    os.close(reader.stdout)
    reader.stdout = os.dup(reader.stderr)
    reader.reactor.turn(0)
    os.write(reader.stderr, b"still\n")
    reader.reactor.turn(0)
    assert reader.taken == [("stderr", ["still"], 0)]


def test_flood_is_slowed_and_told_ever_more_seldom(reader: _Reader, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(output, "RATE_BYTES_PER_S", 64 * 1024 * 1024)
    monkeypatch.setattr(output, "BURST_BYTES", 64 * 1024)
    monkeypatch.setattr(output, "_TELL_S", 0.01)
    reader.output._tell_s = 0.01
    reader.output._allowance = Allowance(time.monotonic())
    line = b"x" * 1023 + b"\n"
    began = time.monotonic()
    for _ in range(4 * 64):
        os.write(reader.stdout, line * 16)
        while select.select([reader.out], [], [], 0)[0]:
            reader.reactor.turn(0.1)
    took = time.monotonic() - began
    reader.output.boundary()
    assert sum(len(lines) for _, lines, _ in reader.taken) == 4 * 1024
    assert 0.01 <= sum(reader.slowed) <= took + 0.1
    told = reader.slowed[:-1]
    assert all(later > earlier for earlier, later in itertools.pairwise(told))
    assert took >= 0.03  # 4 MiB at 64 MiB/s would be 0.06 s; the burst is free


def test_drop_count_at_the_end_is_told():
    reader = _Reader()
    reader.willing = False
    os.write(reader.stderr, b"lost\n")
    reader.reactor.turn(0)
    reader.willing = True
    reader.close()
    assert reader.taken == [("stderr", [], 1)]
