"""Options and arguments that several commands have."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from hayata.client import Client

F = TypeVar("F", bound=Callable[..., Any])

socket_option = click.option("--socket", metavar="PATH", help="Where the daemon listens.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def open_client(ctx: click.Context, socket: str | None) -> Client:
    """Make the client that the options describe: the command's own, else those before its name."""
    from hayata.client import Client

    return Client(socket if socket is not None else ctx.obj)


class Json:
    """A value that was given, so that ``null`` differs from nothing."""

    def __init__(self, value: Any) -> None:
        self.value = value


def read_json(ctx: click.Context, parameter: click.Parameter, given: str | None) -> Json | None:
    """Callback of a parameter that is JSON on the command line, ``@file``, or ``-`` for stdin."""
    if given is None or ctx.resilient_parsing:
        return None
    source = {"-": "stdin", "@": given[1:]}.get(given if given == "-" else given[:1], "")
    try:
        if given == "-":
            text = sys.stdin.read()
        elif source:
            with open(os.path.expanduser(source), encoding="utf-8") as file:
                text = file.read()
        else:
            text = given
    except (OSError, UnicodeDecodeError) as error:
        raise click.BadParameter(str(error)) from None
    try:
        return Json(json.loads(text))
    except (ValueError, RecursionError) as error:
        what = source or repr(given if len(given) <= 60 else given[:59] + "…")
        raise click.BadParameter(f"{what} is no JSON: {error}") from None
