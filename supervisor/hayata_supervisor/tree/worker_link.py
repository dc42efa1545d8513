"""The supervisor's link to one worker that is forked, A or N: keeps it alive, incarnation after incarnation.

Life of a link (`status`):

    starting ──ready──▶ serving ──death──▶ restarting ──buried, judged──▶ starting, failed or stopped
        └────────death, no fork────────────────▲
    any ──terminate──▶ terminating ──buried, judged──▶ restarting
    any ──stop──▶ stopping ──buried──▶ stopped
    serving ──another generation──▶ draining ──what it held has ended──▶ stopping
                                       └─────death, buried, judged─────▶ stopped

The order after a death is always: reap, bury what it left behind, read its last messages, judge what it held. What
comes next is not for the link to say: it tells the agent's `Superior`, and does what that answers.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import msgspec

from hayata.messages import (
    PROTOCOL_VERSION,
    ErrorInfo,
    Launch,
    ProcessInfo,
    RestartType,
    Strategy,
    WorkerFailed,
    WorkerReady,
)
from hayata_supervisor import failpoints
from hayata_supervisor.core.supervision import ExitClass
from hayata_supervisor.process.patience import PatientTimer
from hayata_supervisor.process.pidfd import Exit
from hayata_supervisor.process.reactor import Callback, Reactor, Timer
from hayata_supervisor.process.vigil import Vigil
from hayata_supervisor.process.watcher import EdgeWatcher
from hayata_supervisor.tree.graveyard import Graveyard
from hayata_supervisor.tree.incarnation import Incarnation
from hayata_supervisor.tree.port import Log, WorkerListener, failure

Status: TypeAlias = Literal[
    "starting", "serving", "draining", "restarting", "terminating", "failed", "stopping", "stopped"
]

CONGESTED_BYTES = 128 * 1024 * 1024
"""Most bytes that wait for one worker; what comes after stays with the supervisor."""

CONGESTION_LOOK_S = 0.02


class Ground(NamedTuple):
    """What all links of one tree stand on."""

    reactor: Reactor
    launch: Launch
    environ: Mapping[str, str]
    listener: WorkerListener
    log: Log
    graveyard: Graveyard
    watcher: EdgeWatcher
    vigil: Vigil
    jitter: Callable[[], float]


class Forks(Protocol):
    """Where a link gets its processes from: the forkserver of its app.

    Attributes:
        generation: Of the code that its forks have.
    """

    generation: int

    def apply(self, link: WorkerLink) -> None:
        """Fork a worker for ``link``, in turn, when there is a forkserver that can."""

    def withdraw(self, link: WorkerLink) -> bool:
        """Take an application back; False when it has been sent already."""


class Superior(Protocol):
    """Who decides what becomes of an agent's workers: `AgentGroup`."""

    @property
    def strategy(self) -> Strategy:
        """With whom a worker is restarted."""

    @property
    def intensity(self) -> int:
        """Most restarts of a period."""

    def ready(self, link: WorkerLink) -> None:
        """The worker is up."""

    def ended(self, link: WorkerLink, exit: ExitClass, *, blameless: bool, hopeless: bool) -> None:
        """The worker is dead, buried and judged, or could not be started."""

    def edge_failed(self, link: WorkerLink) -> bool:
        """An edge could not start; True: nothing comes of its node."""


class WorkerLink:
    """See the module. `AgentLink` and `NodeLink` say what is handed to the worker and how it is judged.

    Attributes:
        agent: Id of the agent.
        node: Name of the node; None for the agent's own worker.
        generation: Of its code.
        retired: Whether another generation has taken its place: it takes nothing, and is not started again.
        restarts: How often it was started again.
        last_exit: How the last incarnation ended, for people.
        last_error: What it, or whoever should have started it, said of that.
    """

    role: Literal["agent", "node"]
    listens: bool
    """Whether it runs no user code, so that it can be asked whether it lives."""

    def __init__(
        self,
        ground: Ground,
        forks: Forks,
        superior: Superior,
        agent: str,
        node: str | None,
        decoder: msgspec.msgpack.Decoder[Any],
    ) -> None:
        self.agent = agent
        self.node = node
        self.forks = forks
        self.generation = forks.generation
        self.retired = False
        self.status: Status = "starting"
        self.restarts = 0
        self.last_exit = ""
        self.incarnation: Incarnation | None = None
        self._superior = superior
        self._ground = ground
        self._reactor = ground.reactor
        self._listener = ground.listener
        self._decoder = decoder
        self.last_error: ErrorInfo | None = None
        self._start_timer: PatientTimer | None = None
        self._look_timer: Timer | None = None
        self._unavailable: ErrorInfo | None = None
        self._was_ready = False
        self._giving_up = False
        self._ending = ""  # why it is being terminated, in a word
        self._stopped: list[Callback] = []

    # What a kind of worker adds

    def _pump(self) -> None:
        """Send what waits, as far as the worker can take it."""
        raise NotImplementedError

    def _message(self, message: Any) -> None:
        """The worker sent something else than its start."""
        raise NotImplementedError

    def _bury(self, buried: Callback) -> None:
        """The process is dead: bury what it leaves behind, then call ``buried``."""
        self._ground.graveyard.sweep(buried)

    def _judge(self, incarnation: Incarnation) -> bool:
        """All that the dead worker said was heard: settle what it held. Say whether its death counts."""
        raise NotImplementedError

    def _tell_unavailable(self, error: ErrorInfo, *, stopped: bool) -> None:
        """Tell the listener that there is no worker for now."""
        raise NotImplementedError

    def _tell_back(self) -> None:
        """Tell the listener that there is one again."""
        raise NotImplementedError

    def _refuse_waiting(self, error: ErrorInfo) -> None:
        """Settle what waits for the worker."""
        raise NotImplementedError

    @property
    def restart_type(self) -> RestartType:
        """As in its spec."""
        raise NotImplementedError

    @property
    def grace_s(self) -> float:
        """Seconds that the worker may take to end; 0: none, it is killed. May be infinite."""
        raise NotImplementedError

    # Start

    def start(self) -> None:
        """Ask for a process."""
        self.status = "starting"
        self.last_error = None
        self._ending = ""
        self._giving_up = self._was_ready = False
        self.forks.apply(self)

    def open_incarnation(self) -> Incarnation:
        """Make the next incarnation, for the forkserver to give it a process.

        Raises:
            OSError: No descriptors are left.
        """
        self.incarnation = Incarnation(self._ground, self, self._names(), self._decoder)
        limit_s = self._ground.launch.start_timeout_s
        self._start_timer = PatientTimer(self._reactor, limit_s, self._start_timed_out)
        return self.incarnation

    def forked(self, pid: int) -> None:
        """The forkserver has forked: this is the process."""
        assert self.incarnation is not None
        try:
            adopted = self.incarnation.adopt(pid)
        except OSError as error:
            self._never_born(failure("node_unavailable", f"the system refused a worker: {error}"))
            self._ground.graveyard.sweep(lambda: None)
            return
        if not adopted:
            self._never_born(failure("protocol_error", f"the forkserver names pid {pid}, which is no child of ours"))

    def fork_failed(self, error: ErrorInfo) -> None:
        """There is no process."""
        self._never_born(error)

    def fork_lost(self) -> None:
        """The forkserver is dead and did not say whether it forked. Ask again, unless the worker speaks.

        A process that is never heard of is an orphan, and is swept.
        """
        assert self.incarnation is not None
        self.incarnation.stream.read_once()
        if self.incarnation.pid is not None:
            return
        self.discard_incarnation()
        if self.status == "stopping":
            self._finish_stop()
        elif self.status == "terminating":
            self._terminated()
        else:
            self.start()

    def _never_born(self, error: ErrorInfo) -> None:
        self.last_error = error
        self.last_exit = error.code
        self._ground.log.warning("worker not started", **self._names(), error=error.message)
        self.discard_incarnation()
        self._tell_ended("never_started")

    def discard_incarnation(self) -> None:
        """Give up an incarnation that has no process of its own."""
        self._forget_start_timer()
        if self.incarnation is not None:
            self.incarnation.close()
            self.incarnation = None

    def _start_timed_out(self) -> None:
        assert self.incarnation is not None
        limit_s = self._ground.launch.start_timeout_s
        self.last_error = failure("agent_start_failed", f"{self} was not ready within {limit_s:g} s")
        self._ground.log.error("worker start timed out", **self._names(), timeout_s=limit_s)
        self.incarnation.kill()

    def _forget_start_timer(self) -> None:
        if self._start_timer is not None:
            self._start_timer.cancel()
            self._start_timer = None

    # Life

    def received(self, message: Any) -> None:
        """Take a message of the living incarnation."""
        if isinstance(message, WorkerReady):
            self._ready(message)
        elif isinstance(message, WorkerFailed):
            self.last_error = message.error
        else:
            self._message(message)

    def _ready(self, message: WorkerReady) -> None:
        incarnation = self.incarnation
        assert incarnation is not None
        if self.status == "restarting":
            return  # it got ready, and died
        expected = (self.role, incarnation.id, PROTOCOL_VERSION)
        if self.status in ("serving", "draining") or (message.role, message.incarnation, message.protocol) != expected:
            incarnation.refuse("a start that does not fit")
            return
        try:
            adopted = incarnation.adopt(message.pid)
        except OSError as error:
            self.last_error = failure("node_unavailable", f"the system refused a worker: {error}")
            incarnation.kill()  # as soon as its forkserver has named it, too, or has died
            return
        if not adopted:
            incarnation.refuse(f"pid {message.pid}, which is no child of ours")
            return
        self._forget_start_timer()
        if self.status in ("stopping", "terminating"):
            return
        self.status = "serving"
        self._was_ready = True
        if self.listens:
            incarnation.expect_answers()
        self._ground.log.info("worker ready", **self._names(), pid=message.pid, incarnation=incarnation.id)
        self._superior.ready(self)
        self._pump()

    def _look_again(self) -> None:
        """Pump again soon: the worker takes what it was sent more slowly than more comes."""
        if self._look_timer is None:
            self._look_timer = self._reactor.call_later(CONGESTION_LOOK_S, self._looked)

    def _looked(self) -> None:
        self._look_timer = None
        self._pump()

    def broken(self, reason: str) -> None:
        """Note that the worker does not speak our protocol."""
        self.last_error = failure("protocol_error", f"{self} sent {reason}")
        self._ground.log.error("protocol error", **self._names(), reason=reason)

    # Death

    def died(self) -> None:
        """The process is dead and reaped."""
        self._forget_start_timer()
        if self.status not in ("stopping", "terminating"):
            self.status = "restarting"
        failpoints.hit("supervisor.before_bury")
        self._bury(self._buried)

    def _buried(self) -> None:
        incarnation = self.incarnation
        assert incarnation is not None
        incarnation.drain()
        self.incarnation = None
        self.last_exit = incarnation.ending
        if self.status == "stopping":
            self._finish_stop()
            return
        log = self._ground.log.info if self._ending else self._ground.log.warning
        log(
            "worker died",
            **self._names(),
            pid=incarnation.pid,
            exit=self.last_exit,
            error=self.last_error.message if self.last_error else None,
        )
        failpoints.hit("supervisor.before_judge")
        counts = self._judge(incarnation)
        failpoints.hit("supervisor.after_judge")
        if self._unavailable is not None:
            self._refuse_waiting(self._unavailable)
        self._tell_ended(self._exit_class(incarnation.exit), blameless=not counts)

    def _exit_class(self, exit: Exit | None) -> ExitClass:
        if not self._was_ready:
            return "never_started"
        if exit is not None and exit.code == 0:
            return "normal"
        return "shutdown" if exit is not None and exit.signal == signal.SIGTERM else "abnormal"

    def _tell_ended(self, exit: ExitClass, *, blameless: bool = False) -> None:
        if self.status == "stopping" or self.retired:
            self._finish_stop()
        elif self.status != "stopped":  # the listener may have stopped us meanwhile
            self.status = "restarting"
            self._superior.ended(self, exit, blameless=blameless, hopeless=self._giving_up)

    # What the superior decides

    def terminate(self, reason: str) -> None:
        """End the worker within its grace, or take its start back. The superior hears `ended`, not from within."""
        withdrawn = self.status == "starting" and self.forks.withdraw(self)
        self.status = "terminating"
        if withdrawn or self.incarnation is None:
            self._reactor.call_soon(self._terminated)
            return
        if self.incarnation.exit is None:
            self._ending = reason
        self._end(self.grace_s)

    def _terminated(self) -> None:
        if self.status == "terminating":
            self._tell_ended("shutdown")

    def refuse(self, error: ErrorInfo, *, stopped: bool = False) -> None:
        """From now on, until `come_back`, nobody waits for this worker."""
        if self._unavailable is None:
            self._unavailable = error
            self._tell_unavailable(error, stopped=stopped)
            self._refuse_waiting(error)

    def come_back(self) -> None:
        """The worker may be waited for again."""
        if self._unavailable is not None:
            self._unavailable = None
            self._tell_back()

    # Stop

    def stop(self, stopped: Callback, grace_s: float) -> None:
        """End the worker for good, within ``grace_s`` seconds; call ``stopped`` when nothing of it lives."""
        self._stopped.append(stopped)
        if self.status == "stopped":
            self._reactor.call_soon(self._finish_stop)
        elif self.status == "stopping":
            self._end(grace_s)
        else:
            withdrawn = self.status == "starting" and self.forks.withdraw(self)
            self.status = "stopping"
            if withdrawn or self.incarnation is None:
                self._reactor.call_soon(self._finish_stop)
            else:
                self._end(grace_s)

    def _end(self, grace_s: float) -> None:
        if self.incarnation is None:
            return
        if grace_s > 0:
            self.incarnation.stop(grace_s, self._ending or "stopped")
        else:
            self.incarnation.kill()

    def _finish_stop(self) -> None:
        self.status = "stopped"
        if self._look_timer is not None:
            self._look_timer.cancel()
        stopped, self._stopped = self._stopped, []
        for callback in stopped:
            callback()

    # Description

    def __str__(self) -> str:
        return f"agent {self.agent!r}" if self.node is None else f"node {self.node!r} of agent {self.agent!r}"

    def _names(self) -> dict[str, str]:
        return {"agent": self.agent} if self.node is None else {"agent": self.agent, "node": self.node}

    def _crash(self, code: str, incarnation: Incarnation, what: str) -> ErrorInfo:
        """Say that ``what`` was cut off by the end of the worker."""
        exit = incarnation.exit
        return failure(
            code,
            f"the worker of {self} ended with {incarnation.ending} while {what}",
            interrupted=True,
            reason=self._ending or incarnation.killed_for or "crash",
            signal=exit.signal_name if exit else None,
            exit_code=exit.code if exit else None,
        )

    def info(self) -> ProcessInfo:
        """Describe the worker."""
        incarnation = self.incarnation
        return ProcessInfo(
            role=self.role,
            name=self.agent if self.node is None else f"{self.agent}/{self.node}",
            pid=(incarnation.pid or 0) if incarnation else 0,
            status="stopped" if incarnation and incarnation.stopped else self.status,
            incarnation=incarnation.id if incarnation else "",
            started_at=incarnation.started_at if incarnation else None,
            restarts=self.restarts,
            last_exit=self.last_exit,
            restart=self.restart_type,
            strategy=self._superior.strategy,
            generation=self.generation,
        )
