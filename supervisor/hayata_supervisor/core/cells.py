"""Start notes, the pure part: which cell of the shared page a task's worker writes its execution id to.

A running mark is durable before the body begins, so after a crash a marked task may or may not have run. The note
settles many such cases: the supervisor clears a cell before it marks a task, and a worker writes the execution id to
it as its last act before the body, in memory that outlives every process of the machine's current boot. The cell is
still clear: the body never began.

A cell is used again only after all others that are free, and never while its execution is out: by then the record of
how its former execution ended is long durable, since records are stored in order. Were it used at once, it would be
clear before that record is stored, and a crash in between would take a body that has run for one that never began.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

CELLS = 65_536
"""Cells of the page; more than marks can be between an execution's end and the commit that tells of it."""


class Cells:
    """Hands cells out, around the page.

    Args:
        count: How many there are.
        clear: Clears a cell; called for each that is handed out, so before the mark can be durable.
    """

    def __init__(self, count: int = CELLS, clear: Callable[[int], None] = lambda cell: None) -> None:
        self._count = count
        self._clear = clear
        self._next = 0
        self._held: set[int] = set()
        self._inherited: set[int] = set()
        self._released: deque[int] = deque()

    def take(self) -> int:
        """A cell for one execution; -1 when all are held: then nothing will be proven."""
        while self._next in self._inherited:
            self._next += 1
        if self._next < self._count:
            cell, self._next = self._next, self._next + 1
        elif self._released:
            cell = self._released.popleft()
        else:
            return -1
        self._held.add(cell)
        self._clear(cell)
        return cell

    def hold(self, cell: int) -> None:
        """Keep a cell whose note is still to be read: one that an earlier incarnation handed out, or one that was
        released a moment ago.
        """
        if not 0 <= cell < self._count or cell in self._held:
            return
        self._held.add(cell)
        if cell in self._released:
            self._released.remove(cell)
        elif cell >= self._next:
            self._inherited.add(cell)

    def release(self, cell: int) -> None:
        """The execution is over."""
        if cell in self._held:
            self._held.discard(cell)
            self._released.append(cell)
