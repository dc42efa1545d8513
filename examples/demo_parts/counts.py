"""What the outside ledger says at the end, against what the product says."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hayata import Task

from .ledger import Body, Story


@dataclass(frozen=True)
class Counts:
    """The numbers that the demo ends with.

    Attributes:
        tasks: Tasks whose body has begun at least once.
        bodies: How often a body has begun.
        kills: Processes killed.
        cut_off: Bodies that were running in them.
        reused: Tasks that were done when the supervisor was killed, and never began again.
        after_restart: Tasks that began after that.
        again: Of these, tasks that had begun before and were cut off.
        settled: Uncertain tasks that were settled.
        twice: Completed tasks whose body began again. The product's promise is that it is 0.
        unexplained: What else does not fit, in words.
    """

    tasks: int
    bodies: int
    kills: int
    cut_off: int
    reused: int
    after_restart: int
    again: int
    settled: int
    twice: int
    unexplained: tuple[str, ...]


def count(story: Story, tasks: Collection[Task], told: Iterable[str]) -> Counts:
    """Count.

    Args:
        story: What the ledger says.
        tasks: All attempts, as the product reports them at the end.
        told: Ids of the executions that the client was told have completed, at any time.
    """
    restart = max((kill.at for kill in story.kills if kill.role == "supervisor"), default=float("inf"))
    begun: dict[str, list[Body]] = {}
    for body in story.bodies:
        begun.setdefault(body.key, []).append(body)
    before = {key for key, bodies in begun.items() if bodies[0].start < restart}
    after = {key for key, bodies in begun.items() if bodies[-1].start > restart}
    done = {body.key for body in story.bodies if body.end is not None and body.end < restart}
    completed = {*told, *(task.id for task in tasks if task.status == "completed")}
    return Counts(
        tasks=len(begun),
        bodies=len(story.bodies),
        kills=len(story.kills),
        cut_off=sum(story.cut_at(body) is not None for body in story.bodies),
        reused=len(done - after),
        after_restart=len(after),
        again=len(after & before),
        settled=len(story.settled),
        twice=sum(_ran_again(bodies, completed) for bodies in begun.values()),
        unexplained=tuple(_unexplained(story, tasks, completed)),
    )


def lines(counts: Counts) -> list[str]:
    """The counts for a viewer."""
    again = f"{counts.again} of them again, as they were cut off"
    return [
        f"{number:6} {what}"
        for number, what in (
            (counts.tasks, f"tasks, in {counts.bodies} runs of their bodies"),
            (counts.kills, f"kills, which cut off {counts.cut_off} running bodies"),
            (counts.reused, "results from before the supervisor's death, reused"),
            (counts.after_restart, f"tasks run after its restart, {again}"),
            (counts.settled, "uncertain task settled by reconcile"),
            (counts.twice, "completed tasks run twice"),
        )
    ]


def problems(counts: Counts, result: Mapping[str, Any], published: list[str], by_wc: int | None) -> list[str]:
    """What is not as promised, in words.

    Args:
        counts: The counts.
        result: The job's result: ``words`` and ``receipts``.
        published: What was found outside.
        by_wc: What ``wc`` says; None when there is none.
    """
    found = list(counts.unexplained)
    if counts.twice:
        found.append(f"{counts.twice} completed tasks ran twice")
    if by_wc not in (None, result["words"]):
        found.append(f"the words are {result['words']}, and {by_wc} by wc -w")
    if published != result["receipts"]:
        found.append(f"published are {published}, with receipts {result['receipts']}")
    return found


def _ran_again(bodies: list[Body], completed: Collection[str]) -> bool:
    """Whether a body began after the one that completed the task; these are all bodies of one task."""
    first = next((number for number, body in enumerate(bodies) if body.execution in completed), None)
    return first is not None and first < len(bodies) - 1


def _unexplained(story: Story, tasks: Collection[Task], completed: Collection[str]) -> Iterable[str]:
    known = {task.id: task for task in tasks}
    for body in story.bodies:
        if body.execution not in known:
            yield f"{body.node} ran as {body.execution}, which the product does not know"
    for execution in sorted(completed):
        ended = story.body(execution)
        if (ended is None or ended.end is None) and execution not in story.settled:
            yield f"{execution} is completed, but its body never ended"
        if execution not in known or known[execution].status != "completed":
            yield f"{execution} was completed once, and is not any more"
