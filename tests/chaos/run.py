"""One run from its beginning to its verdict."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from hayata import Client
from hayata.loading import load_app
from hayata.manifest import agent_manifest
from hayata_supervisor.store.lmdb_store import open_store
from tests.chaos.checks import Violation, check
from tests.chaos.descriptors import Descriptors
from tests.chaos.faults import Faults
from tests.chaos.ledger import Ledger, Line, read
from tests.chaos.plan import Fault, make_plan
from tests.chaos.runtime import APP, Runtime
from tests.chaos.settle import settle
from tests.chaos.story import Story, ask_all, heard_lines, known_ids
from tests.chaos.watch import Watch

T = TypeVar("T")

_CLIENTS = ("blocking", "async")
_CLIENT_END_S = 90.0
_GONE_S = 5.0
_LOOK_S = 0.1


class Wanted(NamedTuple):
    """What to do.

    Attributes:
        seconds: How long there are faults.
        seed: Of the plan and of the load.
        roles: Whose processes are hurt.
        app: Reference of the app.
        input: Of its invocations; our own app has inputs of its own.
        lanes: Invocations at once, of each client.
    """

    seconds: float
    seed: int
    roles: Collection[str]
    app: str = APP
    input: Any = None
    lanes: int = 16

    @property
    def plan(self) -> list[Fault]:
        """The faults."""
        return make_plan(self.seed, self.seconds, self.roles)


class Verdict(NamedTuple):
    """How it went.

    Attributes:
        story: All that is known.
        violations: What was not as promised.
        faults: What was done.
        watch: Who was seen.
        seconds: What took how long.
    """

    story: Story
    violations: list[Violation]
    faults: Faults
    watch: Watch
    seconds: dict[str, float]


class Run:
    """See the module. The caller destroys the runtime, however this ends."""

    def __init__(self, runtime: Runtime, wanted: Wanted) -> None:
        self._runtime = runtime
        self._wanted = wanted
        self._ours = wanted.app == APP
        self._found: list[Violation] = []
        self._seconds: dict[str, float] = {}

    def run(self) -> Verdict:
        """Do it."""
        runtime, wanted = self._runtime, self._wanted
        os.environ["CHAOS_HOME"] = str(runtime.home)  # the app is imported here, too, for its bounds
        bounds = bounds_of(wanted.app)
        runtime.start()
        agents = runtime.wait_serving()
        ledger = Ledger(runtime.home / "faults")
        watch = Watch(agents)
        faults = Faults(runtime, wanted.plan, ledger, watch, agents)
        descriptors = Descriptors(faults, agents)
        descriptors.before()
        faults.begin()
        clients = [self._client(kind) for kind in _CLIENTS]
        faults.run(wanted.seconds)
        self._timed("until the clients ended", lambda: self._end_clients(clients, faults))
        runtime.wait_serving()
        asked, acknowledged = known_ids(heard_lines(runtime.home))
        self._timed("until everything had ended", lambda: self._settle(ledger, faults))
        self._note(9, descriptors.after())
        self._note(9, watch.overdue)
        self._note(10, faults.surprises)
        ids = asked | acknowledged
        told = self._timed("to ask for all of it", lambda: asyncio.run(ask_all(runtime.socket, ids)))
        self._timed("to verify and copy the store", self._back_up)
        self._stop(acknowledged)
        ledger.close()
        bodies, heard, done = (
            read(runtime.home / "ledger"),
            heard_lines(runtime.home),
            read(runtime.home / "faults"),
        )
        story = Story(bodies, heard, done, told, bounds, self._ours)
        return Verdict(story, self._found + check(story), faults, watch, self._seconds)

    def _timed(self, what: str, act: Callable[[], T]) -> T:
        began = time.monotonic()
        result = act()
        self._seconds[what] = time.monotonic() - began
        return result

    def _note(self, number: int, found: Iterable[str]) -> None:
        self._found += [Violation(number, text) for text in found]

    # The clients

    def _client(self, kind: str) -> subprocess.Popen[bytes]:
        other = [] if self._ours else [json.dumps(self._wanted.input)]
        arguments = ["-m", "tests.chaos.load", kind, str(self._wanted.seed), str(self._wanted.lanes), *other]
        return self._runtime.spawn(arguments)

    def _end_clients(self, clients: list[subprocess.Popen[bytes]], faults: Faults) -> None:
        for client in clients:
            client.terminate()
        due = time.monotonic() + _CLIENT_END_S
        while any(client.poll() is None for client in clients) and time.monotonic() < due:
            faults.look()
            time.sleep(_LOOK_S)
        for kind, client in zip(_CLIENTS, clients, strict=True):
            if client.poll() is None:
                self._note(10, [f"the {kind} client does not end"])
                client.kill()
                client.wait()
            elif client.returncode != 0:
                self._note(10, [f"the {kind} client ended with {client.returncode}:\n{self._runtime.tail()}"])

    # The end

    def _settle(self, ledger: Ledger, faults: Faults) -> None:
        asked: list[Line] = [line for line in heard_lines(self._runtime.home) if line["what"] == "asked"]
        bases = {line["id"]: line["input"]["base"] for line in asked if self._ours}
        with Client(self._runtime.socket) as client:
            self._note(10, settle(client, ledger, bases, self._wanted.seed))
        faults.look()

    def _back_up(self) -> None:
        with Client(self._runtime.socket) as client:
            reports = client.verify(), client.backup(self._runtime.backup)
        self._note(11, [f"the store is damaged: {report}" for report in reports if report.found])

    def _stop(self, acknowledged: set[str]) -> None:
        """Stop the daemon in good manners; nothing may be left, and store and backup must open."""
        code = self._runtime.stop()
        if code != 0:
            self._note(9, [f"the daemon ended with {code}:\n{self._runtime.tail()}"])
        due = time.monotonic() + _GONE_S
        while (left := self._runtime.left()) and time.monotonic() < due:
            time.sleep(_LOOK_S)
        self._note(9, [f"left behind: {pid} {command}" for pid, command in left.items()])
        for directory in (self._runtime.data_dir, self._runtime.backup):
            self._note(11, _lacking(directory, acknowledged))


def _lacking(data_dir: Path, acknowledged: set[str]) -> Iterator[str]:
    store = open_store(data_dir)
    try:
        for name in acknowledged:
            if store.find(name) is None:
                yield f"invocation {name} is not in {data_dir.name}"
        for each in store.load_open():
            yield f"invocation {each.header.name} is open in {data_dir.name}"
    finally:
        store.close()


def bounds_of(app: str) -> dict[tuple[str, str], int]:
    """(agent, node) → most attempts that its definition allows without a person."""
    manifests = [agent_manifest(agent) for agent in load_app(app)]
    return {
        (manifest.id, node.name): max(1, node.rerun_attempts, node.retry.max_attempts if node.retry else 1)
        for manifest in manifests
        for node in manifest.nodes
    }
