"""Start notes: what they prove, and what they must not prove."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hayata_supervisor.process import clock, start_notes
from hayata_supervisor.process.start_notes import FILE, NoteWriter, StartNotes

ID = f"{7:032x}.3.1"
OTHER = f"{8:032x}.0.2"


def restarted(path: Path, cell: int = 5, execution: str = ID) -> bool:
    """Whether the next supervisor takes the execution for one that may have begun."""
    return StartNotes(path).began(cell, execution)


def test_cell_tells_whether_a_marked_body_has_begun(tmp_path: Path):
    notes, edge = StartNotes(tmp_path), NoteWriter(tmp_path)
    notes.clear(5)
    assert not restarted(tmp_path)
    edge.begins(5, ID)
    assert restarted(tmp_path)
    assert restarted(tmp_path), "after any number of restarts"


def test_cell_that_is_used_again_speaks_of_the_later_one(tmp_path: Path):
    notes, edge = StartNotes(tmp_path), NoteWriter(tmp_path)
    notes.clear(5)
    edge.begins(5, ID)
    notes.clear(5)
    assert not restarted(tmp_path, execution=OTHER)
    edge.begins(5, OTHER)
    assert restarted(tmp_path, execution=OTHER)


def test_what_is_noted_in_this_run_counts_too(tmp_path: Path):
    notes, edge = StartNotes(tmp_path), NoteWriter(tmp_path)
    notes.clear(5)
    assert not notes.began(5, ID)
    edge.begins(5, ID)
    assert notes.began(5, ID)


def test_new_page_proves_nothing_however_often_it_is_opened(tmp_path: Path):
    """Found by a trial: a mark that is older than the page was taken for one whose body never began."""
    assert restarted(tmp_path)
    assert restarted(tmp_path)
    NoteWriter(tmp_path).begins(6, OTHER)
    assert restarted(tmp_path)


@pytest.mark.parametrize("what", ["copied", "of another boot", "cut off", "removed"])
def test_page_that_is_not_ours_proves_nothing_however_often_it_is_opened(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    home, there = tmp_path / "a", tmp_path / "b"
    home.mkdir()
    StartNotes(home).clear(5)
    match what:
        case "copied":
            shutil.copytree(home, there)
            home = there
        case "of another boot":
            owner = start_notes._owner
            monkeypatch.setattr(start_notes, "_owner", lambda fd: owner(fd).replace(b"-", b"+"))
        case "cut off":
            (home / FILE).write_bytes((home / FILE).read_bytes()[:-1])
        case _:
            (home / FILE).unlink()
    assert restarted(home)
    assert restarted(home)


def test_no_cell_proves_nothing(tmp_path: Path):
    notes = StartNotes(tmp_path)
    notes.clear(-1)
    NoteWriter(tmp_path).begins(-1, ID)
    assert restarted(tmp_path, -1)


def test_anchor_of_the_clock_is_that_of_the_first_supervisor_of_a_boot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first = StartNotes(tmp_path).anchor
    assert abs(first + clock.since_boot() - clock.wall()) < 5.0
    monkeypatch.setattr(clock, "wall", lambda: 86400.0)  # somebody sets the clock
    assert StartNotes(tmp_path).anchor == first
    page = tmp_path / FILE
    page.write_bytes(page.read_bytes().replace(b"hayata starts", b"another boots"))
    assert abs(StartNotes(tmp_path).anchor + clock.since_boot() - 86400.0) < 5.0
