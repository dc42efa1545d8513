"""One trial: a daemon with one failpoint armed, clients that do everything, and what was promised."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from hayata.errors import HayataError
from hayata.loading import load_app
from hayata.manifest import agent_manifest
from hayata_supervisor.store.lmdb_store import open_store
from tests.chaos.checks import check
from tests.chaos.ledger import Ledger, read
from tests.chaos.processes import Family
from tests.chaos.story import Story, Told, ask_all, heard_lines, known_ids
from tests.chaos.watch import GONE_S, Watch
from tests.matrix.host import APP, Host
from tests.matrix.scenario import Clients, patiently

_SCENARIO_S = 60.0
_SETTLE_S = 30.0
_END_S = 3.0
_LOOK_S = 0.2
_KEEP_S = 0.02
_MOST_DEATHS = 20
_BEGUN = 14
"""Bodies; by then those that take their time are in their midst."""


class Trial(NamedTuple):
    """What is tried.

    Attributes:
        armed: Failpoints, each ``NAME=ACTION@N`` without a marker.
        fresh: Begin with an empty directory, not with what a killed daemon has left.
    """

    armed: tuple[str, ...]
    fresh: bool = False

    def __str__(self) -> str:
        return ";".join(self.armed) + (" (fresh)" if self.fresh else "")


class Outcome(NamedTuple):
    """How it went.

    Attributes:
        struck: Those of the failpoints that did something.
        violations: In words.
        log: End of the daemon's log, where there are violations.
    """

    trial: Trial
    struck: tuple[str, ...]
    violations: list[str]
    seconds: float
    log: str


def run(trial: Trial, template: Path | None, *, keep: bool = False) -> Outcome:
    """Try it. Nothing is left behind, unless ``keep`` says that the directory is."""
    began = time.monotonic()
    host = Host(template=None if trial.fresh else template)
    marks = {each: host.home / f"struck-{number}" for number, each in enumerate(trial.armed)}
    host.armed = ";".join(f"{each}@once:{mark}" for each, mark in marks.items())
    os.environ["CHAOS_HOME"] = str(host.home)  # the app is imported here, too, for its bounds
    violations: list[str] = []
    try:
        violations += asyncio.run(_Run(host, str(trial)).run())
        violations += _end(host)
    except Exception as error:
        violations.append(f"10: {error!r}")
    finally:
        log = host.tail(200) if violations else ""
        struck = tuple(each for each, mark in marks.items() if mark.exists())
        host.close_control()
        host.destroy(keep=keep)
    return Outcome(trial, struck, violations, time.monotonic() - began, log)


def undisturbed(host: Host) -> list[str]:
    """Run the scenario in a daemon whose failpoints hurt nobody."""
    os.environ["CHAOS_HOME"] = str(host.home)
    try:
        return [*asyncio.run(_Run(host, "undisturbed").run()), *_end(host)]
    finally:
        host.close_control()


def make_template() -> Host:
    """Have a daemon killed amid all kinds of work. The caller destroys what is left."""
    host = Host()
    os.environ["CHAOS_HOME"] = str(host.home)
    host.wait_ready()
    asyncio.run(_make_unfinished(host))
    host.kill_guard()
    host.close_control()
    due = time.monotonic() + _END_S
    while host.left() and time.monotonic() < due:
        time.sleep(_LOOK_S)
    return host


async def _make_unfinished(host: Host) -> None:
    ledger = Ledger(host.home / "told-template")
    clients = Clients(host, ledger, "template")
    await clients.unfinished()
    while sum(line["what"] == "start" for line in read(host.home / "ledger")) < _BEGUN:
        await asyncio.sleep(_KEEP_S)
    await clients.close()
    ledger.close()


class _Run:
    def __init__(self, host: Host, seed: str) -> None:
        self._host = host
        self._ledger = Ledger(host.home / "told-matrix")
        self._clients = Clients(host, self._ledger, seed)
        self._bounds = _bounds()
        self._family = Family(host.data_dir)
        self._watch = Watch({agent for agent, _ in self._bounds})
        self._violations: list[str] = []

    async def run(self) -> list[str]:
        host = self._host
        heard = heard_lines(host.home)
        self._clients.knows({line["id"]: line["input"] for line in heard if line["what"] == "asked"})
        keeper = asyncio.create_task(self._keep())
        watcher = asyncio.create_task(self._look())
        try:
            async with asyncio.timeout(_SCENARIO_S):
                await self._clients.everything()
            self._violations += [f"10: {text}" for text in await self._clients.settle(_SETTLE_S)]
            self._violations += [f"9: {text}" for text in await self._left()]
            asked, acknowledged = known_ids(heard_lines(host.home))
            told = await patiently(_tell_all, host.socket, asked | acknowledged)
        finally:
            watcher.cancel()
            keeper.cancel()
            await asyncio.gather(watcher, keeper, return_exceptions=True)
            await self._clients.close()
            self._ledger.close()
        story = Story(read(host.home / "ledger"), heard_lines(host.home), [], told, self._bounds)
        self._violations += [*map(str, check(story)), *_check_substeps(story)]
        self._violations += [f"9: {text}" for text in self._watch.overdue]
        return self._violations

    async def _left(self) -> list[str]:
        """Now that nothing runs: what is in nobody's place a second later."""
        due = time.monotonic() + GONE_S
        while True:
            guard = self._host.guard
            left = [] if guard is None else [*self._family.read(guard.pid).misplaced()]
            if not left or time.monotonic() > due:
                return [f"{process}: {what}" for process, what in left]
            await asyncio.sleep(_KEEP_S)

    async def _keep(self) -> None:
        """Start the daemon whenever there is none."""
        host = self._host
        while host.starts < _MOST_DEATHS:
            if host.guard is None or host.ended():
                if host.guard is not None and not is_expected(host):
                    self._violations.append(f"10: the guard ended with {host.guard.returncode}")
                host.start()
            await asyncio.sleep(_KEEP_S)

    async def _look(self) -> None:
        """See that what is dead is gone."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(_LOOK_S)
            guard = self._host.guard
            if guard is not None:
                now = time.monotonic()
                self._watch.look(self._family.read(guard.pid), now - last, held=False)
                last = now


def _bounds() -> dict[tuple[str, str], int]:
    """(agent, node) → most attempts that its definition allows without a person."""
    manifests = [agent_manifest(agent) for agent in load_app(APP)]
    return {
        (manifest.id, node.name): max(
            1, node.rerun_attempts, node.probe_attempts, node.retry.max_attempts if node.retry else 1
        )
        for manifest in manifests
        for node in manifest.nodes
    }


def _check_substeps(story: Story) -> Iterator[str]:
    """What a sub-step has once given to a body it gives to all later attempts."""
    known: dict[tuple[str, str], str] = {}
    for line in story.bodies:
        if line["what"] == "stepped":
            token = known.setdefault((line["task"], line["key"]), line["token"])
            if token != line["token"]:
                yield f"2: sub-step {line['key']} of {line['execution']} gave {line['token']}, and {token} before"


async def _tell_all(socket: str, ids: set[str]) -> dict[str, Told]:
    try:
        return await ask_all(socket, ids)
    except* HayataError as errors:
        raise errors.exceptions[0] from None


def is_expected(host: Host) -> bool:
    """Whether the guard may have ended as it did."""
    assert host.guard is not None
    failing = [each.partition(".")[0] for each in host.armed.split(";") if "=error" in each or "=raise" in each]
    match host.guard.returncode:
        case 0 | -9:
            return True
        case 1:
            return "guard" in failing  # of an exception of its own
        case 2:
            return "forkserver" in failing  # an app that can't be imported ends the first start
    return False


def _end(host: Host) -> Iterator[str]:
    """Have the daemon end; nothing may be left of it, and the store must be whole."""
    code = host.end()
    if not is_expected(host):
        yield f"9: the daemon ended with {code}"
    due = time.monotonic() + _END_S
    while (left := host.left()) and time.monotonic() < due:
        time.sleep(_KEEP_S)
    yield from (f"9: left behind: {pid} {command}" for pid, command in left.items())
    while True:
        try:
            store = open_store(host.data_dir)
            break
        except HayataError as error:
            if error.code != "data_dir_in_use" or time.monotonic() > due:  # it has let its memory go, not its files
                yield f"11: the store can't be opened: {error}"
                return
        time.sleep(_KEEP_S)
    try:
        acknowledged = known_ids(heard_lines(host.home))[1]
        yield from (f"11: {name} is not in the store" for name in acknowledged if not store.find(name))
        yield from (f"11: {each.header.name} is open in the store" for each in store.load_open())
    finally:
        store.close()
