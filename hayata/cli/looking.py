"""``hayata ps``, ``show``, ``events``: invocations, one with its tasks, its events."""

from __future__ import annotations

import sys

import click

from hayata.cli.options import json_option, open_client, socket_option
from hayata.cli.output import ago, compact, jsonable, print_event, print_json, print_table, status, took
from hayata.client.options import STATUSES
from hayata.client.records import InvocationRecord, Task

_BAR = 24
_LONGEST_VERDICT = 200


@click.command()
@click.option("--agent", metavar="AGENT", help="Only those of this agent.")
@click.option("--status", "wanted", type=click.Choice(STATUSES), help="Only those with this status.")
@click.option("--session", metavar="NAME", help="Only those of this session.")
@click.option("--limit", type=int, default=100, show_default=True, metavar="N", help="At most so many.")
@json_option
@socket_option
@click.pass_context
def ps(
    ctx: click.Context,
    agent: str | None,
    wanted: str | None,
    session: str | None,
    limit: int,
    as_json: bool,
    socket: str | None,
) -> None:
    """List invocations, newest first."""
    with open_client(ctx, socket) as client:
        found = [one.record for one in client.invocations(agent, wanted, session, limit)]
    print_invocations(found, as_json)


def print_invocations(found: list[InvocationRecord], as_json: bool) -> None:
    """Print a table of invocations."""
    if as_json:
        print_json(found)
        return
    rows = [
        [
            one.id,
            one.agent,
            one.status,
            str(one.step),
            ago(one.created_at),
            _duration(one),
            one.session or "-",
        ]
        for one in found
    ]
    heads = ["INVOCATION", "AGENT", "STATUS", "STEP", "CREATED", "TOOK", "SESSION"]
    print_table(heads, rows, empty="no invocations")


def _duration(one: InvocationRecord) -> str:
    return took(one.started_at, one.ended_at)


@click.command()
@click.argument("invocation", metavar="ID")
@json_option
@socket_option
@click.pass_context
def show(ctx: click.Context, invocation: str, as_json: bool, socket: str | None) -> None:
    """Show one invocation with its tasks, as a timeline."""
    with open_client(ctx, socket) as client:
        found = client.invocation(invocation)
        tasks = found.tasks()
    record = found.record
    if as_json:
        print_json({**jsonable(record), "tasks": tasks})
        return
    _print_record(record)
    if tasks:
        click.echo()
        print_tasks(tasks)
    if record.status == "uncertain":
        unsure = [task.id for task in tasks if task.status == "uncertain"]
        click.echo()
        for task_id in unsure:
            click.echo(f"hayata reconcile {record.id} {task_id} --result JSON | --error TEXT | --retry", err=True)


def _print_record(record: InvocationRecord) -> None:
    click.echo(f"{click.style(record.id, bold=True)}  {record.agent}  {status(record.status)}")
    facts = {
        "version": record.version,
        "session": record.session,
        "key": record.key,
        "step": str(record.step),
        "created": ago(record.created_at),
        "took": None if record.ended_at is None else took(record.started_at, record.ended_at),
        "restarted from": record.restarted_from,
        "result": compact(record.result) if record.status == "completed" else None,
    }
    for name, text in facts.items():
        if text is not None:
            click.echo(f"  {name:<14}  {text}")
    error = record.error
    if error is not None:
        click.echo(f"  {'error':<14}  {click.style(error.code, fg='red')}: {error.message}")
        if error.hint:
            click.echo(f"  {'hint':<14}  {error.hint}")
        trace = error.details.get("traceback")
        if isinstance(trace, str):
            click.echo("".join(f"    {line}\n" for line in trace.splitlines()), nl=False)


def print_tasks(tasks: list[Task]) -> None:
    """Print tasks, each with a bar that says when it ran between the first start and the last end."""
    starts = [task.started_at for task in tasks if task.started_at is not None]
    ends = [task.ended_at for task in tasks if task.ended_at is not None]
    first, last = min(starts, default=0.0), max([*ends, *starts], default=0.0)
    rows = [
        [
            _place(task),
            task.node,
            str(task.attempt),
            task.status,
            "-" if task.started_at is None else f"+{took(first, task.started_at)}",
            took(task.started_at, task.ended_at),
            _bar(task, first, last),
            task.id,
        ]
        for task in tasks
    ]
    print_table(["STEP", "NODE", "TRY", "STATUS", "START", "TOOK", "TIMELINE".ljust(_BAR), "TASK"], rows, empty="")
    for task in tasks:
        notes = []
        if task.error is not None:
            notes.append(f"{task.error.code}: {task.error.message}")
        if task.reconciled is not None:
            notes.append(f"reconciled by {task.reconciled.by} ({_verdict(task)}) {ago(task.reconciled.at)}")
        if task.substeps:
            notes.append(f"stored {', '.join(task.substeps)}")
        for note in notes:
            click.echo(f"  {_place(task)}.{task.attempt} {task.node}: {note}")


def _place(task: Task) -> str:
    """Its step, and its edge if it is one's."""
    return str(task.step) if task.edge is None else f"{task.step}-{task.edge}"


def _verdict(task: Task) -> str:
    """How somebody settled it, with the result that he gave; an error is told anyway."""
    assert task.reconciled is not None
    given = f"{task.reconciled.how} {compact(task.update)}" if task.update is not None else task.reconciled.how
    return given if len(given) <= _LONGEST_VERDICT else f"{given[: _LONGEST_VERDICT - 1]}…"


def _bar(task: Task, first: float, last: float) -> str:
    if task.started_at is None:
        return " " * _BAR
    scale = _BAR / max(last - first, 1e-9)
    begin = min(_BAR - 1, int((task.started_at - first) * scale))
    end = _BAR if task.ended_at is None else max(begin + 1, round((task.ended_at - first) * scale))
    full, open_end = ("█", "░") if "utf" in (sys.stdout.encoding or "").lower() else ("#", "-")
    return (" " * begin + (open_end if task.ended_at is None else full) * (end - begin)).ljust(_BAR)


@click.command()
@click.argument("invocation", metavar="ID")
@click.option("--follow", is_flag=True, help="Wait for those to come, until it has ended.")
@click.option("--after", type=click.IntRange(0), default=0, metavar="N", help="Only those after number N.")
@json_option
@socket_option
@click.pass_context
def events(ctx: click.Context, invocation: str, follow: bool, after: int, as_json: bool, socket: str | None) -> None:
    """Print the events of an invocation, one on each line."""
    with open_client(ctx, socket) as client:
        for event in client.invocation(invocation).events(after, until="terminal" if follow else "now"):
            print_event(event, as_json)
