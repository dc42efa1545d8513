"""``ctx.step``: in the worker, and in the coordinator."""

from __future__ import annotations

import asyncio
from datetime import date
from typing import Any

import pydantic
import pytest

from hayata import Agent, HayataError, Node, Probe, Retry
from hayata import messages as m
from hayata.calls import TaskCall
from hayata.errors import error_for
from hayata.values import decode, decode_mapping
from hayata_supervisor.core import facts as f
from hayata_supervisor.core.views import tasks
from tests.support.pure_shell import PureShell, agent, node

ONE = b"\0" * 16


# ---- in the worker -----------------------------------------------------------------------------------------


class Worker:
    """Attempts of one task, with what they have stored."""

    def __init__(self) -> None:
        self.stored: list[m.Substep] = []
        self.refuse: HayataError | None = None

    def store(self, substep: m.Substep) -> None:
        if self.refuse is not None:
            raise self.refuse
        self.stored.append(substep)

    async def store_later(self, substep: m.Substep) -> None:
        await asyncio.sleep(0)
        self.store(substep)

    def attempt(self, fn: Any, *, probe: bool = False, **options: Any) -> Any:
        """The result of an attempt as a mapping, or its error."""
        made = Agent("a", [Node(fn, name="n", **options)])
        run = m.RunTask("i.0.1", None, "i", 1, "k", None, False, {}, m.NIL, probe=probe, substeps=list(self.stored))
        is_async = made.nodes["n"].is_async
        store = self.store_later if is_async else self.store
        call = TaskCall(made, "n", run, "e", None, None, None, store)
        outcome = asyncio.run(call.run_async()) if is_async else call.run()
        return decode_mapping(outcome.update) if isinstance(outcome, m.TaskCompleted) else outcome.error


def counted(calls: list[Any], value: Any = None) -> Any:
    def fetch(*args):
        calls.append(args)
        return args[0] if value is None else value

    return fetch


def test_result_is_stored_before_the_body_goes_on_and_reused_by_the_next_attempt():
    worker, calls = Worker(), []
    fetch = counted(calls)

    def body(state, ctx):
        one = ctx.step(fetch, 1)
        assert worker.stored[0].key == 0
        two = ctx.step(fetch, 2, key="second")
        three = ctx.step(fetch, 3)
        return {"sum": one + two + three}

    assert worker.attempt(body) == {"sum": 6}
    assert [(each.key, each.name) for each in worker.stored] == [
        (0, "fetch"),
        ("second", "fetch"),
        (1, "fetch"),
    ]
    assert worker.attempt(body) == {"sum": 6}
    assert calls == [(1,), (2,), (3,)]
    assert len(worker.stored) == 3


def test_attempt_goes_on_at_the_first_step_that_was_not_stored():
    worker, calls = Worker(), []
    fetch = counted(calls)

    def broken(state, ctx):
        ctx.step(fetch, "a")
        raise RuntimeError

    def body(state, ctx):
        return {"both": [ctx.step(fetch, "a"), ctx.step(fetch, "b")]}

    assert worker.attempt(broken).code == "node_exception"
    assert worker.attempt(body) == {"both": ["a", "b"]}
    assert calls == [("a",), ("b",)]


def test_exception_of_a_step_passes_and_nothing_is_stored():
    worker, tries = Worker(), []

    def flaky():
        tries.append(1)
        if len(tries) == 1:
            raise ConnectionError("later")
        return "fine"

    def body(state, ctx):
        return {"x": ctx.step(flaky)}

    assert worker.attempt(body).message == "ConnectionError: later"
    assert worker.stored == []
    assert worker.attempt(body) == {"x": "fine"}


def test_another_function_at_a_position_is_a_mismatch_and_not_retried():
    worker = Worker()

    def charge():
        return 1

    def refund():
        raise AssertionError("it must not run")

    worker.attempt(lambda state, ctx: {"x": ctx.step(charge)})

    def changed(state, ctx):
        ctx.step(refund)
        return {}

    made = Agent("a", [Node(changed, name="n", retry=Retry(max_attempts=9))])
    run = m.RunTask("i.0.2", None, "i", 2, "k", None, False, {}, m.NIL, substeps=worker.stored)
    failed = TaskCall(made, "n", run, "e", None, None, None, worker.store).run()
    assert (failed.error.code, failed.retryable) == ("step_mismatch", False)
    assert "step 0 is refund now, and was charge" in failed.error.message
    assert decode(failed.error.details) == {"position": 0, "name": "refund", "stored": "charge"}


def test_steps_with_keys_may_come_in_any_order_and_don_t_move_the_others():
    worker, calls = Worker(), []
    fetch = counted(calls)

    def first(state, ctx):
        ctx.step(fetch, "p")
        ctx.step(fetch, "a", key="a")
        ctx.step(fetch, "b", key="b")
        return {}

    def second(state, ctx):
        return {"all": [ctx.step(fetch, "x", key="b"), ctx.step(fetch, "x", key="a"), ctx.step(fetch, "x")]}

    worker.attempt(first)
    assert worker.attempt(second) == {"all": ["b", "a", "p"]}


def test_key_gives_the_same_result_within_an_attempt():
    worker, calls = Worker(), []
    fetch = counted(calls)
    assert worker.attempt(lambda state, ctx: {"x": [ctx.step(fetch, 1, key="k"), ctx.step(fetch, 2, key="k")]}) == {
        "x": [1, 1]
    }


class Order(pydantic.BaseModel):
    number: int
    due: date


def test_values_come_back_as_they_were_stored_in_every_attempt():
    worker = Worker()
    order = Order(number=1, due=date(2024, 1, 2))
    seen = []

    def body(state, ctx):
        seen.append((ctx.step(lambda: (1, {2}, b"3")), ctx.step(lambda: order)))
        return {}

    options = {"output": dict[str, Order]}
    worker.attempt(body, **options)
    worker.attempt(body, **options)
    assert seen[0] == seen[1] == ((1, {2}, b"3"), {"number": 1, "due": date(2024, 1, 2)})


def test_value_that_can_not_be_stored_is_a_typed_error_with_its_path():
    error = Worker().attempt(lambda state, ctx: {"x": ctx.step(lambda: {"a": [object()]})})
    assert error.code == "unserializable_value"
    assert decode(error.details)["path"] == "step <lambda>.a[0]"


def test_refused_store_is_the_reason_of_the_failure():
    worker = Worker()
    worker.refuse = error_for("execution_not_active", "over")
    assert worker.attempt(lambda state, ctx: {"x": ctx.step(lambda: 1)}).code == "execution_not_active"


async def later(value):
    await asyncio.sleep(0)
    return value


@pytest.mark.parametrize(
    ("step", "told"),
    [
        (lambda ctx: ctx.step(3), "a step needs a function"),
        (lambda ctx: ctx.step(lambda: 1, key=""), "the key of a step"),
        (lambda ctx: ctx.step(lambda: 1, key=3), "the key of a step"),
        (lambda ctx: ctx.step(lambda: 1, key="x" * 513), "the key of a step"),
        (lambda ctx: ctx.step(lambda: 1, key="\ud800"), "lone surrogate"),
        (lambda ctx: ctx.step(later, 1), "coroutine function"),
    ],
)
def test_step_that_can_not_be_is_refused(step, told):
    worker = Worker()
    error = worker.attempt(lambda state, ctx: {"x": step(ctx)})
    assert error.code == "invalid_options"
    assert told in error.message
    assert worker.stored == []


def test_probe_has_no_steps():
    error = Worker().attempt(lambda state, ctx: {}, probe=True, interrupted=Probe(lambda ctx: ctx.step(lambda: 1)))
    assert (error.code, error.message) == ("invalid_options", "a probe has no steps")


def test_coroutine_node_awaits_steps_of_either_kind():
    worker, calls = Worker(), []
    fetch = counted(calls)

    async def body(state, ctx):
        one = await ctx.step(later, 1)
        two = await ctx.step(fetch, 2)
        return {"sum": one + two}

    assert worker.attempt(body) == {"sum": 3}
    assert worker.attempt(body) == {"sum": 3}
    assert calls == [(2,)]


def test_steps_that_are_gathered_keep_the_positions_of_their_calls():
    worker, delays = Worker(), {"a": 0.02, "b": 0.0}

    async def slow(name):
        await asyncio.sleep(delays[name])
        return name

    async def body(state, ctx):
        return {"x": list(await asyncio.gather(ctx.step(slow, "a"), ctx.step(slow, "b")))}

    assert worker.attempt(body) == {"x": ["a", "b"]}
    assert [(each.key, decode(each.value)) for each in worker.stored] == [(1, "b"), (0, "a")]
    assert worker.attempt(body) == {"x": ["a", "b"]}


# ---- in the coordinator ------------------------------------------------------------------------------------


def started(**options) -> PureShell:
    shell = PureShell(agent(node("a", **options)))
    shell.run("one")
    shell.save()
    shell.decide("a")
    shell.save()
    shell.begin_body(shell.only())
    return shell


def step(shell: PureShell, number: int, key: int | str = 0) -> None:
    shell.substep(shell.only(), number, key)


def keys(shell: PureShell) -> list[int | str]:
    return [each.key for each in shell.dispatched[shell.only()].substeps]


def test_step_is_acknowledged_when_it_is_durable():
    shell = started()
    step(shell, 1)
    assert shell.acks == []
    shell.save()
    assert shell.acks[-1].ack == m.PartialAck(shell.only(), 1, None)


ENDS = {
    "retried": lambda shell: (shell.fail(shell.only(), retryable=True), shell.save(), shell.advance(60)),
    "rerun": lambda shell: shell.interrupt(shell.only()),
    "rerun after a restart": lambda shell: shell.reopen(proofs=True),
    "probed": lambda shell: (shell.interrupt(shell.only()), shell.probed(shell.only(), not_done=True)),
    "reconciled": lambda shell: (
        shell.reopen(proofs=True),
        shell.save(),
        shell.do(shell.coordinator.reconcile(ONE, f.Reconciled(0, 1, "a", "me", "r", None, {}, None), shell.now)),
    ),
}
OPTIONS = {
    "retried": {"retry": m.RetryManifest(3, 1.0, 2.0, 8.0, 0.0)},
    "rerun": {"rerun": 3},
    "rerun after a restart": {"rerun": 3},
    "probed": {"probe": 3},
    "reconciled": {},
}


@pytest.mark.parametrize("how", ENDS)
def test_next_attempt_gets_what_was_stored_whatever_it_is_due_to(how):
    shell = started(**OPTIONS[how])
    step(shell, 1, 0)
    step(shell, 2, "k")
    shell.save()
    ENDS[how](shell)
    shell.save()
    assert shell.dispatched[shell.only()].attempt == 2
    assert keys(shell) == [0, "k"]
    step(shell, 1, 1)
    shell.save()
    ENDS[how](shell) if how != "reconciled" else None
    shell.save()
    if how != "reconciled":
        assert keys(shell) == [0, "k", 1]


def test_stored_steps_go_with_the_task_and_not_to_the_next():
    shell = started()
    step(shell, 1)
    shell.complete(shell.only())
    shell.save()
    assert shell.coordinator.invocations[ONE].tasks[0].substeps == []
    shell.decide("a")
    shell.save()
    assert keys(shell) == []


def test_step_of_an_execution_that_is_over_is_refused():
    shell = started()
    execution = shell.only()
    shell.do(shell.coordinator.cancel(ONE, "no", None, shell.now))
    step(shell, 1)
    assert shell.acks[-1].ack.error.code == "execution_not_active"
    shell.interrupt(execution, "cancelled")
    before = len(shell.acks)
    shell.substep(execution, 2, 0)
    assert len(shell.acks) == before, "nobody is left to be told"


def test_step_of_a_body_that_was_cut_off_is_refused_while_its_probe_is_asked():
    shell = started(probe=3)
    shell.interrupt(shell.only())
    assert shell.dispatched[shell.only()].substeps == []
    step(shell, 1)
    assert shell.acks[-1].ack.error.code == "execution_not_active"


def test_tasks_name_their_stored_steps():
    shell = started(rerun=2)
    step(shell, 1, 0)
    step(shell, 2, "charge")
    shell.interrupt(shell.only())
    shell.save()
    step(shell, 1, 1)
    shell.complete(shell.only())
    shell.save()
    first, second = tasks(ONE, shell.journals[ONE])
    assert (first.substeps, second.substeps) == (["fetch", "charge"], ["fetch"])
