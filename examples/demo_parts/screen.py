"""The live view: the process tree beside the tasks' timeline."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from hayata import HayataError
from hayata.client import Process

from .job import agent
from .ledger import Body, Ledger, Story
from .stage import Stage

_TREE_WIDTH = 36
_LABEL_WIDTH = 9
_LOOK_AT_TREE_S = 0.15
_FRAMES_PER_S = 8
_LEAST_S_A_COLUMN = 0.1
_RUNNING, _DONE, _CUT, _KILLED = ("▒", "cyan"), ("█", "green"), ("░", "red"), ("✗", "bold red")
_NEXT_DONE = ("█", "dark_green")  # batches alternate, so that neighbours can be told apart


@contextmanager
def live(console: Console, stage: Stage, began: float) -> Iterator[None]:
    """Show the job while the block runs; lines that are printed appear above."""
    watcher = _TreeWatcher(stage)

    def frame() -> RenderableType:
        return _frame(console.width, watcher.root, stage.ledger, began)

    with Live(console=console, get_renderable=frame, refresh_per_second=_FRAMES_PER_S):
        try:
            yield
        finally:
            watcher.stop()


class _TreeWatcher:
    """Asks for the supervision tree again and again, in a thread: it waits while the supervisor is away."""

    def __init__(self, stage: Stage) -> None:
        self.root: Process | None = None
        self._stage = stage
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopping.set()
        self._thread.join(1.0)

    def _watch(self) -> None:
        while not self._stopping.wait(_LOOK_AT_TREE_S):
            try:
                self.root = self._stage.client.tree()
            except HayataError:
                return  # the runtime is closed


def _frame(width: int, root: Process | None, ledger: Ledger, began: float) -> RenderableType:
    story = ledger.story()
    sides = Table.grid(padding=(0, 1))
    sides.add_column(width=_TREE_WIDTH, no_wrap=True, overflow="ellipsis")
    sides.add_column(no_wrap=True, overflow="crop")
    tree: RenderableType = Text("") if root is None else _tree(root, story)
    sides.add_row(tree, _timeline(story, began, max(10, width - _TREE_WIDTH - _LABEL_WIDTH - 3)))
    return sides


# ----------------------------------------------------------------------------------------------------------
# Processes
# ----------------------------------------------------------------------------------------------------------


def _tree(process: Process, story: Story) -> Tree:
    tree = Tree(_label(process, story), guide_style="dim")
    _grow(tree, process, story)
    return tree


def _grow(tree: Tree, process: Process, story: Story) -> None:
    for child in process.children:
        _grow(tree.add(_label(child, story)), child, story)


def _label(process: Process, story: Story) -> Text:
    name = process.name.rpartition("/")[2] if process.role in ("node", "agent") else ""
    label = Text(f"{process.role} {name} ".replace("  ", " "))
    label.append(str(process.pid or ""), style="bold")
    if process.pid and not os.path.exists(f"/proc/{process.pid}"):
        label.stylize("red strike")
    elif process.restarts:
        label.append(f" ↻{process.restarts}", style="yellow")
    body = next((body for body in story.running() if body.pid == process.pid), None)
    if body is not None:
        label.append(" works" if body.batch < 0 else f" batch {body.batch + 1}", style="cyan")
    return label


# ----------------------------------------------------------------------------------------------------------
# Tasks
# ----------------------------------------------------------------------------------------------------------


def _timeline(story: Story, began: float, columns: int) -> Text:
    """A row for each node, over all the time so far, and one for the kills."""
    passed = time.monotonic() - began
    column_s = max(_LEAST_S_A_COLUMN, passed / columns)
    text = Text()
    for node in agent.nodes:
        bodies = [body for body in story.bodies if body.node == node]
        text.append(f"{node:<{_LABEL_WIDTH}}")
        for column in range(columns):
            since = began + column * column_s
            mark, style = _cell(story, bodies, since, since + column_s)
            text.append(mark, style=style)
        text.append("\n")
    text.append(f"{'kill -9':<{_LABEL_WIDTH}}", style="red")
    text.append(_kills(story, began, column_s, columns), style="bold red")
    text.append(f"\n\n{'':<{_LABEL_WIDTH}}{passed:.0f} s; a column is {column_s:.2f} s\n", style="dim")
    for (mark, style), word in ((_RUNNING, "runs"), (_DONE, "done"), (_CUT, "cut off"), (_KILLED, "killed")):
        text.append(mark, style=style)
        text.append(f" {word}  ", style="dim")
    return text


def _cell(story: Story, bodies: list[Body], since: float, until: float) -> tuple[str, str]:
    """Mark and style of a node between two instants: a kill, or else the last body that ran then."""
    last = " ", ""
    for body in bodies:
        cut = story.cut_at(body)
        end = body.end if cut is None else cut
        if body.start >= until or (end is not None and end < since):
            continue
        if cut is not None and cut < until:
            return _KILLED
        if cut is not None:
            last = _CUT
        elif end is None:
            last = _RUNNING if since < time.monotonic() else (" ", "")
        else:
            last = _NEXT_DONE if body.batch % 2 else _DONE
    return last


def _kills(story: Story, began: float, column_s: float, columns: int) -> str:
    marks = [" "] * columns
    for kill in story.kills:
        column = min(columns - 1, int((kill.at - began) / column_s))
        marks[column] = kill.role[0].upper()
    return "".join(marks)
