"""``hayata run``: one invocation, from start to result."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

import click

from hayata.cli.options import Json, open_client, read_json, socket_option
from hayata.cli.output import print_event, print_json
from hayata.cli.root import EXIT_INTERRUPTED
from hayata.client.options import new_id

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hayata.client import Client, Invocation


@click.command()
@click.argument("agent")
@click.argument("input", callback=read_json, required=False, metavar="[JSON]")
@click.option("--stream", is_flag=True, help="Print events as they come, then the result.")
@click.option("--json", "as_json", is_flag=True, help="With --stream: events as JSON lines.")
@click.option("--session", metavar="NAME", help="Session that it belongs to.")
@click.option("--key", metavar="KEY", help="The same key and input give the same invocation.")
@click.option("--id", "invocation_id", metavar="ID", help="Its id; made up without.")
@click.option("--on-busy", type=click.Choice(["reject", "queue"]), default="reject", help="If the session is held.")
@click.option("--timeout", type=click.FloatRange(0), metavar="S", help="Seconds to wait; then it goes on alone.")
@click.option("--app", metavar="APP", help="Run it here, without a daemon: module:attr or path.py[:attr].")
@click.option("--data-dir", metavar="DIR", help="With --app: where the store lives.  [default: .hayata]")
@socket_option
@click.pass_context
def run(
    ctx: click.Context,
    agent: str,
    input: Json | None,
    stream: bool,
    as_json: bool,
    session: str | None,
    key: str | None,
    invocation_id: str | None,
    on_busy: Literal["reject", "queue"],
    timeout: float | None,
    app: str | None,
    data_dir: str | None,
    socket: str | None,
) -> None:
    """Run AGENT and print its result as JSON.

    JSON is its input; @FILE reads it from a file, - from stdin. Ctrl-C stops waiting, not the invocation.
    """
    if app is None and data_dir is not None:
        raise click.UsageError("--data-dir goes with --app")
    if app is not None and socket is not None:
        raise click.UsageError("--app runs without a daemon: no --socket")
    with _opened(ctx, socket, app, data_dir) as client:
        name = new_id() if invocation_id is None else invocation_id
        try:
            invocation = client.run(
                agent,
                None if input is None else input.value,
                stream=stream,
                session=session,
                invocation_id=name,
                key=key,
                on_busy=on_busy,
            )
            name = invocation.id  # the key may name an earlier one
            _wait(invocation, stream, as_json, timeout)
        except KeyboardInterrupt:
            _say_it_goes_on(name, data_dir or ".hayata" if app else None)
            ctx.exit(EXIT_INTERRUPTED)


@contextmanager
def _opened(ctx: click.Context, socket: str | None, app: str | None, data_dir: str | None) -> Iterator[Client]:
    if app is None:
        with open_client(ctx, socket) as client:
            yield client
        return
    from hayata.embedded import start

    with start(app, data_dir=data_dir or ".hayata") as runtime:
        yield runtime


def _wait(invocation: Invocation, stream: bool, as_json: bool, timeout: float | None) -> None:
    if stream:
        for event in invocation.events():
            print_event(event, as_json)
    print_json(invocation.result(timeout), one_line=stream)


def _say_it_goes_on(invocation_id: str, data_dir: str | None) -> None:
    if data_dir is None:
        click.echo(f"\ninterrupted: invocation {invocation_id} goes on (hayata show {invocation_id})", err=True)
    else:
        where = os.path.abspath(data_dir)
        click.echo(f"\ninterrupted: invocation {invocation_id} goes on when {where} is run again", err=True)
