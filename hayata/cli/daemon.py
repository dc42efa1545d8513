"""``hayata tree``, ``agents``, ``stats``, ``reload``, ``stop``: the daemon itself."""

from __future__ import annotations

import time

import click

from hayata.cli import processes
from hayata.cli.options import json_option, open_client, socket_option
from hayata.cli.output import print_json, print_table, size, status, took
from hayata.cli.root import EXIT_REFUSED, complain
from hayata.client.transport import wait_gone
from hayata.errors import DefinitionError


@click.command()
@json_option
@socket_option
@click.pass_context
def tree(ctx: click.Context, as_json: bool, socket: str | None) -> None:
    """Show the processes.

    The supervision tree, with pids, incarnations, restarts, memory, the tasks that each edge runs (those of a node
    wait for an edge), and how the process before ended.
    """
    with open_client(ctx, socket) as client:
        root = client.tree()
    if as_json:
        print_json(root)
        return
    rows = [
        [
            line,
            str(process.pid),
            process.status,
            str(process.restarts),
            (process.strategy if process.role == "agent" else process.restart) or "-",
            str(process.generation or "-"),
            "-" if process.memory_bytes is None else size(process.memory_bytes),
            "-" if process.cpu_s is None else f"{process.cpu_s:.1f} s",
            "-" if process.started_at is None else took(process.started_at, time.time()),
            process.incarnation[:8] or "-",
            processes.tasks(process) or "-",
            process.last_exit or "-",
        ]
        for line, process in processes.lines(root)
    ]
    heads = ["PROCESS", "PID", "STATUS", "RESTARTS", "SUPERVISION", "CODE", "MEMORY", "CPU", "UP"]
    heads += ["INCARNATION", "TASKS", "LAST EXIT"]
    print_table(heads, rows, empty="")


@click.command()
@json_option
@socket_option
@click.pass_context
def agents(ctx: click.Context, as_json: bool, socket: str | None) -> None:
    """List the agents."""
    with open_client(ctx, socket) as client:
        found = client.agents()
    if as_json:
        print_json(found)
        return
    rows = [
        [
            agent.id,
            agent.version,
            agent.status,
            str(agent.running),
            str(agent.queued),
            ", ".join(node.name for node in agent.nodes),
            agent.app,
        ]
        for agent in found
    ]
    print_table(["AGENT", "VERSION", "STATUS", "RUNNING", "QUEUED", "NODES", "APP"], rows, empty="no agents")
    for agent in found:
        if agent.error is not None:
            click.echo(f"{agent.id}: {status('failed')}: {agent.error.code}: {agent.error.message}")


@click.command()
@json_option
@socket_option
@click.pass_context
def stats(ctx: click.Context, as_json: bool, socket: str | None) -> None:
    """Show counters and gauges.

    Counters are since the supervisor's start. docs/operations.md says what each one means.
    """
    with open_client(ctx, socket) as client:
        values = client.stats()
    if as_json:
        print_json(values)
        return
    print_table(["NAME", "VALUE"], [[name, f"{values[name]:,.6g}"] for name in sorted(values)], empty="no stats")


@click.command()
@json_option
@socket_option
@click.pass_context
def reload(ctx: click.Context, as_json: bool, socket: str | None) -> None:
    """Load new code without losing an invocation.

    All apps are loaded anew; if one can't be, nothing changes. What runs ends with the code that it began with; the
    next steps are the new code's. Invocations of another version rest, see hayata recover.
    """
    with open_client(ctx, socket) as client:
        try:
            report = client.reload()
        except DefinitionError as error:  # the daemon's app, not this command, is what is wrong
            complain(error.code, error.message, error.hint)
            trace = error.details.get("traceback")
            click.echo(trace if isinstance(trace, str) else "", err=True, nl=False)
            ctx.exit(EXIT_REFUSED)
    if as_json:
        print_json(report)
        return
    rows = [
        [
            agent.id,
            agent.outcome,
            agent.version if agent.was is None else f"{agent.was} -> {agent.version}",
            "; ".join(agent.changes) or "-",
            agent.app,
        ]
        for agent in report.agents
    ]
    print_table(["AGENT", "OUTCOME", "VERSION", "CHANGES", "APP"], rows, empty="no agents")
    click.echo(f"generation {report.generation} serves", err=True)


@click.command()
@click.option("--drain", type=click.FloatRange(0), metavar="S", help="Seconds for what runs.  [default: its setting]")
@socket_option
@click.pass_context
def stop(ctx: click.Context, drain: float | None, socket: str | None) -> None:
    """Stop the daemon.

    It lets running executions end, then exits. Waits until it is gone.
    """
    with open_client(ctx, socket) as client:
        guard = client.tree().pid
        client.stop(drain)
        click.echo("stopping", err=True)
        wait_gone(client.socket, guard)
