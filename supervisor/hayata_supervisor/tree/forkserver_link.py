"""The supervisor's link to a forkserver: one app, imported once, and the forks that are asked of it.

The forkserver is never given up: without it no worker of its app can be replaced, and a developer who mends
an import error wants to see it come back. Workers it has forked are not its children and don't notice its
death.
"""

from __future__ import annotations

import signal
import socket
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import msgspec

from hayata.messages import (
    PROTOCOL_VERSION,
    AgentManifest,
    ErrorInfo,
    Fork,
    Forked,
    ForkFailed,
    FromForkserver,
    Manifest,
    Pong,
    ProcessInfo,
    WorkerFailed,
    WorkerReady,
    decoder,
    encode,
)
from hayata_supervisor import failpoints
from hayata_supervisor.process import clock
from hayata_supervisor.process.patience import LATE_S, PatientTimer
from hayata_supervisor.process.reactor import Callback, Timer
from hayata_supervisor.process.spawn import spawn_module
from hayata_supervisor.tree.incarnation import Incarnation
from hayata_supervisor.tree.port import failure
from hayata_supervisor.tree.restarter import Restarter
from hayata_supervisor.tree.worker_link import Ground, Status, WorkerLink

OPEN_FORKS = 8
"""Most forks asked for and not answered: each has four descriptors in flight, which the kernel counts."""

FORK_TIMEOUT_S = 10.0
"""A forkserver that takes longer hangs; and no orphan can be told from a worker before it has answered."""

MOST_KILLED_IMPORTS = 3
"""An import that somebody kills, or that the system has no process for, says nothing about the app: it is tried
again, until that has happened so often."""

MOST_FAILED_IMPORTS = 10
"""In a row. An app that can't be imported so often is tried again after a rest only."""

_RETRY_S = 0.005
_DECODER = decoder(FromForkserver)


class App(msgspec.Struct, frozen=True):
    """What a forkserver imports.

    Attributes:
        index: The supervisor's number for it.
        reference: ``module:attr`` or ``path.py:attr``; ``<value>`` for agents that came by value.
        launch_fd: The launch in which the forkserver finds it.
        launch_index: Where in that launch; -1 for the agents by value.
        pass_fds: What else it must inherit.
        keep: Try again when the very first import fails.
    """

    index: int
    reference: str
    launch_fd: int
    launch_index: int
    pass_fds: tuple[int, ...]
    keep: bool


class _Open(NamedTuple):
    """A fork that was asked for and is not answered."""

    link: WorkerLink
    worker: Incarnation
    asked_at: float

    @property
    def settled(self) -> bool:
        """The worker has spoken before its forkserver did; it may even be dead and replaced by now."""
        return self.worker.pid is not None


class Apps(Protocol):
    """Who hears what a forkserver found."""

    def loaded(self, link: ForkserverLink, manifests: list[AgentManifest], changed: bool) -> ErrorInfo | None:
        """The app is imported; ``changed``: not for the first time, and it is not what it was. An error refuses it,
        as if the import had failed.
        """

    def failed(self, link: ForkserverLink, error: ErrorInfo) -> None:
        """The app can't be imported, and its forkserver is gone."""


class ForkserverLink:
    """See the module. Implements `worker_link.Forks`.

    Attributes:
        apps: Who hears of it.
        generation: Of the code that it has imported.
        stopped_agents: Ids of agents that the app defines and that nobody wants any more.
    """

    def __init__(self, ground: Ground, app: App, apps: Apps, generation: int) -> None:
        self.app = app
        self.apps = apps
        self.generation = generation
        self.status: Status = "starting"
        self.last_exit = ""
        self.stopped_agents: set[str] = set()
        self._ground = ground
        self._reactor = ground.reactor
        self._incarnation: Incarnation | None = None
        self._restarter = Restarter(ground.reactor, ground.launch.node_retry_s, ground.jitter, self.start)
        self._error: ErrorInfo | None = None
        self._imported: Manifest | None = None
        self._killed_imports = 0
        self._failed_imports = 0
        self._start_timer: PatientTimer | None = None
        self._applicants: deque[WorkerLink] = deque()
        self._open: dict[int, _Open] = {}
        self._requests = 0
        self._fork_timer: Timer | None = None
        self._stopped: list[Callback] = []

    # Start

    def start(self) -> None:
        """Start a forkserver, which imports the app."""
        if self.status in ("stopping", "stopped"):
            return
        self.status = "starting"
        self._error = None
        try:
            self._incarnation = self._spawn()
        except OSError as error:
            self._killed_imports += 1
            refused = failure("agent_start_failed", f"no forkserver can be started: {error}")
            self._ended(None if self._killed_imports < MOST_KILLED_IMPORTS else refused)
            return
        limit_s = self._ground.launch.start_timeout_s
        self._start_timer = PatientTimer(self._reactor, limit_s, self._start_timed_out)

    def _spawn(self) -> Incarnation:
        incarnation = Incarnation(self._ground, self, {"app": self.app.reference}, _DECODER)
        ends = incarnation.child_ends
        stream, fds = ends.stream.fileno(), ends.fds.fileno()
        arguments = ["--stream-fd", stream, "--fds-fd", fds, "--launch-fd", self.app.launch_fd]
        arguments += ["--app-index", self.app.launch_index, "--incarnation", incarnation.id]
        try:
            pid = spawn_module(
                "hayata_supervisor.forkserver",
                [str(argument) for argument in arguments],
                pass_fds=(stream, fds, self.app.launch_fd, *self.app.pass_fds),
                environ=self._ground.environ,
                move_fds={1: ends.stdout, 2: ends.stderr},
            )
        except OSError:
            incarnation.close()
            raise
        incarnation.close_child_ends()
        try:
            incarnation.adopt(pid)
        except OSError:
            incarnation.close()
            self._ground.graveyard.sweep(lambda: None)
            raise
        return incarnation

    def _start_timed_out(self) -> None:
        limit_s = self._ground.launch.start_timeout_s
        self._error = failure(
            "agent_start_failed",
            f"the import of {self.app.reference} took longer than {limit_s:g} s",
            hint="raise start_timeout_s, or move slow work from the module into a lifespan",
            timeout_s=limit_s,
        )
        if self._incarnation is not None:
            self._incarnation.kill()

    # Life

    def received(self, message: Any) -> None:
        """Take what the forkserver says."""
        match message:
            case WorkerReady():
                if message.role != "forkserver" or message.protocol != PROTOCOL_VERSION:
                    self._refuse("a start that does not fit")
            case WorkerFailed():
                self._error = message.error
            case Manifest():
                self._loaded(message)
            case Forked():
                self._answered(message.request, lambda link: link.forked(message.pid))
            case ForkFailed():
                self._answered(message.request, lambda link: link.fork_failed(message.error))
            case Pong():
                if self._incarnation is not None:
                    self._incarnation.pulse.answered()

    def _loaded(self, imported: Manifest) -> None:
        if self.status != "starting":
            return
        if self._start_timer is not None:
            self._start_timer.cancel()
        self._error = self.apps.loaded(self, imported.agents, self._imported not in (None, imported))
        if self._error is not None:
            assert self._incarnation is not None
            self._incarnation.kill()
        elif self.status == "starting":  # the listener may have stopped us meanwhile
            self._imported = imported
            self._killed_imports = self._failed_imports = 0
            self._restarter.healed()
            self.status = "serving"
            assert self._incarnation is not None
            self._incarnation.expect_answers()
            self.pump()

    def broken(self, reason: str) -> None:
        """Note that the forkserver does not speak our protocol."""
        self._error = failure("protocol_error", f"the forkserver of {self.app.reference} sent {reason}")
        self._ground.log.error("protocol error", app=self.app.reference, reason=reason)

    def _refuse(self, reason: str) -> None:
        if self._incarnation is not None:
            self._incarnation.refuse(reason)

    # Forks

    def apply(self, link: WorkerLink) -> None:
        """Fork a worker for ``link``, in turn."""
        self._applicants.append(link)
        self.pump()

    def withdraw(self, link: WorkerLink) -> bool:
        """Take an application back; False when it has been sent already."""
        try:
            self._applicants.remove(link)
        except ValueError:
            return False
        return True

    def pump(self) -> None:
        """Ask for as many forks as may be open."""
        while (
            self.status == "serving"
            and self._applicants
            and len(self._open) < OPEN_FORKS
            and self._ground.graveyard.may_fork
        ):
            link = self._applicants.popleft()
            try:
                asked = self._ask(link)
            except OSError as error:
                link.fork_failed(failure("node_unavailable", f"the system refused a worker: {error}"))
                continue
            if not asked:
                self._applicants.appendleft(link)
                self._reactor.call_later(_RETRY_S, self.pump)
                return

    def _ask(self, link: WorkerLink) -> bool:
        """Send one request; False when the forkserver can't take it now, or is gone."""
        assert self._incarnation is not None
        worker = link.open_incarnation()
        request = Fork(self._requests + 1, link.agent, link.node, worker.id)
        failpoints.hit("supervisor.before_send_fork", self._incarnation.fds)
        try:
            socket.send_fds(self._incarnation.fds, [encode(request)], worker.child_ends.numbers)
        except (BlockingIOError, BrokenPipeError, ConnectionResetError):
            link.discard_incarnation()
            return False
        failpoints.hit("supervisor.after_send_fork", self._incarnation.fds)
        worker.close_child_ends()
        self._requests = request.request
        self._open[request.request] = _Open(link, worker, clock.monotonic())
        self._ground.graveyard.fork_asked(worker.id)
        if self._fork_timer is None:
            self._fork_timer = self._reactor.call_later(FORK_TIMEOUT_S, self._look_at_forks)
        return True

    def _answered(self, request: int, settle: Callable[[WorkerLink], None]) -> None:
        opened = self._open.pop(request, None)
        if opened is None:
            self._refuse("an answer to a fork that nobody asked for")
            return
        if not opened.settled:
            settle(opened.link)
            self._ground.graveyard.fork_settled(opened.worker.id)
        self.pump()

    def _look_at_forks(self) -> None:
        self._fork_timer = None
        if not self._open or self._incarnation is None:
            return
        due, now = min(opened.asked_at for opened in self._open.values()) + FORK_TIMEOUT_S, clock.monotonic()
        if now - due > LATE_S:  # we were not there to hear it
            due = now + FORK_TIMEOUT_S
        if now < due:
            self._fork_timer = self._reactor.call_at(due, self._look_at_forks)
            return
        self._error = failure("agent_start_failed", f"the forkserver of {self.app.reference} hangs")
        self._incarnation.lose_patience("stopped" if self._incarnation.stopped else "hung")

    # Death

    def died(self) -> None:
        """The forkserver is dead. What it had answered counts; what it had not is asked again of the next
        one.
        """
        if self._start_timer is not None:
            self._start_timer.cancel()
        assert self._incarnation is not None
        failpoints.hit("supervisor.before_bury_forkserver")
        self._incarnation.stream.drain()
        loaded = self.status == "serving"
        if self.status != "stopping":
            self.status = "restarting"
        lost, self._open = self._open, {}
        for opened in lost.values():
            if not opened.settled:
                opened.link.fork_lost()
                self._ground.graveyard.fork_settled(opened.worker.id)
        self._ground.graveyard.sweep(lambda: self._buried(loaded))

    def _buried(self, loaded: bool) -> None:
        incarnation, self._incarnation = self._incarnation, None
        assert incarnation is not None
        incarnation.drain()
        self.last_exit = incarnation.ending
        if self.status == "stopping":
            self._finish_stop()
            return
        self._ground.log.warning("forkserver died", app=self.app.reference, pid=incarnation.pid, exit=self.last_exit)
        error = self._error
        if not loaded and error is None:
            self._killed_imports += 1
            was_killed = incarnation.exit is not None and incarnation.exit.signal == signal.SIGKILL
            if was_killed and self._killed_imports < MOST_KILLED_IMPORTS:
                self._ended(None)
                return
            error = failure(
                "agent_start_failed",
                f"the import of {self.app.reference} ended its process: {self.last_exit}",
                signal=incarnation.exit.signal_name if incarnation.exit else None,
                exit_code=incarnation.exit.code if incarnation.exit else None,
            )
        self._ended(None if loaded else error)

    def _ended(self, error: ErrorInfo | None) -> None:
        """Start again, after a pause unless it is the first time; ``error``: why there was no import."""
        self.status = "restarting"
        self._restarter.count()
        if error is not None:
            self._failed_imports += 1
            if self._imported is None and not self.app.keep:
                self.status = "stopped"
            self.apps.failed(self, error)
        if self.status != "restarting":
            return
        if self._failed_imports <= MOST_FAILED_IMPORTS:
            self._restarter.restart()
        else:
            self.status = "failed"
            rest_s = self._restarter.rest()
            self._ground.log.error("app rests", app=self.app.reference, rest_s=rest_s)

    # Stop

    def stop(self, stopped: Callback) -> None:
        """Kill the forkserver; call ``stopped`` when it is dead and no fork of it is unheard of."""
        self._stopped.append(stopped)
        if self.status != "stopped":
            self.status = "stopping"
        self._restarter.cancel()
        if self._incarnation is None:
            self._reactor.call_soon(self._finish_stop)
        else:
            self._incarnation.kill()

    def _finish_stop(self) -> None:
        self.status = "stopped"
        if self._fork_timer is not None:
            self._fork_timer.cancel()
        stopped, self._stopped = self._stopped, []
        for callback in stopped:
            callback()

    @property
    def restarts(self) -> int:
        """How often it was started again."""
        return self._restarter.restarts

    def info(self) -> ProcessInfo:
        """Describe the forkserver."""
        incarnation = self._incarnation
        return ProcessInfo(
            role="forkserver",
            name=self.app.reference,
            pid=(incarnation.pid or 0) if incarnation else 0,
            status="stopped" if incarnation and incarnation.stopped else self.status,
            incarnation=incarnation.id if incarnation else "",
            started_at=incarnation.started_at if incarnation else None,
            restarts=self._restarter.restarts,
            last_exit=self.last_exit,
            generation=self.generation,
        )
