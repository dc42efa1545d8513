"""The verdict as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from tests.chaos.checks import INVARIANTS, Violation
from tests.chaos.plan import ROLES
from tests.chaos.run import Verdict

_MOST_SHOWN = 50
_MOST_CHARACTERS = 1500


def report(verdict: Verdict) -> Iterator[str]:
    """The lines; the last one is ``violations: N``."""
    yield f"{'role':12}{'kills':>8}{'stops':>8}{'squeezes':>10}{'skipped':>9}{'restarts':>10}"
    for role in ROLES:
        kills, stops, squeezes, skipped = (
            verdict.faults.counts[kind, role] for kind in ("kill", "stop", "squeeze", "skipped")
        )
        restarts = verdict.watch.restarts[role]
        yield f"{role:12}{kills:8}{stops:8}{squeezes:10}{skipped:9}{restarts:10}"
    yield ""
    for what, count in _counts(verdict):
        yield f"{what:40}{count:>10}"
    yield ""
    yield from _invariants(verdict)
    yield ""
    for violation in verdict.violations[:_MOST_SHOWN]:
        yield _shortened(violation)
    if len(verdict.violations) > _MOST_SHOWN:
        yield f"and {len(verdict.violations) - _MOST_SHOWN} more"
    yield f"violations: {len(verdict.violations)}"


def _invariants(verdict: Verdict) -> Iterator[str]:
    """What was held against the ledgers, and how often it did not hold."""
    broken = Counter(violation.number for violation in verdict.violations)
    checked = _checked(verdict)
    yield f"{'invariant':72}{'checked':>10}{'broken':>8}"
    for number, text in INVARIANTS.items():
        yield f"{number:2} {text:69}{checked[number]:>10}{broken[number]:>8}"


def _checked(verdict: Verdict) -> dict[int, int]:
    """Invariant → of how many things it was checked."""
    story = verdict.story
    tasks = [task for told in story.told.values() for task in told.tasks]
    begun = sum(line["what"] == "start" for line in story.bodies)
    completed = [told for told in story.told.values() if told.record.status == "completed"]
    return {
        1: len({line["id"] for line in story.heard_of("acknowledged")}),
        2: sum(task.status == "completed" for task in tasks),
        3: begun,
        4: begun,
        5: sum(story.ours and told.record.agent in ("fan", "pieces") for told in completed),
        6: len(completed) if story.ours else 0,
        7: sum(len(told.events) for told in story.told.values()) + len(story.heard_of("event")),
        8: sum(len(story.heard_of(what)) for what in ("ended", "ended_by_event", "cancel")),
        9: sum(count for (kind, _), count in verdict.faults.counts.items() if kind == "kill"),
        10: len(story.told),
        11: 2,
    }


def _counts(verdict: Verdict) -> Iterator[tuple[str, int | str]]:
    story = verdict.story
    yield "kills", sum(count for (kind, _), count in verdict.faults.counts.items() if kind == "kill")
    yield "invocations acknowledged", len({line["id"] for line in story.heard_of("acknowledged")})
    statuses = Counter(told.record.status for told in story.told.values())
    for status, count in sorted(statuses.items()):
        yield f"  {status}", count
    codes = Counter(
        told.record.error.code for told in story.told.values() if told.record.error and told.record.status == "failed"
    )
    for code, count in sorted(codes.items()):
        yield f"    {code}", count
    yield "invocations refused (busy session)", len(story.heard_of("refused"))
    tasks = [task for told in story.told.values() for task in told.tasks]
    yield "tasks, attempts", len(tasks)
    for status, count in sorted(Counter(task.status for task in tasks).items()):
        yield f"  {status}", count
    yield "bodies begun", sum(line["what"] == "start" for line in story.bodies)
    yield "  cut off", sum(_is_cut_off(lines) for lines in story.bodies_of.values())
    yield "attempts after the first", sum(task.attempt > 1 for task in tasks)
    events = Counter(event.type for told in story.told.values() for event in told.events)
    yield "events", sum(events.values())
    yield "  heard by clients", len(story.heard_of("event"))
    yield "recovered", events["invocation_recovered"]
    yield "uncertain", events["node_uncertain"]
    how = Counter(task.reconciled.how for task in tasks if task.reconciled is not None)
    yield "reconciled", sum(how.values())
    for each, count in sorted(how.items()):
        yield f"  {each}", count
    yield "longest that a dead process was left", f"{verdict.watch.longest_s:.2f} s"
    for what, seconds in verdict.seconds.items():
        yield what, f"{seconds:.1f} s"


def _is_cut_off(lines: list[dict]) -> bool:
    return not any(line["what"] in ("end", "raise") for line in lines)


def _shortened(violation: Violation) -> str:
    text = str(violation)
    if len(text) <= _MOST_CHARACTERS:
        return text
    return f"{text[: _MOST_CHARACTERS // 3]} … {text[-_MOST_CHARACTERS:]}"  # an error's name is at its end
