"""The supervisor's side of `hayata_supervisor.maintenance`: starts it, hears it, ends it with the runtime.

The child is started with exec from the loop's thread, which is the main one: it dies with that. Its death is
what the pidfd says; then its pipe is read to the end, and what it said counts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence

from hayata import maintenance
from hayata.errors import error_for
from hayata.maintenance import Collector, Said
from hayata_supervisor.process.pidfd import open_child, reap, send_signal, wait_dead
from hayata_supervisor.process.reactor import Reactor
from hayata_supervisor.process.spawn import spawn_module

MOST = 4
_READ_BYTES = 64 * 1024
_DYING_S = 5.0


class MaintenanceRuns:
    """See the module. All methods belong to the loop's thread.

    Args:
        reactor: The loop.
        data_dir: Whose store is maintained; it is open in this process.
        environ: The children's environment.
        born: Hears the pid of a child, before anything else can come by: it must be let live.
        buried: Hears that it was reaped.
    """

    def __init__(
        self,
        reactor: Reactor,
        data_dir: str,
        environ: Mapping[str, str],
        *,
        born: Callable[[int], None] = lambda pid: None,
        buried: Callable[[int], None] = lambda pid: None,
    ) -> None:
        self._reactor = reactor
        self._data_dir = data_dir
        self._environ = environ
        self._born = born
        self._buried = buried
        self._runs: set[_Run] = set()

    def start(self, command: str, arguments: Sequence[str], done: Callable[[Said], None]) -> None:
        """Start one; ``done`` is called once, later, with its answer, or not at all after `close`.

        Raises:
            HayataError: ``overloaded``, ``unsupported_platform``.
            OSError: The system refused.
        """
        if sys.platform != "linux":
            raise error_for(
                "unsupported_platform",
                "a store that is in use can be maintained on Linux alone",
                hint=f"end the runtime, then hayata {command} --data-dir {self._data_dir}",
            )
        if len(self._runs) >= MOST:
            raise error_for("overloaded", f"{MOST} of these are under way", hint="try again when one has ended")
        self._runs.add(_Run(self, command, arguments, done))

    def close(self) -> None:
        """Kill and reap what is left."""
        for run in list(self._runs):
            run.kill()

    def spawn(self, command: str, arguments: Sequence[str], stdout: int) -> tuple[int, int]:
        """Start the process, and say that it was born; return its pid and a pidfd."""
        line = [command, "--parent", str(os.getpid()), "--shared", "--data-dir", self._data_dir, *arguments]
        pid = spawn_module(maintenance.PROGRAM, line, pass_fds=(), environ=self._environ, move_fds={1: stdout})
        pidfd = open_child(pid)
        self._born(pid)
        return pid, pidfd

    def ended(self, run: _Run) -> None:
        """A run's process was reaped."""
        self._buried(run.pid)
        self._runs.discard(run)

    @property
    def reactor(self) -> Reactor:
        """The loop."""
        return self._reactor


class _Run:
    """One child."""

    def __init__(
        self, owner: MaintenanceRuns, command: str, arguments: Sequence[str], done: Callable[[Said], None]
    ) -> None:
        self._owner = owner
        self._verifies = command == "verify"
        self._done = done
        self._collector = Collector()
        self._pipe, theirs = os.pipe()
        try:
            self.pid, self._pidfd = owner.spawn(command, arguments, theirs)
        except BaseException:
            os.close(self._pipe)
            raise
        finally:
            os.close(theirs)
        os.set_blocking(self._pipe, False)
        owner.reactor.watch_read(self._pipe, self._read)
        owner.reactor.watch_read(self._pidfd, self._died)

    def _read(self) -> None:
        """Take what it has said; at the end of the pipe look no more, and wait for the pidfd."""
        while True:
            try:
                data = os.read(self._pipe, _READ_BYTES)
            except BlockingIOError:
                return
            if not data:
                self._owner.reactor.unwatch_read(self._pipe)
                return
            self._collector.feed(data)

    def _died(self) -> None:
        ending = reap(self._pidfd)
        if ending is None:
            return
        self._read()
        self._close()
        self._done(self._collector.ended(str(ending), verifies=self._verifies))

    def kill(self) -> None:
        """End it; nobody hears of it."""
        send_signal(self._pidfd)
        wait_dead([self._pidfd], _DYING_S)
        reap(self._pidfd)
        self._close()

    def _close(self) -> None:
        for fd in (self._pipe, self._pidfd):
            self._owner.reactor.unwatch_read(fd)
            os.close(fd)
        self._owner.ended(self)
