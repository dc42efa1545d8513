"""What was promised, compared with what happened. Pure: a `Story` comes in, violations go out.

1. Every acknowledged ``run`` exists.
2. No body of a completed task starts again, and its result is what that body returned.
3. No body that may have begun starts again beyond what its node or a person allows. Never two live attempts.
4. The running mark was durable before the body's first line.
5. Parallel results are in the order of the request.
6. The state is the fold of the completed sequential updates; a conversation goes on where it was.
7. Each event number is an event or lies in one gap, the same to everybody; the terminal event is the last.
8. A terminal status and its result never change.
9. Nothing of a dead incarnation lives a second later (`tests.chaos.watch`); descriptors don't grow.
10. In the end everything has ended.
11. The store verifies and opens again, and has all of it; so does a backup.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

from hayata.client.records import TERMINAL, Event, Task
from hayata.ids import parse_execution_id
from tests.chaos.app import amount
from tests.chaos.ledger import Line, plain
from tests.chaos.story import Story, describe

INVARIANTS = {
    1: "what was acknowledged exists",
    2: "what completed is not run again, and is what its body returned",
    3: "what may have run is run again as allowed, never twice at once",
    4: "the mark was durable before the body began",
    5: "parallel results are in the order of the request",
    6: "the state is the fold of the completed updates",
    7: "each event number is told once, the same to everybody",
    8: "what has ended does not change",
    9: "nothing of the dead lives on; no more descriptors",
    10: "everything comes to an end",
    11: "the store and its backup verify and open",
}

_TERMINAL_EVENTS = frozenset({"invocation_completed", "invocation_failed", "invocation_cancelled"})
REDUCING = frozenset({("pieces", "cut"), ("pieces", "saw")})
"""Agent and node of those whose executions are reductions: begun twice at most."""

_EXPECTED_FAILURES = frozenset(
    {
        "edge_crashed",
        "node_crashed",
        "agent_crashed",
        "agent_start_failed",
        "node_unavailable",
        "node_exception",
        "reducer_failed",
        "execution_timeout",
        "policy_failed",
        "reconciled",
        "supervisor_lost",
    }
)


class Violation(NamedTuple):
    """A promise that was broken. ``number``: of the list above."""

    number: int
    text: str

    def __str__(self) -> str:
        return f"{self.number:2}: {self.text}"


def check(story: Story) -> list[Violation]:
    """Check everything."""
    checks = (
        check_existence,
        check_bodies,
        check_attempts,
        check_overlaps,
        check_states,
        check_conversations,
        check_events,
        check_what_was_heard,
        check_ends,
    )
    return [violation for each in checks for violation in each(story)]


# 1


def check_existence(story: Story) -> Iterator[Violation]:
    """Invariant 1, and that the same key is the same invocation."""
    for line in story.heard_of("acknowledged"):
        if line["id"] not in story.told:
            yield Violation(1, f"invocation {line['id']} was acknowledged as {line['status']} and is unknown")
    for line in story.heard_of("again"):
        if line["got"] != line["id"]:
            yield Violation(1, f"key of invocation {line['id']} has started {line['got']}, too")


# 2, 3, 4


def check_bodies(story: Story) -> Iterator[Violation]:
    """Invariants 2 and 4, body by body."""
    tasks = {task.id: task for told in story.told.values() for task in told.tasks}
    for execution, lines in story.bodies_of.items():
        starts = [line for line in lines if line["what"] == "start"]
        task = tasks.get(execution)
        if len(starts) > 1:
            number = 2 if task is not None and task.status == "completed" else 3
            yield Violation(number, f"the body of {execution} has started {len(starts)} times: {starts}")
        if task is None or task.started_at is None:
            yield Violation(4, f"the body of {execution} has started and was never marked: {starts}")
        elif starts and starts[0]["wall"] < task.started_at:
            yield Violation(4, f"the body of {execution} started at {starts[0]['wall']}, before its mark: {task}")
    if story.ours:
        for task in tasks.values():
            yield from _check_result(story, task)


def _check_result(story: Story, task: Task) -> Iterator[Violation]:
    if task.status != "completed" or task.reconciled is not None:
        return
    ends = [line for line in story.bodies_of.get(task.id, ()) if line["what"] == "end"]
    if len(ends) != 1 or ends[0]["result"] != task.update:
        yield Violation(2, f"task {task.id} has completed with {task.update}, and its bodies with {ends}")


def check_attempts(story: Story) -> Iterator[Violation]:
    """Invariants 2 and 3, task by task: each attempt must be allowed by how the one before has ended."""
    for id, told in story.told.items():
        steps: dict[tuple[int, int | None], list[Task]] = defaultdict(list)
        for task in told.tasks:
            steps[task.step, task.edge].append(task)
        for (step, edge), attempts in steps.items():
            bound = story.bounds.get((told.record.agent, attempts[0].node), 1)
            if edge is None and (told.record.agent, attempts[0].node) in REDUCING:
                bound = 2
            what = f"step {step} of invocation {id}" + ("" if edge is None else f", edge {edge}")
            yield from _check_attempts_of_task(what, attempts, bound)


def _check_attempts_of_task(what: str, attempts: list[Task], bound: int) -> Iterator[Violation]:
    numbers = [task.attempt for task in attempts]
    if numbers != list(range(1, len(numbers) + 1)):
        yield Violation(3, f"{what} has attempts {numbers}")
    for before, task in pairwise(attempts):
        if before.status != "failed":
            yield Violation(2 if before.status == "completed" else 3, f"{what}: {task} came after {before}")
    by_hand = sum(1 for task in attempts if task.reconciled is not None and task.reconciled.how == "retry")
    if len(attempts) > bound + by_hand:
        yield Violation(3, f"{what} has {len(attempts)} attempts, {bound} are allowed and {by_hand} by hand")


def check_overlaps(story: Story) -> Iterator[Violation]:
    """Invariant 3: never two live attempts of one task. A killed body is over when its process was."""
    kills = {line["pid"]: line["alive"] for line in story.faults if line["what"] == "kill"}
    steps: dict[tuple[bytes, int, int], list[tuple[float, float, str]]] = defaultdict(list)
    for execution, lines in story.bodies_of.items():
        for line in lines:
            if line["what"] == "overlap":
                yield Violation(3, f"{execution} has met another attempt of its task, alive")
        parsed = parse_execution_id(execution)
        start = next((line for line in lines if line["what"] == "start"), None)
        if parsed is not None and start is not None:
            interval = (start["mono"], _end_of(lines, start, kills), execution)
            steps[parsed.invocation, parsed.step, parsed.edge].append(interval)
    for intervals in steps.values():
        intervals.sort()
        for (_, end, first), (start_mono, _, second) in pairwise(intervals):
            if start_mono < end:
                yield Violation(3, f"{second} started at {start_mono}, {first} lived until {end}")


def _end_of(lines: list[Line], start: Line, kills: dict[int, float]) -> float:
    ends = [line["mono"] for line in lines if line["what"] in ("end", "raise")]
    killed = kills.get(start["pid"], 0.0)
    if not ends and killed > start["mono"]:
        ends = [killed]
    return max([start["mono"], *ends])


# 5, 6


def check_states(story: Story) -> Iterator[Violation]:
    """Invariants 5 and 6, of our own agents."""
    if not story.ours:
        return
    bases = {line["id"]: line["input"].get("base", 0) for line in story.heard_of("asked")}
    for id, told in story.told.items():
        if told.record.status != "completed":
            continue
        done = sorted((task for task in told.tasks if task.status == "completed"), key=lambda task: task.step)
        sequential = [task for task in done if "sum" in (task.update or {})]
        expected = {
            "sum": sum(amount(bases[id], task.step) for task in sequential),
            "log": [task.update["log"] for task in sequential if task.update],
        }
        result = told.record.result
        if {key: result.get(key) for key in expected} != expected:
            yield Violation(6, f"invocation {id} has the state {result}, its steps make {expected}")
        if told.record.agent == "fan":
            yield from _check_order(id, done)
        if told.record.agent == "pieces":
            yield from _check_pieces(id, told.tasks)


def _check_pieces(id: str, tasks: list[Task]) -> Iterator[Violation]:
    """`pieces` completes only with all edges, and the reduction has got their results in their order."""
    for step in (0, 1):
        edges = {task.edge: task for task in tasks if task.step == step and task.edge is not None}
        results = {task.edge: task.update for task in tasks if task.step == step and task.status == "completed"}
        kept = (results.pop(None, None) or {}).get("results")
        if kept != [results.get(edge) for edge in sorted(edges)]:
            yield Violation(5, f"the reduction of step {step} of invocation {id} got {kept}, of edges {results}")
        if kept and [each["piece"] for each in kept] != list(range(len(kept))):
            yield Violation(5, f"the edges of step {step} of invocation {id} are {kept}")


def _check_order(id: str, done: list[Task]) -> Iterator[Violation]:
    """`fan` asks for the branches right, wait, left, then for left; the step after them keeps the results."""
    updates: dict[int, Any] = {task.step: task.update for task in done}
    for branches, join in (((0, 1, 2), 3), ((4,), 5)):
        kept = updates.get(join, {}).get("results")
        if kept is not None and kept != [updates.get(step) for step in branches]:
            yield Violation(5, f"step {join} of invocation {id} got {kept}, of branches {updates}")
    names = [updates[step]["branch"] for step in (0, 1, 2, 4) if step in updates]
    if names != ["right", "wait", "left", "left"]:
        yield Violation(5, f"the branches of invocation {id} are {names}")


def check_conversations(story: Story) -> Iterator[Violation]:
    """Invariant 6: of two conversations in a session the shorter one is how the longer one began."""
    sessions: dict[str | None, list[tuple[str, list[Any]]]] = defaultdict(list)
    for id, told in story.told.items():
        if story.ours and told.record.agent == "talk" and told.record.status == "completed":
            sessions[told.record.session].append((id, told.record.result.get("messages", [])))
    for session, talks in sessions.items():
        talks.sort(key=lambda talk: len(talk[1]))
        for (first, shorter), (second, longer) in pairwise(talks):
            # A turn that a person has settled adds nothing, so they may be equal.
            if longer[: len(shorter)] != shorter:
                yield Violation(6, f"session {session}: {second} does not go on where {first} has ended")


# 7


def check_events(story: Story) -> Iterator[Violation]:
    """Invariant 7, by what the product says in the end."""
    for id, told in story.told.items():
        numbers: list[int] = []
        for event in told.events:
            numbers += numbers_of(event)
        if numbers != list(range(1, len(numbers) + 1)):
            yield Violation(7, f"events of invocation {id} have the numbers {numbers}")
        ends = [place for place, event in enumerate(told.events) if event.type in _TERMINAL_EVENTS]
        last = len(told.events) - 1
        if ends != ([last] if told.record.status in TERMINAL else []):
            yield Violation(7, f"events of invocation {id}, {told.record.status}, end {ends} of 0 to {last}")
        elif ends and told.events[-1].type != f"invocation_{told.record.status}":
            yield Violation(7, f"invocation {id} is {told.record.status}, its last event {told.events[-1].type}")
        completions = [event.data["execution_id"] for event in told.events if event.type == "node_completed"]
        if len(completions) != len(set(completions)):
            yield Violation(7, f"invocation {id} has completed tasks twice: {completions}")


def numbers_of(event: Event) -> range:
    """The numbers that an event stands for."""
    first = event.data["from"] if event.type == "gap" else event.sequence
    return range(first, event.sequence + 1)


# 7, 8


def check_what_was_heard(story: Story) -> Iterator[Violation]:
    """Invariants 7 and 8, by what clients were told on the way."""
    known: dict[str, dict[int, tuple[str, Any]]] = {}
    for line in story.heard_of("event"):
        told = story.told.get(line["id"])
        if told is None:
            continue  # told of already
        if line["id"] not in known:
            known[line["id"]] = _meanings(told.events)
        yield from _check_heard_event(known[line["id"]], line)
    yield from _check_readings(story)
    for line in story.heard:
        told = story.told.get(line.get("id", ""))
        if told is None or line["what"] not in ("ended", "ended_by_event", "cancel"):
            continue
        outcome = told.record.result if told.record.status == "completed" else None
        if told.record.status == "failed":
            outcome = told.record.error.code if told.record.error else None
        changed = line["what"] == "ended" and line["result"] != plain(outcome)
        if line["status"] != told.record.status or changed:
            yield Violation(8, f"a client was told {line}, in the end it is {told.record}")
    yield from _check_cancelled(story)


def _meanings(events: list[Event]) -> dict[int, tuple[str, Any]]:
    lines = [describe(event) for event in events]
    return {line["n"]: (line["type"], line["about"]) for line in lines if line["type"] != "gap"}


def _check_heard_event(known: dict[int, tuple[str, Any]], line: Line) -> Iterator[Violation]:
    """A number means the same for ever. A partial result may be forgotten, and lies in a gap then."""
    if line["type"] == "gap":
        return
    now = (line["type"], line["about"])
    is_partial = line["type"] == "node_partial_result"
    meaning = known.setdefault(line["n"], now) if is_partial else known.get(line["n"])
    if meaning != now:
        yield Violation(7, f"number {line['n']} of invocation {line['id']} was heard as {now} and is {meaning}")


def _check_readings(story: Story) -> Iterator[Violation]:
    """A reading goes on directly behind the number that it asked for, without a hole or a repetition."""
    last: dict[tuple[str, int], int] = {}
    for line in story.heard_of("event"):
        reading = (line["id"], line["reading"])
        before = last.get(reading, line["after"])
        if line["first"] != before + 1:
            yield Violation(7, f"a reader of invocation {line['id']} was told, after number {before}: {line}")
        last[reading] = line["n"]


def _check_cancelled(story: Story) -> Iterator[Violation]:
    """When a cancel is answered, no body of the invocation lives."""
    cancels = {line["id"]: line["mono"] for line in story.heard_of("cancel") if line["status"] == "cancelled"}
    owners = {line["execution"]: line["invocation"] for line in story.bodies if line["what"] == "start"}
    for line in story.bodies:
        cancelled = cancels.get(owners.get(line["execution"], ""))
        if cancelled is not None and line["mono"] > cancelled:
            yield Violation(8, f"a cancel was answered at {cancelled}, and a body wrote {line}")


# 10


def check_ends(story: Story) -> Iterator[Violation]:
    """Invariant 10, and that nothing has failed for a reason that nobody gave."""
    for id, told in story.told.items():
        record = told.record
        if record.status not in TERMINAL:
            yield Violation(10, f"invocation {id} is {record.status}: {told.tasks}")
        code = record.error.code if record.error is not None else ""
        if story.ours and record.status == "failed" and code not in _EXPECTED_FAILURES:
            yield Violation(10, f"invocation {id} has failed with {code}: {record.error}")
