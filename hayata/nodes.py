"""`Node`: a node function and how it is run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, Literal, Never, TypeAlias, overload

from pydantic import InstanceOf

from hayata.callables import (
    arguments_problem,
    is_coroutine_function,
    is_generator_function,
    name_of,
    resolve,
    takes_context,
)
from hayata.errors import DefinitionError
from hayata.field_types import FieldType
from hayata.problems import (
    Count,
    Fields,
    MemoryBytes,
    Name,
    OpenFiles,
    Problems,
    Seconds,
    ShutdownTime,
    reserved,
)
from hayata.reducers import Edges, Reduce, ReduceFunction, edges_problem
from hayata.supervision import Probe, Rerun, RestartType, Retry, Shutdown

NodeFunction: TypeAlias = Callable[..., Any]
"""``fn(state, ctx)`` or ``fn(state)``, maybe ``async``; returns a mapping of updates."""

Lifespan: TypeAlias = Callable[[], AbstractContextManager[Any] | AbstractAsyncContextManager[Any]]
"""Makes a context manager, entered once in each edge worker; what it yields is ``ctx.deps``."""


class Node:
    """A node of an agent.

    Args:
        fn: The node function, or ``"pkg.mod:function"``.
        name: Name of the node; by default the function's, or the key under which the agent has it.
        input: Type of ``ctx.input``; what doesn't fit is ``invalid_node_input``.
        output: Type that each update must fit, a mapping type; extra keys are fine.
        concurrency: Most tasks at once; by default 4 or the number of cores, whichever is less; 64 for a
            coroutine.
        execution_timeout: Seconds for one execution, instead of the agent's.
        retry: For bodies that ended with a failure.
        interrupted: For bodies that were cut off: ``"uncertain"``, never run again by itself; `Rerun`; or
            `Probe`.
        isolation: ``"warm"``: an edge worker runs task after task; ``"fresh"``: each task has a new process.
        max_tasks: After this many tasks an edge worker is replaced; up to a tenth earlier, at random, so that
            not all of them are at once.
        memory_limit: Bytes of memory of an edge worker and of all that its tasks have started; beyond it they are
            killed, and the task is cut off with ``edge_crashed``, reason ``memory_limit`` (coroutines: all that
            run there). By default, in a container, what its limit leaves; elsewhere none.
        address_space_limit: Bytes of address space of an edge worker; beyond it allocations fail
            (``MemoryError``, or whatever a native library makes of it). Usually much more than the memory.
        cpu_limit: CPU seconds of one task and of all that it has started; beyond it they are killed, and the task
            is cut off with ``edge_crashed``, reason ``cpu_limit``. Not for coroutines.
        open_files: Most open files of an edge worker; beyond it opening fails with ``EMFILE``.
        restart: When the node's worker is started again after it has ended: ``"permanent"``, always;
            ``"transient"``, if it ended abnormally (not with exit code 0 or SIGTERM); ``"temporary"``, never. A node
            that is not started again is ``stopped``, and fails its tasks with ``node_unavailable``.
        shutdown: Seconds that edge workers have to end what they run when the node is ended; ``"brutal_kill"``:
            none; ``"infinity"``: as long as it takes.
        lifespan: Instead of the agent's.
        edges: Run the function once for each of these values, side by side, with the value as ``ctx.input``: a
            list, or a pure function of the node's input that returns one; up to 1,000. Each edge is a task of
            its own: what is said above of executions and tasks holds for each of them. ``input`` is the type of
            a value then, and ``output`` that of what `reduce` returns.
        reduce: Makes the node's updates of those of its edges: a function, or `Reduce`.

    Raises:
        DefinitionError: ``invalid_definition``; all problems at once.

    Attributes:
        fn: The function itself.
        is_async: Whether it is a coroutine function.
        takes_context: Whether it takes ``ctx``.
    """

    def __init__(
        self,
        fn: NodeFunction | str,
        *,
        name: str | None = None,
        input: Any = None,
        output: Any = None,
        concurrency: int | None = None,
        execution_timeout: float | None = None,
        retry: Retry | None = None,
        interrupted: Literal["uncertain"] | Rerun | Probe = "uncertain",
        isolation: Literal["warm", "fresh"] = "warm",
        max_tasks: int = 1000,
        memory_limit: int | None = None,
        address_space_limit: int | None = None,
        cpu_limit: float | None = None,
        open_files: int | None = None,
        restart: RestartType = "permanent",
        shutdown: Shutdown = 5.0,
        lifespan: Lifespan | None = None,
        edges: Edges | None = None,
        reduce: ReduceFunction | Reduce | str | None = None,
        **unknown: Never,
    ) -> None:
        problems = Problems()
        self.fn = _function(fn, problems)
        self.is_async = is_coroutine_function(self.fn)
        self.takes_context = callable(self.fn) and takes_context(self.fn)
        self.explicit_name = name
        self.name = name if name is not None else name_of(self.fn) or ""
        self.input = input
        self.output = output
        self.concurrency = concurrency
        self.execution_timeout = execution_timeout
        self.retry = retry
        self.interrupted = interrupted
        self.isolation = isolation
        self.max_tasks = max_tasks
        self.memory_limit = memory_limit
        self.address_space_limit = address_space_limit
        self.cpu_limit = cpu_limit
        self.open_files = open_files
        self.restart = restart
        self.shutdown = shutdown
        self.lifespan = lifespan
        self.edges = edges
        self.reduce = _as_reduce(reduce, problems)
        simple = {key: value for key, value in vars(self).items() if key in _NodeFields.model_fields}
        problems.check(_NodeFields, {**simple, "name": name, **unknown})
        self._check(problems)
        problems.raise_any(f"node {self.name!r}" if self.name else "node")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the node function itself, as in a unit test."""
        return self.fn(*args, **kwargs)

    def __repr__(self) -> str:
        return f"Node({self.name!r})"

    def _check(self, problems: Problems) -> None:
        if self.explicit_name is not None and isinstance(self.explicit_name, str):
            reason = reserved(self.explicit_name)
            if reason:
                problems.add("name", reason)
        if self.is_async and self.isolation == "fresh":
            problems.add("isolation", "a coroutine node shares its process: 'fresh' is for functions")
        if self.is_async and self.cpu_limit is not None:
            problems.add("cpu_limit", "coroutines share a process: nobody can tell which of them used the CPU")
        if isinstance(self.interrupted, Probe) and self.interrupted.is_async and not self.is_async:
            problems.add("interrupted", "a coroutine function probes a coroutine node only: nothing awaits it here")
        if (self.edges is None) is not (self.reduce is None):
            problems.add("reduce" if self.reduce is None else "edges", "edges and reduce need each other")
        problem = None if self.edges is None else edges_problem(self.edges)
        if problem:
            problems.add("edges", problem)
        problem = lifespan_problem(self.lifespan)
        if problem:
            problems.add("lifespan", problem)
        for field, annotation in (("input", self.input), ("output", self.output)):
            if annotation is not None:
                try:
                    FieldType(annotation)
                except TypeError as error:
                    problems.add(field, str(error))


class _NodeFields(Fields):
    name: Name | None
    concurrency: Count | None
    execution_timeout: Seconds | None
    retry: InstanceOf[Retry] | None
    interrupted: Literal["uncertain"] | InstanceOf[Rerun] | InstanceOf[Probe]
    isolation: Literal["warm", "fresh"]
    max_tasks: Count
    memory_limit: MemoryBytes | None
    address_space_limit: MemoryBytes | None
    cpu_limit: Seconds | None
    open_files: OpenFiles | None
    restart: RestartType
    shutdown: ShutdownTime


@overload
def node(fn: NodeFunction, /) -> Node: ...


@overload
def node(
    *,
    name: str | None = None,
    input: Any = None,
    output: Any = None,
    concurrency: int | None = None,
    execution_timeout: float | None = None,
    retry: Retry | None = None,
    interrupted: Literal["uncertain"] | Rerun | Probe = "uncertain",
    isolation: Literal["warm", "fresh"] = "warm",
    max_tasks: int = 1000,
    memory_limit: int | None = None,
    address_space_limit: int | None = None,
    cpu_limit: float | None = None,
    open_files: int | None = None,
    restart: RestartType = "permanent",
    shutdown: Shutdown = 5.0,
    lifespan: Lifespan | None = None,
    edges: Edges | None = None,
    reduce: ReduceFunction | Reduce | str | None = None,
) -> Callable[[NodeFunction], Node]: ...


def node(fn: NodeFunction | None = None, /, **options: Any) -> Node | Callable[[NodeFunction], Node]:
    """Make a `Node` of the function below: ``@node`` or ``@node(concurrency=2)``, options as for `Node`."""
    if fn is not None:
        return Node(fn, **options)
    return lambda decorated: Node(decorated, **options)


def as_node(given: Any, key: str | None) -> Node:
    """Make a `Node` of what an agent was given, under the name ``key`` if it is in a mapping.

    Raises:
        DefinitionError: It can't be one.
    """
    if not isinstance(given, Node):
        return Node(given, name=key)
    if key is None or key == given.name:
        return given
    renamed = Node.__new__(Node)
    renamed.__dict__.update(given.__dict__, name=key)
    return renamed


def lifespan_problem(lifespan: Any) -> str | None:
    """Why this can't be a lifespan; None if it can."""
    if lifespan is None:
        return None
    if not callable(lifespan):
        return "is not a function that makes a context manager"
    if is_generator_function(lifespan) or is_coroutine_function(lifespan):
        return "is not a context manager: decorate it with contextlib.contextmanager or asynccontextmanager"
    return arguments_problem(lifespan, 0, 0)


def _as_reduce(reduce: Any, problems: Problems) -> Reduce | None:
    if reduce is None or isinstance(reduce, Reduce):
        return reduce
    try:
        return Reduce(reduce)
    except DefinitionError as error:
        for problem in error.details["problems"]:
            problems.add("reduce", problem["message"])
        return Reduce(lambda results: {})  # not None: that would be another problem


def _function(fn: Any, problems: Problems) -> Any:
    if isinstance(fn, str):
        try:
            fn = resolve(fn)
        except ValueError as error:
            problems.add("fn", str(error))
            return None
    if isinstance(fn, Node):
        problems.add("fn", "is a Node already")
    elif not callable(fn) or isinstance(fn, type):
        problems.add("fn", f"{fn!r} is not a function")
    elif is_generator_function(fn):
        problems.add("fn", "is a generator; partial results go through ctx.stream, the updates are returned")
    else:
        problem = arguments_problem(fn, 1, 2)
        if problem:
            problems.add("fn", f"{problem}: (state) or (state, ctx)")
    return fn
