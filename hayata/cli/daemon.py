"""``hayata tree``, ``agents``, ``stats``, ``stop``: the daemon itself."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator

import click

from hayata.cli.options import json_option, open_client, socket_option
from hayata.cli.output import print_json, print_table, size, status, took
from hayata.client.records import Process
from hayata.client.transport import wait_gone

_INCARNATION = re.compile(r"[0-9a-f]{32}")


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
    pictures = ("├─ ", "│  ", "└─ ", "   ") if "utf" in (sys.stdout.encoding or "").lower() else ("|- ", "|  ") * 2
    rows = [
        [
            branch + _name(process),
            str(process.pid),
            process.status,
            str(process.restarts),
            (process.strategy if process.role == "agent" else process.restart) or "-",
            "-" if process.memory_bytes is None else size(process.memory_bytes),
            "-" if process.cpu_s is None else f"{process.cpu_s:.1f} s",
            "-" if process.started_at is None else took(process.started_at, time.time()),
            process.incarnation[:8] or "-",
            _tasks(process) or "-",
            process.last_exit or "-",
        ]
        for branch, process in _walk(root, "", "", pictures)
    ]
    heads = ["PROCESS", "PID", "STATUS", "RESTARTS", "SUPERVISION", "MEMORY", "CPU", "UP"]
    heads += ["INCARNATION", "TASKS", "LAST EXIT"]
    print_table(heads, rows, empty="")


def _tasks(process: Process) -> str:
    """The oldest, and how many more."""
    oldest = sorted(process.tasks.items(), key=lambda item: -item[1])
    text = "".join(f"{name} ({age_s:.1f} s)" for name, age_s in oldest[:1])
    return text if len(oldest) < 2 else f"{text} and {len(oldest) - 1} more"


def _name(process: Process) -> str:
    """Role and name, an incarnation in it shortened."""
    if process.name in ("", process.role):
        return process.role
    return f"{process.role} {_INCARNATION.sub(lambda found: found[0][:8], process.name)}"


def _walk(process: Process, own: str, below: str, pictures: tuple[str, ...]) -> Iterator[tuple[str, Process]]:
    yield own, process
    middle, line, last, space = pictures
    for index, child in enumerate(process.children):
        is_last = index == len(process.children) - 1
        yield from _walk(child, below + (last if is_last else middle), below + (space if is_last else line), pictures)


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
