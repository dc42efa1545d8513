"""The control: a story that is as promised has no violations, and each doctored one has the right one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from hayata.client.records import Event, InvocationRecord, Reconciliation, Task
from hayata.errors import error_for
from tests.chaos.checks import check
from tests.chaos.story import Story, Told, describe

LINE, FAN, PIECES = "0" * 31 + "1", "0" * 31 + "2", "0" * 31 + "3"
"""Internal ids; the names are ``line``, ``fan`` and ``pieces``."""

SUM = {0: 100, 1: 107, 2: 114, 3: 121, 5: 135}
"""What a step adds when the base is 100."""


class Clock:
    """Each look is a second later."""

    def __init__(self) -> None:
        self._now = 1000.0

    def __call__(self) -> float:
        self._now += 1.0
        return self._now


def task(internal: str, step: int, update: dict, *, node: str = "quick", attempt: int = 1) -> Task:
    """A task that has completed."""
    id = f"{internal}.{step}.{attempt}"
    return Task(id, node, step, attempt, "completed", 1.0, 2.0, 9.0, None, update, None)


def body(clock: Clock, of: Task, invocation: str) -> list[dict]:
    """What the body of a task has written."""
    about = {"execution": of.id}
    start = {"what": "start", "pid": 50, "wall": 5.0, "node": of.node, "invocation": invocation}
    end = {"what": "end", "result": of.update}
    return [{**start, "mono": clock(), **about}, {**end, "mono": clock(), **about}]


def events(tasks: list[Task], id: str, result: dict) -> list[Event]:
    """The events of an invocation that has completed."""
    found: list[tuple[str, dict]] = [("invocation_started", {"input": {"base": 100}})]
    for each in tasks:
        found.append(("node_started", {"execution_id": each.id}))
        if each.status == "completed":
            found.append(("node_completed", {"execution_id": each.id}))
        elif each.status == "failed":
            found.append(("node_failed", {"execution_id": each.id, "will_retry": True}))
    found.append(("invocation_completed", {"result": result}))
    return [Event(number, type, 1.0, id, data) for number, (type, data) in enumerate(found, 1)]


def record(id: str, agent: str, result: dict) -> InvocationRecord:
    return InvocationRecord(id, agent, "completed", "1", None, None, False, 3, 1.0, 1.0, 9.0, result, None, None)


def told(id: str, agent: str, tasks: list[Task], result: dict) -> Told:
    return Told(record(id, agent, result), tasks, events(tasks, id, result))


def line_told() -> Told:
    """An invocation with a second attempt of its step 1, after the first was cut off."""
    tasks = [task(LINE, step, {"sum": SUM[step], "log": f"token {step}"}) for step in (0, 1, 2)]
    tasks[1:2] = [
        dataclasses.replace(task(LINE, 1, {}, node="work"), status="failed", update=None),
        task(LINE, 1, {"sum": SUM[1], "log": "token 1"}, node="work", attempt=2),
    ]
    result = {"sum": 321, "log": ["token 0", "token 1", "token 2"]}
    return told("line", "line", tasks, result)


def fan_told() -> Told:
    branches = {0: "right", 1: "wait", 2: "left", 4: "left"}
    updates: dict[int, dict] = {step: {"branch": name, "token": f"t{step}"} for step, name in branches.items()}
    updates[3] = {"sum": SUM[3], "log": "token 3", "results": [updates[0], updates[1], updates[2]]}
    updates[5] = {"sum": SUM[5], "log": "token 5", "results": [updates[4]]}
    tasks = [task(FAN, step, updates[step], node=branches.get(step, "join")) for step in range(6)]
    result = {"sum": 256, "log": ["token 3", "token 5"], "results": updates[5]["results"]}
    return told("fan", "fan", tasks, result)


def edge(step: int, number: int, node: str) -> Task:
    update = {"piece": number, "token": f"e{step}{number}"}
    whole = task(PIECES, step, update, node=node)
    return dataclasses.replace(whole, id=f"{PIECES}.{step}-{number}.1", edge=number)


def pieces_told() -> Told:
    """Two executions with edges, and a plain one; the first reduction was cut off."""
    tasks: list[Task] = []
    for step, node, count in ((0, "cut", 2), (1, "saw", 1)):
        edges = [edge(step, number, node) for number in range(count)]
        update = {"sum": SUM[step], "log": f"token {step}", "results": [each.update for each in edges]}
        attempts = [task(PIECES, step, update, node=node, attempt=number) for number in (1, 2)[: 2 - step]]
        attempts[:-1] = [dataclasses.replace(each, status="failed", update=None) for each in attempts[:-1]]
        tasks += [*edges, *attempts]
    tasks.append(task(PIECES, 2, {"sum": SUM[2], "log": "token 2"}))
    result = {"sum": 321, "log": ["token 0", "token 1", "token 2"]}
    return told("pieces", "pieces", tasks, result)


def heard(clock: Clock, of: Told) -> list[dict]:
    """What a client was told of it: all events in one reading, and the end."""
    id = of.record.id
    lines = [{"what": "asked", "id": id, "agent": of.record.agent, "input": {"base": 100}}]
    lines += [{"what": "acknowledged", "id": id, "status": "running"}]
    about = {"what": "event", "id": id, "reading": 1, "after": 0}
    lines += [{**about, **describe(event)} for event in of.events]
    lines += [{"what": "ended", "id": id, "status": of.record.status, "result": of.record.result}]
    return [{**each, "mono": clock()} for each in lines]


def story() -> Story:
    """Three invocations, as promised. The first body of step 1 of ``line`` was killed, and a reducer of ``pieces``."""
    clock = Clock()
    line, fan, pieces = all_told = line_told(), fan_told(), pieces_told()
    bodies = [written for of in all_told for each in of.tasks for written in body(clock, each, of.record.id)]
    faults = []
    for pid, execution in ((60, f"{LINE}.1.1"), (70, f"{PIECES}.0.1")):
        begun, cut_off = (each for each in bodies if each["execution"] == execution)
        begun["pid"] = pid
        faults.append({"what": "kill", "role": "edge", "pid": pid, "mono": cut_off["mono"], "alive": cut_off["mono"]})
        bodies.remove(cut_off)
    lines = [*heard(clock, line), *heard(clock, fan), *heard(clock, pieces)]
    return Story(bodies, lines, faults, {"line": line, "fan": fan, "pieces": pieces}, {("line", "work"): 2})


def change(story: Story, id: str, place: int, **changes: object) -> None:
    tasks = story.told[id].tasks
    tasks[place] = dataclasses.replace(tasks[place], **changes)


def change_record(story: Story, id: str, **changes: object) -> None:
    story.told[id].record = dataclasses.replace(story.told[id].record, **changes)


def find(lines: list[dict], what: str, **wanted: object) -> dict:
    return next(
        line for line in lines if line["what"] == what and all(line[name] == value for name, value in wanted.items())
    )


def test_story_as_promised_has_no_violation():
    assert check(story()) == []


# Each takes a story that is as promised, and breaks one promise.


def acknowledged_is_unknown(story: Story) -> None:
    del story.told["line"]
    story.bodies = [each for each in story.bodies if LINE not in each["execution"]]


def key_started_two(story: Story) -> None:
    story.heard.append({"what": "again", "id": "line", "got": "fan", "mono": 1.0})


def completed_body_ran_again(story: Story) -> None:
    start = find(story.bodies, "start", execution=f"{LINE}.0.1")
    story.bodies.append({**start, "mono": 9000.0})


def completed_task_has_another_attempt(story: Story) -> None:
    again = task(LINE, 0, {"sum": 100, "log": "token 0"}, attempt=2)
    story.told["line"].tasks.insert(1, again)
    story.bodies += body(Clock(), again, "line")
    story.bounds = {**story.bounds, ("line", "quick"): 2}


def result_is_not_what_the_body_returned(story: Story) -> None:
    find(story.bodies, "end", execution=f"{FAN}.0.1")["result"] = {"branch": "right", "token": "other"}


def marked_body_ran_again_beyond_its_bound(story: Story) -> None:
    story.bounds = {}


def attempt_is_missing(story: Story) -> None:
    line = story.told["line"]
    del line.tasks[1]
    story.bodies = [each for each in story.bodies if each["execution"] != f"{LINE}.1.1"]


def attempts_overlap(story: Story) -> None:
    story.faults[0]["alive"] = 9000.0


def attempts_met(story: Story) -> None:
    story.bodies.append({"what": "overlap", "execution": f"{LINE}.1.2", "mono": 1.0})


def body_ran_without_a_mark(story: Story) -> None:
    change(story, "line", 0, started_at=None)


def body_ran_before_its_mark(story: Story) -> None:
    change(story, "line", 0, started_at=6.0)


def body_ran_of_a_task_that_nobody_knows(story: Story) -> None:
    start = find(story.bodies, "start", execution=f"{LINE}.0.1")
    story.bodies.append({**start, "execution": f"{LINE}.7.1"})


def parallel_results_in_another_order(story: Story) -> None:
    update = story.told["fan"].tasks[3].update
    assert update is not None
    update["results"].reverse()


def branches_in_another_order(story: Story) -> None:
    updates = [each.update for each in story.told["fan"].tasks[:2]]
    for each, name in zip(updates, ("wait", "right"), strict=True):
        assert each is not None
        each["branch"] = name


def reduction_got_results_in_another_order(story: Story) -> None:
    tasks = story.told["pieces"].tasks
    place = next(number for number, each in enumerate(tasks) if each.id == f"{PIECES}.0.2")
    results = tasks[place].update["results"][::-1]
    change(story, "pieces", place, update={**tasks[place].update, "results": results})
    find(story.bodies, "end", execution=f"{PIECES}.0.2")["result"]["results"] = results


def edge_ran_again(story: Story) -> None:
    again = dataclasses.replace(edge(0, 1, "cut"), id=f"{PIECES}.0-1.2", attempt=2)
    story.told["pieces"].tasks.insert(2, again)
    story.bodies += body(Clock(), again, "pieces")


def reduction_was_begun_three_times(story: Story) -> None:
    tasks = story.told["pieces"].tasks
    change(story, "pieces", 3, status="failed", update=None)
    third = {"sum": SUM[0], "log": "token 0", "results": [each.update for each in tasks[:2]]}
    tasks.insert(4, task(PIECES, 0, third, node="cut", attempt=3))


def update_is_lost(story: Story) -> None:
    result = {"sum": 321, "log": ["token 0", "token 2"]}
    change_record(story, "line", result=result)
    find(story.heard, "ended", id="line")["result"] = result


def update_counts_twice(story: Story) -> None:
    result = {**story.told["line"].record.result, "sum": 428}
    change_record(story, "line", result=result)
    find(story.heard, "ended", id="line")["result"] = result


def conversation_is_forgotten(story: Story) -> None:
    for number, messages in enumerate((["a"], ["a", "b"], ["a", "c", "d"])):
        each = told(f"talk{number}", "talk", [], {"sum": 0, "log": [], "messages": messages})
        each.record = dataclasses.replace(each.record, session="s")
        story.told[f"talk{number}"] = each
        story.heard.append({"what": "asked", "id": f"talk{number}", "input": {}, "mono": 1.0})


def event_number_is_missing(story: Story) -> None:
    del story.told["line"].events[3]
    story.heard = [each for each in story.heard if each["what"] != "event"]


def event_number_repeats(story: Story) -> None:
    events = story.told["line"].events
    events.insert(3, events[2])


def task_completed_in_two_events(story: Story) -> None:
    events = story.told["line"].events
    again = [dataclasses.replace(each, sequence=each.sequence + 1) for each in events[2:]]
    events[3:] = again
    story.heard = [each for each in story.heard if each["what"] != "event"]


def terminal_event_is_missing(story: Story) -> None:
    story.told["line"].events.pop()
    story.heard = [each for each in story.heard if each["what"] != "event"]


def terminal_event_is_another(story: Story) -> None:
    events = story.told["line"].events
    events[-1] = dataclasses.replace(events[-1], type="invocation_failed")
    story.heard = [each for each in story.heard if each["what"] != "event"]


def event_was_heard_as_another(story: Story) -> None:
    find(story.heard, "event", id="line", n=3)["type"] = "node_failed"


def reader_was_told_twice(story: Story) -> None:
    line = find(story.heard, "event", id="line", n=3)
    story.heard.insert(story.heard.index(line), dict(line))


def reader_was_not_told(story: Story) -> None:
    story.heard.remove(find(story.heard, "event", id="line", n=3))


def partial_result_was_heard_as_two(story: Story) -> None:
    gap = {"what": "event", "id": "fan", "reading": 2, "after": 99, "n": 100, "first": 100}
    for about in ("x {'chunk': 1}", "x {'chunk': 2}"):
        line = {**gap, "type": "node_partial_result", "about": about, "mono": 1.0}
        story.heard.append({**line, "reading": 2 + len(story.heard)})


def terminal_status_has_changed(story: Story) -> None:
    find(story.heard, "ended", id="line").update(status="cancelled", result=None)


def result_has_changed(story: Story) -> None:
    find(story.heard, "ended", id="line")["result"] = {"sum": 1}


def body_lived_after_its_cancel(story: Story) -> None:
    line = story.told["line"]
    change_record(story, "line", status="cancelled", result=None)
    line.events[-1] = dataclasses.replace(line.events[-1], type="invocation_cancelled")
    story.heard = [each for each in story.heard if each["what"] in ("asked", "acknowledged")]
    story.heard.append({"what": "cancel", "id": "line", "status": "cancelled", "mono": 1003.5})


def invocation_has_not_ended(story: Story) -> None:
    change_record(story, "line", status="running", result=None)
    story.told["line"].events.pop()
    story.heard = [each for each in story.heard if each["what"] in ("asked", "acknowledged")]


def failed_for_no_reason(story: Story) -> None:
    change_record(story, "line", status="failed", error=error_for("protocol_error", "it broke"))
    events = story.told["line"].events
    events[-1] = dataclasses.replace(events[-1], type="invocation_failed")
    story.heard = [each for each in story.heard if each["what"] in ("asked", "acknowledged")]


DOCTORED: list[tuple[Callable[[Story], None], int]] = [
    (acknowledged_is_unknown, 1),
    (key_started_two, 1),
    (completed_body_ran_again, 2),
    (completed_task_has_another_attempt, 2),
    (result_is_not_what_the_body_returned, 2),
    (marked_body_ran_again_beyond_its_bound, 3),
    (attempt_is_missing, 3),
    (attempts_overlap, 3),
    (attempts_met, 3),
    (body_ran_without_a_mark, 4),
    (body_ran_before_its_mark, 4),
    (body_ran_of_a_task_that_nobody_knows, 4),
    (parallel_results_in_another_order, 5),
    (branches_in_another_order, 5),
    (reduction_got_results_in_another_order, 5),
    (edge_ran_again, 2),
    (reduction_was_begun_three_times, 3),
    (update_is_lost, 6),
    (update_counts_twice, 6),
    (conversation_is_forgotten, 6),
    (event_number_is_missing, 7),
    (event_number_repeats, 7),
    (task_completed_in_two_events, 7),
    (terminal_event_is_missing, 7),
    (terminal_event_is_another, 7),
    (event_was_heard_as_another, 7),
    (reader_was_told_twice, 7),
    (reader_was_not_told, 7),
    (partial_result_was_heard_as_two, 7),
    (terminal_status_has_changed, 8),
    (result_has_changed, 8),
    (body_lived_after_its_cancel, 8),
    (invocation_has_not_ended, 10),
    (failed_for_no_reason, 10),
]


@pytest.mark.parametrize(("doctor", "number"), DOCTORED, ids=lambda value: getattr(value, "__name__", ""))
def test_doctored_story_has_the_violation(doctor: Callable[[Story], None], number: int):
    doctored = story()
    doctor(doctored)
    assert number in {violation.number for violation in check(doctored)}


def test_attempt_that_a_person_allowed_is_none():
    doctored = story()
    doctored.bounds = {}
    by_hand = Reconciliation("somebody", 3.0, "retry")
    change(doctored, "line", 1, reconciled=by_hand)
    assert check(doctored) == []
