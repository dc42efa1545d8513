"""The store's upkeep while the daemon runs: verify, backup and prune for those who ask, retention by itself.

Verify and backup are children's work (`maintenance_runs`). Pruning is the store's own writer's, job by job
between two commits, so that nothing waits for it longer than for a commit.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hayata import messages as m
from hayata.errors import HayataError, error_for
from hayata.maintenance import Said
from hayata_supervisor.core.facts import TERMINAL
from hayata_supervisor.core.reasons import Refusal
from hayata_supervisor.engine import Engine
from hayata_supervisor.hub import Sink
from hayata_supervisor.maintenance_runs import MaintenanceRuns
from hayata_supervisor.process import clock
from hayata_supervisor.store.retention import Job, Jobs, Pruned, Rule, prune
from hayata_supervisor.tree.port import failure

RETENTION_S = 3600.0
"""How often what is too old is removed."""

_FIRST_RETENTION_S = 1.0
_ONLY_LEFTOVERS = Rule(ended_before=0.0)


class Admin:
    """See the module. All methods belong to the loop's thread.

    Args:
        engine: Whose store it is.
        runs: Does what children do.
        retention_s: How long invocations are kept after their end; None: for ever.
    """

    def __init__(self, engine: Engine, runs: MaintenanceRuns, retention_s: float | None = None) -> None:
        self._engine = engine
        self._runs = runs
        self._retention_s = retention_s
        self._closed = False

    def start(self) -> None:
        """Finish removals that were cut off, and begin to apply the retention."""
        self._engine.reactor.call_later(_FIRST_RETENTION_S, self._retain)

    def close(self) -> None:
        """End what is under way; what it has done stays done."""
        self._closed = True
        self._runs.close()

    def handle(self, request: m.VerifyStore | m.BackupStore | m.PruneStore, sink: Sink) -> None:
        """Grant a request.

        Raises:
            Refusal, HayataError: It can't be granted.
        """
        match request:
            case m.VerifyStore():
                self._run("verify", [], sink)
            case m.BackupStore():
                if not os.path.isabs(request.directory) or "\0" in request.directory:
                    raise Refusal(failure("invalid_options", "the backup's directory needs an absolute path"))
                target = str(Path(request.directory))
                self._run("backup", ["--to", target, "--request-id", request.request_id], sink)
            case m.PruneStore():
                self._prune(request, sink)

    # children

    def _run(self, command: str, arguments: list[str], sink: Sink) -> None:
        def done(said: Said) -> None:
            # Its read transaction is over, and if it was killed, its place among the readers is still taken.
            self._engine.reader.submit(self._engine.store.tidy, lambda _: None, self._engine.read_failed)
            assert not isinstance(said, m.Stored)  # that is not asked of a daemon
            sink.reply(said)

        try:
            self._runs.start(command, arguments, done)
        except OSError as error:
            raise Refusal(failure("overloaded", f"the system refused to start it: {error}")) from None

    # pruning

    def _prune(self, request: m.PruneStore, sink: Sink) -> None:
        unknown = sorted(set(request.statuses) - TERMINAL)
        if unknown or request.keep < 0 or not 0 <= request.older_than_s < float("inf"):
            what = f"status {unknown[0]}" if unknown else "keep or older_than_s"
            hint = f"statuses are {', '.join(sorted(TERMINAL))}; numbers are 0 or more"
            raise Refusal(failure("invalid_options", f"{what} can't be pruned by", hint=hint))
        rule = Rule(clock.wall() - request.older_than_s, frozenset(request.statuses), request.agent, request.keep)

        def failed(error: HayataError) -> None:
            sink.reply(m.Refused(failure(error.code, error.message, hint=error.hint, **error.details)))

        self._drive(prune(self._engine.store, rule), lambda pruned: sink.reply(m.Pruned(*pruned)), failed)

    def _retain(self) -> None:
        """Remove what is too old, and come back in an hour."""
        rule = _ONLY_LEFTOVERS
        if self._retention_s is not None:
            rule = Rule(clock.wall() - self._retention_s)
            self._engine.reactor.call_later(RETENTION_S, self._retain)

        def done(pruned: Pruned) -> None:
            if pruned != Pruned(0, 0):
                self._engine.log.info("pruned", invocations=pruned.invocations, records=pruned.records)

        def failed(error: HayataError) -> None:
            self._engine.log.warning("could not prune", code=error.code, error=error.message)

        self._drive(prune(self._engine.store, rule), done, failed)

    def _drive(self, jobs: Jobs, done: Callable[[Pruned], None], failed: Callable[[HayataError], None]) -> None:
        """Have one job after the other done by the thread it belongs to."""

        def go_on(outcome: Any) -> None:
            if self._closed:
                return
            try:
                job: Job = jobs.send(outcome)
            except StopIteration as stop:
                done(stop.value)
                return
            thread = self._engine.writer if job.writes else self._engine.reader
            thread.submit(job.work, go_on, functools.partial(wrong, writing=job.writes))

        def wrong(error: BaseException, *, writing: bool) -> None:
            if isinstance(error, HayataError):
                failed(error)
            elif writing:  # the outcome of a commit is unknown
                self._engine.broken(error)
            else:
                self._engine.read_failed(error)
                failed(error_for("store_corrupt", f"the store could not be read: {error}"))

        go_on(None)
