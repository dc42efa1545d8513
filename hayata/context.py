"""What node functions and decision policies receive. All of it is read-only."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Generic, overload

if TYPE_CHECKING:
    from structlog.stdlib import BoundLogger
    from typing_extensions import (
        TypeVar,
    )  # not typing's: a default lets `Context` stand alone under mypy --strict

    from hayata.substeps import Substeps

    Deps = TypeVar("Deps", default=Any)
    State = TypeVar("State", default=Any)
else:
    from typing import TypeVar

    Deps = TypeVar("Deps")
    State = TypeVar("State")

T = TypeVar("T")


class _ReadOnly:
    """Attributes are set once, by ``_fill``."""

    __slots__ = ()

    def _fill(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__}.{name} is read-only")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__}.{name} is read-only")

    def __repr__(self) -> str:
        names = [name for kind in type(self).__mro__ for name in getattr(kind, "__slots__", ()) if name[0] != "_"]
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"


class _TaskContext(_ReadOnly, Generic[Deps]):
    """What `Context` and `AsyncContext` share."""

    __slots__ = (
        "_log",
        "_stream",
        "_substeps",
        "agent_id",
        "attempt",
        "deadline",
        "deps",
        "edge",
        "execution_id",
        "idempotency_key",
        "input",
        "invocation_id",
        "node",
        "session",
    )

    input: Any
    """What the policy gave to `Next`; of a node with edges: this edge's value."""
    deps: Deps
    """What the lifespan yielded; None without one."""
    agent_id: str
    invocation_id: str
    execution_id: str
    """Id of this attempt."""
    node: str
    """Name of this node."""
    edge: int | None
    """Number of this edge, from 0; None for a node without edges."""
    session: str | None
    attempt: int
    """1 for the first."""
    idempotency_key: str
    """The same for every attempt of this task, also after restarts: give it to services that deduplicate."""
    deadline: float | None
    """When the execution times out, in seconds of ``time.monotonic()`` (fits ``asyncio.timeout_at``)."""

    _log: BoundLogger | None
    _stream: Callable[[Mapping[Any, Any]], Any]
    _substeps: Substeps

    @property
    def log(self) -> BoundLogger:
        """A structlog logger bound to the ids; it logs through the stdlib logger ``hayata.task``."""
        if self._log is None:
            from hayata.task_log import task_logger

            log = task_logger(
                agent_id=self.agent_id,
                invocation_id=self.invocation_id,
                execution_id=self.execution_id,
                node_id=self.node,
                attempt=self.attempt,
            )
            object.__setattr__(self, "_log", log)
            return log
        return self._log


class Context(_TaskContext[Deps]):
    """Second argument of a node function; ``Context[Deps]`` types `deps`."""

    __slots__ = ()

    def stream(self, chunk: Mapping[Any, Any]) -> None:
        """Publish a partial result. Does nothing when nobody asked for a stream.

        Returns when the supervisor has numbered the chunk; it doesn't change the state.

        Raises:
            HayataError: ``invalid_partial_result`` (not a mapping), ``unserializable_value``,
                ``execution_not_active`` (the task is over).
        """
        self._stream(chunk)

    def step(self, fn: Callable[..., T], *args: Any, key: str | None = None) -> T:
        """Run ``fn(*args)`` as a durable sub-step, and return its result.

        The result is stored before this returns. When the node runs again (`Retry`, `Rerun`, a probe's
        `NOT_DONE`, ``reconcile(retry=True)``), it is given instead of a call. What ``fn`` raises passes, and
        nothing is stored. A sub-step that is cut off in its middle is run again if its node is. The result
        comes back as it was stored: a pydantic model as a dict.

        Args:
            fn: A plain function.
            args: Its arguments. They are not stored, nor compared.
            key: What the sub-step is known by, up to 512 characters. Without one that is its position among
                those without one, and these must be called in the same order in every attempt.

        Raises:
            HayataError: ``step_mismatch`` (an earlier attempt called another function at this position),
                ``unserializable_value``, ``frame_too_large``, ``execution_not_active`` (the task is over),
                ``invalid_options`` (in a probe, say).
        """
        value: T = self._substeps.run(fn, args, key)
        return value


class AsyncContext(_TaskContext[Deps]):
    """Second argument of a coroutine node function."""

    __slots__ = ()

    async def stream(self, chunk: Mapping[Any, Any]) -> None:
        """Like `Context.stream`, to be awaited."""
        sent: Awaitable[None] = self._stream(chunk)
        await sent

    @overload
    def step(
        self, fn: Callable[..., Coroutine[Any, Any, T]], *args: Any, key: str | None = None
    ) -> Coroutine[Any, Any, T]: ...
    @overload
    def step(self, fn: Callable[..., T], *args: Any, key: str | None = None) -> Coroutine[Any, Any, T]: ...
    def step(self, fn: Callable[..., Any], *args: Any, key: str | None = None) -> Coroutine[Any, Any, Any]:
        """Like `Context.step`, to be awaited; ``fn`` may be a coroutine function.

        Its position is that of the call: ``asyncio.gather(ctx.step(a), ctx.step(b))`` is the same in every
        attempt.
        """
        return self._substeps.run_async(fn, args, key)


class ReduceContext(_ReadOnly):
    """Second argument of a reduce function."""

    __slots__ = (
        "agent_id",
        "attempt",
        "deadline",
        "error_count",
        "errors",
        "execution_id",
        "expected_edges",
        "input",
        "invocation_id",
        "node",
        "pending_edges",
        "result_count",
        "session",
    )

    input: Any
    """What the policy gave to `Next`."""
    expected_edges: int
    """How many edges there are: the length of the results."""
    result_count: int
    """How many have a result."""
    error_count: int
    """How many have failed; only `Reduce` with ``partial=True`` knows failures and pending edges."""
    pending_edges: int
    """How many were not done when the timeout came."""
    errors: dict[int, Any]
    """Number of the edge → its `HayataError`, for those that have failed."""
    agent_id: str
    invocation_id: str
    execution_id: str
    """Id of this attempt of the reduction."""
    node: str
    session: str | None
    attempt: int
    """1, or 2 if the first was cut off."""
    deadline: float | None
    """When the reduction times out, in seconds of ``time.monotonic()``."""


class PolicyContext(_ReadOnly, Generic[State]):
    """What a decision policy decides by; ``PolicyContext[State]`` types `state`."""

    __slots__ = (
        "agent_id",
        "failure",
        "input",
        "invocation_id",
        "last",
        "max_steps",
        "now",
        "parallel_results",
        "session",
        "state",
        "step",
    )

    agent_id: str
    invocation_id: str
    state: State
    """The shared state, as the agent's ``state_type``."""
    input: Any
    """The invocation's input."""
    step: int
    """Executions scheduled so far; 0 at the start."""
    max_steps: int
    parallel_results: list[dict[str, Any]] | None
    """The updates of the last parallel transition in the order asked for; None before one and after the next
    `Next`.
    """
    last: str | tuple[str, ...] | None
    """What completed last: a name, the names of a parallel transition, or None at the start."""
    failure: Any
    """The node's `HayataError`, for an agent with ``on_failure="policy"``."""
    session: str | None
    now: float
    """Seconds since the epoch, recorded: a policy that needs the time takes it from here and stays pure."""
