"""Printing: values as JSON, tables, times, and what a person wants to see of an event."""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import shutil
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, datetime, timedelta
from datetime import time as time_of_day
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID

import click

from hayata.client.records import Event
from hayata.errors import HayataError

STATUS_COLORS = {
    "completed": "green",
    "serving": "green",
    "running": "cyan",
    "failed": "red",
    "uncertain": "yellow",
    "recovery_required": "yellow",
    "cancelled": "bright_black",
}


def jsonable(value: Any) -> Any:
    """Make JSON's types of a value that was stored, a record or an error, as ``hayata --help`` says."""
    if value is None or isinstance(value, str | bool):
        return value.value if isinstance(value, Enum) else value
    if isinstance(value, int | float):
        return value if math.isfinite(value) else {"nan": "NaN", "inf": "Infinity"}.get(str(value), "-Infinity")
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else str(jsonable(key)): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((jsonable(item) for item in value), key=lambda item: json.dumps(item, sort_keys=True))
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, datetime | date | time_of_day):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Enum):
        return jsonable(value.value)
    if isinstance(value, HayataError):
        return {
            "code": value.code,
            "message": value.message,
            "hint": value.hint,
            "details": jsonable(value.details),
        }
    if dataclasses.is_dataclass(value):
        return {field.name: jsonable(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return str(value) if isinstance(value, Decimal | UUID) else repr(value)


def _utf8() -> bool:
    return (getattr(sys.stdout, "encoding", "") or "").lower().replace("-", "") in ("utf8", "utf8sig")


def compact(value: Any) -> str:
    """One line of JSON."""
    return json.dumps(jsonable(value), ensure_ascii=not _utf8(), separators=(", ", ": "))


def print_json(value: Any, *, one_line: bool = False) -> None:
    """Print JSON: indented on a terminal, one line elsewhere."""
    if one_line or not sys.stdout.isatty():
        click.echo(compact(value))
    else:
        click.echo(json.dumps(jsonable(value), ensure_ascii=not _utf8(), indent=2))


# tables


def print_table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, empty: str) -> None:
    """Print rows under their heads, aligned; ``empty`` instead of no rows.

    Nothing is cut off: ids are there to be copied.
    """
    lines = [list(row) for row in rows]
    if not lines:
        click.echo(empty, err=True)
        return
    widths = [max(len(line[column]) for line in [list(heads), *lines]) for column in range(len(heads))]
    click.echo(click.style(_aligned(heads, widths, []), bold=True))
    for line in lines:
        click.echo(_aligned(line, widths, [STATUS_COLORS.get(cell) for cell in line]))


def _aligned(cells: Sequence[str], widths: Sequence[int], colors: Sequence[str | None]) -> str:
    padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
    padded[-1] = cells[-1]
    for index, color in enumerate(colors):
        if color is not None:
            padded[index] = click.style(padded[index], fg=color)
    return "  ".join(padded).rstrip()


def status(text: str) -> str:
    """A status in its colour."""
    return click.style(text, fg=STATUS_COLORS.get(text))


# times


def ago(instant: float | None) -> str:
    """How long ago, in one unit."""
    if instant is None:
        return "-"
    seconds = max(0.0, time.time() - instant)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds / size:.0f}{unit} ago"
    return f"{seconds:.0f}s ago"


def took(began: float | None, ended: float | None) -> str:
    """A duration: ``12 ms``, ``3.4 s``, ``2 m 5 s``."""
    if began is None or ended is None:
        return "-"
    seconds = max(0.0, ended - began)
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{seconds // 60:.0f} m {seconds % 60:.0f} s"


def clock(instant: float) -> str:
    """Local time of day, with milliseconds."""
    return datetime.fromtimestamp(instant).strftime("%H:%M:%S.%f")[:-3]


# sizes


def size(count: int) -> str:
    """Bytes, in one unit: ``512 B``, ``1.5 MB``."""
    for least, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= least:
            return f"{count / least:.1f} {unit}"
    return f"{count} B"


# events


def print_event(event: Event, as_json: bool) -> None:
    """Print an event: a JSON line, or a line for a person."""
    if as_json:
        click.echo(compact(event))
        return
    data = dict(event.data)
    node = data.pop("node_id", None)
    for name in ("execution_id", "edge_id"):
        data.pop(name, None)
    line = f"{event.sequence:>4}  {clock(event.time)}  {event.type:<21}"
    if node is not None:
        line += f"  {node}"
    rest = _summary(data)
    if rest:
        line += f"  {rest}"
    click.echo(_fitted(line))


def _summary(data: dict[str, Any]) -> str:
    """What is worth a line: the only value, or an error's message with what becomes of it, or all as JSON."""
    attempt = data.pop("attempt", 1)
    if attempt != 1 and not data:
        return f"attempt {attempt}"
    error = data.get("error", data.get("reason"))
    if isinstance(error, dict) and "message" in error:
        retry = "  (will be tried again)" if data.get("will_retry") else ""
        return f"{error.get('code', '')}: {error['message']}{retry}".replace("\n", " ")
    if set(data) == {"result"} or set(data) == {"input"}:
        return compact(next(iter(data.values())))
    return compact(data) if data else ""


def _fitted(line: str) -> str:
    """Cut to the terminal's width; whole where no terminal is."""
    if not sys.stdout.isatty():
        return line
    width = shutil.get_terminal_size().columns
    return line if len(line) <= width else line[: width - 1] + "…"
