"""The supervisor's log: callers hand lines over and go on; one thread renders and writes them.

Nothing here ever holds up the loop. The queue is bounded: when stderr is slower than what is said, or gone,
lines are dropped and counted, and the count is logged when there is room again. Every line of the log is one
line.

The formats: ``json`` and ``console`` (structlog renders), and ``plain`` for a runtime embedded in a script,
where what user code wrote appears as it wrote it, on the stream it wrote it to, beside our own lines from
``log_level`` on.
"""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, NamedTuple

import msgspec

from hayata.messages import Output
from hayata_supervisor.process import clock
from hayata_supervisor.process.stderr import timestamp
from hayata_supervisor.worker_logging import MARK

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
QUEUE_LINES = 10_000
QUEUE_BYTES = 16 * 1024 * 1024
LINE_CHARS = 64 * 1024
_ENTRY_BYTES = 200  # what an entry costs beside its text, roughly
_BATCH = 200

Render = Callable[[dict[str, Any]], str]


class _Entry(NamedTuple):
    """Something to be written; with ``output``, lines of user code, and in ``fields`` whose they are."""

    wall_s: float
    level: str
    event: str
    fields: dict[str, Any]
    output: Output | None
    size: int


class LogThread:
    """See the module. All methods may be called from any thread, and from a signal handler.

    Args:
        log_format: ``json``, ``console`` or ``plain``.
        log_level: Least level of our own lines; user code's lines always pass.
        stdout: Descriptor for user code's stdout, in ``plain``.
        stderr: Descriptor for everything else.
        queue_lines: Most lines that wait.
        queue_bytes: Most bytes that wait, about.
    """

    def __init__(
        self,
        log_format: str,
        log_level: str,
        *,
        stdout: int = 1,
        stderr: int = 2,
        queue_lines: int = QUEUE_LINES,
        queue_bytes: int = QUEUE_BYTES,
    ) -> None:
        self._least = LEVELS[log_level]
        self._queue: deque[_Entry] = deque()
        self._queue_lines = queue_lines
        self._queue_bytes = queue_bytes
        self._lines = 0
        self._bytes = 0
        self._dropped = 0
        self._closing = False
        # Re-entrant: a signal handler that logs may have interrupted a caller that holds it.
        self._lock = threading.RLock()
        # Not an Event: its lock is not re-entrant.
        self._wake: SimpleQueue[None] = SimpleQueue()
        writer = _Writer(log_format, stdout, stderr)
        self._thread = threading.Thread(target=self._run, args=(writer,), name="hayata-log", daemon=True)
        self._thread.start()

    def debug(self, event: str, **fields: Any) -> None:
        """For whoever looks for a fault."""
        self._say("debug", event, fields)

    def info(self, event: str, **fields: Any) -> None:
        """A fact."""
        self._say("info", event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        """Something that an operator may want to look at."""
        self._say("warning", event, fields)

    def error(self, event: str, **fields: Any) -> None:
        """Something that an operator has to look at."""
        self._say("error", event, fields)

    def output(self, output: Output, *, agent: str, node: str) -> None:
        """Lines that user code wrote; those that begin with U+001E are records of its ``logging``."""
        ids = {"agent_id": agent, "node_id": node, "edge_id": output.edge}
        ids["execution_id"] = output.execution_id or ""
        fields = {name: value for name, value in ids.items() if value}
        size = sum(map(len, output.lines)) + _ENTRY_BYTES * max(1, len(output.lines))
        self._put(_Entry(clock.wall(), "info", "", fields, output, size), max(1, len(output.lines)))

    def close(self, timeout_s: float = 2.0) -> None:
        """Write what waits, for at most ``timeout_s`` seconds. What is said afterwards is not written."""
        with self._lock:
            self._closing = True
        self._wake.put(None)
        self._thread.join(timeout_s)

    def _say(self, level: str, event: str, fields: dict[str, Any]) -> None:
        if LEVELS[level] >= self._least:
            texts = sum(len(value) for value in fields.values() if isinstance(value, str))
            size = _ENTRY_BYTES + len(event) + texts
            self._put(_Entry(clock.wall(), level, event, fields, None, size), 1)

    def _put(self, entry: _Entry, lines: int) -> None:
        with self._lock:
            if self._closing:
                return
            if self._lines + lines > self._queue_lines or self._bytes + entry.size > self._queue_bytes:
                self._dropped += lines
                return
            idle = not self._queue
            self._queue.append(entry)
            self._lines += lines
            self._bytes += entry.size
        if idle:
            self._wake.put(None)

    # the thread

    def _run(self, writer: _Writer) -> None:
        while True:
            self._wake.get()
            while batch := self._take():
                lost = sum(_lines_of(entry) for entry in batch if not writer.write(entry))
                with self._lock:
                    self._dropped += lost
                    for entry in batch:
                        self._lines -= _lines_of(entry)
                        self._bytes -= entry.size
            self._confess(writer)
            if self._closing and not self._queue:
                return

    def _confess(self, writer: _Writer) -> None:
        """Now that there is room, say how much there was none for."""
        with self._lock:
            dropped, self._dropped = self._dropped, 0
        if not dropped:
            return
        entry = _Entry(clock.wall(), "warning", "log lines dropped", {"count": dropped}, None, 0)
        if not writer.write(entry):
            with self._lock:
                self._dropped += dropped

    def _take(self) -> list[_Entry]:
        with self._lock:
            return [self._queue.popleft() for _ in range(min(_BATCH, len(self._queue)))]


def _lines_of(entry: _Entry) -> int:
    return 1 if entry.output is None else max(1, len(entry.output.lines))


class _Writer:
    """Renders and writes, in the log's thread alone."""

    def __init__(self, log_format: str, stdout: int, stderr: int) -> None:
        self._format = log_format
        self._stdout = stdout
        self._stderr = stderr
        self._render: Render | None = None
        self._torn: set[int] = set()  # where a line has begun and could not be ended

    def write(self, entry: _Entry) -> bool:
        """Write an entry; False when it is lost."""
        if entry.output is None:
            return self._emit(entry.wall_s, entry.level, entry.event, entry.fields)
        output = entry.output
        written = True
        if output.dropped:
            fields = {**entry.fields, "stream": output.stream, "count": output.dropped}
            written &= self._emit(entry.wall_s, "warning", "output dropped", fields)
        if output.slowed_s:
            fields = {**entry.fields, "seconds": round(output.slowed_s, 1)}
            written &= self._emit(entry.wall_s, "warning", "output slowed", fields)
        for line in output.lines:
            record = _parse(line) if line.startswith(MARK) else None
            if self._format == "plain":
                written &= self._plain(output.stream, line, record)
            elif record is None:
                written &= self._emit(entry.wall_s, "info", line, {**entry.fields, "stream": output.stream})
            else:
                level, event = record.pop("level"), record.pop("event")
                written &= self._emit(entry.wall_s, level, event, {**record, **entry.fields})
        return written

    def _plain(self, stream: str, line: str, record: dict[str, Any] | None) -> bool:
        if record is None:
            return self._put(self._stdout if stream == "stdout" else self._stderr, line + "\n")
        text = f"{record['level'].upper()}:{record.get('logger', 'root')}:{record['event']}\n"
        if "exception" in record:
            text += f"{record['exception']}\n"
        return self._put(self._stderr, text)

    def _put(self, fd: int, text: str) -> bool:
        """Write a line, and on a line of its own: the disk may have become full in the middle of the last one."""
        sent, whole = _write_all(fd, f"\n{text}" if fd in self._torn else text)
        if whole:
            self._torn.discard(fd)
        elif sent:
            self._torn.add(fd)
        return whole

    def _emit(self, wall_s: float, level: str, event: str, fields: dict[str, Any]) -> bool:
        if self._render is None:
            self._render = _renderer(self._format, self._stderr)
        try:
            text = self._render({"timestamp": timestamp(wall_s), "level": level, "event": event, **fields})
        except Exception as error:  # noqa: BLE001  a value that can't be rendered must not end the log
            text = f"{timestamp(wall_s)} [{level}] {event!r} (fields can't be rendered: {error!r})"
        return self._put(self._stderr, text + "\n")


def _renderer(log_format: str, fd: int) -> Render:
    """Make structlog's renderer. Imported here, in the thread: the supervisor does not wait for it."""
    if log_format == "json":
        from structlog.processors import JSONRenderer

        to_json = JSONRenderer(serializer=_to_json)
        return lambda record: _as_text(to_json(None, "", record))
    from structlog.dev import ConsoleRenderer, plain_traceback

    colors = os.isatty(fd) and not os.environ.get("NO_COLOR")
    to_line = ConsoleRenderer(colors=colors, sort_keys=False, pad_event_to=0, exception_formatter=plain_traceback)
    return lambda record: _as_text(to_line(None, "", _for_console(record)))


def _for_console(record: dict[str, Any]) -> dict[str, Any]:
    shown: dict[str, Any] = {}
    for name, value in record.items():
        if name in ("timestamp", "level", "event", "logger"):
            shown[name] = _clean(value)
        else:
            # structlog gives these two lines of their own, and many.
            shown[{"exception": "traceback", "stack": "stack_trace"}.get(name, name)] = _Shown(value)
    return shown


class _Shown:
    """A value whose repr is one line that can't move a terminal's cursor, whatever user code put there."""

    def __init__(self, value: Any) -> None:
        self._text = value[:LINE_CHARS] if isinstance(value, str) else _clean(repr(value))
        self._quoted = isinstance(value, str) and (not value.isprintable() or bool(_QUOTED & set(value)))

    def __repr__(self) -> str:
        return repr(self._text) if self._quoted else self._text


def _to_json(record: dict[str, Any], **_: Any) -> str:
    cut = {name: value[:LINE_CHARS] if isinstance(value, str) else value for name, value in record.items()}
    return msgspec.json.encode(cut, enc_hook=repr).decode()


def _as_text(rendered: str | bytes) -> str:
    return rendered if isinstance(rendered, str) else rendered.decode()


_CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), 127, *range(0x80, 0xA0))}
_CONTROL |= {9: "\t", 10: "\\n", 13: "\\r"}
_QUOTED = frozenset(" =\"'")


def _clean(text: Any) -> str:
    return str(text)[:LINE_CHARS].translate(_CONTROL)


def _parse(line: str) -> dict[str, Any] | None:
    """A record of a worker's ``logging``; None for a line that only looks like one."""
    try:
        record = msgspec.json.decode(line[len(MARK) :])
    except (msgspec.DecodeError, ValueError):
        return None
    if not isinstance(record, dict):
        return None
    if record.get("level") not in LEVELS or not isinstance(record.get("event"), str):
        return None
    record.pop("timestamp", None)
    return record


def _write_all(fd: int, text: str) -> tuple[int, bool]:
    """Write; return how many bytes went out, and whether those were all."""
    data = memoryview(text.encode("utf-8", "backslashreplace"))
    size = len(data)
    while data:
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:  # somebody who shares our terminal made it non-blocking
            poll = select.poll()
            poll.register(fd, select.POLLOUT)
            poll.poll()
        except OSError:
            return size - len(data), False
    return size, True
