"""The supervision tree as data: the whole matrix strategy x restart type x exit class x position, and what goes beyond.

What is expected stands in tables, as OTP's documentation has it; nothing of it is computed as the code does.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from hayata_supervisor.core.supervision import (
    Back,
    ChildSpec,
    Effect,
    Escalate,
    GaveUp,
    Rest,
    Rule,
    Start,
    State,
    Stopped,
    Terminate,
    child_exited,
    child_ready,
    define,
    edge_failed,
    try_again,
)

A, N1, N2, N3 = "", "n1", "n2", "n3"
ALL = (A, N1, N2, N3)

RESTARTED = {  # by restart type, then by exit class
    "permanent": {"normal": True, "shutdown": True, "abnormal": True, "never_started": True},
    "transient": {"normal": False, "shutdown": False, "abnormal": True, "never_started": True},
    "temporary": {"normal": False, "shutdown": False, "abnormal": False, "never_started": False},
}
TERMINATED = {  # by strategy, then by who died: who falls with it, in this order
    "one_for_one": {A: (), N1: (), N2: (), N3: ()},
    "one_for_all": {A: (N3, N2, N1), N1: (N3, N2, A), N2: (N3, N1, A), N3: (N2, N1, A)},
    "rest_for_one": {A: (N3, N2, N1), N1: (N3, N2), N2: (N3,), N3: ()},
}
STARTED = {  # and who is then started, in this order
    "one_for_one": {A: (A,), N1: (N1,), N2: (N2,), N3: (N3,)},
    "one_for_all": {A: ALL, N1: ALL, N2: ALL, N3: ALL},
    "rest_for_one": {A: ALL, N1: (N1, N2, N3), N2: (N2, N3), N3: (N3,)},
}


class Tree:
    """An agent at work, and all that was to be done so far."""

    def __init__(self, strategy: str = "one_for_one", *, ready: bool = True, **options: Any) -> None:
        kinds = options.pop("kinds", {})
        numbers = {"intensity": 3, "period_s": 60.0, "backoff_s": 1.0, "max_backoff_s": 8.0}
        rests = {"first_rest_s": 60.0, "longest_rest_s": 600.0}
        rule: Any = {"strategy": strategy, **numbers, **rests, **options}
        self.rule = Rule(**rule)
        self.now = 0.0
        self.done: list[Effect] = []
        self.state = State(self.rule, ())
        self.take(define(self.state, self.rule, [ChildSpec(id, kinds.get(id, "permanent")) for id in ALL]))
        if ready:
            self.ready(*ALL)
        self.forget()

    def take(self, outcome: tuple[State, list[Effect]]) -> list[Effect]:
        self.state, effects = outcome
        self.done += effects
        return effects

    def forget(self) -> None:
        self.done = []

    def ready(self, *ids: str) -> None:
        for id in ids:
            self.take(child_ready(self.state, id, self.now))

    def exits(self, id: str, exit: Any = "abnormal", **how: bool) -> list[Effect]:
        return self.take(child_exited(self.state, id, exit, self.now, 0.0, **how))

    def settle(self) -> None:
        """Everything that was told to terminate does."""
        while going := [child.spec.id for child in self.state.children if child.status == "terminating"]:
            self.exits(going[0], "abnormal")

    def again(self, id: str | None) -> list[Effect]:
        return self.take(try_again(self.state, id))

    def statuses(self) -> dict[str, str]:
        return {child.spec.id: child.status for child in self.state.children}


@pytest.mark.parametrize("position", ALL, ids=["agent_worker", "first_node", "middle_node", "last_node"])
@pytest.mark.parametrize("exit", ["normal", "shutdown", "abnormal", "never_started"])
@pytest.mark.parametrize("restart", ["permanent", "transient", "temporary"])
@pytest.mark.parametrize("strategy", ["one_for_one", "one_for_all", "rest_for_one"])
def test_child_that_exits_is_restarted_with_whom_its_strategy_says(strategy, restart, exit, position):
    tree = Tree(strategy, kinds={position: restart})
    tree.exits(position, exit)
    tree.settle()
    if RESTARTED[restart][exit]:
        assert tree.done == [
            *(Terminate(id) for id in TERMINATED[strategy][position]),
            Start(STARTED[strategy][position], 0.0),
        ]
        assert set(tree.statuses().values()) == {"up"}
    else:
        assert tree.done == [Stopped(position)]
        assert tree.statuses() == {id: "stopped" if id == position else "up" for id in ALL}


SIBLING = {  # a sibling's restart type, and whether it had stopped before: what becomes of it in a group's restart
    ("permanent", False): "started",
    ("transient", False): "started",
    ("temporary", False): "terminated for good",
    ("transient", True): "started",  # OTP: a child that is not temporary stays in the list, and the list is started
    ("temporary", True): "untouched",
}


@pytest.mark.parametrize(("restart", "had_stopped"), SIBLING)
@pytest.mark.parametrize("strategy", ["one_for_all", "rest_for_one"])
def test_sibling_in_a_restart_of_the_group_follows_its_restart_type(strategy, restart, had_stopped):
    tree = Tree(strategy, kinds={N2: restart})
    if had_stopped:
        tree.exits(N2, "normal")
        tree.forget()
    tree.exits(N1)
    tree.settle()
    expected = SIBLING[restart, had_stopped]
    (start,) = [effect for effect in tree.done if isinstance(effect, Start)]
    assert (N2 in start.children) == (expected == "started")
    assert (Terminate(N2) in tree.done) == (not had_stopped)
    assert (Stopped(N2) in tree.done) == (expected == "terminated for good")
    assert tree.statuses()[N2] == ("up" if expected == "started" else "stopped")


# ---- a group's restart ---------------------------------------------------------------------------------------------


def test_siblings_are_terminated_one_after_the_other():
    tree = Tree("one_for_all")
    assert tree.exits(N2) == [Terminate(N3)]
    assert tree.exits(N3, "shutdown") == [Terminate(N1)]
    assert tree.exits(N1, "normal") == [Terminate(A)]
    assert tree.exits(A) == [Start(ALL, 0.0)]


def test_death_of_a_sibling_that_is_to_be_terminated_counts_no_more_and_is_not_waited_for():
    tree = Tree("one_for_all", intensity=1)
    tree.exits(N3)
    assert tree.exits(A) == []  # N2 is terminating still
    assert tree.exits(N2) == [Terminate(N1)]
    assert tree.exits(N1) == [Start(ALL, 0.0)]
    assert len(tree.state.window.restarts) == 1


@pytest.mark.parametrize("exit", ["normal", "shutdown", "abnormal"])
def test_terminated_sibling_comes_back_however_it_ended(exit):
    tree = Tree("one_for_all", kinds={N1: "transient"})
    tree.exits(N3)
    for id in (N2, N1, A):
        tree.exits(id, exit)
    assert tree.done[-1] == Start(ALL, 0.0)


def test_death_outside_of_the_group_makes_it_larger_and_never_begins_another():
    tree = Tree("rest_for_one")
    assert tree.exits(N2) == [Terminate(N3)]
    assert tree.exits(N1) == []
    assert tree.exits(N3) == [Start((N1, N2, N3), 0.5)]  # two deaths: the second restart of the window waits
    assert [effect for effect in tree.done if isinstance(effect, Start)] == [Start((N1, N2, N3), 0.5)]


def test_death_outside_of_the_group_of_a_child_that_is_not_restarted_leaves_it():
    tree = Tree("rest_for_one", kinds={N1: "temporary"})
    tree.exits(N2)
    assert tree.exits(N1) == [Stopped(N1)]
    assert tree.exits(N3) == [Start((N2, N3), 0.0)]


def test_death_while_the_group_waits_to_be_started_takes_the_start_back():
    tree = Tree("rest_for_one")
    tree.exits(N3)
    tree.exits(N2)
    tree.settle()
    tree.forget()
    tree.exits(A)
    assert tree.done == [Terminate(N3)]  # it has no process yet: whoever does it answers at once
    tree.settle()
    assert tree.done == [Terminate(N3), Terminate(N2), Terminate(N1), Start(ALL, 1.0)]


def test_child_that_gets_ready_while_it_is_terminated_changes_nothing():
    tree = Tree("one_for_all", ready=False)
    tree.exits(N3, "never_started")
    tree.ready(N2)
    assert not tree.state.child(N2).ready
    tree.settle()
    assert tree.done[-1] == Start(ALL, 0.0)


# ---- intensity, backoff --------------------------------------------------------------------------------------------


def test_restart_alone_is_delayed_by_its_own_window_only():
    tree = Tree()
    assert [tree.exits(N1) for _ in range(3)] == [[Start((N1,), 0.0)], [Start((N1,), 0.5)], [Start((N1,), 1.0)]]
    assert tree.exits(N2) == [Start((N2,), 0.0)]


def test_restart_after_a_stable_period_is_immediate_again():
    tree = Tree()
    for _ in range(3):
        tree.exits(N1)
    tree.now = 60.1
    assert tree.exits(N1) == [Start((N1,), 0.0)]


def test_child_over_its_intensity_is_given_up_and_its_siblings_are_not():
    tree = Tree()
    for _ in range(3):
        tree.exits(N1)
    assert tree.exits(N1) == [GaveUp(N1, 60.0)]
    assert tree.statuses() == {A: "up", N1: "failed", N2: "up", N3: "up"}


def test_child_that_never_starts_is_given_up_after_as_many_starts():
    """P14, supervisor 1285, gunicorn 2504: a restart storm."""
    tree = Tree(ready=False)
    starts = 1
    while tree.state.child(N1).status == "up":
        starts += sum(isinstance(effect, Start) for effect in tree.exits(N1, "never_started"))
    assert starts == 1 + 3  # the first, and `intensity` restarts


def test_rest_of_a_child_doubles_and_one_failure_is_enough_until_it_has_come_up():
    tree = Tree(intensity=0, period_s=10.0)
    tree.exits(N1)
    assert tree.done[0] == GaveUp(N1, 60.0)
    tree = Tree(intensity=3)
    for _ in range(4):
        tree.exits(N1)
    rests = []
    for _ in range(5):
        tree.now += 1000.0
        assert tree.again(N1) == [Start((N1,), 0.0)]
        rests += [effect.rest_s for effect in tree.exits(N1, "never_started") if isinstance(effect, GaveUp)]
    assert rests == [120.0, 240.0, 480.0, 600.0, 600.0]
    tree.again(N1)
    tree.forget()
    tree.ready(N1)
    assert tree.done == [Back((N1,))]
    tree.now += 60.1
    for _ in range(4):
        tree.exits(N1)
    assert tree.done[-1] == GaveUp(N1, 60.0)  # it had healed


def test_blameless_death_alone_is_restarted_at_once_and_not_counted():
    tree = Tree(intensity=1)
    for _ in range(5):
        assert tree.exits(A, blameless=True) == [Start((A,), 0.0)]


def test_blameless_death_that_fells_siblings_counts():
    tree = Tree("one_for_all", intensity=1)
    tree.exits(A, blameless=True)
    tree.settle()
    assert tree.exits(A, blameless=True)[0] == Escalate()


def test_edges_that_do_not_start_count_against_their_node():
    tree = Tree(intensity=2)
    verdicts = []
    for _ in range(3):
        tree.state, hopeless = edge_failed(tree.state, N1, tree.now)
        verdicts.append(hopeless)
    assert verdicts == [False, False, True]
    assert tree.exits(N1, "normal", hopeless=True) == [GaveUp(N1, 60.0)]


def test_edges_that_do_not_start_count_against_the_group_where_there_is_one():
    tree = Tree("one_for_all", intensity=1)
    tree.state, first = edge_failed(tree.state, N1, tree.now)
    tree.state, second = edge_failed(tree.state, N2, tree.now)
    assert (first, second) == (False, True)
    assert tree.exits(N2, "normal", hopeless=True)[0] == Escalate()


@pytest.mark.parametrize(("restart", "expected"), [("transient", GaveUp(N1, 60.0)), ("temporary", Stopped(N1))])
def test_hopeless_node_is_not_taken_for_one_that_ended_normally(restart, expected):
    tree = Tree(kinds={N1: restart})
    assert tree.exits(N1, "normal", hopeless=True)[0] == expected


# ---- escalation ----------------------------------------------------------------------------------------------------


def test_children_given_up_count_as_restarts_of_their_agent():
    tree = Tree(intensity=1)
    for id in (N1, N2):
        tree.exits(id)
        tree.forget()
        tree.exits(id)
    assert tree.done == [GaveUp(N2, 60.0), Escalate(), Terminate(N3)]
    tree.settle()
    assert tree.done[3:] == [Terminate(N2), Terminate(N1), Terminate(A), Rest(60.0)]  # the failed ones rest no more
    assert set(tree.statuses().values()) == {"down"}


@pytest.mark.parametrize("strategy", ["one_for_all", "rest_for_one"])
def test_group_over_its_intensity_fails_the_whole_agent(strategy):
    tree = Tree(strategy, intensity=1)
    tree.exits(N3)
    tree.settle()
    tree.forget()
    tree.exits(N3)
    tree.settle()
    assert tree.done == [Escalate(), Terminate(N2), Terminate(N1), Terminate(A), Rest(60.0)]


def test_agent_that_fails_while_it_restarts_a_group_goes_on_terminating_all():
    tree = Tree("rest_for_one", intensity=1)
    tree.exits(N2)
    assert tree.exits(N1) == [Escalate()]  # N3 is terminating already
    assert tree.exits(N3) == [Terminate(A)]
    assert tree.exits(A) == [Rest(60.0)]


def test_agent_that_is_tried_again_starts_all_and_is_back_when_all_are_up():
    tree = Tree("one_for_all", intensity=0, kinds={N3: "temporary"})
    tree.exits(N3, "normal")
    tree.exits(N1)
    tree.settle()
    tree.forget()
    assert tree.again(None) == [Start(ALL, 0.0)]
    tree.ready(A, N1, N3)
    assert tree.done == [Start(ALL, 0.0)]
    tree.ready(N2)
    assert tree.done[-1] == Back((N3, N2, N1, A))


@pytest.mark.parametrize("strategy", ["one_for_one", "one_for_all", "rest_for_one"])
def test_agent_on_trial_fails_at_the_first_failure_and_rests_longer(strategy):
    tree = Tree(strategy, intensity=2)
    while tree.state.phase != "failed":
        for id in (N1, N2, N3):
            if tree.state.child(id).status == "up":
                tree.exits(id)
                tree.settle()
    rests = []
    for _ in range(5):
        tree.again(None)
        tree.ready(A, N2)
        tree.forget()
        tree.exits(N1, "never_started")
        tree.settle()
        assert tree.done[0] == Escalate()
        rests += [effect.rest_s for effect in tree.done if isinstance(effect, Rest)]
    assert rests == [120.0, 240.0, 480.0, 600.0, 600.0]


@pytest.mark.parametrize("strategy", ["one_for_one", "one_for_all"])
def test_agent_that_is_back_begins_to_count_anew(strategy):
    tree = Tree(strategy, intensity=1)
    for id in (N3, N1, N1, N2, N2):
        if tree.state.phase == "serving":
            tree.exits(id)
            tree.settle()
    tree.again(None)
    tree.ready(*ALL)
    tree.forget()
    tree.exits(N3)
    tree.settle()
    assert tree.done[-1] == Start((N3,) if strategy == "one_for_one" else ALL, 0.0)


def test_child_that_is_back_begins_to_count_anew():
    tree = Tree(intensity=1)
    tree.exits(N1)
    tree.exits(N1)
    tree.again(N1)
    tree.ready(N1)
    assert tree.exits(N1) == [Start((N1,), 0.0)]


def test_trial_ends_well_without_a_child_that_is_not_restarted():
    tree = Tree("one_for_all", intensity=0, kinds={N1: "temporary"})
    tree.exits(N2)
    tree.settle()
    tree.again(None)
    tree.ready(A, N2, N3)
    assert tree.exits(N1, "never_started") == [Stopped(N1), Back((N3, N2, A))]


def test_tries_that_come_too_late_do_nothing():
    tree = Tree(intensity=0)
    tree.exits(N1)
    tree.settle()
    assert tree.again(N1) == []
    tree.again(None)
    assert tree.again(None) == []
    assert tree.again(N1) == []


# ---- definitions ---------------------------------------------------------------------------------------------------


def test_definition_with_more_children_starts_those_alone():
    tree = Tree()
    assert tree.take(define(tree.state, tree.rule, [ChildSpec(A), ChildSpec("n4")])) == [Start(("n4",), 0.0)]
    assert [child.spec.id for child in tree.state.children] == [*ALL, "n4"]


def test_definition_with_more_children_of_a_failed_agent_waits_for_its_trial():
    tree = Tree(intensity=0)
    tree.exits(N1)
    tree.settle()
    assert tree.take(define(tree.state, tree.rule, [ChildSpec("n4")])) == []
    assert tree.again(None) == [Start((*ALL, "n4"), 0.0)]


def test_definition_with_another_restart_type_counts_from_now_on():
    tree = Tree()
    assert tree.take(define(tree.state, tree.rule, [ChildSpec(N1, "temporary")])) == []
    assert tree.exits(N1) == [Stopped(N1)]


def test_matrix_is_whole():
    assert len(list(product(TERMINATED, RESTARTED, RESTARTED["permanent"], ALL))) == 144
