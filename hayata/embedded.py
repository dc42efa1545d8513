"""`start`: a runtime of one's own, beside the program that uses it.

It is the same process tree as a daemon's, as a child of this process, in a session of its own; or, inline,
everything in this process and thread. Either way what comes back is a `Runtime`: a `hayata.Client` that also
ends the runtime.
"""

from __future__ import annotations

import atexit
import importlib
import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from hayata import loading
from hayata import messages as m
from hayata.client.blocking import Client
from hayata.client.options import (
    FOREVER,
    absolute_reference,
    check_age,
    check_choice,
    check_count,
    check_flag,
    check_seconds,
    invalid,
)
from hayata.client.transport import SocketTransport, Transport, connect
from hayata.errors import HayataError, error_for
from hayata.framing import DEFAULT_CAP_BYTES

if TYPE_CHECKING:
    from datetime import timedelta

    from hayata.agent import Agent
    from hayata.embedded_async import AsyncRuntime
    from hayata.guard_child import GuardChild

DRAIN_S = 5.0
"""How long running executions may go on when a ``with`` block is left."""

_START_MARGIN_S = 30.0
_LOG_LEVELS = ("debug", "info", "warning", "error")


class Server(Protocol):
    """What a runtime stands on: a guard that is our child, or everything inline."""

    def connect(self) -> Transport:
        """Open a connection."""
        ...

    def stop(self, drain_s: float, /) -> None:
        """End it, after at most ``drain_s`` seconds for what runs. Harmless when it has ended."""

    def why_gone(self) -> HayataError | None:
        """The error for calls when it has ended by itself; None while it lives."""


class Runtime(Client):
    """A running runtime, with the methods of `hayata.Client`.

    Leaving its ``with`` block lets running executions go on for 5 s, or not at all after an exception. What
    is then unfinished goes on when a runtime is started on the same data directory. ``async with`` gives an
    `AsyncRuntime` on the same runtime. In a forked copy of the process it is inert: closing it does nothing,
    calls raise.

    Attributes:
        data_dir: Where its store lives, absolute.
        pid: Process id of its guard; inline, of this process.
    """

    def __init__(self, server: Server, *, data_dir: str, socket: str, pid: int, inline: bool, cap: int) -> None:
        self._server = server
        self._owner = os.getpid()
        self._closing = False
        self.data_dir = data_dir
        self.pid = pid
        self.inline = inline
        super().__init__(socket, frame_cap_bytes=cap)
        _open.add(self)

    def close(self, drain: float = DRAIN_S) -> None:
        """End the runtime, and return when its processes have ended.

        Args:
            drain: Seconds that running executions are given to end.
        """
        self._closing = True
        try:
            super().close()
        finally:
            if self._owner == os.getpid():
                self._server.stop(drain)
                _open.discard(self)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(DRAIN_S if kind is None else 0.0)

    async def __aenter__(self) -> AsyncRuntime:
        from hayata.embedded_async import AsyncRuntime

        self._async = AsyncRuntime(self)
        return self._async

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._async.close(DRAIN_S if kind is None else 0.0)

    def __del__(self) -> None:
        if getattr(self, "_closing", True) or self._owner != os.getpid():
            return
        warnings.warn(f"{self!r} was never closed", ResourceWarning, stacklevel=2, source=self)
        self.close(0.0)

    def __repr__(self) -> str:
        return f"<Runtime in {self.data_dir}>"

    def _connect(self) -> Transport:
        return self._server.connect()

    def _check_open(self) -> None:
        if self._owner != os.getpid():
            raise error_for(
                "daemon_unavailable",
                "this is a forked copy of the process that started the runtime",
                hint="" if self.inline else f"hayata.Client({self.socket!r}) works here",
            )
        if self._closing:
            raise error_for("daemon_unavailable", "this runtime is closed")

    def _explain(self, error: HayataError) -> HayataError:
        if error.code != "daemon_unavailable" or self._owner != os.getpid():
            return error
        if self._closing:
            return error_for("daemon_unavailable", "this runtime is closed")
        return self._server.why_gone() or error


_open: weakref.WeakSet[Runtime] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for runtime in list(_open):
        runtime.close()


def start(
    agents: Agent | Iterable[Agent] | str,
    *,
    data_dir: str | os.PathLike[str] = ".hayata",
    inline: bool = False,
    log_level: Literal["debug", "info", "warning", "error"] = "warning",
    drain_timeout_s: float = 25.0,
    policy_timeout_s: float = 10.0,
    start_timeout_s: float = 60.0,
    node_retry_s: float = 60.0,
    hang_timeout_s: float = 10.0,
    stopped_timeout_s: float = 30.0,
    frame_cap_bytes: int = DEFAULT_CAP_BYTES,
    retention: str | float | timedelta | None = None,
) -> Runtime:
    """Start a runtime, and return when it serves.

    Agents that are a global of a module or script go there by reference, and are imported there anew; others
    (of a notebook, a prompt, a function) go by value. What user code prints appears where this process
    prints.

    Args:
        agents: An agent, several, or a reference: ``module:attr`` or ``path.py[:attr]``.
        data_dir: Where its store lives. One runtime at a time; what an earlier one left unfinished goes on.
        inline: Everything in this process and thread: for debuggers, coverage, tests, and other systems than
            Linux. The same semantics, without isolation.
        log_level: Least level of the runtime's own log lines.
        drain_timeout_s: How long ``stop()`` waits for running executions.
        policy_timeout_s: How long one evaluation of a decision policy may take.
        start_timeout_s: How long a worker may take to get ready, the app's import included.
        node_retry_s: How long a node that was given up rests before it is tried again.
        hang_timeout_s: How long a worker that runs no code of yours may be silent before it is replaced.
        stopped_timeout_s: How long a worker may be stopped (SIGSTOP) before it is killed.
        frame_cap_bytes: Largest message.
        retention: How long invocations are kept after their end: ``"30d"``, a timedelta or seconds; None: for ever.

    Raises:
        HayataError: ``agent_start_failed`` (details ``traceback``), ``invalid_definition``,
            ``data_dir_in_use``, ``permission_denied``, ``store_corrupt``, ``invalid_options``,
            ``unsupported_platform``, ``daemon_unavailable``.
    """
    loading.stop_if_loading()
    check_choice("log_level", log_level, _LOG_LEVELS)
    directory = _checked_directory(data_dir)
    cap_bytes = check_count("frame_cap_bytes", frame_cap_bytes, 1 << 16, (1 << 32) - 1)
    retention_s = None if retention is None else check_age("retention", retention)
    if check_flag("inline", inline):
        return _start_inline(agents, directory, cap_bytes, retention_s)
    if not sys.platform.startswith("linux"):
        raise error_for(
            "unsupported_platform",
            f"the runtime needs Linux, and this is {sys.platform}",
            hint="hayata.start(agent, inline=True) runs anywhere",
        )
    apps, value = _by_reference_or_value(agents)
    launch = m.Launch(
        apps=apps,
        data_dir=directory,
        socket=os.path.join(directory, "hayata.sock"),
        sys_path=[os.path.abspath(entry) for entry in sys.path if isinstance(entry, str)],
        cwd=os.getcwd(),
        argv=sys.argv,
        log_level=log_level,
        log_format="plain",
        drain_timeout_s=_checked_seconds("drain_timeout_s", drain_timeout_s, zero=True),
        policy_timeout_s=_checked_seconds("policy_timeout_s", policy_timeout_s),
        start_timeout_s=_checked_seconds("start_timeout_s", start_timeout_s),
        node_retry_s=_checked_seconds("node_retry_s", node_retry_s),
        hang_timeout_s=_checked_seconds("hang_timeout_s", hang_timeout_s),
        stopped_timeout_s=_checked_seconds("stopped_timeout_s", stopped_timeout_s),
        frame_cap_bytes=cap_bytes,
        retention_s=retention_s,
    )
    return _start_guard(launch, value)


def _start_guard(launch: m.Launch, value: bytes | None) -> Runtime:
    from hayata.guard_child import GuardChild

    guard = GuardChild(launch, value)
    try:
        guard.wait_serving(2 * launch.start_timeout_s + _START_MARGIN_S)
    except BaseException as error:
        guard.stop(0.0)
        if isinstance(error, HayataError) and error.code == "data_dir_in_use":
            _blame_ourselves(error, launch.data_dir)
        raise
    return Runtime(
        _Guarded(guard, launch.frame_cap_bytes),
        data_dir=launch.data_dir,
        socket=launch.socket,
        pid=guard.pid,
        inline=False,
        cap=launch.frame_cap_bytes,
    )


def _blame_ourselves(error: HayataError, data_dir: str) -> None:
    """In a notebook a cell that starts a runtime is soon run twice."""
    for runtime in list(_open):
        if runtime.data_dir == data_dir and runtime._owner == os.getpid():
            error.hint = "this process has a runtime there already: use it, or close() it first"


class _Guarded:
    """A `Server` in processes of its own."""

    def __init__(self, guard: GuardChild, cap_bytes: int) -> None:
        self._guard = guard
        self._cap = cap_bytes

    def connect(self) -> Transport:
        return SocketTransport(connect(self._guard.socket), self._cap)

    def stop(self, drain_s: float, /) -> None:
        self._guard.stop(drain_s)

    def why_gone(self) -> HayataError | None:
        return self._guard.why_gone()


# ----------------------------------------------------------------------------------------------------------
# Inline
# ----------------------------------------------------------------------------------------------------------


class InlineServer(Protocol):
    """What ``hayata_supervisor.inline.InlineServer(agents, data_dir)`` is: the runtime without processes.

    It does its work while somebody waits in `Transport.receive`, in his thread. Calls never overlap.
    """

    def connect(self) -> Transport:
        """Open a connection. Its ``receive`` runs what there is to run until it has a message to return."""
        ...

    def close(self, drain_s: float, /) -> None:
        """Let what runs end, at most ``drain_s`` seconds, and close the store."""


class _Inline:
    """A `Server` in this thread."""

    def __init__(self, server: InlineServer) -> None:
        self._server = server
        self._turn = threading.RLock()  # reentrant: a node function may use the runtime it runs in

    def connect(self) -> Transport:
        with self._turn:
            return _TakingTurns(self._server.connect(), self._turn)

    def stop(self, drain_s: float, /) -> None:
        with self._turn:
            self._server.close(drain_s)

    def why_gone(self) -> HayataError | None:
        return None


class _TakingTurns:
    """A `Transport` of a program with threads: while one waits, and so does the work, the others stand by."""

    def __init__(self, transport: Transport, turn: threading.RLock) -> None:
        self._transport = transport
        self._turn = turn

    def send(self, body: bytes, /) -> None:
        with self._turn:
            self._transport.send(body)

    def receive(self, timeout_s: float | None, /) -> bytes:
        began = time.monotonic()
        if not self._turn.acquire(timeout=-1 if timeout_s is None else min(timeout_s, threading.TIMEOUT_MAX)):
            raise TimeoutError
        try:
            left = None if timeout_s is None else max(0.0, timeout_s - (time.monotonic() - began))
            return self._transport.receive(left)
        finally:
            self._turn.release()

    def close(self) -> None:
        with self._turn:
            self._transport.close()


def _start_inline(
    agents: Agent | Iterable[Agent] | str, directory: str, cap_bytes: int, retention_s: float | None
) -> Runtime:
    # By name: what authors import must not depend on the runtime.
    module: Any = importlib.import_module("hayata_supervisor.inline")
    group = loading.load_app(absolute_reference(agents)) if isinstance(agents, str) else _listed(agents)
    made = module.InlineServer(group, directory, frame_cap_bytes=cap_bytes, retention_s=retention_s)
    server = cast("InlineServer", made)
    return Runtime(
        _Inline(server),
        data_dir=directory,
        socket=os.path.join(directory, "hayata.sock"),
        pid=os.getpid(),
        inline=True,
        cap=cap_bytes,
    )


# ----------------------------------------------------------------------------------------------------------
# What was given
# ----------------------------------------------------------------------------------------------------------


def _by_reference_or_value(agents: Agent | Iterable[Agent] | str) -> tuple[list[str], bytes | None]:
    if isinstance(agents, str):
        return [absolute_reference(agents)], None
    group = _listed(agents)
    references = loading.reference_of(group)
    return ([], loading.dump_value(group)) if references is None else (references, None)


def _listed(agents: Agent | Iterable[Agent]) -> list[Agent]:
    from hayata.agent import Agent

    group = [agents] if isinstance(agents, Agent) else list(agents)
    strangers = [agent for agent in group if not isinstance(agent, Agent)]
    if strangers or not group:
        what = repr(strangers[0])[:60] if strangers else "nothing"
        raise invalid(f"can't start {what}", "agents", "an Agent, several, or module:attr or path.py[:attr]")
    return group


def _checked_directory(path: str | os.PathLike[str]) -> str:
    text = os.fspath(path)
    if not isinstance(text, str) or not text or "\0" in text:
        raise invalid(f"data_dir can't be {path!r}", "data_dir")
    return os.path.abspath(os.path.expanduser(text))


def _checked_seconds(field: str, value: float, *, zero: bool = False) -> float:
    check_seconds(field, value)
    if value is None or value == FOREVER or (value == 0 and not zero):
        raise invalid(f"{field} can't be {value!r}", field, "seconds")
    return float(value)
