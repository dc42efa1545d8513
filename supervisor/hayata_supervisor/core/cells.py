"""Start notes, the pure part: which cell of the shared page a task's worker writes its execution id to.

A running mark is durable before the body begins, so after a crash a marked task may or may not have run. The note
settles many such cases: the supervisor clears a cell before it marks a task, and a worker writes the execution id to
it as its last act before the body, in memory that outlives every process of the machine's current boot. The cell is
still clear: the body never began.

A cell is used again only after all others have been, and never while its execution is out: by then the record of how
its former execution ended is long durable, since records are stored in order.
"""

from __future__ import annotations

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

    def take(self) -> int:
        """A cell for one execution; -1 when all are held: then nothing will be proven."""
        if len(self._held) == self._count:
            return -1
        while self._next in self._held:
            self._next = (self._next + 1) % self._count
        cell = self._next
        self._held.add(cell)
        self._next = (cell + 1) % self._count
        self._clear(cell)
        return cell

    def hold(self, cell: int) -> None:
        """Keep a cell that an earlier incarnation handed out: its note is still to be read."""
        if 0 <= cell < self._count:
            self._held.add(cell)

    def release(self, cell: int) -> None:
        """The execution is over."""
        self._held.discard(cell)
