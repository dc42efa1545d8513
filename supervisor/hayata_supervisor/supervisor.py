"""The supervisor: all coordination, the store, the client socket. It never runs user code and never forks.

Life: take the store → read what is open → start the tree of workers → as each app is loaded, recover its
invocations → serve → drain → end. If its guard dies it kills everything below it and ends: the next start recovers.

The process has five threads: the loop (this file's), the store's writer and reader, the edge watcher, and the log's.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

import hayata
from hayata.errors import HayataError, error_for
from hayata.memfd import read_memfd
from hayata.messages import (
    Beat,
    ErrorInfo,
    Fatal,
    Launch,
    ProcessInfo,
    Reloaded,
    Reloading,
    ReloadReport,
    ReloadRuntime,
    Serving,
    Stopping,
    StopRuntime,
    ToSupervisor,
    decoder,
)
from hayata_supervisor import failpoints
from hayata_supervisor.admin import Admin
from hayata_supervisor.engine import Engine
from hayata_supervisor.logs import LogThread
from hayata_supervisor.maintenance_runs import MaintenanceRuns
from hayata_supervisor.process import clock, prctl, start_notes
from hayata_supervisor.process.background import BackgroundThread
from hayata_supervisor.process.gauges import with_gauges
from hayata_supervisor.process.packets import PACKET_BYTES, Packets
from hayata_supervisor.process.pidfd import open_pidfd
from hayata_supervisor.process.reactor import Reactor
from hayata_supervisor.process.signals import SignalInbox
from hayata_supervisor.process.spawn import keep_descriptors_to_ourselves
from hayata_supervisor.process.start_notes import StartNotes
from hayata_supervisor.process.sweep import kill_children
from hayata_supervisor.requests import Requests
from hayata_supervisor.server import MOST_CONNECTIONS, Connection, Server
from hayata_supervisor.statistics import Statistics, ages
from hayata_supervisor.store.directory import DATA, STORE
from hayata_supervisor.store.interface import StoreRemoved
from hayata_supervisor.store.layout import SCHEMA
from hayata_supervisor.store.lmdb_store import open_store
from hayata_supervisor.tree import WorkerTree
from hayata_supervisor.tree.port import failure
from hayata_supervisor.tree.worker_tree import VALUE_INDEX

EXIT_AGAIN, EXIT_USAGE, EXIT_REFUSED, EXIT_CORRUPT = 1, 2, 5, 65
_EXIT_CODES = {
    "store_corrupt": EXIT_CORRUPT,
    "data_dir_in_use": EXIT_REFUSED,
    "permission_denied": EXIT_REFUSED,
    "invalid_options": EXIT_USAGE,
    "unsupported_platform": EXIT_USAGE,
}
_REMOVED_HINT = "put it back, or restore a backup, and start again"
_BEAT_S = 1.0
_LOOK_S = 0.02
_SWITCH_INTERVAL_S = 0.0005
"""How long a thread may hold the interpreter while another wants it. Measured: the default, ten times as long, makes
the slowest percent of a single invocation's steps two to three times as slow, since loop and writer take turns."""


class Supervisor:
    """See the module.

    Args:
        launch: What to run.
        launch_fd: The memfd it came in, for the forkservers.
        listener: The listening client socket, inherited from the guard.
        guard: SEQPACKET socket to the guard.
        restarts: How many were before it. At the first start an app that can't be loaded ends the runtime: later,
            its agents only fail.
        last_exit: How the last one ended.
    """

    def __init__(
        self,
        launch: Launch,
        launch_fd: int,
        listener: socket.socket,
        guard: socket.socket,
        *,
        restarts: int,
        last_exit: str,
    ) -> None:
        self._launch = launch
        self._listener = listener
        self._restarts = restarts
        self._last_exit = last_exit
        self._started_at = clock.wall()
        self._reactor = Reactor()
        self._log = LogThread(launch.log_format, launch.log_level)
        self._guard = Packets(self._reactor, guard, ToSupervisor, self._guard_says, self._guard_lost)
        self._watch_guard()
        self._apps_left = {*range(len(launch.apps))} if launch.value_fd is None else {VALUE_INDEX}
        self._app_errors: list[ErrorInfo] = []
        self._drain_deadline: float | None = None
        self._hurried = False
        self._tree_stopping = False
        self._exit_code = 0
        failpoints.hit("supervisor.before_open")
        if restarts:
            _refuse_removed(Path(launch.data_dir))
        store = open_store(Path(launch.data_dir))
        failpoints.hit("supervisor.after_open")
        if store.schema_before != SCHEMA:
            self._log.info("store migrated", schema_before=store.schema_before, schema=SCHEMA)
        self._engine = Engine(
            self._reactor,
            store,
            self._log,
            writer=BackgroundThread(self._reactor, "store-writer"),
            reader=BackgroundThread(self._reactor, "store-reader"),
            notes=StartNotes(Path(launch.data_dir)),
            app_events=self._app_settled,
            broken=self._broken,
        )
        recovered = self._engine.load(store.load_open())
        self._tree = WorkerTree(
            self._reactor, launch, launch_fd, self._engine, self._log, dict(os.environ), self._reloading
        )
        self._engine.workers = self._tree
        runs = MaintenanceRuns(
            self._reactor, launch.data_dir, dict(os.environ), born=self._tree.spare, buried=self._tree.forget
        )
        self._admin = Admin(self._engine, runs, launch.retention_s)
        self._requests = Requests(
            self._engine,
            tree=self._describe,
            stats=Statistics(
                self._engine,
                worker_restarts=lambda: self._tree.restarts,
                supervisor_restarts=restarts,
                store_file=Path(launch.data_dir, STORE, DATA),
            ).values,
            stop=self._stop_asked,
            reload=self._tree.reload,
            admin=self._admin,
            page_bytes=launch.frame_cap_bytes // 2,
        )
        self._server = Server(
            self._reactor,
            listener,
            self._requests,
            self._log,
            version=hayata.__version__,
            gone=self._client_gone,
            cap_bytes=launch.frame_cap_bytes,
            # The other half of what we may open is for workers.
            most_connections=min(MOST_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2),
        )
        self._log.info("supervisor started", open_invocations=recovered, data_dir=launch.data_dir)

    def run(self) -> int:
        """Serve until told to stop; return the exit code."""
        inbox = SignalInbox([signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD])
        self._reactor.watch_read(inbox.fd, lambda: self._signalled(inbox))
        self._beat()
        self._tree.start()
        self._admin.start()
        self._reactor.run()
        self._server.close()
        self._admin.close()
        self._engine.close()
        self._log.info("supervisor stopped")
        self._log.close()
        return self._exit_code

    # ---- the guard -------------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        self._guard.send(Beat(self._status()))
        self._reactor.call_later(_BEAT_S, self._beat)

    def _status(self) -> str:
        """For the service manager: a line that changes only when something has."""
        agents = self._engine.agents.values()
        running = sum(agent.coordinator.admission.running for agent in agents)
        failed = sum(agent.status == "failed" for agent in agents)
        doing = f"serving {_count(len(agents), 'agent')}"
        if self._drain_deadline is not None:
            doing = "stopping its workers" if self._tree_stopping else "draining"
        elif self._apps_left:
            doing = f"loading {_count(len(self._apps_left), 'app')}"
        return doing + (f" ({failed} failed)" if failed else "") + f", {_count(running, 'invocation')} running"

    def _watch_guard(self) -> None:
        guard = os.getppid()
        pidfd = open_pidfd(guard)
        if os.getppid() != guard:
            self._guard_lost()
        self._reactor.watch_read(pidfd, self._guard_lost)

    def _guard_lost(self) -> None:
        """Without a guard nobody would restart us or hear a signal: end everything; what runs is classified later."""
        self._log.error("guard lost, ending")
        self._listener.close()  # nobody is accepted any more, and who is to be killed is found with one descriptor
        kill_children((), timeout_s=10.0)
        os._exit(1)

    def _reloading(self, busy: bool) -> None:
        """The guard tells the service manager."""
        self._guard.send(Reloading() if busy else Reloaded())

    def _guard_says(self, message: StopRuntime | ReloadRuntime) -> None:
        if isinstance(message, StopRuntime):
            self._drain(message.drain_s)
        else:
            self._tree.reload(_nothing)  # the log says what comes of it

    def _signalled(self, inbox: SignalInbox) -> None:
        """Signals are the guard's; one that was sent to us is passed on to it. SIGCHLD tells of our own children."""
        for number in inbox.take():
            if number == signal.SIGCHLD:
                self._tree.children_changed()
            elif number == signal.SIGHUP:
                self._tree.reload(_nothing)
            else:
                self._stop_asked(None)

    def _stop_asked(self, drain_s: float | None) -> None:
        self._guard.send(StopRuntime(self._launch.drain_timeout_s if drain_s is None else drain_s))

    # ---- apps ------------------------------------------------------------------------------------------------------

    def _app_settled(self, index: int, reference: str, error: ErrorInfo | None) -> None:
        self._requests.app_settled(index, reference, error)
        if error is not None:
            self._log.error("app failed to load", app=reference, code=error.code, error=error.message)
        if index not in self._apps_left:  # not of the launch, or loaded anew
            return
        if error is not None and self._restarts == 0:
            self._fatal(error, EXIT_USAGE)
            return
        self._apps_left.discard(index)
        if error is not None:
            self._engine.app_lost(reference, error)
        if not self._apps_left:
            self._requests.apps_ready()
            self._tree.open_reloads()
            self._guard.send(Serving())
            self._log.info("serving", agents=list(self._engine.agents), socket=self._launch.socket)

    def _fatal(self, error: ErrorInfo, exit_code: int) -> None:
        self._guard.send(Fatal(_fitting(error), exit_code))
        self._exit_code = exit_code
        self._drain(0.0)

    def _broken(self, error: BaseException) -> None:
        """The outcome of a commit is unknown: acknowledge nobody, and let recovery read the truth."""
        self._log.error("store broken, ending", error=repr(error))
        self._log.close()
        if isinstance(error, StoreRemoved):
            self._guard.send(Fatal(failure("store_corrupt", str(error), hint=_REMOVED_HINT), EXIT_CORRUPT))
            os._exit(EXIT_CORRUPT)
        os._exit(EXIT_AGAIN)

    # ---- clients ---------------------------------------------------------------------------------------------------

    def _client_gone(self, connection: Connection) -> None:
        self._engine.hub.gone(lambda sink: getattr(sink, "connection", None) is connection)

    def _describe(self, described: Callable[[ProcessInfo], None]) -> None:
        """Ask the nodes, then look from outside, in a thread: of a thousand edges that takes its time."""

        def look() -> None:
            root = self._described()
            self._engine.reader.submit(lambda: with_gauges(root), described, lambda error: described(root))

        self._tree.look(look)

    def _described(self) -> ProcessInfo:
        age_s = ages(self._engine, clock.monotonic())
        supervisor = ProcessInfo(
            role="supervisor",
            name="supervisor",
            pid=os.getpid(),
            status="draining" if self._engine.draining else "serving",
            started_at=self._started_at,
            restarts=self._restarts,
            last_exit=self._last_exit,
            children=[_with_ages(child, age_s) for child in self._tree.tree()],
        )
        return ProcessInfo(role="guard", name="guard", pid=os.getppid(), status="serving", children=[supervisor])

    # ---- the end ---------------------------------------------------------------------------------------------------

    def _drain(self, drain_s: float) -> None:
        """Drain, and end; or, when that is under way, do so within less time."""
        due = clock.monotonic() + drain_s
        if self._drain_deadline is not None:
            self._drain_deadline = min(self._drain_deadline, due)
            if drain_s == 0 and self._tree_stopping:
                self._tree.hurry()
            self._hurried = self._hurried or drain_s == 0
            return
        self._drain_deadline, self._hurried = due, drain_s == 0
        self._tree.close_reloads()
        self._engine.drain()
        self._log.info("draining", drain_s=drain_s)
        self._look_at_drain()

    def _look_at_drain(self) -> None:
        assert self._drain_deadline is not None
        if not self._engine.idle and clock.monotonic() < self._drain_deadline:
            self._reactor.call_later(_LOOK_S, self._look_at_drain)
        elif not self._tree_stopping:
            self._tree_stopping = True
            # Without a drain, what runs isn't given its node's ``shutdown`` either: at once means at once.
            gently = self._engine.idle or not self._hurried
            self._guard.send(Stopping(self._tree.longest_grace_s if gently else 0.0))
            self._tree.stop(gently, self._tree_stopped)

    def _tree_stopped(self) -> None:
        """Nothing runs any more; what is being written is written."""
        if self._engine.committer.idle:
            self._reactor.stop()
        else:
            self._reactor.call_later(_LOOK_S, self._tree_stopped)


def _nothing(came: ReloadReport | ErrorInfo) -> None:
    """Nobody waits for the answer."""


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _refuse_removed(data_dir: Path) -> None:
    """See that a store is still there which an earlier supervisor of this guard had: start notes come after it.

    Raises:
        HayataError: ``store_corrupt``. A new one in its place would hide that all is lost.
    """
    if (data_dir / start_notes.FILE).exists() and not (data_dir / STORE).exists():
        raise error_for("store_corrupt", f"the store in {data_dir} was removed", hint=_REMOVED_HINT)


def _fitting(error: ErrorInfo) -> ErrorInfo:
    """The error, without its details if those don't fit into a packet."""
    if len(bytes(error.details)) < PACKET_BYTES // 2:
        return error
    return ErrorInfo(error.code, error.message[:4096], error.hint)


def _with_ages(info: ProcessInfo, age_s: Mapping[str, float]) -> ProcessInfo:
    tasks = {name: age_s.get(name, 0.0) for name in info.tasks}
    return msgspec.structs.replace(info, tasks=tasks, children=[_with_ages(child, age_s) for child in info.children])


def supervisor_main(arguments: Sequence[str]) -> int:
    """Be the supervisor that the guard has started; return the exit code."""
    parser = argparse.ArgumentParser(prog="hayata_supervisor.supervisor")
    parser.add_argument("--launch-fd", type=int, required=True)
    parser.add_argument("--listen-fd", type=int, required=True)
    parser.add_argument("--guard-fd", type=int, required=True)
    parser.add_argument("--restart", type=int, default=0)
    parser.add_argument("--last-exit", default="")
    options = parser.parse_args(arguments)
    failpoints.enter("supervisor")
    prctl.set_name("hayata-super")
    prctl.become_subreaper()
    keep_descriptors_to_ourselves()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # six descriptors a worker, one an edge, one a client
    launch: Launch = decoder(Launch).decode(read_memfd(options.launch_fd))
    guard = socket.socket(fileno=options.guard_fd)
    listener = socket.socket(fileno=options.listen_fd)
    try:
        supervisor = Supervisor(
            launch, options.launch_fd, listener, guard, restarts=options.restart, last_exit=options.last_exit
        )
    except HayataError as error:
        code = _EXIT_CODES.get(error.code, EXIT_AGAIN)
        info = failure(error.code, error.message, hint=error.hint, **error.details)
        if code == EXIT_AGAIN:
            print(f"hayata: {error}", file=sys.stderr)
        else:
            failpoints.hit("supervisor.before_send_fatal", guard)
            guard.send(msgspec.msgpack.encode(Fatal(_fitting(info), code)))  # the guard says it
            failpoints.hit("supervisor.after_send_fatal", guard)
        return code
    return supervisor.run()


if __name__ == "__main__":
    sys.exit(supervisor_main(sys.argv[1:]))
