"""The outside ledger: an append-only file, synced line by line, in which task bodies and the demo write what
they do.

It knows nothing of Hayata, and Hayata nothing of it. What really happened is read from here, and compared
with what the product says. Instants are `time.monotonic`, which all processes of a Linux machine share.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


def append(path: str, text: str) -> None:
    """Add a line, and return when it is on the disk. One `write` with O_APPEND: lines never mix."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, f"{text}\n".encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def note(path: str, what: str, **fields: Any) -> None:
    """Add a line of the ledger; ``at`` is now unless it is given."""
    append(path, json.dumps({"what": what, "at": time.monotonic(), **fields}))


@dataclass(frozen=True)
class Body:
    """One run of a task's body.

    Attributes:
        execution: Id of the attempt.
        key: The same for all attempts of a task.
        node: Name of the node.
        attempt: Number of the attempt, from 1.
        batch: Number of the batch it was given; -1 for none.
        pid: Of the edge worker it ran in.
        parent: Pid of the node worker.
        start: When it began.
        end: When it was done; None if it never was.
        words: What it had counted by then.
    """

    execution: str
    key: str
    node: str
    attempt: int
    batch: int
    pid: int
    parent: int
    start: float
    end: float | None = None
    words: int | None = None


@dataclass(frozen=True)
class Kill:
    """A ``kill -9`` of the demo's; ``node`` is empty for the supervisor."""

    at: float
    role: str
    pid: int
    node: str

    def cut_off(self, body: Body) -> bool:
        """Whether it ended this body before its time. In this job a node runs one body at a time."""
        hit = self.role == "supervisor" or self.node == body.node
        return hit and body.start < self.at and (body.end is None or body.end > self.at)


@dataclass(frozen=True)
class Story:
    """All that is written in a ledger. Bodies are in the order of their starts; ``settled`` is execution id →
    how.
    """

    bodies: tuple[Body, ...]
    kills: tuple[Kill, ...]
    settled: Mapping[str, str]

    def cut_at(self, body: Body) -> float | None:
        """When it was killed, if it was."""
        return next((kill.at for kill in self.kills if kill.cut_off(body)), None)

    def running(self) -> list[Body]:
        """Bodies that have begun, are not done, and were not killed by us."""
        return [body for body in self.bodies if body.end is None and self.cut_at(body) is None]

    def body(self, execution: str) -> Body | None:
        """The body with this execution id."""
        return next((body for body in self.bodies if body.execution == execution), None)


class Ledger:
    """Reads a ledger while others write it. Safe to use from several threads."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._read = 0
        self._lock = threading.Lock()
        self._bodies: list[Body] = []
        self._kills: list[Kill] = []
        self._settled: dict[str, str] = {}

    def note(self, what: str, **fields: Any) -> None:
        """Write a line."""
        note(self.path, what, **fields)

    def story(self) -> Story:
        """What is written by now."""
        with self._lock:
            for line in self._new_lines():
                self._take(line)
            return Story(tuple(self._bodies), tuple(self._kills), dict(self._settled))

    def _new_lines(self) -> list[dict[str, Any]]:
        try:
            with open(self.path, "rb") as file:
                file.seek(self._read)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]  # the last line may be half written
        self._read += len(whole)
        return [json.loads(line) for line in whole.splitlines()]

    def _take(self, line: dict[str, Any]) -> None:
        what, at = line.pop("what"), line.pop("at")
        if what == "start":
            self._bodies.append(Body(start=at, **line))
        elif what == "end":
            for number, body in enumerate(self._bodies):
                if body.execution == line["execution"] and body.end is None:
                    self._bodies[number] = replace(body, end=at, words=line["words"])
                    break
        elif what == "kill":
            self._kills.append(Kill(at=at, **line))
        elif what == "settled":
            self._settled[line["execution"]] = line["how"]
