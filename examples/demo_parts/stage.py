"""What the demo knows while the job runs: the ledger, the job's events, and a way to wait for either."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from hayata import Client, HayataError, Invocation

from .ledger import Ledger

T = TypeVar("T")

DEADLINE_S = 30.0
_LOOK_AGAIN_S = 0.005


class DemoFailed(Exception):
    """Something did not come, or was not as it must be."""


class Stage:
    """The running job.

    Attributes:
        client: Of the runtime.
        invocation: The job.
        ledger: The outside ledger.
        outbox: The file that stands for the outside, to which ``publish`` publishes.
        say: Shows a line of text to the viewer.
        told: Execution ids of the tasks that the client was told have completed.
    """

    def __init__(
        self, client: Client, invocation: Invocation, ledger: Ledger, outbox: str, say: Callable[[str], None]
    ) -> None:
        self.client = client
        self.invocation = invocation
        self.ledger = ledger
        self.outbox = outbox
        self.say = say
        self.told: set[str] = set()
        self._trouble = ""
        self._follower = threading.Thread(target=self._follow, daemon=True)
        self._follower.start()

    def wait(self, look: Callable[[], T | None], what: str, timeout_s: float = DEADLINE_S) -> T:
        """Look until there is an answer, and return it.

        Raises:
            DemoFailed: None has come in time, or the job has failed.
        """
        due = time.monotonic() + timeout_s
        while True:
            found = look()
            if found:
                return found
            if self._trouble:
                raise DemoFailed(f"{self._trouble}, while waiting for {what}")
            if time.monotonic() > due:
                raise DemoFailed(f"{what} did not come in {timeout_s:.0f} s")
            time.sleep(_LOOK_AGAIN_S)

    def wait_read(self) -> None:
        """Wait until all events of the job, which has ended, have been read."""
        self._follower.join(DEADLINE_S)

    def published(self) -> list[str]:
        """What is out."""
        try:
            return Path(self.outbox).read_text().splitlines()
        except FileNotFoundError:
            return []

    def _follow(self) -> None:
        """Read the job's events to their end, also over the supervisor's restart."""
        try:
            for event in self.invocation.events(until="terminal"):
                if event.type == "node_completed":
                    self.told.add(event.data["execution_id"])
                    self._progress(event.data["execution_id"])
                elif event.type in ("invocation_failed", "invocation_cancelled"):
                    self._trouble = f"the job ended with {event.type}: {event.data}"
        except HayataError as error:
            self._trouble = str(error)  # also when the runtime is closed; then nobody waits any more

    def _progress(self, execution: str) -> None:
        body = self.ledger.story().body(execution)
        if body is not None and body.node == "add_up":
            self.say(f"batch {body.batch + 1} counted, {body.words} words by now")


def process_of(pid: int, parent: int) -> int | None:
    """A pidfd, to be closed, of the process with this pid and parent; None if there is none."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        status = ""
    # Looked up after the pidfd was opened: if it is the right one now, it was then.
    if status and int(status.rpartition(")")[2].split()[1]) == parent:
        return pidfd
    os.close(pidfd)
    return None
