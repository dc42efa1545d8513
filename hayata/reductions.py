"""The edges of a decision, in the agent worker, and their reduction, in a process of its own.

As in `hayata.calls`: whatever users' code does, a message comes out.
"""

from __future__ import annotations

from typing import Any

import msgspec

from hayata import messages as m
from hayata.agent import Agent
from hayata.context import ReduceContext
from hayata.error_info import error_from, error_info, exception_error
from hayata.errors import HayataError, error_for
from hayata.nodes import Node
from hayata.reducers import MOST_EDGES
from hayata.updates import checked, shown
from hayata.values import decode, decode_mapping, encode


def edges_of(agent: Agent, names: list[str], given: m.Value) -> dict[str, list[m.Value]]:
    """The values of the edges of those of these nodes that have some, for this input.

    Raises:
        HayataError: ``invalid_edges``, ``unserializable_value``.
    """
    return {name: _values(agent, node, given) for name in names if (node := agent.nodes[name]).edges is not None}


def _values(agent: Agent, node: Node, given: m.Value) -> list[m.Value]:
    values: Any = node.edges
    if callable(values):
        try:
            values = values(decode(given))
        except BaseException as error:  # noqa: BLE001 - SystemExit from users' code is a failure like any other
            raise exception_error("invalid_edges", error, f"the edges of node {node.name} could not be told") from None
    if not isinstance(values, list | tuple):
        raise _invalid(
            node, f"the edges of node {node.name} are {shown(values)}, not a list", "return a list of values"
        )
    if len(values) > MOST_EDGES:
        hint = "give an edge several things to do"
        raise _invalid(node, f"node {node.name} has {len(values)} edges, at most {MOST_EDGES} are allowed", hint)
    return [
        msgspec.Raw(encode(value, f"{node.name}.edges[{number}]", agent.types.declared))
        for number, value in enumerate(values)
    ]


def _invalid(node: Node, message: str, hint: str) -> HayataError:
    return error_for("invalid_edges", message, details={"path": f"{node.name}.edges", "node": node.name}, hint=hint)


def reduce(
    agent: Agent, node_name: str, task: m.ReduceTask, worker: str, deadline: float | None
) -> m.TaskCompleted | m.TaskFailed:
    """Call a node's reduce function with the results of its edges.

    Args:
        agent: The agent.
        node_name: One of its nodes.
        task: What to reduce.
        worker: Id of the process, for the answer.
        deadline: End of the reduction, seconds of ``time.monotonic()``.
    """
    node = agent.nodes[node_name]
    try:
        update = checked(agent, node, _called(agent, node, task, deadline), parallel=task.parallel)
        return m.TaskCompleted(task.execution_id, worker, update)
    except HayataError as error:
        failure = error
    except Exception as error:  # noqa: BLE001 - reading the result may call users' code
        failure = exception_error("invalid_node_result", error)
    return m.TaskFailed(task.execution_id, worker, error_info(failure), False)


def _called(agent: Agent, node: Node, task: m.ReduceTask, deadline: float | None) -> Any:
    """What the function returned.

    Raises:
        HayataError: ``reducer_failed``.
    """
    if node.reduce is None:  # after a reload
        raise error_for("reducer_failed", f"node {node.name} has no reduce function any more", details=counts_of(task))
    context: ReduceContext = ReduceContext()
    context._fill(
        input=decode(task.input),
        agent_id=agent.id,
        invocation_id=task.invocation_id,
        execution_id=task.execution_id,
        node=node.name,
        session=task.session,
        attempt=task.attempt,
        deadline=deadline,
        errors={edge: error_from(error) for edge, error in task.errors.items()},
        **counts_of(task),
    )
    results = [None if each is None else agent.types.read_branch(decode_mapping(each)) for each in task.results]
    try:
        return node.reduce.call(results, context)
    except BaseException as error:  # noqa: BLE001 - SystemExit and KeyboardInterrupt are failures like any other
        failed = exception_error("reducer_failed", error)
        failed.details.update(counts_of(task))
        raise failed from None


def counts_of(task: m.ReduceTask) -> dict[str, int]:
    """How many edges there are, and what became of them."""
    expected, errors = len(task.results), len(task.errors)
    results = sum(each is not None for each in task.results)
    return {
        "expected_edges": expected,
        "result_count": results,
        "error_count": errors,
        "pending_edges": expected - results - errors,
    }
