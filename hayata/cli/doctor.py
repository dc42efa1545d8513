"""``hayata doctor``: is this machine, this installation, this store as a daemon needs them?"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import click
import msgspec

from hayata.cli.options import json_option, socket_option
from hayata.cli.output import print_json
from hayata.cli.root import EXIT_FAILED
from hayata.maintenance import how_ended
from hayata.messages import Finding

_PROGRAM = "hayata_supervisor.doctor"
_COLORS = {"ok": "green", "warn": "yellow", "fail": "red"}


@click.command()
@click.option("--data-dir", metavar="DIR", help="The daemon's data directory.  [default: as the daemon's]")
@click.option("--config", metavar="FILE", help="The daemon's settings.  [default: hayata.toml, if there is one]")
@json_option
@socket_option
@click.pass_context
def doctor(ctx: click.Context, data_dir: str | None, config: str | None, as_json: bool, socket: str | None) -> None:
    """Check the installation.

    The system, its limits, the data directory, the store, and the daemon if one runs. Changes nothing. Exits with 1
    if something fails, with 0 if there are only warnings.
    """
    socket = socket if socket is not None else ctx.obj
    options = {"--data-dir": data_dir, "--config": config, "--socket": socket}
    arguments = [word for name, value in options.items() if value is not None for word in (name, value)]
    found = []
    for finding in _findings(arguments):
        found.append(finding)
        if not as_json:
            _print(finding)
    count = {status: sum(finding.status == status for finding in found) for status in _COLORS}
    worst = "fail" if count["fail"] else "warn" if count["warn"] else "ok"
    if as_json:
        print_json({"status": worst, "checks": [msgspec.to_builtins(finding) for finding in found]})
    else:
        click.echo(f"{count['ok']} ok, {count['warn']} warnings, {count['fail']} failures", err=True)
    if worst == "fail":
        ctx.exit(EXIT_FAILED)


def _findings(arguments: list[str]) -> Iterator[Finding]:
    """What the program says, line by line; if it can't be run to its end, that is the last finding."""
    decode = msgspec.json.Decoder(Finding).decode
    command = [sys.executable, "-P", "-m", _PROGRAM, *arguments]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            for line in process.stdout:
                yield decode(line)
        except BaseException:
            process.kill()
            raise
        said = process.stderr.read().decode(errors="replace").strip().splitlines()
        code = process.wait()
    if code:
        last = said[-1] if said else "it said nothing"
        hint = "the installation is not whole: install hayata again, into one environment"
        yield Finding("installation", "fail", f"the checks came to an end: {how_ended(code)}: {last}", hint)


def _print(finding: Finding) -> None:
    status = click.style(f"{finding.status:<4}", fg=_COLORS[finding.status])
    click.echo(f"{status}  {finding.check:<14}  {finding.message}")
    if finding.hint:
        click.echo(f"{'':22}{click.style('hint:', fg='yellow')} {finding.hint}")
