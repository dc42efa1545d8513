"""The command line; see the package."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any, NoReturn

from hayata.client.options import absolute_reference
from tests.chaos.plan import ROLES
from tests.chaos.report import report
from tests.chaos.run import Run, Verdict, Wanted
from tests.chaos.runtime import APP, Runtime

_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; return the exit code: 0 when nothing was violated, 1 when something was, 130 after Ctrl-C."""
    options = _parse(arguments)
    app = absolute_reference(options.app)
    wanted = Wanted(options.minutes * 60, options.seed, options.roles, app, options.input, options.lanes)
    if options.plan:
        for fault in wanted.plan:
            print(fault)
        return 0
    try:
        verdict = _run(wanted, keep=options.keep)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    for line in report(verdict):
        print(line)
    return 1 if verdict.violations else 0


def _run(wanted: Wanted, *, keep: bool) -> Verdict:
    """Run, and leave nothing behind, also after a signal."""
    for number in _ENDS:
        signal.signal(number, _end)
    runtime = Runtime(wanted.app)
    try:
        return Run(runtime, wanted).run()
    finally:
        for number in _ENDS:
            signal.signal(number, signal.SIG_IGN)
        runtime.destroy(keep=keep)
        if keep:
            print(f"kept: {runtime.home}")


def _end(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _roles(text: str) -> list[str]:
    roles = text.split(",")
    unknown = [role for role in roles if role not in ROLES]
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not among {', '.join(ROLES)}")
    return roles


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON: {error}") from None


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos",
        description="Kill, stop and starve processes at random under load, and check what was promised.",
    )
    add = parser.add_argument
    add("--minutes", type=float, default=1.0, help="how long there are faults")
    add("--seed", type=int, default=1, help="the same seed makes the same plan")
    add("--roles", type=_roles, default=list(ROLES), metavar="ROLE,ROLE", help=", ".join(ROLES))
    add("--app", default=APP, help="another app, of which less is known and less is checked")
    add("--input", type=_json, default={}, metavar="JSON", help="input of that app's invocations")
    add("--lanes", type=int, default=16, help="invocations at once, of each of the two clients")
    add("--plan", action="store_true", help="print the plan, and do nothing")
    add("--keep", action="store_true", help="keep the directory with ledgers, log and store")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
