"""The control of the watch: trees that are sound, and trees with somebody in them who should be dead."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.chaos.processes import Process, Snapshot
from tests.chaos.watch import Watch


def processes(*strangers: Process) -> Iterator[Process]:
    yield Process(10, 1, 1, 10, "S", "hayata-guard")
    yield Process(11, 2, 10, 11, "S", "hayata-super")
    yield Process(12, 3, 11, 12, "S", "h:forkserver")
    yield Process(13, 4, 11, 12, "S", "h:line")
    yield Process(14, 5, 11, 12, "S", "h:quick")
    yield Process(15, 6, 14, 15, "S", "h:quick*")
    yield Process(16, 7, 15, 15, "S", "sleep")
    yield from strangers


def seen(watch: Watch, looks: int, *strangers: Process, held: bool = False) -> list[str]:
    snapshot = Snapshot({process.pid: process for process in processes(*strangers)}, guard=10)
    for _ in range(looks):
        watch.look(snapshot, 0.2, held=held)
    return watch.overdue


def test_watch_is_content_with_a_sound_tree():
    assert seen(Watch(["line"]), 20) == []


@pytest.mark.parametrize(
    ("stranger", "what"),
    [
        (Process(20, 9, 1, 20, "S", "h:slow*"), "dead incarnation"),
        (Process(20, 9, 1, 20, "S", "hayata-super"), "dead incarnation"),
        (Process(20, 9, 11, 15, "S", "sleep"), "orphan at the supervisor"),
        (Process(20, 9, 11, 20, "S", "h:quick*"), "orphan at the supervisor"),
        (Process(20, 9, 14, 15, "S", "sleep"), "orphan at node h:quick"),
        (Process(20, 9, 11, 20, "Z", "h:slow"), "zombie of hayata-super"),
        (Process(20, 9, 14, 20, "Z", "h:quick*"), "zombie of h:quick"),
    ],
)
def test_watch_finds_what_is_left_for_longer_than_a_second(stranger: Process, what: str):
    assert seen(Watch(["line"]), 5, stranger) == []
    watch = Watch(["line"])
    assert seen(watch, 3, stranger) == []
    assert seen(watch, 20, stranger, held=True) == []
    (found,) = seen(watch, 4, stranger)
    assert what in found
    assert "pid 20" in found


def test_watch_forgives_what_goes_in_time():
    watch = Watch(["line"])
    for number in range(5):
        stranger = Process(20, number, 1, 20, "S", "h:slow*")
        assert seen(watch, 4, stranger) == []


def test_watch_counts_restarts_by_role():
    watch = Watch(["line"])
    seen(watch, 2)
    seen(watch, 2, Process(21, 30, 11, 12, "S", "h:slow"), Process(22, 31, 14, 22, "S", "h:quick*"))
    assert watch.restarts == {
        "guard": 0,
        "supervisor": 0,
        "forkserver": 0,
        "agent": 0,
        "node": 1,
        "edge": 1,
        "reducer": 0,
    }
