"""Looking: invocations, their tasks, events and journals. Read from the store, with what only the living know."""

from __future__ import annotations

from collections.abc import Sequence

from hayata import messages as m
from hayata_supervisor.core import facts as f
from hayata_supervisor.core.coordinator import Refusal
from hayata_supervisor.core.effects import Call
from hayata_supervisor.core.invocation import info
from hayata_supervisor.core.views import journal_page, tasks
from hayata_supervisor.hub import Follower, Sink
from hayata_supervisor.requests.desk import Desk
from hayata_supervisor.store.interface import Header, Loaded
from hayata_supervisor.stored import info_of_header, restored
from hayata_supervisor.tree.port import failure

_ENTRY_BYTES = 1024  # of a task or an invocation in a message, without what its node returned and its error
_HEADERS_A_PAGE = 500  # an error may have a traceback of 64 KB, and all of them are in memory at once
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

    def page(self, shown: list[m.InvocationInfo]) -> m.InvocationList:
        """As many of them as one message holds."""
        return m.InvocationList(shown[: _fitting(shown, self._page_bytes)])

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
        limit = max(1, min(request.limit, _HEADERS_A_PAGE))
        before = _place(request.after)
        # Resting is derived: in the store these are running.
        status = "running" if request.status == "recovery_required" else request.status

        def answered(headers: list[Header]) -> None:
            shown = [self._engine.overlay(each.agent, each.id, info_of_header(each)) for each in headers]
            count = _fitting(shown, self._page_bytes)
            more = headers[count - 1].id.hex() if headers and (count < len(headers) or count == limit) else ""
            wanted = [each for each in shown[:count] if request.status in (None, each.status)]
            sink.reply(m.InvocationList(wanted, more))

        self._desk.read(
            lambda: self._engine.store.headers(
                agent=request.agent, status=status, session=request.session, limit=limit, before=before
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
    end = first + _fitting(found[first:], page_bytes)
    return m.TaskList(found[first:end], more=end < len(found))


def _place(after: str) -> bytes | None:
    """Where a list goes on: the internal id that the page before has ended with."""
    try:
        place = bytes.fromhex(after)
    except ValueError:
        place = b"?"
    if len(place) not in (0, 16):
        raise Refusal(failure("invalid_options", f"after can't be {after[:60]!r}", hint="what the last page said"))
    return place or None


def _fitting(found: Sequence[m.TaskInfo | m.InvocationInfo], page_bytes: int) -> int:
    """How many of them fit into a message, one at least."""
    size = 0
    for count, each in enumerate(found):
        size += _size(each)
        if size > page_bytes and count:
            return count
    return len(found)


def _size(entry: m.TaskInfo | m.InvocationInfo) -> int:
    """About how many bytes it takes in a message."""
    values = entry.update if isinstance(entry, m.TaskInfo) else None
    size = _ENTRY_BYTES + sum(memoryview(value).nbytes for value in (values or {}).values())
    return size if entry.error is None else size + len(entry.error.message) + memoryview(entry.error.details).nbytes
