"""The client's core without I/O: frames, greeting and numbers, patience, operations driven by hand."""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hayata import messages as m
from hayata.client import asynchronous, blocking, core, operations
from hayata.errors import HayataError
from hayata.framing import frame
from hayata.values import encode

HELLO = m.encode(m.Hello(package="x"))


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def info(status: str = "running", **fields: Any) -> m.InvocationInfo:
    return m.InvocationInfo("i", "a", status, "1", 1.0, **fields)


def event(number: int) -> m.EventInfo:
    return m.EventInfo(number, "node_started", 1.0, msgspec.Raw(b"\x80"))


# ------------------------------------------------------------------------------------------------------------
# Frames
# ------------------------------------------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=200), min_size=1, max_size=5), st.data())
def test_frames_in_any_pieces_give_the_same_bodies(bodies: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(frame(body) for body in bodies)
    frames = core.Frames()
    found: list[bytes] = []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        found += frames.feed(stream[:size])
        stream = stream[size:]
    assert found == bodies


@given(st.binary(min_size=4, max_size=64))
def test_frames_of_foreign_bytes_never_wait_for_gigabytes(data: bytes) -> None:
    frames = core.Frames()
    announced = int.from_bytes(data[:4], "big")
    if announced > 64 * 1024:
        with pytest.raises(HayataError, match="protocol_error"):
            frames.feed(data)
    else:
        frames.feed(frame(b"x" * announced))


def test_frames_over_the_cap_after_the_greeting_are_protocol_error() -> None:
    frames = core.Frames(cap_bytes=1000)
    assert frames.feed(frame(HELLO)) == [HELLO]
    with pytest.raises(HayataError, match="protocol_error"):
        frames.feed((1001).to_bytes(4, "big"))


# ------------------------------------------------------------------------------------------------------------
# Conversation
# ------------------------------------------------------------------------------------------------------------


def test_conversation_numbers_requests_and_reads_answers() -> None:
    talk = core.Conversation()
    decode = m.decoder(m.ToServer).decode
    assert decode(talk.hello()).protocol == m.PROTOCOL_VERSION
    first, second = talk.ask(m.GetTree()), talk.ask(m.GetStats())
    assert (first[0], second[0]) == (1, 2)
    assert decode(second[1]) == m.Ask(2, m.GetStats())
    assert talk.receive(HELLO) is None
    assert talk.receive(m.encode(m.Tell(2, m.Done()))) == m.Tell(2, m.Done())


@given(st.binary(max_size=100))
def test_conversation_never_raises_anything_but_protocol_errors(body: bytes) -> None:
    talk = core.Conversation()
    talk.ask(m.GetTree())
    code = "protocol_error"
    try:
        talk.receive(body)
    except HayataError as error:
        code = error.code
    assert code == "protocol_error"


# ------------------------------------------------------------------------------------------------------------
# Patience
# ------------------------------------------------------------------------------------------------------------


def lost(greeted: bool = False) -> core.Lost:
    return core.Lost("gone", greeted=greeted)


def test_patience_pauses_longer_each_time_up_to_a_second() -> None:
    patience, pauses = core.Patience(), []
    for _ in range(10):
        patience.begin(0.0)
        pauses.append(patience.lost(0.0, lost()))
    assert pauses == sorted(pauses)
    assert pauses[0] < 0.05
    assert pauses[-1] == 1.0


def test_patience_ends_after_thirty_seconds_without_a_good_connection() -> None:
    patience = core.Patience()
    now = 0.0
    while now < 30:
        patience.begin(now)
        now += patience.lost(now, lost(greeted=True))
    patience.begin(now)
    with pytest.raises(HayataError, match="daemon_unavailable"):
        patience.lost(now, lost(greeted=True))


def test_patience_counts_the_time_that_a_silent_daemon_takes() -> None:
    patience = core.Patience()
    assert patience.begin(0.0) == 30.0
    with pytest.raises(HayataError, match="daemon_unavailable"):
        patience.lost(30.0, lost(greeted=False))


def test_patience_begins_anew_when_a_good_connection_is_lost() -> None:
    patience = core.Patience()
    for hour in range(5):
        patience.begin(hour * 3600.0)
        assert patience.lost((hour + 1) * 3600.0, lost(greeted=True)) < 0.05


def test_patience_raises_a_refusal_at_once() -> None:
    patience = core.Patience()
    patience.begin(0.0)
    refusal = HayataError("permission_denied", "no")
    with pytest.raises(HayataError) as error:
        patience.lost(0.0, core.Lost("no", refusal=refusal))
    assert error.value is refusal


# ------------------------------------------------------------------------------------------------------------
# Operations, driven by hand
# ------------------------------------------------------------------------------------------------------------


def test_drive_sends_the_same_request_again_after_a_loss() -> None:
    clock = Clock()
    steps = core.drive(operations.run("a", {"x": 1}), clock)
    first = next(steps)
    assert isinstance(first, core.Exchange)
    pause = steps.throw(lost())
    assert isinstance(pause, core.Pause)
    again = steps.send(None)
    assert isinstance(again, core.Exchange)
    assert again.request == first.request
    with pytest.raises(StopIteration) as done:
        steps.send(info())
    assert done.value.value == info()


def test_drive_keeps_the_deadline_over_losses() -> None:
    clock = Clock()
    steps = core.drive(operations.result("i", 10.0), clock)
    first = next(steps)
    assert isinstance(first, core.Exchange)
    assert (first.request, first.timeout_s) == (m.AwaitInvocation("i"), 10.0)
    clock.now += 4
    steps.throw(lost(greeted=True))
    clock.now += 1
    second = steps.send(None)
    assert isinstance(second, core.Exchange)
    assert second.timeout_s == 5.0
    clock.now += 5
    late = steps.throw(TimeoutError())
    assert isinstance(late, core.Exchange)
    assert late.request == m.GetInvocation("i"), "it may have ended just now"
    with pytest.raises(TimeoutError, match="invocation i has not ended in 10"):
        steps.send(info())


def test_drive_waits_for_a_result_without_bound_when_no_timeout_is_given() -> None:
    step = next(core.drive(operations.result("i"), Clock()))
    assert isinstance(step, core.Exchange)
    assert step.timeout_s is None


def test_drive_bounds_what_is_answered_at_once() -> None:
    steps = core.drive(operations.tree(), Clock())
    step = next(steps)
    assert isinstance(step, core.Exchange)
    assert step.timeout_s == core.ANSWER_S
    with pytest.raises(HayataError, match="daemon_unavailable"):
        steps.throw(TimeoutError())


def test_follow_goes_on_behind_the_last_event_emitted() -> None:
    steps = core.follow(m.FollowEvents("i", 3), Clock())
    opening = next(steps)
    assert isinstance(opening, core.Open)
    assert opening.request == m.FollowEvents("i", 3)
    assert isinstance(steps.send(None), core.Receive)
    emitted = steps.send(m.EventBatch([event(4), event(5)]))
    assert isinstance(emitted, core.Emit)
    assert isinstance(steps.send(None), core.Receive)
    assert isinstance(steps.send(m.EventBatch([])), core.Receive), "an empty batch is nothing to emit"
    assert isinstance(steps.throw(lost(greeted=True)), core.Pause)
    again = steps.send(None)
    assert isinstance(again, core.Open)
    assert again.request == m.FollowEvents("i", 5)
    steps.send(None)
    with pytest.raises(StopIteration):
        steps.send(m.Done())


def test_after_a_gap_the_next_number_is_behind_its_last() -> None:
    gap = m.EventInfo(4, "gap", 1.0, msgspec.Raw(encode({"from": 4, "to": 9})))
    assert core.after(m.FollowEvents("i"), [event(3), gap]).after == 9
    broken = m.EventInfo(4, "gap", 1.0, msgspec.Raw(encode({"from": 4})))
    with pytest.raises(HayataError, match="protocol_error"):
        core.after(m.FollowEvents("i"), [broken])


@given(st.lists(st.sampled_from(["loss", "batch", "empty"]), max_size=30))
def test_follow_emits_each_event_once_whatever_is_lost(script: list[str]) -> None:
    """A server with ten events, one for each batch, and connections that break as the script says."""
    steps = core.follow(m.FollowEvents("i"), Clock())
    position, emitted = 0, []
    effect: Any = next(steps)
    plan = iter(script)
    try:
        while True:
            match effect:
                case core.Open(request=request):
                    position = request.after
                    effect = steps.send(None)
                case core.Receive():
                    action = next(plan, "batch")
                    if action == "loss":
                        effect = steps.throw(lost(greeted=True))
                    elif action == "empty":
                        effect = steps.send(m.EventBatch([]))
                    elif position < 10:
                        position += 1
                        effect = steps.send(m.EventBatch([event(position)]))
                    else:
                        effect = steps.send(m.Done())
                case core.Emit(events=events):
                    emitted += [one.sequence for one in events]
                    effect = steps.send(None)
                case _:
                    effect = steps.send(None)
    except StopIteration:
        pass
    assert emitted == list(range(1, 11))


def test_run_without_options_makes_a_new_id_each_time() -> None:
    def sent() -> Any:
        step = next(core.drive(operations.run("a"), Clock()))
        assert isinstance(step, core.Exchange)
        return step.request

    one, other = sent(), sent()
    assert one.invocation_id != other.invocation_id


@pytest.mark.parametrize(
    ("given_reference", "absolute"),
    [("pkg.mod:agent", True), ("app.py", False), ("sub/app.py:agent", False), ("/x/app.py:agent", True)],
)
def test_app_reference_with_a_path_becomes_absolute(given_reference: str, absolute: bool) -> None:
    step = next(core.drive(operations.start_agent(given_reference), Clock()))
    assert isinstance(step, core.Exchange)
    assert isinstance(step.request, m.StartAgent)
    assert (step.request.app == given_reference) is absolute
    assert step.request.app.endswith(given_reference)


# ------------------------------------------------------------------------------------------------------------
# No twins
# ------------------------------------------------------------------------------------------------------------


def public(kind: type) -> dict[str, Any]:
    return {name: member for name, member in vars(kind).items() if not name.startswith("_")}


@pytest.mark.parametrize(
    ("one", "other"),
    [(blocking.Client, asynchronous.AsyncClient), (blocking.Invocation, asynchronous.AsyncInvocation)],
)
def test_both_faces_have_the_same_methods_with_the_same_parameters(one: type, other: type) -> None:
    theirs = public(other)
    assert set(public(one)) == set(theirs)
    for name, member in public(one).items():
        if isinstance(member, property):
            continue
        assert list(inspect.signature(member).parameters) == list(inspect.signature(theirs[name]).parameters)
        assert member.__doc__
        assert "self" in inspect.signature(member).parameters


def test_methods_show_their_operation_in_help() -> None:
    signature = inspect.signature(blocking.Client.run)
    assert list(signature.parameters)[:3] == ["self", "agent_id", "input"]
    assert signature.return_annotation == "Invocation"
    assert blocking.Client.run.__name__ == "run"
    assert "Start an invocation" in (blocking.Client.run.__doc__ or "")
    assert list(inspect.signature(blocking.Invocation.result).parameters) == ["self", "timeout"]


@pytest.mark.parametrize("module", [core, operations])
def test_core_and_operations_do_no_io(module: Any) -> None:
    tree = ast.parse(inspect.getsource(module))
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert not imported & {"socket", "select", "asyncio", "threading", "time", "os", "selectors"}


def test_infinite_time_is_no_time_limit() -> None:
    make: Callable[[], Any] = lambda: operations.result("i", math.inf)  # noqa: E731
    step = next(core.drive(make(), Clock()))
    assert isinstance(step, core.Exchange)
    assert step.timeout_s is None
