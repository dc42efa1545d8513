"""The entry point: finding commands, and turning errors into messages and exit codes."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

import click

from hayata.cli.options import socket_option
from hayata.errors import HayataError

_HOMES = {
    "running": "run",
    "looking": "ps show events",
    "deciding": "recover reconcile cancel",
    "daemon": "tree agents stats reload stop",
    "top": "top",
    "storing": "verify backup prune export",
    "doctor": "doctor",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

EXIT_FAILED, EXIT_USAGE, EXIT_RESTS, EXIT_NO_DAEMON, EXIT_REFUSED = 1, 2, 3, 4, 5
EXIT_BUG, EXIT_TIMEOUT, EXIT_INTERRUPTED, EXIT_PIPE = 70, 124, 130, 141

_USAGE_CODES = frozenset({"invalid_options", "unserializable_value"})

_EPILOG = """\b
Exit codes:
  0    done
  1    the invocation failed or was cancelled; the store is not whole; doctor found a failure
  2    wrong usage, or an app that can't be loaded
  3    it rests: a task is uncertain, or recovery is required
  4    no daemon
  5    refused
  124  --timeout has passed (the invocation goes on)
  130  interrupted (the invocation goes on)

\b
Values are printed as JSON. What JSON lacks: times as ISO 8601 text, durations as seconds, bytes as base64,
sets and tuples as lists, Decimal and UUID as text, keys as text, NaN and infinities as text.

\b
Completion, for bash (zsh and fish likewise):
  eval "$(_HAYATA_COMPLETE=bash_source hayata)"
"""


class Commands(click.Group):
    """A group whose commands are imported when they are needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names, in the order of the help."""
        return list(_HOME_OF)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command."""
        home = _HOME_OF.get(cmd_name)
        if home is None:
            return None
        command: click.Command = getattr(importlib.import_module(f"hayata.cli.{home}"), cmd_name)
        return command


def _print_version(ctx: click.Context, parameter: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        from hayata import __version__

        click.echo(f"hayata {__version__}")
        ctx.exit()


@click.group(cls=Commands, epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@socket_option
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the version.",
)
@click.pass_context
def commands(ctx: click.Context, socket: str | None) -> None:
    """Run agents, look at what they do, and decide what they can't.

    The daemon is found by --socket, else $HAYATA_SOCKET, else at $XDG_RUNTIME_DIR/hayata/hayata.sock or
    /tmp/hayata-UID/hayata.sock. A runtime that a program embeds listens in its data directory: hayata.sock.
    """
    if os.environ.get("NO_COLOR"):
        ctx.color = False
    ctx.obj = socket


def exit_code(error: HayataError) -> int:
    """What the process exits with for an error."""
    from hayata import errors

    if isinstance(error, errors.InvocationFailed | errors.InvocationCancelled):
        return EXIT_FAILED
    if isinstance(error, errors.RecoveryNeeded):
        return EXIT_RESTS
    if isinstance(error, errors.DefinitionError) or error.code in _USAGE_CODES:
        return EXIT_USAGE
    return EXIT_NO_DAEMON if error.code == "daemon_unavailable" else EXIT_REFUSED


def complain(code: str, message: str, hint: str = "") -> None:
    """Say on stderr what went wrong."""
    color = False if os.environ.get("NO_COLOR") else None
    click.echo(f"{click.style('error:', fg='red', bold=True)} {code}: {message}", err=True, color=color)
    for line in hint.splitlines():
        click.echo(f"{click.style('hint:', fg='yellow')} {line}", err=True, color=color)


def run_command(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; return the exit code."""
    stdout = sys.stdout
    try:
        code = commands.main(arguments, prog_name="hayata", standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:
        return _reader_gone()
    except SystemExit:
        if sys.stdout is not stdout:  # click met the broken pipe: it wraps the stream, and exits with 1
            return _reader_gone()
        raise
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return EXIT_USAGE
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        path = context.command_path if context else "hayata"
        complain("invalid_options", error.format_message(), f"{path} --help")
        return EXIT_USAGE
    except (click.Abort, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    except HayataError as error:
        complain(error.code, error.message, error.hint)
        return exit_code(error)
    except TimeoutError as error:
        complain("timeout", str(error))
        return EXIT_TIMEOUT
    except Exception:  # noqa: BLE001 - Python would exit with 1, and a bug is no failed invocation
        traceback.print_exc()
        return EXIT_BUG
    return code if isinstance(code, int) else 0


def _reader_gone() -> int:
    """Whoever read us has seen enough. Python would complain once more when it flushes at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return EXIT_PIPE


def main() -> NoReturn:
    """Be the ``hayata`` command."""
    sys.exit(run_command())
