"""The two clocks of a process."""

from __future__ import annotations

from hayata_supervisor.core.liveness import Pulse

HANG_S, STOPPED_S = 10.0, 30.0


def judged(pulse: Pulse, now_s: float) -> str:
    return pulse.judge(now_s, hang_s=HANG_S, stopped_s=STOPPED_S)


def listening() -> Pulse:
    pulse = Pulse()
    pulse.asks = True
    return pulse


def test_silent_process_is_asked_and_hangs_when_its_answer_is_late():
    pulse = listening()
    assert judged(pulse, 0.0) == "ask"
    pulse.asked(0.0)
    assert judged(pulse, 9.9) == "well"
    assert judged(pulse, 10.0) == "hung"


def test_question_that_is_asked_again_leaves_the_first_one_s_clock_alone():
    pulse = listening()
    pulse.asked(0.0)
    pulse.asked(9.0)
    assert judged(pulse, 10.0) == "hung"


def test_answer_ends_the_silence():
    pulse = listening()
    pulse.asked(0.0)
    assert pulse.owes_answer
    pulse.answered()
    assert not pulse.owes_answer
    assert judged(pulse, 100.0) == "ask"


def test_process_with_user_code_is_never_asked_and_never_hangs_p19():
    """P19, prefect 16459, 20887: it may hold the interpreter for as long as its deadline allows."""
    assert judged(Pulse(), 1e9) == "well"


def test_stopped_process_is_judged_by_its_stop_alone():
    pulse = listening()
    pulse.asked(0.0)
    pulse.stopped(1.0)
    assert judged(pulse, 30.9) == "well"
    assert judged(pulse, 31.0) == "stopped"


def test_process_that_went_on_is_as_good_as_any():
    pulse = listening()
    pulse.asked(0.0)
    pulse.stopped(1.0)
    pulse.went_on(29.0)
    assert not pulse.is_stopped
    assert judged(pulse, 38.9) == "well"
    assert judged(pulse, 39.0) == "hung"
    pulse.answered()
    pulse.stopped(40.0)
    assert judged(pulse, 69.9) == "well"


def test_stop_that_is_told_twice_has_ended_in_between():
    pulse = Pulse()
    pulse.stopped(0.0)
    pulse.stopped(20.0)
    assert judged(pulse, 49.9) == "well"
    assert judged(pulse, 50.0) == "stopped"


def test_forgiven_process_has_all_its_time_again():
    pulse = listening()
    pulse.asked(0.0)
    pulse.forgive(100.0)
    assert judged(pulse, 109.9) == "well"
    assert judged(pulse, 110.0) == "hung"
    pulse.stopped(100.0)
    pulse.forgive(200.0)
    assert judged(pulse, 229.9) == "well"
    assert judged(pulse, 230.0) == "stopped"


def test_time_without_a_processor_is_no_silence():
    pulse = listening()
    pulse.asked(0.0, waited_s=7.0)
    assert pulse.judge(500.0, 7.0 + 490.1, hang_s=HANG_S, stopped_s=STOPPED_S) == "well"
    assert pulse.judge(500.0, 7.0 + 490.0, hang_s=HANG_S, stopped_s=STOPPED_S) == "hung"
    pulse.forgive(500.0, waited_s=497.0)
    assert pulse.silent_s(520.0, 502.0) == 15.0
