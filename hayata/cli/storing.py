"""``hayata verify``, ``backup``, ``prune``, ``export``: what is stored.

With ``--data-dir`` no daemon is asked: the program that maintains stores is run here, and has the directory
for itself meanwhile.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from hayata import durations
from hayata import messages as m
from hayata.cli.options import json_option, open_client, socket_option
from hayata.cli.output import compact, print_json, print_table, size
from hayata.cli.root import EXIT_FAILED
from hayata.client import records
from hayata.client.options import new_id
from hayata.client.upkeep import export_lines
from hayata.ids import check_name

if TYPE_CHECKING:
    from hayata.client.records import Pruned, StoreReport

_data_dir_option = click.option(
    "--data-dir", metavar="DIR", help="The store of a daemon that does not run.  [default: ask the daemon]"
)


@click.command()
@_data_dir_option
@json_option
@socket_option
@click.pass_context
def verify(ctx: click.Context, data_dir: str | None, as_json: bool, socket: str | None) -> None:
    """Verify the store.

    Its structure, every checksum, and what its records say of each other. Exits with 0 when all of it is
    whole, else with 1.
    """
    if data_dir is None:
        with open_client(ctx, socket) as client:
            report = client.verify()
    else:
        _refuse_socket(socket)
        report = _verified(_offline("verify", data_dir))
    _print_report(report, as_json)
    if report.found:
        ctx.exit(EXIT_FAILED)


@click.command()
@click.argument("directory", metavar="DIR")
@_data_dir_option
@json_option
@socket_option
@click.pass_context
def backup(ctx: click.Context, directory: str, data_dir: str | None, as_json: bool, socket: str | None) -> None:
    """Copy the store to DIR.

    DIR is where nothing is yet, or an empty directory. Nothing is there before the copy is complete and verified; the
    daemon goes on meanwhile. To restore, start a daemon with --data-dir DIR.
    """
    if data_dir is None:
        with open_client(ctx, socket) as client:
            report = client.backup(directory)
    else:
        _refuse_socket(socket)
        target = os.path.abspath(os.path.expanduser(directory))
        report = _verified(_offline("backup", data_dir, "--to", target, "--request-id", new_id()))
    _print_report(report, as_json)


def _print_report(report: StoreReport, as_json: bool) -> None:
    if as_json:
        print_json(report)
        return
    rows = [[name, size(count) if name == "bytes" else f"{count:,}"] for name, count in report.counts.items()]
    print_table(["WHAT", "COUNT"], rows, empty="")
    if report.directory:
        click.echo(f"backup in {report.directory}")
    for problem in report.problems:
        click.echo(f"{click.style('problem:', fg='red', bold=True)} {problem.record}: {problem.problem}")
    if report.found > len(report.problems):
        click.echo(f"and {report.found - len(report.problems):,} more problems")
    click.echo(f"{report.found:,} problems", err=True) if report.found else click.echo("all of it is whole", err=True)


@click.command()
@click.option("--older-than", metavar="AGE", help="Ended at least so long ago: 90s, 12h, 30d.")
@click.option("--keep", type=click.IntRange(0), default=0, metavar="N", help="The newest N of each agent stay.")
@click.option(
    "--status",
    "statuses",
    type=click.Choice(sorted(records.TERMINAL)),
    multiple=True,
    help="Only those that ended so; may be given several times.",
)
@click.option("--agent", metavar="AGENT", help="Only those of this agent.")
@click.option("--compact", "shrink", is_flag=True, help="Shrink the file, too; with --data-dir.")
@_data_dir_option
@json_option
@socket_option
@click.pass_context
def prune(
    ctx: click.Context,
    older_than: str | None,
    keep: int,
    statuses: tuple[str, ...],
    agent: str | None,
    shrink: bool,
    data_dir: str | None,
    as_json: bool,
    socket: str | None,
) -> None:
    """Remove invocations that have ended.

    Their tasks, events and results go with them; their ids and keys can be used again. Open ones, and so uncertain
    ones, stay.
    """
    if older_than is None and not shrink:
        raise click.UsageError("give --older-than AGE, for example 30d")
    if shrink and data_dir is None:
        raise click.UsageError("--compact goes with --data-dir DIR, of a daemon that does not run")
    try:
        age_s = None if older_than is None else durations.seconds(older_than)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--older-than") from None
    if data_dir is None:
        assert age_s is not None
        with open_client(ctx, socket) as client:
            pruned = client.prune(age_s, keep=keep, status=statuses, agent=agent)
    else:
        _refuse_socket(socket)
        pruned = _prune_offline(data_dir, age_s, keep, statuses, agent, shrink)
    if as_json:
        print_json(pruned)
        return
    click.echo(f"{pruned.invocations:,} invocations removed, {pruned.records:,} records")
    if pruned.bytes_before is not None and pruned.bytes_after is not None:
        click.echo(f"file: {size(pruned.bytes_before)} before, {size(pruned.bytes_after)} now")


def _prune_offline(
    data_dir: str, age_s: float | None, keep: int, statuses: tuple[str, ...], agent: str | None, shrink: bool
) -> Pruned:
    options = [] if age_s is None else ["--older-than-s", repr(age_s), "--keep", str(keep)]
    for status in statuses:
        options += ["--status", status]
    options += [] if agent is None else ["--agent", agent]
    options += ["--compact"] if shrink else []
    said = _offline("prune", data_dir, *options)
    assert isinstance(said, m.Pruned)
    return records.pruned(said)


@click.command()
@click.argument("invocation", metavar="ID")
@_data_dir_option
@socket_option
@click.pass_context
def export(ctx: click.Context, invocation: str, data_dir: str | None, socket: str | None) -> None:
    """Print all that is stored of an invocation.

    As JSON lines. The kinds are header, record (a commit with its facts), task and event.
    """
    if data_dir is None:
        with open_client(ctx, socket) as client:
            lines = client.export(invocation)
    else:
        _refuse_socket(socket)
        said = _offline("export", data_dir, "--name", check_name("invocation id", invocation))
        assert isinstance(said, m.Stored)
        lines = export_lines(said.invocation, said.journal.records, map(records.task, said.tasks.tasks))
    for line in lines:
        click.echo(compact(line))


def _offline(command: str, data_dir: str, *arguments: str) -> m.StoreReport | m.Pruned | m.Stored:
    from hayata import maintenance

    where = os.path.abspath(os.path.expanduser(data_dir))
    return maintenance.run(command, ["--data-dir", where, *arguments])


def _verified(said: m.StoreReport | m.Pruned | m.Stored) -> StoreReport:
    assert isinstance(said, m.StoreReport)
    return records.store_report(said)


def _refuse_socket(socket: str | None) -> None:
    if socket is not None:
        raise click.UsageError("--data-dir is of a daemon that does not run: no --socket")
