"""``hayata-supervisor``: check, configure, and become the guard.

It execs, so that the guard has the pid that the service manager started, and none of pydantic's memory.
"""

from __future__ import annotations

import os
import platform
import re
import signal
import sys
from importlib import metadata
from typing import NoReturn

import click

from hayata.errors import HayataError, error_for
from hayata_supervisor.process import activation
from hayata_supervisor.process.spawn import module_command, open_missing_standard_streams

EXIT_USAGE = 2
_LEAST_KERNEL = (5, 4)
_LEAST_PYTHON = (3, 11)


def check_platform(system: str, release: str, python: tuple[int, ...], *, pidfds: bool) -> None:
    """Raise ``unsupported_platform`` unless the runtime can work here.

    Args:
        system: As `sys.platform`.
        release: The kernel's, as ``uname -r``.
        python: As `sys.version_info`.
        pidfds: Whether this Python and this kernel give out pidfds.
    """
    version = tuple(map(int, re.findall(r"\d+", release)[:2]))
    if system != "linux":
        problem = f"it needs Linux, and this is {system}"
        hint = "hayata.start(agent, inline=True) runs anywhere"
    elif python < _LEAST_PYTHON:
        problem = f"it needs Python 3.11 or later, and this is {'.'.join(map(str, python[:3]))}"
        hint = "install it into a newer Python"
    elif version < _LEAST_KERNEL:
        problem, hint = f"it needs Linux 5.4 or later, and this is {release}", "update the kernel"
    elif not pidfds:
        problem = f"it needs pidfds, and this Linux {release} refuses them"
        hint = "allow pidfd_open and pidfd_send_signal in the container's seccomp profile"
    else:
        return
    raise error_for("unsupported_platform", f"hayata-supervisor can't run here: {problem}", hint=hint)


def has_pidfds() -> bool:
    """Whether this Python and this kernel give out pidfds, and take them."""
    try:
        fd = os.pidfd_open(os.getpid())
    except (AttributeError, OSError):
        return False
    try:
        signal.pidfd_send_signal(fd, 0)  # 0: only ask whether it could
    except (AttributeError, OSError):
        return False
    finally:
        os.close(fd)
    return True


def _version() -> str:
    try:
        return metadata.version("hayata")
    except metadata.PackageNotFoundError:  # run from a source tree
        return "(not installed)"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("app", nargs=-1)
@click.option("--data-dir", metavar="DIR", help="Where the store lives.  [default: .hayata]")
@click.option("--socket", metavar="PATH", help="Where clients connect.  [default: see below]")
@click.option("--config", metavar="FILE", help="Settings.  [default: hayata.toml, if there is one]")
@click.option("--log-format", type=click.Choice(["json", "console"]), help="[default: console]")
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), help="[default: info]")
@click.version_option(_version(), prog_name="hayata-supervisor")
def command(app: tuple[str, ...], config: str | None, **options: str | None) -> None:
    r"""Run the agents of each APP, in the foreground, until SIGTERM.

    APP is path.py, path.py:attr or module:attr: an Agent, a list of them, or a function that returns one.

    Settings come from hayata.toml, then from HAYATA_* in the environment (HAYATA_DRAIN_TIMEOUT=60), then from
    here. The socket is $HAYATA_SOCKET, else $XDG_RUNTIME_DIR/hayata/hayata.sock, else
    /tmp/hayata-UID/hayata.sock.

    \b
    Exit codes: 0 stopped, 2 usage or an app that can't be imported, 5 refused (in use, no permission),
    65 the store is corrupt, 70 the supervisor died again and again.
    """
    from hayata_supervisor import config as configuration  # pydantic, 0.4 s that --help need not cost

    flags: dict[str, object] = {name: value for name, value in options.items() if value is not None}
    if app:
        flags["apps"] = list(app)
    loaded = configuration.load(flags, config)
    launch = configuration.launch(loaded, activation.take())
    for name in configuration.unknown_variables(os.environ):
        click.echo(f"hayata-supervisor: {name} in the environment is no setting, ignored", err=True)
    from hayata import messages
    from hayata.memfd import sealed_memfd

    launch_fd = sealed_memfd("hayata-launch", messages.encode(launch))
    os.set_inheritable(launch_fd, True)
    become = module_command("hayata_supervisor.guard", ["--launch-fd", str(launch_fd)])
    os.execv(become[0], become)


def main() -> NoReturn:
    """Entry point of the console script."""
    try:
        check_platform(sys.platform, platform.release(), sys.version_info[:3], pidfds=has_pidfds())
        open_missing_standard_streams()
        # Until the guard's handlers stand: as process 1 a signal without a handler would be lost.
        held = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
        signal.pthread_sigmask(signal.SIG_BLOCK, held)
        sys.exit(command.main(prog_name="hayata-supervisor", standalone_mode=False) or 0)
    except click.ClickException as error:
        hint = "hayata-supervisor --help shows what there is"
        refused = error_for("invalid_options", error.format_message(), hint=hint)
    except HayataError as error:
        refused = error
    click.echo(f"hayata-supervisor: {refused}", err=True)
    sys.exit(EXIT_USAGE)


if __name__ == "__main__":
    main()
