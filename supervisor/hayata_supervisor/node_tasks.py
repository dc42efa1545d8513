"""A node's tasks: what waits, what runs, when each is due, and what is said of one that was cut off."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from hayata.messages import ErrorInfo, encode
from hayata_supervisor.process import clock
from hayata_supervisor.process.pidfd import Exit
from hayata_supervisor.process.reactor import Reactor, Timer

if TYPE_CHECKING:
    from hayata_supervisor.node_edge import Edge


class Task:
    """One `RunTask` or `ReduceTask` in this node.

    Attributes:
        execution_id: Its id.
        timeout_s: Seconds from the hand-over to an edge.
        reduces: It is a reduction, for a process of its own.
        body: The frame, until it is handed over.
        edge: Who has it.
        due: Monotonic seconds of its deadline.
        verdict: Why it is being cut off, once it is.
        cpu_before_s: CPU seconds that its edge had used when it was handed over, if they are counted.
    """

    __slots__ = ("body", "cpu_before_s", "due", "edge", "execution_id", "reduces", "timeout_s", "verdict")

    def __init__(self, execution_id: str, timeout_s: float | None, body: bytes, *, reduces: bool = False) -> None:
        self.execution_id = execution_id
        self.timeout_s = timeout_s
        self.reduces = reduces
        self.body: bytes | None = body
        self.edge: Edge | None = None
        self.due: float | None = None
        self.verdict: ErrorInfo | None = None
        self.cpu_before_s: float | None = None


def interruption(code: str, message: str, reason: str, *, hint: str = "", **details: Any) -> ErrorInfo:
    """Say why a body was cut off. Its details always hold ``interrupted: true`` and the reason in a word."""
    data = {"interrupted": True, "reason": reason, **details}
    return ErrorInfo(code, message, hint, msgspec.Raw(encode(data)))


def timed_out(timeout_s: float) -> ErrorInfo:
    """The deadline has passed."""
    return interruption(
        "execution_timeout",
        f"the execution took longer than {timeout_s:g} s and was ended",
        "timeout",
        timeout_s=timeout_s,
    )


def told_to_end(reason: str) -> ErrorInfo:
    """The supervisor sent `KillTask`."""
    return interruption("cancelled", f"the execution was ended: {reason}", reason)


_NODE_ENDED = {
    "sibling_restart": "its node was ended because another worker of the agent had, and they are restarted together",
    "agent_failed": "its node was ended because the whole agent was given up",
}


def never_ran(reason: str) -> ErrorInfo:
    """The node stops, and no edge had the task."""
    return interruption("node_unavailable", "the node stopped before the execution began", reason)


class Death(NamedTuple):
    """What a node knows of an edge's end.

    Attributes:
        exit: How it ended.
        killed: Why the node killed it; empty when it didn't.
        neighbour: It was killed for another task's sake.
        stopping: Why the node is being stopped, in a word; empty when it isn't.
        out_of_memory: The kernel has killed for memory since the node last looked.
        reducer: It was a reducer.
    """

    exit: Exit
    killed: str
    neighbour: bool
    stopping: str
    out_of_memory: bool
    reducer: bool = False


def edge_lost(death: Death) -> ErrorInfo:
    """The edge died, by itself or by our hand, and not on account of the task that this is said of."""
    code, who = ("reducer_failed", "reducer") if death.reducer else ("edge_crashed", "edge worker")
    details: dict[str, Any] = {"exit_code": death.exit.code}
    if death.exit.signal is not None:
        details = {"signal": death.exit.signal_name}
    if death.neighbour:
        message = "its edge worker was killed because another execution in it did not end"
        return interruption(code, message, "neighbour", **details)
    if death.stopping in _NODE_ENDED:
        return interruption("node_crashed", _NODE_ENDED[death.stopping], death.stopping, **details)
    if death.stopping:
        return interruption(code, "its node is being stopped", "shutdown", **details)
    if death.killed and death.exit.signal == signal.SIGKILL:
        message = f"its {who} was killed: {death.killed}"
        return interruption(code, message, death.killed, **details)
    hint = ""
    if death.exit.signal == signal.SIGKILL:
        if death.out_of_memory:
            message = f"its {who} was killed by the kernel, which was out of memory"
            hint = "give the node a memory_limit below what there is: then only tasks that are over it die"
            return interruption(code, message, "out_of_memory", hint=hint, **details)
        hint = "if nobody sent it, the kernel may have: see `dmesg`"
    return interruption(code, f"its {who} ended: {death.exit}", "crash", hint=hint, **details)


class Deadlines:
    """The due times of the tasks in hand, on one timer for all of them.

    A timer for each task would be set and thrown away thousands of times a second; a node has few tasks at
    once, so looking through them when the earliest deadline has passed costs less.

    Args:
        reactor: The loop.
        tasks: The tasks in hand; those without a due time are skipped.
        overdue: Called for each task whose time has come; its due time is forgotten.
    """

    def __init__(self, reactor: Reactor, tasks: Mapping[str, Task], overdue: Callable[[Task], None]) -> None:
        self._reactor = reactor
        self._tasks = tasks
        self._overdue = overdue
        self._timer: Timer | None = None
        self._due = math.inf

    def start(self, task: Task, now: float) -> None:
        """Start ``task``'s clock."""
        if task.timeout_s is not None:
            task.due = now + task.timeout_s
            if task.due < self._due:
                self._arm(task.due)

    def _arm(self, due: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._due = due
        self._timer = self._reactor.call_at(due, self._look)

    def _look(self) -> None:
        self._timer = None
        self._due = math.inf
        now = clock.monotonic()
        for task in list(self._tasks.values()):
            if task.due is not None and task.due <= now:
                task.due = None
                self._overdue(task)
        rest = [task.due for task in self._tasks.values() if task.due is not None]
        if rest:
            self._arm(min(rest))
