"""What clients ask, one method for each request. Answers come when what they say is durable.

Only `Requests` is for others: the server calls it, the supervisor and the inline runtime make it.
"""

from __future__ import annotations

from collections.abc import Callable

from hayata import messages as m
from hayata.errors import HayataError
from hayata_supervisor.admin import Admin
from hayata_supervisor.core.coordinator import Refusal
from hayata_supervisor.engine import Engine
from hayata_supervisor.hub import Sink
from hayata_supervisor.requests.agents import Agents
from hayata_supervisor.requests.deciding import Deciding
from hayata_supervisor.requests.desk import Desk
from hayata_supervisor.requests.looking import Looking
from hayata_supervisor.requests.running import Running
from hayata_supervisor.tree.port import failure

_LONGEST_DRAIN_S = 7 * 24 * 3600.0  # as in the configuration; more, or none at all, would be no timer


class Requests:
    """Grants requests.

    Args:
        engine: The coordinators and their surroundings.
        tree: Describes the process tree from the guard down, and calls back with it.
        stats: Counters and gauges.
        stop: Begins to stop the daemon, with a drain time in seconds or None for the configured one.
        reload: Loads the apps anew, and calls what it is given with what came of it.
        admin: Grants what is asked of the store as a whole.
        page_bytes: About how much of a list goes into one message.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        tree: Callable[[Callable[[m.ProcessInfo], None]], None],
        stats: Callable[[], dict[str, float]],
        stop: Callable[[float | None], None],
        reload: Callable[[Callable[[m.ReloadReport | m.ErrorInfo], None]], None],
        admin: Admin,
        page_bytes: int,
    ) -> None:
        self._engine = engine
        self._tree = tree
        self._stats = stats
        self._stop = stop
        self._reload = reload
        self._admin = admin
        self._desk = Desk(engine)
        self._agents = Agents(self._desk)
        self._looking = Looking(self._desk, page_bytes)
        self._running = Running(self._desk, self._looking)
        self._deciding = Deciding(self._desk, self._looking, self._running)

    def handle(self, request: m.Request, sink: Sink) -> None:
        """Grant a request or refuse it; never raises for what a client can cause."""
        try:
            self._handle(request, sink)
        except Refusal as refusal:
            sink.reply(m.Refused(refusal.error))
        except HayataError as error:
            sink.reply(m.Refused(failure(error.code, error.message, hint=error.hint, **error.details)))

    def _handle(self, request: m.Request, sink: Sink) -> None:
        match request:
            case m.Run():
                self._running.run(request, sink)
            case m.GetInvocation() | m.ListTasks():
                self._looking.look(request, sink)
            case m.AwaitInvocation():
                self._looking.await_settled(request, sink)
            case m.ListInvocations():
                self._looking.list_invocations(request, sink)
            case m.FollowEvents():
                self._looking.follow(request, sink)
            case m.ReadJournal():
                self._looking.journal(request, sink)
            case m.Recover():
                self._deciding.recover(request, sink)
            case m.Reconcile():
                self._deciding.reconcile(request, sink)
            case m.Cancel():
                self._deciding.cancel(request, sink)
            case m.ListAgents():
                self._agents.list_agents(request, sink)
            case m.StartAgent():
                self._agents.start(request, sink)
            case m.StopAgent():
                self._agents.stop(request, sink)
            case m.Reload():
                self._reload(lambda came: sink.reply(m.Refused(came) if isinstance(came, m.ErrorInfo) else came))
            case m.GetTree():
                self._tree(lambda root: sink.reply(m.Tree(root)))
            case m.GetStats():
                sink.reply(m.Stats(self._stats()))
            case m.StopDaemon():
                self._stop_daemon(request, sink)
            case m.VerifyStore() | m.BackupStore() | m.PruneStore():
                self._admin.handle(request, sink)

    def _stop_daemon(self, request: m.StopDaemon, sink: Sink) -> None:
        drain_s = request.drain_s
        if drain_s is not None and not 0 <= drain_s <= _LONGEST_DRAIN_S:
            raise Refusal(failure("invalid_options", f"drain_s can't be {drain_s}", hint="seconds, 0 or more"))
        sink.reply(m.Done())
        self._stop(drain_s)

    def app_settled(self, index: int, reference: str, error: m.ErrorInfo | None) -> None:
        """An app that `StartAgent` asked for is here, or can't be."""
        self._agents.app_settled(index, reference, error)

    def apps_ready(self) -> None:
        """All apps of the launch are loaded or given up: what waited for them is granted now."""
        self._engine.apps_ready()
        for request, sink in self._desk.unpark():
            match request:
                case m.GetInvocation() | m.ListTasks():
                    self._looking.look_when_recovered(request, sink)
                case _:
                    self.handle(request, sink)
