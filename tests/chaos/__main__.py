"""The command line; see the package."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

from tests.chaos.plan import ROLES
from tests.chaos.runtime import APP


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; return the exit code: 0 when nothing was violated, 1 when something was, 130 after Ctrl-C."""
    options = _parse(arguments)
    from tests.chaos.report import report  # after --help
    from tests.chaos.run import Wanted, run

    wanted = Wanted(
        options.minutes * 60, options.seed, options.roles, options.app, options.lanes, keep=options.keep
    )
    if options.plan:
        for fault in wanted.plan:
            print(fault)
        return 0
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGHUP, _end)
    try:
        verdict = run(wanted)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    for line in report(verdict):
        print(line)
    return 1 if verdict.violations else 0


def _end(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _roles(text: str) -> list[str]:
    roles = text.split(",")
    unknown = [role for role in roles if role not in ROLES]
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not among {', '.join(ROLES)}")
    return roles


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos",
        description="Kill, stop and starve processes at random under load, and check what was promised.",
    )
    parser.add_argument("--minutes", type=float, default=1.0, help="how long there are faults")
    parser.add_argument("--seed", type=int, default=1, help="the same seed makes the same plan")
    parser.add_argument("--roles", type=_roles, default=list(ROLES), metavar="ROLE,…", help=", ".join(ROLES))
    parser.add_argument("--app", default=APP, help="another app; less is known of it, and less is checked")
    parser.add_argument("--lanes", type=int, default=12, help="invocations at once, of each of the two clients")
    parser.add_argument("--plan", action="store_true", help="print the plan, and do nothing")
    parser.add_argument("--keep", action="store_true", help="keep the directory with ledgers, log and store")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
