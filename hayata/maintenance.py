"""Having a store maintained by the program that does it, `hayata_supervisor.maintenance`, and hearing it.

For the command line, where no daemon has the store open, and for the supervisor.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from hayata import messages as m
from hayata.error_info import error_from
from hayata.errors import error_for
from hayata.framing import FrameReader, FrameTooLarge

PROGRAM = "hayata_supervisor.maintenance"
PROBLEMS_SHOWN = 1000
CAP_BYTES = 2**31 - 1
_READ_BYTES = 64 * 1024

Said: TypeAlias = m.StoreReport | m.Pruned | m.Stored | m.Refused

_decode = m.decoder(m.FromMaintenance).decode


class Collector:
    """Puts together what the program says on its stdout."""

    def __init__(self) -> None:
        self._reader = FrameReader(CAP_BYTES)
        self._problems: list[m.StoreProblem] = []
        self._found = 0
        self._said: Said | None = None

    def feed(self, data: bytes) -> None:
        """Take some of it. What can't be read is as if it had not been said."""
        try:
            for body in self._reader.feed(data):
                self._hear(_decode(body))
        except (msgspec.DecodeError, FrameTooLarge):
            self._reader = FrameReader(CAP_BYTES)

    def _hear(self, message: m.StoreProblem | Said) -> None:
        if not isinstance(message, m.StoreProblem):
            self._said = message
            return
        self._found += 1
        if len(self._problems) < PROBLEMS_SHOWN:
            self._problems.append(message)

    def ended(self, how: str, *, verifies: bool) -> Said:
        """Its answer, or what its end without one means.

        Args:
            how: How it ended, for a person.
            verifies: It was verifying: then what it has read has ended it.
        """
        said = self._said
        if isinstance(said, m.StoreReport):
            return msgspec.structs.replace(said, problems=self._problems, found=self._found)
        if said is not None:
            return said
        if verifies:
            end = m.StoreProblem("data.mdb", f"whoever reads it comes to an end: {how}")
            return m.StoreReport({}, [*self._problems, end], self._found + 1)
        return m.Refused(m.ErrorInfo("daemon_unavailable", f"the maintenance has ended: {how}", "try again"))


def how_ended(code: int) -> str:
    """A return code of `subprocess` in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def run(command: str, arguments: Sequence[str]) -> m.StoreReport | m.Pruned | m.Stored:
    """Run the program to its end; Ctrl-C ends it too.

    Args:
        command: ``verify``, ``backup``, ``prune`` or ``export``.
        arguments: Its options.

    Raises:
        HayataError: What it refuses, and why.
    """
    line = [sys.executable, "-P", "-m", PROGRAM, command, "--parent", str(os.getpid()), *arguments]
    collector = Collector()
    try:
        process = subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    except OSError as error:
        raise error_for("daemon_unavailable", f"can't start {PROGRAM}: {error}") from None
    with process:
        assert process.stdout is not None
        try:
            while data := os.read(process.stdout.fileno(), _READ_BYTES):
                collector.feed(data)
        except BaseException:
            process.kill()
            raise
        code = process.wait()
    said = collector.ended(how_ended(code), verifies=command == "verify")
    if isinstance(said, m.Refused):
        raise error_from(said.error)
    return said
