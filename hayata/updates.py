"""What a node returned → an encoded update, or why it can't be one.

What a person reconciles with is held to the same rules, in the agent worker.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from hayata import messages as m
from hayata.agent import Agent
from hayata.error_info import error_info, exception_info
from hayata.errors import HayataError, error_for
from hayata.field_types import Unfit, field_type
from hayata.nodes import Node
from hayata.values import decode, decode_mapping


def check_update(agent: Agent, message: m.CheckUpdate) -> m.UpdateChecked:
    """Check whether a value could be the result of a node or of an edge. Never raises an `Exception`."""
    try:
        node = agent.nodes.get(message.node)
        if node is None:
            raise error_for("unknown_node", f"agent {agent.id} has no node {message.node!r}")
        update = checked(agent, node, decode(message.update), parallel=message.parallel, edge=message.edge)
        return m.UpdateChecked(message.check, update, None)
    except HayataError as error:
        return m.UpdateChecked(message.check, None, error_info(error))
    except Exception as error:  # noqa: BLE001 - validators are users' code
        return m.UpdateChecked(message.check, None, exception_info("invalid_node_result", error))


def checked(agent: Agent, node: Node, result: object, *, parallel: bool = False, edge: bool = False) -> m.Update:
    """Encode what a node function or a reduction returned.

    Args:
        agent: The agent.
        node: Its node.
        result: What was returned.
        parallel: It is a branch's, and doesn't join the state: it need not fit its type.
        edge: It is one edge's, for the reduction alone: nor need it be the node's output.

    Raises:
        HayataError: ``invalid_node_result``, ``invalid_state``, ``unserializable_value``.
    """
    if inspect.iscoroutine(result):
        result.close()
    if not isinstance(result, Mapping):
        raise error_for(
            "invalid_node_result",
            f"node {node.name} returned {shown(result)}, not a mapping of updates",
            details={"path": "result", "type": type(result).__name__},
            hint="return a dict with the keys of the state that change; {} if none does",
        )
    update = agent.types.encode_branch(result) if parallel or edge else agent.types.check_update(result)
    if node.output is not None and not edge:
        try:
            field_type(node.output).read(decode_mapping(update))
        except Unfit as error:
            raise error_for(
                "invalid_node_result",
                f"node {node.name} returned what its output type doesn't allow: {error}",
                details={"path": f"result{error.where}", "message": error.why},
            ) from None
    return update


def shown(value: object) -> str:
    """A value in a message: short, whatever its ``__repr__`` does."""
    try:
        text = value if isinstance(value, str) else repr(value)
    except Exception:  # noqa: BLE001 - a user's __repr__
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 200 else f"{text[:197]}..."
