"""``hayata top``: the daemon, live."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from types import TracebackType
from typing import Any, Self

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from hayata.cli import snapshot
from hayata.cli.options import json_option, open_client, socket_option
from hayata.cli.output import STATUS_COLORS, compact, jsonable, print_table
from hayata.cli.snapshot import Rates, Snapshot
from hayata.client import Client
from hayata.errors import HayataError

REFRESH_S = 1.0

_TASKS = 10
"""Oldest tasks on the screen: below them the processes must have room."""


@click.command()
@click.option("--once", is_flag=True, help="Print once.")
@json_option
@socket_option
@click.pass_context
def top(ctx: click.Context, once: bool, as_json: bool, socket: str | None) -> None:
    """Watch the daemon.

    Agents, running tasks with their ages, processes with memory and CPU, rates; anew each second, until q or Ctrl-C.
    Where no terminal is, it prints once. --json prints one document a line, each second, until it is interrupted.
    """
    with open_client(ctx, socket) as client:
        try:
            if as_json:
                _stream(client, once)
            elif once or not sys.stdout.isatty():
                _print(snapshot.take(client))
            else:
                _watch(client, Console(no_color=ctx.color is False or None))
        except KeyboardInterrupt:
            pass  # that is how one leaves it


def _print(now: Snapshot) -> None:
    rates = Rates(None, now)
    click.echo(snapshot.headline(now, rates))
    for heads, rows in (
        (snapshot.AGENT_HEADS, snapshot.agent_rows(now)),
        (snapshot.TASK_HEADS, snapshot.task_rows(now)),
        (snapshot.PROCESS_HEADS, snapshot.process_rows(now, rates)),
    ):
        if rows:
            click.echo()
            print_table(heads, rows, empty="")


def _stream(client: Client, once: bool) -> None:
    before: Snapshot | None = None
    while True:
        try:
            now = snapshot.take(client)
        except HayataError as error:
            if before is None or not _is_away(error):
                raise
            document: dict[str, Any] = {"time": time.time(), "error": jsonable(error)}
        else:
            document, before = snapshot.document(now, Rates(before, now)), now
        click.echo(compact(document))
        sys.stdout.flush()
        if once:
            return
        time.sleep(REFRESH_S)


def _watch(client: Client, console: Console) -> None:
    now = snapshot.take(client)  # without a daemon there is nothing to watch
    picture: RenderableType = _picture(now, Rates(None, now))
    with Keys() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(picture, refresh=True)
            if "q" in keys.pressed(REFRESH_S).lower():
                return
            try:
                before, now = now, snapshot.take(client)
            except HayataError as error:
                if not _is_away(error):
                    raise
                picture = Text(f"{error.message}\n\nWaiting for it; q ends.", style="yellow")
            else:
                picture = _picture(now, Rates(before, now))


def _is_away(error: HayataError) -> bool:
    return error.code == "daemon_unavailable"


def _picture(now: Snapshot, rates: Rates) -> Group:
    tasks = snapshot.task_rows(now)
    parts: list[RenderableType] = [
        Text(snapshot.headline(now, rates), style="bold"),
        _table(snapshot.AGENT_HEADS, snapshot.agent_rows(now)),
        _table(snapshot.TASK_HEADS, tasks[:_TASKS]),
    ]
    if len(tasks) > _TASKS:
        parts.append(Text(f"and {len(tasks) - _TASKS} more"))
    parts.append(_table(snapshot.PROCESS_HEADS, snapshot.process_rows(now, rates)))
    return Group(*parts)


def _table(heads: list[str], rows: list[list[str]]) -> Table:
    """A table in which names give way, in the first and last column, and numbers don't."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for index, head in enumerate(heads):
        widest = max([len(head), *(len(row[index]) for row in rows)])
        gives_way = index in (0, len(heads) - 1)
        table.add_column(head, no_wrap=True, overflow="ellipsis", min_width=len(head) if gives_way else widest)
    for row in rows:
        table.add_row(*(Text(cell, style=STATUS_COLORS.get(cell, "")) for cell in row))
    table.add_row()
    return table


class Keys:
    """Single keys of the terminal that is stdin; without one, only the time passes."""

    def __init__(self) -> None:
        self._fd = sys.stdin.fileno() if sys.stdin.isatty() else -1
        self._before: list[Any] = []

    def __enter__(self) -> Self:
        if self._fd >= 0:
            self._before = termios.tcgetattr(self._fd)
            tty.setcbreak(self._fd)
        return self

    def pressed(self, timeout_s: float) -> str:
        """What is pressed in time; empty when nothing is."""
        watched = [self._fd] if self._fd >= 0 else []
        readable, _, _ = select.select(watched, [], [], timeout_s)
        return os.read(self._fd, 64).decode(errors="replace") if readable else ""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._fd >= 0:
            termios.tcsetattr(self._fd, termios.TCSADRAIN, self._before)
