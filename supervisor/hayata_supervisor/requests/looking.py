"""Looking: invocations, their tasks, events and journals. Read from the store, with what only the living know."""

from __future__ import annotations

from hayata import messages as m
from hayata_supervisor.core import facts as f
from hayata_supervisor.core.effects import Call
from hayata_supervisor.core.invocation import info
from hayata_supervisor.core.views import journal_page, tasks
from hayata_supervisor.hub import Follower, Sink
from hayata_supervisor.requests.desk import Desk
from hayata_supervisor.store.interface import Header, Loaded
from hayata_supervisor.stored import info_of_header, restored

_TASK_BYTES = 1024  # of a task in a message, without what its node returned
_SETTLED = f.TERMINAL | {"uncertain", "recovery_required"}


class Looking:
    """Grants what changes nothing.

    Args:
        desk: What all parts share.
        page_bytes: About how much of a list goes into one message.
    """

    def __init__(self, desk: Desk, page_bytes: int) -> None:
        self._desk = desk
        self._engine = desk.engine
        self._page_bytes = page_bytes

    def look(self, request: m.GetInvocation | m.ListTasks, sink: Sink) -> None:
        """Show an invocation, or its tasks."""
        self._desk.with_invocation(request.invocation_id, sink, lambda header: self._look(header, request, sink))

    def _look(self, header: Header, request: m.GetInvocation | m.ListTasks, sink: Sink) -> None:
        """Answer from the store; but after a restart, while that says ``running`` of what does not run, later."""
        engine = self._engine
        if engine.apps_pending and header.id in engine.open and header.agent not in engine.agents:
            self._desk.park(request, sink)
        elif isinstance(request, m.GetInvocation):
            self.show(header, sink)
        else:
            self._tasks(header, request.after, sink)

    def look_when_recovered(self, request: m.GetInvocation | m.ListTasks, sink: Sink) -> None:
        """Answer when what recovery has found is in the store."""

        def found(header: Header) -> None:
            self._engine.committer.barrier(header.id, [Call(lambda: self._look(header, request, sink))])

        self._desk.with_invocation(request.invocation_id, sink, found)

    def show(self, header: Header, sink: Sink) -> None:
        """Answer with what is stored of an invocation."""
        self._desk.read(
            lambda: self._engine.store.load(header.id), lambda loaded: self._shown(loaded, header, sink), sink
        )

    def _shown(self, loaded: Loaded | None, header: Header, sink: Sink) -> None:
        stored = info_of_header(header) if loaded is None else info(restored(loaded))
        sink.reply(self._engine.overlay(header.agent, header.id, stored))

    def await_settled(self, request: m.AwaitInvocation, sink: Sink) -> None:
        """Answer when an invocation has ended or rests."""
        self._desk.with_invocation(request.invocation_id, sink, lambda header: self._await(header, sink))

    def _await(self, header: Header, sink: Sink) -> None:
        """Register first and look then: whatever settles meanwhile is told by one of the two."""
        hub = self._engine.hub
        hub.wait(header.id, sink)

        def answered(loaded: Loaded | None) -> None:
            shown = self._engine.overlay(
                header.agent, header.id, info(restored(loaded)) if loaded else info_of_header(header)
            )
            if shown.status in _SETTLED and hub.unwait(header.id, sink):
                sink.reply(shown)

        self._desk.read(lambda: self._engine.store.load(header.id), answered, sink)

    def list_invocations(self, request: m.ListInvocations, sink: Sink) -> None:
        """Show invocations, newest first."""
        limit = max(1, min(request.limit, 10_000))
        # Resting is derived: in the store these are running.
        status = "running" if request.status == "recovery_required" else request.status

        def answered(headers: list[Header]) -> None:
            shown = [self._engine.overlay(each.agent, each.id, info_of_header(each)) for each in headers]
            if request.status is not None:
                shown = [each for each in shown if each.status == request.status]
            sink.reply(m.InvocationList(shown[:limit]))

        self._desk.read(
            lambda: self._engine.store.headers(
                agent=request.agent, status=status, session=request.session, limit=limit
            ),
            answered,
            sink,
        )

    def follow(self, request: m.FollowEvents, sink: Sink) -> None:
        """Send an invocation's events, as long as there are any."""

        def found(header: Header) -> None:
            self._engine.hub.follow(Follower(header.id, sink, max(0, request.after), request.until))

        self._desk.with_invocation(request.invocation_id, sink, found)

    def _tasks(self, header: Header, after: str, sink: Sink) -> None:
        def answered(found: list[m.TaskInfo]) -> None:
            sink.reply(_page(found, after, self._page_bytes))

        self._desk.read(lambda: self.read_tasks(header.id), answered, sink)

    def journal(self, request: m.ReadJournal, sink: Sink) -> None:
        """Send a page of an invocation's journal."""
        self._desk.with_invocation(request.invocation_id, sink, lambda header: self._journal(header, request, sink))

    def _journal(self, header: Header, request: m.ReadJournal, sink: Sink) -> None:
        id, records = header.id, self._engine.store.records
        self._desk.read(lambda: journal_page(id, records(id, 1), request.first, self._page_bytes), sink.reply, sink)

    def read_tasks(self, id: bytes) -> list[m.TaskInfo]:
        """An invocation's tasks; for the reader's thread."""
        return tasks(id, (record for _, record in self._engine.store.records(id, 1)))


def _page(found: list[m.TaskInfo], after: str, page_bytes: int) -> m.TaskList:
    """The tasks behind ``after``, as many as fit, one at least."""
    first = next((index + 1 for index, task in enumerate(found) if task.id == after), 0)
    end, size = first, 0
    while end < len(found):
        size += _size(found[end])
        if size > page_bytes and end > first:
            break
        end += 1
    return m.TaskList(found[first:end], more=end < len(found))


def _size(task: m.TaskInfo) -> int:
    """About how many bytes it takes in a message."""
    size = _TASK_BYTES + sum(memoryview(value).nbytes for value in (task.update or {}).values())
    return size if task.error is None else size + len(task.error.message) + memoryview(task.error.details).nbytes
