"""The guard: parent of everything, the pid that the service manager sees, and small enough to be trusted.

It holds the data directory's lock and the listening socket for life, hears the signals, restarts a supervisor
that died or hangs after killing all that it left behind, and knows when to give up. It runs no user code,
opens no store and has one thread. It works as process 1 of a container: its handlers are its first act, and
it reaps whatever is handed to it.

    claim the data directory → end an orphaned supervisor → sweep → listen
      → (start a supervisor → its death → kill all descendants → back off)* → exit

Source: s6-supervise (one small program for one supervised process, exit codes with a meaning, a death tally).
"""

from __future__ import annotations

import math
import os
import signal
import sys
from collections.abc import Sequence
from typing import assert_never

import msgspec

from hayata import messages
from hayata.address import GUARD_NAME
from hayata.errors import HayataError
from hayata.memfd import read_memfd
from hayata.messages import (
    Beat,
    ErrorInfo,
    Fatal,
    Launch,
    Reloaded,
    Reloading,
    ReloadRuntime,
    Serving,
    Stopping,
    StopRuntime,
)
from hayata_supervisor import failpoints
from hayata_supervisor.process import clock, prctl
from hayata_supervisor.process.claim import Claim, claim
from hayata_supervisor.process.embedder import Embedder
from hayata_supervisor.process.notify import ServiceManager
from hayata_supervisor.process.pidfd import Exit, children_of
from hayata_supervisor.process.reactor import Reactor, Timer
from hayata_supervisor.process.signals import SignalInbox
from hayata_supervisor.process.spawn import keep_descriptors_to_ourselves, open_missing_standard_streams
from hayata_supervisor.process.stderr import Stderr
from hayata_supervisor.process.supervised import DeathTally, Limits, Supervised
from hayata_supervisor.process.sweep import kill_children

SUPERVISOR = "hayata_supervisor.supervisor"
EXIT_USAGE, EXIT_REFUSED, EXIT_CORRUPT, EXIT_CRASH_LOOP = 2, 5, 65, 70
_FINAL = frozenset({EXIT_USAGE, EXIT_REFUSED, EXIT_CORRUPT})  # a supervisor that exits so is not restarted
_EXIT_CODES = {
    "invalid_options": EXIT_USAGE,
    "data_dir_in_use": EXIT_REFUSED,
    "socket_in_use": EXIT_REFUSED,
    "permission_denied": EXIT_REFUSED,
}
_EXTENSION_S = 15.0  # how long the service manager waits for our next word while we start or stop
_SIGNALS = ("SIGCHLD", "SIGTERM", "SIGINT", "SIGQUIT", "SIGHUP", "SIGUSR1", "SIGUSR2")


class Guard:
    """See the module.

    Args:
        launch: What to run.
        launch_fd: The memfd it came in; each supervisor gets it anew.
        inbox: This process's signals, taken over as early as possible.
        limits: Patience.
        supervisor_module: What is started as the supervisor.
    """

    def __init__(
        self,
        launch: Launch,
        launch_fd: int,
        inbox: SignalInbox,
        *,
        limits: Limits | None = None,
        supervisor_module: str = SUPERVISOR,
    ) -> None:
        self._launch = launch
        self._launch_fd = launch_fd
        self._inbox = inbox
        self._limits = limits or Limits()
        self._module = supervisor_module
        self._stderr = Stderr(launch.log_format, launch.log_level)
        embedded = launch.control_fd is not None or launch.parent_pid is not None
        self._manager = ServiceManager(mute=embedded)
        self._reactor = Reactor()
        self._tally = DeathTally(self._limits)
        self._foreign: set[int] = set()  # children that we had before we were the guard
        self._claim: Claim | None = None
        self._supervisor: Supervised | None = None
        self._starts = 0
        self._last_exit = ""
        self._served = False
        self._reloads = False
        self._fatal: Fatal | None = None
        self._stop_signals = 0
        self._stop_due_s: float | None = None  # set: we are stopping, and kill what has not ended by then
        self._workers_due_s = 0.0  # or by then, as the supervisor says
        self._hurried = False
        self._kill_timer: Timer | None = None
        self._exit_code = 0
        self._embedder = Embedder(self._reactor, launch, self._stop)

    def run(self) -> int:
        """Run until the runtime has ended; return the exit code."""
        try:
            if self._stop_due_s is None:
                self._manager.status("starting")
                self._manager.extend(self._limits.orphan + 3 * self._limits.kill)
                prctl.become_subreaper()
                self._foreign = set(children_of(os.getpid()))
                failpoints.hit("guard.before_claim")
                self._claim = claim(self._launch, self._limits, self._stderr)
                failpoints.hit("guard.after_claim")
                self._reactor.watch_read(self._inbox.fd, self._signalled)
                self._signalled()
            if self._stop_due_s is None:
                self._start_supervisor()
                self._check_silence(clock.monotonic())
                self._feed_watchdog()
                self._reactor.run()
        except HayataError as error:
            details = msgspec.Raw(msgspec.msgpack.encode(error.details))
            info = ErrorInfo(error.code, error.message, error.hint, details)
            self._give_up(Fatal(info, _EXIT_CODES.get(error.code, EXIT_CRASH_LOOP)))
        finally:
            kill_children(self._foreign, timeout_s=self._limits.kill)
            if self._claim:
                self._claim.release()
        return self._exit_code

    # signals

    def _signalled(self) -> None:
        for number in self._inbox.take():
            name = signal.Signals(number).name
            if number == signal.SIGCHLD:
                self._reap()
            elif number in (signal.SIGTERM, signal.SIGINT):
                self._stop(0.0 if self._stop_signals else self._launch.drain_timeout_s, name)
                self._stop_signals += 1
            elif number == signal.SIGQUIT:
                self._stop(0.0, name)
            elif number == signal.SIGHUP:
                self._reload()
            else:
                self._stderr.log("info", "signal ignored", signal=name)

    def _reap(self) -> None:
        """Reap all that is dead: as subreaper, and more so as process 1, we are handed strangers too."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._foreign.discard(pid)
            if self._supervisor and pid == self._supervisor.pid:
                code = os.waitstatus_to_exitcode(status)
                self._supervisor_died(Exit(code, None) if code >= 0 else Exit(None, -code))

    # the supervisor

    def _start_supervisor(self) -> None:
        assert self._claim
        launch, listen_fd = self._launch, self._claim.listener.sock.fileno()
        arguments = ["--launch-fd", str(self._launch_fd), "--listen-fd", str(listen_fd)]
        if self._starts:
            arguments += ["--restart", str(self._starts), "--last-exit", self._last_exit]
        self._starts += 1
        try:
            self._supervisor = Supervised(
                self._reactor,
                self._module,
                arguments,
                pass_fds=[fd for fd in (self._launch_fd, listen_fd, launch.value_fd) if fd is not None],
                environ=self._claim.environ,
                first_word_s=launch.start_timeout_s,
                silence_s=self._limits.silence,
                received=self._supervisor_said,
            )
        except OSError as error:
            self._restart_later(f"can't be started: {error.strerror}", lived_s=0.0)
        else:
            self._stderr.log("info", "starting supervisor", pid=self._supervisor.pid, start=self._starts)

    def _supervisor_said(self, message: messages.FromSupervisor) -> None:
        match message:
            case Beat():
                self._manager.status(message.status)
            case Serving():
                if not self._served:
                    self._served = True
                    self._manager.tell("READY=1")
                    self._embedder.tell(message)
                self._reloaded()
            case Reloading():
                self._reloading()
            case Reloaded():
                self._reloaded()
            case Stopping(grace_s=grace_s):
                self._wait_for_workers(grace_s)
            case Fatal():
                self._fatal = message
            case StopRuntime(drain_s=drain_s):
                self._stop(drain_s, "asked by client")
            case _:
                assert_never(message)

    def _check_silence(self, due_s: float) -> None:
        check_s = self._limits.check
        if self._supervisor:
            if clock.monotonic() - due_s > 3 * check_s:
                self._supervisor.forgive()  # stopped, frozen or starved: so were we, and it may be well
            elif not self._supervisor.killed and self._supervisor.is_silent():
                self._supervisor.kill("silent")
            elif self._fatal is None and self._stop_due_s is None and self._is_homeless:
                self._fatal = _removed(self._launch.data_dir)
                self._supervisor.kill("data directory removed")
        if self._is_well and (not self._served or self._stop_due_s is not None):
            self._manager.extend(_EXTENSION_S)
        due_s = clock.monotonic() + check_s
        self._reactor.call_at(due_s, lambda: self._check_silence(due_s))

    @property
    def _is_homeless(self) -> bool:
        """Whether the data directory was removed or moved. What is in there now is nobody's, or another daemon's."""
        return self._claim is not None and self._claim.lock.is_lost

    @property
    def _is_well(self) -> bool:
        """Whether nothing is to be done about the supervisor; between two of them, whether we do it."""
        supervisor = self._supervisor
        return supervisor is None or not (supervisor.killed or supervisor.is_silent())

    def _feed_watchdog(self) -> None:
        """A guard that hangs does not come here; a supervisor that can't be killed is left to the manager, too."""
        limit_s = self._manager.watchdog_s
        if limit_s is not None:
            if self._is_well:
                self._manager.tell("WATCHDOG=1")
            self._reactor.call_later(limit_s / 2, self._feed_watchdog)

    def _supervisor_died(self, end: Exit) -> None:
        dead = self._supervisor
        assert dead
        dead.drain()
        dead.close()
        self._supervisor = None
        failpoints.hit("guard.before_bury")
        undying = kill_children(self._foreign, timeout_s=self._limits.kill)
        failpoints.hit("guard.after_bury")
        if self._fatal:
            self._give_up(self._fatal)
        elif undying:
            self._give_up(_lost(f"processes {undying} of a dead supervisor were killed and do not die"))
        elif self._stop_due_s is not None:
            level = "info" if end.code == 0 else "warning"
            killed = {"killed": dead.killed} if dead.killed else {}
            self._stderr.log(level, "stopped", supervisor=str(end), **killed)
            self._reactor.stop()
        elif end.code in _FINAL:
            self._give_up(_lost(f"the supervisor ended with {end}", end.code))
        else:
            self._last_exit = str(end) + (f", killed: {dead.killed}" if dead.killed else "")
            self._restart_later(f"died: {self._last_exit}", lived_s=clock.monotonic() - dead.started_s)

    def _restart_later(self, reason: str, *, lived_s: float) -> None:
        wait_s = self._tally.count(clock.monotonic(), lived_s)
        if wait_s is None:
            times = f"{self._limits.deaths} times in {self._limits.period:g} s"
            self._give_up(_lost(f"the supervisor died {times}; at last it {reason}"))
            return
        self._stderr.log("warning", "supervisor lost", reason=reason, restart_in_s=wait_s)
        self._manager.status(f"restarting the supervisor, which {reason}")
        self._reactor.call_later(wait_s, self._start_again)

    def _start_again(self) -> None:
        if self._stop_due_s is not None:
            return
        if self._is_homeless:  # a new store there would hide that all is lost
            self._give_up(_removed(self._launch.data_dir))
        else:
            self._start_supervisor()

    # reloads

    def _reload(self) -> None:
        """Have the supervisor load the apps anew. One that is not there yet does so when it comes."""
        self._stderr.log("info", "reload asked for", signal="SIGHUP")
        if self._stop_due_s is None:
            self._reloading()
            if self._supervisor:
                self._supervisor.send(ReloadRuntime())

    def _reloading(self) -> None:
        if self._served and self._stop_due_s is None:
            self._reloads = True
            self._manager.tell("RELOADING=1", f"MONOTONIC_USEC={clock.monotonic() * 1e6:.0f}")

    def _reloaded(self) -> None:
        """However it went: what serves, serves. A supervisor that has just been started has the newest code."""
        if self._reloads and self._stop_due_s is None:
            self._reloads = False
            self._manager.tell("READY=1")

    # the end

    def _stop(self, drain_s: float, why: str) -> None:
        """Stop within the drain; one that was asked for before may only become shorter, or lose all patience."""
        due_s = clock.monotonic() + drain_s + self._limits.stop_grace
        if self._hurried or (self._stop_due_s is not None and self._stop_due_s <= due_s and drain_s > 0):
            return  # without a drain it is new even when the drain is over: workers may have more time than that
        first, self._hurried = self._stop_due_s is None, drain_s == 0
        self._stop_due_s = due_s
        self._kill_when_due()
        self._stderr.log("info", "stopping", why=why, drain_s=drain_s)
        if first:
            self._manager.tell("STOPPING=1")
            self._manager.extend(_EXTENSION_S)
        if self._supervisor:
            self._supervisor.send(StopRuntime(drain_s))
        else:
            self._reactor.stop()

    def _wait_for_workers(self, grace_s: float) -> None:
        """The supervisor says how long its workers may take by their own specs. Whoever is in a hurry does not care."""
        if self._stop_due_s is not None and not self._hurried:
            self._workers_due_s = clock.monotonic() + grace_s + self._limits.stop_grace
            self._embedder.tell(Stopping(grace_s))
            self._kill_when_due()

    def _kill_when_due(self) -> None:
        if self._kill_timer:
            self._kill_timer.cancel()
        assert self._stop_due_s is not None
        due_s = self._stop_due_s if self._hurried else max(self._stop_due_s, self._workers_due_s)
        self._kill_timer = None if due_s == math.inf else self._reactor.call_at(due_s, self._stop_by_force)

    def _stop_by_force(self) -> None:
        if self._supervisor:
            self._supervisor.kill("did not stop")

    def _give_up(self, fatal: Fatal) -> None:
        # Whoever waits for the start of an embedded runtime raises it; later there may be nobody who looks.
        if not self._embedder.tell(fatal) or self._served:
            self._stderr.fatal(fatal.error)
        self._exit_code = fatal.exit_code
        self._reactor.stop()


def _removed(data_dir: str) -> Fatal:
    message = f"the data directory {data_dir} was removed, or moved, while it was in use"
    hint = "put it back, or restore a backup, and start again"
    return Fatal(ErrorInfo("store_corrupt", message, hint), EXIT_CORRUPT)


def _lost(message: str, exit_code: int = EXIT_CRASH_LOOP) -> Fatal:
    return Fatal(ErrorInfo("supervisor_lost", message, "the lines above say why"), exit_code)


def guard_main(arguments: Sequence[str], *, limits: Limits | None = None, supervisor_module: str = SUPERVISOR) -> int:
    """Be the guard that ``--launch-fd N`` describes; return the exit code."""
    failpoints.enter("guard")
    open_missing_standard_streams()
    inbox = SignalInbox(getattr(signal, name) for name in _SIGNALS)
    prctl.set_name(GUARD_NAME)
    try:
        option, number = arguments
        if option != "--launch-fd":
            raise ValueError(option)
        launch_fd = int(number)
        launch = messages.decoder(Launch).decode(read_memfd(launch_fd))
    except (ValueError, OSError, msgspec.DecodeError) as error:
        hint = "the guard is started by hayata-supervisor and by hayata.start"
        Stderr("console", "error").fatal(ErrorInfo("invalid_options", f"no launch: {error}", hint))
        return EXIT_USAGE
    keep_descriptors_to_ourselves()
    guard = Guard(launch, launch_fd, inbox, limits=limits, supervisor_module=supervisor_module)
    return guard.run()


if __name__ == "__main__":
    sys.exit(guard_main(sys.argv[1:]))
