"""Limits as arithmetic: what a container leaves to one edge, and when an edge has run enough tasks."""

from __future__ import annotations

_OF_CONTAINER = 0.9
_LEAST_OF_CONTAINER = 0.5


def container_default(container_bytes: int | None, machine_bytes: int, used_bytes: int) -> int | None:
    """The memory limit of an edge whose node names none: so much that the kernel has no reason to kill first.

    Nine tenths of the container's limit, less what the rest of it (supervisor, guard, forkserver and whatever
    else is there) holds when the node starts. Never less than half of the container's limit: what happens to be
    held at that moment must not make every task fail from then on.

    Args:
        container_bytes: The limit of the control group; None without one.
        machine_bytes: All memory of the machine. A limit above it limits nothing.
        used_bytes: What the group holds and the kernel can't drop.

    Returns:
        Bytes, or None where only the machine's memory is the limit.
    """
    if container_bytes is None or container_bytes >= machine_bytes:
        return None
    left = int(_OF_CONTAINER * container_bytes) - used_bytes
    return max(left, int(_LEAST_OF_CONTAINER * container_bytes), 1)


def tasks_of_edge(max_tasks: int, drawn: int) -> int:
    """How many tasks one edge runs: ``max_tasks``, less up to a tenth of it.

    Without the spread, edges that were started together would be replaced together, and for the length of a
    fork and a lifespan the node would have none.

    Args:
        max_tasks: The node's.
        drawn: A random number, not negative.
    """
    return max(1, max_tasks - drawn % (max_tasks // 10 + 1))
