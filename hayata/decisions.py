"""What a decision policy answers: run nodes, finish, or fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from hayata.nodes import Node

NodeReference: TypeAlias = "str | Node | Callable[..., Any]"
"""A node of the agent: its name, the `Node`, or the function that it runs."""


@dataclass(frozen=True, slots=True)
class Next:
    """Run one node, or several in parallel.

    Attributes:
        nodes: One node; or a list of distinct nodes, which is a parallel transition also when it names only
            one. Branches get the same input and state; their updates are not merged but collected, in this
            order, as ``parallel_results``.
        input: What the nodes get as ``ctx.input``.
    """

    nodes: NodeReference | Sequence[NodeReference]
    input: Any = None


@dataclass(frozen=True, slots=True)
class Finish:
    """End the invocation as completed with this result."""

    result: Any = None


@dataclass(frozen=True, slots=True)
class Fail:
    """End the invocation as failed, code ``policy_failed``; ``reason`` is any storable value, in
    ``details.reason``.
    """

    reason: Any = None


Decision: TypeAlias = Next | Finish | Fail
