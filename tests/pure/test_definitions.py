"""What of a definition a checkpoint depends on, and what happens when it has changed without a new version."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any, Literal, Optional, TypedDict

import msgspec
import pydantic
import pytest

from hayata import Agent, Append, Finish, Node
from hayata.calls import TaskCall
from hayata.definition import definition_of, type_text
from hayata.manifest import agent_manifest
from hayata.messages import NIL, ErrorInfo, PolicyFailed, RunTask, TaskFailed
from hayata_supervisor.core import facts as f
from hayata_supervisor.core.coordinator import Refusal
from hayata_supervisor.core.definitions import EMPTY, changes, encode_definition
from tests.support.pure_shell import PureShell, agent, node

ONE = b"\0" * 16


# ---- describing ------------------------------------------------------------------------------------------


class Item(pydantic.BaseModel):
    name: str
    price: float = 0.0


@dataclasses.dataclass
class Customer:
    email: str


class Total(msgspec.Struct):
    cents: int


class State(TypedDict, total=False):
    items: Annotated[list[Item], Append]
    customer: Customer | None
    note: Annotated[str, "a note"]


def plain(state):
    return {}


async def later(state):
    return {}


def finish(context):
    return Finish(None)


def made(**options: Any) -> Agent:
    nodes = options.pop("nodes", [plain, Node(later, output=dict[str, Total], input=int)])
    return Agent("a", nodes, finish, **options)


def test_definition_names_nodes_keys_merges_and_the_fields_of_their_classes():
    described = definition_of(made(state_type=State))
    digests = {path: described.pop(path) for path in list(described) if path.startswith("types.")}
    assert described == {
        "nodes.plain": "function",
        "nodes.later": "coroutine(int) -> dict[str, Total]",
        "state.items": "list[Item]",
        "state.customer": "Customer | None",
        "state.note": "str",
        "merge.items": "append",
    }
    assert list(digests) == sorted(digests, key=list(digests).index)
    assert set(digests) == {"types.Item", "types.Customer", "types.Total"}
    assert agent_manifest(made(state_type=State)).definition == {**described, **digests}


@pytest.mark.parametrize(
    ("annotation", "text"),
    [
        (int, "int"),
        (None, "None"),
        (Optional[int], "int | None"),  # noqa: UP045
        (dict[str, list[int | None]], "dict[str, list[int | None]]"),
        (tuple[int, ...], "tuple[int, ...]"),
        (Literal["a", 1], "Literal['a', 1]"),
        (Annotated[int, pydantic.Field(gt=0)], "int"),
        (Callable[[int], str], "Callable[[int], str]"),
        (Any, "Any"),
        ("Forward", "Forward"),
    ],
)
def test_types_are_written_without_modules_and_addresses(annotation, text):
    assert type_text(annotation) == text


def test_annotation_that_can_not_be_written_does_no_harm():
    class Odd:
        def __repr__(self):
            raise RuntimeError

    assert type_text(Odd()) == "?"
    assert " at 0x" not in type_text(object())


def told(before: Agent, after: Agent) -> list[str]:
    return changes(encode_definition(definition_of(before)), encode_definition(definition_of(after)))


def test_changes_are_named():
    class Before(TypedDict, total=False):
        count: int
        gone: str
        items: list[Item]

    class After(TypedDict, total=False):
        count: str
        items: Annotated[list[Item], Append]
        fresh: int

    assert told(made(state_type=Before, nodes=[plain, later]), made(state_type=After, nodes={"later": plain})) == [
        "node plain is gone",
        "node later was coroutine, is function",
        "state.count was int, is str",
        "state.gone is gone",
        "state.fresh is new",
        "the merge of state.items is new",
    ]


def test_field_of_a_class_within_the_state_is_a_change():
    def of(**fields: Any) -> Agent:
        model = pydantic.create_model("Thing", **fields)
        return made(state_type=TypedDict("S", {"thing": list[model]}), nodes=[plain])

    assert told(of(a=(int, 0)), of(a=(int, 0))) == []
    assert told(of(a=(int, 0)), of(a=(int, 0), b=(int, 0))) == ["type Thing has other fields"]
    assert told(of(a=(int, 0)), of(a=(str, ""))) == ["type Thing has other fields"]


def test_order_is_no_change_and_of_what_is_not_known_nothing_is_said():
    assert told(made(nodes=[plain, later]), made(nodes=[later, plain])) == []
    assert changes(EMPTY, encode_definition(definition_of(made()))) == []


def test_body_that_can_not_be_given_its_state_has_not_begun():
    def body(state):
        raise ValueError

    made = Agent("a", [Node(body, name="n")], state_type=State)
    runs = [RunTask("i.0.1", None, "i", 1, "k", None, False, state, NIL) for state in ({"note": NIL}, {})]
    unfit, failed = (TaskCall(made, "n", run, "e", None, None, None).run() for run in runs)
    assert (unfit.error.code, unfit.began) == ("invalid_state", False)
    assert (failed.error.code, failed.began) == ("node_exception", True)


# ---- after a restart -------------------------------------------------------------------------------------

OLD = {"nodes.a": "function", "state.count": "int"}
NEW = {"nodes.a": "function", "state.count": "str"}
UNFIT = ErrorInfo("invalid_state", "state.count: Expected `str`, got `int`")


def manifest(definition=OLD, **changes):
    return agent(node("a", rerun=9), node("b", rerun=9), definition=definition, **changes)


def started(**changes) -> PureShell:
    shell = PureShell(manifest(**changes))
    shell.run("one")
    shell.save()
    return shell


def unfit_policy(shell: PureShell) -> None:
    """The policy can't be asked: the state is not of its type."""
    number = shell.asked.pop(0).request.evaluation
    shell.do(shell.coordinator.policy_answered(PolicyFailed(number, UNFIT), shell.now))
    shell.save()


def unfit_task(shell: PureShell, execution: str, *, began: bool = False) -> None:
    shell.dispatched.pop(execution)
    shell.do(shell.coordinator.reported(TaskFailed(execution, "e", UNFIT, False, began), shell.now))
    shell.save()


def rested(shell: PureShell) -> ErrorInfo | None:
    if not shell.settled:
        return None
    info = shell.coordinator.overlay(ONE, shell.settled[-1].info)
    return info.error if info.status == "recovery_required" else None


def test_change_without_a_new_version_is_logged_once_and_the_invocation_goes_on():
    shell = PureShell(manifest())
    for name in ("one", "two", "three"):
        shell.run(name)
    shell.save()
    shell.reopen(manifest(NEW))
    shell.save()
    assert shell.warnings == [
        {"agent": "agent", "version": "1", "invocations": 3, "changes": "state.count was int, is str"}
    ]
    assert len(shell.asked) == 3


def test_nothing_is_logged_without_a_change_or_with_a_new_version():
    shell = started()
    shell.reopen(manifest())
    shell.reopen(manifest(NEW, version="2"))
    assert shell.warnings == []
    shell.do(shell.coordinator.recover("continue", shell.now)[0])
    shell.save()
    shell.reopen(manifest(NEW, version="2"))
    assert shell.warnings == [], "a person has said that it goes on by this one"


def test_reload_is_a_change_of_definition_too():
    shell = started()
    shell.do(shell.coordinator.take_manifest(manifest(NEW), shell.now))
    assert len(shell.warnings) == 1
    shell.run("two")
    assert shell.coordinator.invocations[(1).to_bytes(16, "big")].definition == encode_definition(NEW)


def test_state_that_does_not_fit_a_changed_definition_rests_and_names_the_field():
    shell = started()
    shell.reopen(manifest(NEW))
    unfit_policy(shell)
    error = rested(shell)
    assert (error.code, "state.count" in error.message) == ("invalid_state", True)
    assert "state.count was int, is str" in error.message
    assert shell.coordinator.admission.running == 0
    shell.reopen(manifest(OLD))
    shell.save()
    shell.decide(None)
    shell.save()
    assert shell.restored(ONE).status == "completed"


def test_state_that_does_not_fit_its_own_definition_fails():
    shell = started()
    unfit_policy(shell)
    assert shell.settled[-1].info.error == UNFIT
    assert shell.settled[-1].info.status == "failed"


def test_state_that_does_not_fit_the_version_a_person_chose_rests():
    shell = started()
    shell.reopen(manifest(NEW, version="2"))
    shell.do(shell.coordinator.recover("continue", shell.now)[0])
    unfit_policy(shell)
    assert rested(shell).code == "invalid_state"


def test_task_that_can_not_be_given_its_state_is_scheduled_again_and_rests():
    shell = started()
    shell.decide("a")
    shell.save()
    shell.reopen(manifest(NEW))
    shell.save()
    unfit_task(shell, shell.only())
    assert rested(shell).code == "invalid_state"
    (task,) = shell.restored(ONE).tasks
    assert (task.attempt, task.status) == (2, "scheduled")
    shell.do(shell.coordinator.recover(None, shell.now)[0])
    shell.save()
    assert shell.dispatched[shell.only()].attempt == 2, "nothing is used up"
    shell.complete(shell.only())
    assert len(shell.asked) == 1
    assert shell.coordinator.admission.running == 1


def test_branches_that_can_not_be_given_their_state_rest_together():
    shell = started()
    shell.decide(["a", "b"])
    shell.save()
    shell.reopen(manifest(NEW))
    shell.save()
    first, second = sorted(shell.dispatched)
    unfit_task(shell, first)
    assert rested(shell) is None, "the other one may still be at work"
    unfit_task(shell, second)
    assert rested(shell).code == "invalid_state"
    shell.advance(100)
    assert shell.dispatched == {}
    shell.reopen(manifest(OLD))
    shell.save()
    assert len(shell.dispatched) == 2


def test_result_that_does_not_fit_fails_as_ever():
    shell = started()
    shell.decide("a")
    shell.save()
    shell.reopen(manifest(NEW))
    shell.save()
    unfit_task(shell, shell.only(), began=True)
    assert shell.settled[-1].info.status == "failed"


@pytest.mark.parametrize(("changed", "status"), [("drop", "cancelled"), ("restart", "cancelled")])
def test_invocation_whose_state_does_not_fit_can_be_given_up(changed, status):
    shell = started()
    shell.decide("a")
    shell.save()
    shell.reopen(manifest(NEW))
    shell.save()
    unfit_task(shell, shell.only())
    shell.do(shell.coordinator.recover(changed, shell.now)[0])
    shell.save()
    assert shell.restored(ONE).status == status
    kinds = [kind for _, kind in shell.events[ONE]]
    assert kinds[-2:] == ["node_cancelled", "invocation_cancelled"]


def test_nothing_is_dropped_while_nothing_could_begin_anew():
    shell = started()
    shell.reopen(manifest(version="2"))
    shell.do(shell.coordinator.agent_given_up(ErrorInfo("agent_crashed", "again and again"), shell.now))
    with pytest.raises(Refusal):
        shell.coordinator.recover("restart", shell.now)
    assert shell.restored(ONE).status == "running"


def test_started_keeps_its_definition_over_snapshots():
    shell = started()
    facts = shell.facts(ONE)
    (start,) = [fact for fact in facts if isinstance(fact, f.Started)]
    assert bytes(start.definition) == bytes(encode_definition(OLD))
    assert bytes(shell.restored(ONE).definition) == bytes(encode_definition(OLD))
