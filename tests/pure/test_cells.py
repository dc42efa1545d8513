"""Start notes' cells: none is used again before its turn, whoever held it."""

from __future__ import annotations

import pytest

from hayata_supervisor.core.cells import Cells


def test_cell_is_cleared_when_it_is_handed_out():
    cleared: list[int] = []
    cells = Cells(3, cleared.append)
    assert [cells.take() for _ in range(4)] == [0, 1, 2, -1]
    assert cleared == [0, 1, 2]


def test_released_cell_comes_after_all_others_that_are_free():
    cells = Cells(4)
    assert [cells.take(), cells.take()] == [0, 1]
    cells.release(0)
    assert [cells.take(), cells.take(), cells.take(), cells.take()] == [2, 3, 0, -1]


def test_cell_that_was_held_for_long_is_not_used_the_moment_it_is_released():
    """A long task holds it while the others go around: it must not be cleared before its end is stored."""
    cells = Cells(4)
    long = cells.take()
    short = [cells.take() for _ in range(3)]
    for cell in short:
        cells.release(cell)
    cells.release(long)
    assert [cells.take() for _ in range(4)] == [*short, long]


def test_cell_of_an_earlier_incarnation_comes_last_when_it_is_released():
    """After a restart, recovery releases it before what it says of the task is stored."""
    cells = Cells(4)
    cells.hold(1)
    cells.release(1)
    assert [cells.take() for _ in range(4)] == [0, 2, 3, 1]


def test_cell_that_is_held_on_is_not_handed_out():
    cells = Cells(2)
    first = cells.take()
    cells.release(first)
    cells.hold(first)  # its task is probed
    assert [cells.take(), cells.take()] == [1, -1]
    cells.release(first)
    cells.release(first)
    assert [cells.take(), cells.take()] == [0, -1]


@pytest.mark.parametrize("cell", [-1, 2])
def test_no_cell_is_no_cell(cell):
    cells = Cells(2)
    cells.hold(cell)
    cells.release(cell)
    assert [cells.take() for _ in range(3)] == [0, 1, -1]
