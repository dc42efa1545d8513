"""When a reload begins, whom it answers, and what becomes of those who ask meanwhile."""

from __future__ import annotations

import pytest

from hayata.messages import ErrorInfo
from hayata_supervisor.core.reload import Abandon, Answer, Begin, Reloads, Rest, Switch

WHY = ErrorInfo("agent_start_failed", "no module for today")


@pytest.fixture
def reloads() -> Reloads[str]:
    reloads: Reloads[str] = Reloads()
    reloads.opened()
    return reloads


def loading(reloads: Reloads[str], *apps: int) -> None:
    assert reloads.ask("one") == [Begin(2)]
    assert reloads.begun(apps) == []


def test_reload_asked_for_before_the_first_generation_is_there_waits_for_it():
    reloads: Reloads[str] = Reloads()
    assert reloads.ask("early") == []
    assert reloads.opened() == [Begin(2)]
    assert reloads.opened() == []


def test_reload_switches_when_the_last_app_is_imported_and_is_over_when_the_old_code_is_gone(reloads):
    loading(reloads, 0, 1)
    assert reloads.imported(1) == []
    assert reloads.imported(1) == []
    assert reloads.imported(0) == [Switch()]
    assert reloads.generation == 1
    assert reloads.switched() == [Answer(["one"], None), Rest()]
    assert (reloads.generation, reloads.state) == (2, "draining")
    assert reloads.drained() == []
    assert reloads.ask("two") == [Begin(3)]


def test_reload_of_no_app_switches_at_once(reloads):
    reloads.ask("one")
    assert reloads.begun([]) == [Switch()]


def test_reload_that_is_refused_abandons_what_there_is_and_says_why(reloads):
    loading(reloads, 0, 1)
    reloads.imported(0)
    assert reloads.refused(WHY) == [Abandon(), Answer(["one"], WHY), Rest()]
    assert reloads.refused(WHY) == []
    assert reloads.imported(1) == []
    assert reloads.generation == 1
    reloads.drained()
    assert reloads.ask("two") == [Begin(2)]


def test_those_who_ask_meanwhile_get_one_more_reload_together_when_all_is_quiet(reloads):
    loading(reloads, 0)
    assert reloads.ask("two") == []
    reloads.imported(0)
    assert reloads.switched() == [Answer(["one"], None)], "no rest: somebody waits"
    assert reloads.ask("three") == []
    assert reloads.drained() == [Begin(3)]
    reloads.begun([0])
    reloads.imported(0)
    assert reloads.switched() == [Answer(["two", "three"], None), Rest()]


def test_workers_that_are_replaced_without_a_reload_drain_before_the_next_one(reloads):
    assert reloads.replaced() == 2
    assert reloads.ask("one") == []
    assert reloads.drained() == [Begin(3)]
    assert reloads.replaced() == 3
    reloads.begun([0])
    assert reloads.imported(0) == [Switch()]
    reloads.switched()
    assert reloads.generation == 4


def test_end_answers_everybody_and_nothing_begins_after_it(reloads):
    loading(reloads, 0)
    reloads.ask("two")
    assert reloads.close(WHY) == [Abandon(), Answer(["one", "two"], WHY)]
    assert [reloads.imported(0), reloads.switched(), reloads.refused(WHY), reloads.drained()] == [[], [], [], []]
    assert reloads.close(WHY) == [Answer([], WHY)]
