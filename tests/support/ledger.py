"""The outside ledger of the crash tests: what the product says is compared with what really happened.

The bodies of `tests.support.apps.crash` write it. The invariants are numbered as in the recovery design:

1. What was acknowledged exists.
2. The body of a completed task never starts again, and its result is the same bytes.
3. The body of a task that was running starts again only if it may, in its bound, never beside the old one.
4. The running mark was durable before the body's first line.
5. Parallel results are in the order of the request.
6. Shared state is the fold of the committed updates.
7. Events: each number once or in exactly one gap; one terminal event, the last.
8. A terminal status never changes.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from hayata import Client
from hayata.client import Invocation
from hayata.client.records import TERMINAL, Event, Task
from tests.support.eventually import eventually

TERMINAL_EVENTS = {"invocation_completed", "invocation_failed", "invocation_cancelled"}


class Ledger:
    """What the bodies have written so far."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def lines(self, what: str | None = None, **wanted: object) -> list[dict]:
        """The lines of that kind whose fields are as wanted. A line that is being written is left out."""
        try:
            text = self.path.read_text()
        except FileNotFoundError:
            return []
        found = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return [
            line
            for line in found
            if what in (None, line["what"]) and all(line.get(name) == value for name, value in wanted.items())
        ]

    def size(self) -> int:
        """How many bytes there are; a line has about 250."""
        return self.path.stat().st_size if self.path.exists() else 0

    def wait(self, what: str, **wanted: object) -> dict:
        """Wait for a line, and return it."""
        return eventually(lambda: self.lines(what, **wanted), f"ledger line {what} {wanted}")[0]

    def attempts(self, invocation: str, node: str) -> list[int]:
        """The attempts of this node's bodies that have started, in the order of their starts."""
        return [line["attempt"] for line in self.lines("start", invocation=invocation, node=node)]


def audit(
    client: Client,
    ledger: Ledger,
    acknowledged: Iterable[str],
    *,
    reruns: Mapping[str, int],
    seen: Mapping[str, tuple[str, object]] | None = None,
) -> dict[str, list[Task]]:
    """Check the invariants of all these invocations. Nothing may run any more.

    Args:
        client: Asks the product.
        ledger: Knows what happened.
        acknowledged: Ids of the invocations whose `run` has returned.
        reruns: Node → most attempts, for the nodes that say `Rerun`.
        seen: Invocation → a terminal status and result that a client was told before.

    Returns:
        Invocation → its tasks.
    """
    assert not ledger.lines("overlap")
    bodies: dict[str, dict[str, list[dict]]] = {"start": defaultdict(list), "end": defaultdict(list)}
    for line in ledger.lines():
        if line["what"] in bodies:
            bodies[line["what"]][line["invocation"]].append(line)
    found = {}
    for id in acknowledged:
        invocation = client.invocation(id)  # 1: or it raises
        found[id] = tasks = invocation.tasks()
        check_bodies(tasks, bodies["start"][id], bodies["end"][id], reruns)
        check_state(invocation, tasks)
        check_events(list(invocation.events(until="now")), invocation.record.status)
        if seen and id in seen:
            assert (invocation.record.status, invocation.record.result) == seen[id]  # 8
    return found


def check_bodies(tasks: list[Task], starts: list[dict], ends: list[dict], reruns: Mapping[str, int]) -> None:
    """Invariants 2, 3 and 4 of one invocation."""
    by_id = {task.id: task for task in tasks}
    executions = [line["execution"] for line in starts]
    assert len(executions) == len(set(executions)), f"an execution has started twice: {starts}"
    for line in starts:
        task = by_id.get(line["execution"])
        assert task is not None, f"4: it ran and was never marked: {line}"
        assert task.started_at is not None, f"4: it ran and was never marked: {line}, {task}"
    results = {line["execution"]: line["result"] for line in ends}
    previous: Task | None = None
    for task in tasks:
        if task.attempt == 1:
            previous = None
        if previous is not None:
            assert previous.status == "failed", f"2, 3: {task} came after {previous}"
            allowed = previous.reconciled is not None and previous.reconciled.how == "retry"
            assert allowed or task.attempt <= reruns.get(task.node, 1), f"3: {task} came after {previous}"
        if task.status == "completed" and task.reconciled is None:
            assert results[task.id] == task.update, "2: the stored result is not what the body returned"
        previous = task


def check_state(invocation: Invocation, tasks: list[Task]) -> None:
    """Invariants 5 and 6, of the agent ``short`` when it has completed."""
    record = invocation.record
    if record.agent != "short" or record.status != "completed":
        return
    done = {task.step: task.update for task in tasks if task.status == "completed"}
    state: dict = {"log": []}
    for step in (0, 3, 4):
        update = dict(done[step])
        state["log"].append(update.pop("log"))
        state.update(update)
    assert record.result == {"state": state}  # 6
    assert state["results"] == [done[1], done[2]]  # 5
    assert ("left" in done[1], "right" in done[2]) == (True, True)


def check_events(events: list[Event], status: str, *, first: int = 1) -> None:
    """Invariant 7."""
    numbers = []
    for event in events:
        if event.type == "gap":
            numbers += range(event.data["from"], event.data["to"] + 1)
        else:
            numbers.append(event.sequence)
    assert numbers == list(range(first, first + len(numbers)))
    terminal = [number for number, event in enumerate(events) if event.type in TERMINAL_EVENTS]
    assert terminal == ([len(events) - 1] if status in TERMINAL else [])
