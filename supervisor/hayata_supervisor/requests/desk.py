"""What all parts of granting share: the store's reader, and what waits until the apps are loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from hayata import messages as m
from hayata.errors import HayataError
from hayata.ids import check_name
from hayata_supervisor.core.coordinator import Refusal
from hayata_supervisor.core.effects import Call
from hayata_supervisor.engine import Agent, Engine
from hayata_supervisor.hub import Sink
from hayata_supervisor.store.interface import Header
from hayata_supervisor.tree.port import failure

T = TypeVar("T")


class Desk:
    """See the module."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._parked: list[tuple[m.Request, Sink]] = []

    def park(self, request: m.Request, sink: Sink) -> None:
        """Keep a request until all apps of the launch are loaded or given up."""
        self._parked.append((request, sink))

    def unpark(self) -> list[tuple[m.Request, Sink]]:
        """Hand out what was parked."""
        parked, self._parked = self._parked, []
        return parked

    def agent(self, name: str, request: m.Request, sink: Sink) -> Agent | None:
        """The agent; None when the request was parked until the apps are loaded."""
        agent = self.engine.agents.get(name)
        if agent is not None and agent.status not in ("stopped", "gone"):
            return agent
        if self.engine.apps_pending:
            self.park(request, sink)
            return None
        if self.engine.lost_apps and agent is None:
            raise Refusal(self.engine.why_missing(name))
        known = ", ".join(self.engine.agents) or "none"
        raise Refusal(failure("unknown_agent", f"there is no agent {name!r}", hint=f"agents here: {known}"))

    def read(
        self,
        query: Callable[[], T],
        answered: Callable[[T], None],
        sink: Sink,
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        """Ask the store; what goes wrong, there or in ``answered``, is the sink's answer. ``ended`` is called last."""

        def failed(error: BaseException) -> None:
            ended()
            if isinstance(error, HayataError):
                sink.reply(m.Refused(failure(error.code, error.message, hint=error.hint, **error.details)))
                return
            self.engine.read_failed(error)
            sink.reply(m.Refused(failure("store_corrupt", f"the store could not be read: {error}")))

        def guarded(found: T) -> None:
            try:
                answered(found)
            except Refusal as refusal:
                sink.reply(m.Refused(refusal.error))
            finally:
                ended()

        self.engine.reader.submit(query, guarded, failed)

    def with_invocation(self, name: str, sink: Sink, found: Callable[[Header], None]) -> None:
        """Look an invocation's header up; an unknown one is refused."""
        check_name("invocation_id", name)

        def answered(header: Header | None) -> None:
            if header is None:
                raise Refusal(failure("unknown_invocation", f"there is no invocation {name!r}", hint="hayata ps"))
            found(header)

        self.read(lambda: self.engine.store.find(name), answered, sink)


def reply(sink: Sink, answer: m.Answer) -> Call:
    """Answer when it is the effect's turn."""
    return Call(lambda: sink.reply(answer))
