"""``hayata recover``, ``reconcile``, ``cancel``: what a person decides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import click

from hayata.cli.looking import print_invocations, print_tasks
from hayata.cli.options import Json, json_option, open_client, read_json, socket_option
from hayata.cli.output import print_json, status
from hayata.client.records import Task


@click.command()
@click.argument("agent")
@click.option(
    "--changed",
    type=click.Choice(["continue", "restart", "drop"]),
    help="What to do with those of another version: go on by the new one, start anew, or cancel.",
)
@json_option
@socket_option
@click.pass_context
def recover(
    ctx: click.Context,
    agent: str,
    changed: Literal["continue", "restart", "drop"] | None,
    as_json: bool,
    socket: str | None,
) -> None:
    """Let the resting invocations of AGENT go on; list them."""
    with open_client(ctx, socket) as client:
        touched = [one.record for one in client.recover(agent, changed)]
    print_invocations(touched, as_json)


@click.command()
@click.argument("invocation", metavar="[ID", required=False)
@click.argument("task", metavar="TASK]", required=False)
@click.option("--result", callback=read_json, metavar="JSON", help="It is done: what the node would have returned.")
@click.option("--error", metavar="TEXT", help="It has failed, and why.")
@click.option("--retry", is_flag=True, help="Run it once more.")
@click.option("--by", metavar="NAME", help="Who says so, for the record.  [default: your login]")
@click.option("--agent", metavar="AGENT", help="With --all: tasks of this agent.")
@click.option("--node", metavar="NODE", help="With --all: only those of this node.")
@click.option("--all", "all_tasks", is_flag=True, help="All uncertain tasks of --agent.")
@json_option
@socket_option
@click.pass_context
def reconcile(
    ctx: click.Context,
    invocation: str | None,
    task: str | None,
    result: Json | None,
    error: str | None,
    retry: bool,
    by: str | None,
    agent: str | None,
    node: str | None,
    all_tasks: bool,
    as_json: bool,
    socket: str | None,
) -> None:
    """Settle an uncertain task.

    It is TASK of invocation ID, as `hayata show ID` names it, or, with --agent AGENT --all, each one of
    an agent's. Exactly one of --result, --error and --retry says what became of it.
    """
    verdict = _verdict(result, error, retry)
    if all_tasks:
        if agent is None or invocation is not None:
            raise click.UsageError("--all goes with --agent AGENT and without ID and TASK")
    elif invocation is None or task is None or agent is not None or node is not None:
        raise click.UsageError("name ID and TASK, or give --agent AGENT [--node NODE] --all")
    settled: list[Task]
    with open_client(ctx, socket) as client:
        if agent is not None:
            settled = client.reconcile_all(agent, node, by=by, **verdict)
        else:
            settled = [client.reconcile(invocation or "", task or "", by=by, **verdict)]
    if as_json:
        print_json(settled if all_tasks else settled[0])
    elif settled:
        print_tasks(settled)
    else:
        click.echo("no uncertain tasks", err=True)


def _verdict(result: Json | None, error: str | None, retry: bool) -> dict[str, Any]:
    given: dict[str, Any] = {}
    if result is not None:
        if not isinstance(result.value, Mapping):
            raise click.UsageError("--result is a JSON object: what the node would have returned")
        given["result"] = result.value
    if error is not None:
        given["error"] = error
    if retry:
        given["retry"] = True
    if len(given) != 1:
        raise click.UsageError("give exactly one of --result, --error and --retry")
    return given


@click.command()
@click.argument("invocation", metavar="ID")
@json_option
@socket_option
@click.pass_context
def cancel(ctx: click.Context, invocation: str, as_json: bool, socket: str | None) -> None:
    """Cancel an invocation.

    Waits until its workers are dead, and prints its status.
    """
    with open_client(ctx, socket) as client:
        found = client.invocation(invocation)
        ended = found.cancel()
        record = found.refresh()
    if as_json:
        print_json(record)
    else:
        click.echo(status(ended))
