"""`Reduce`: how the results of a node's edges become one; and what the edges of a node may be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from hayata.callables import arguments_problem, is_coroutine_function, is_generator_function, resolve, takes_context
from hayata.problems import Fields, Flag, Problems, Seconds

MOST_EDGES = 1000
"""Of one execution."""

Edges: TypeAlias = "list[Any] | tuple[Any, ...] | Callable[[Any], list[Any] | tuple[Any, ...]]"
ReduceFunction: TypeAlias = Callable[..., Mapping[str, Any]]
"""``fn(results)`` or ``fn(results, ctx)``; returns a mapping of updates."""


@dataclass(frozen=True, slots=True)
class Reduce:
    """Make one result of those of a node's edges.

    The function runs in a process of its own when all results are stored. It must be pure: one that is cut off is
    run once more, with the same results.

    Attributes:
        fn: ``fn(results)`` or ``fn(results, ctx)``, or ``"pkg.mod:function"``; ``results`` are the updates of the
            edges in the order of the edges, ``ctx`` is a `ReduceContext`. It returns the node's updates.
        timeout: Seconds that the edges have, from the decision that the node runs. Time in which the invocation
            waits for a person doesn't count, time in which the runtime is down does.
        partial: Do without edges that have failed for good, or were not done in time: their places in ``results``
            are None. Otherwise the node fails with them.

    Raises:
        DefinitionError: ``invalid_definition``.
    """

    fn: ReduceFunction | str
    timeout: float | None = None
    partial: bool = False

    def __post_init__(self) -> None:
        problems = Problems()
        problems.check(_ReduceFields, {"timeout": self.timeout, "partial": self.partial})
        if isinstance(self.fn, str):
            try:
                object.__setattr__(self, "fn", resolve(self.fn))
            except ValueError as error:
                problems.add("fn", str(error))
        problem = None if isinstance(self.fn, str) else _function_problem(self.fn)
        if problem:
            problems.add("fn", problem)
        problems.raise_any("Reduce")

    def call(self, results: list[Any], context: Any) -> Any:
        """Call the function."""
        assert callable(self.fn)
        return self.fn(results, context) if takes_context(self.fn) else self.fn(results)


class _ReduceFields(Fields):
    timeout: Seconds | None
    partial: Flag


def _function_problem(fn: Any) -> str | None:
    if not callable(fn) or isinstance(fn, type):
        return f"{fn!r} is not a function"
    if is_generator_function(fn) or is_coroutine_function(fn):
        return "must be a plain function: it is given the results, and returns one"
    problem = arguments_problem(fn, 1, 2)
    return f"{problem}: (results) or (results, ctx)" if problem else None


def edges_problem(edges: Any) -> str | None:
    """Why a node can't have these edges; None if it can."""
    if isinstance(edges, list | tuple):
        return f"has {len(edges)} values, at most {MOST_EDGES} are allowed" if len(edges) > MOST_EDGES else None
    if not callable(edges) or isinstance(edges, type):
        return "is neither a list of values nor a function of the node's input"
    if is_generator_function(edges) or is_coroutine_function(edges):
        return "must be a plain function that returns a list"
    problem = arguments_problem(edges, 1, 1)
    return f"{problem}: (input)" if problem else None
