from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hayata_supervisor.core.restart import RestartWindow, add_restart, rest_s, restart_delay_s


def count(instants: list[float], *, period_s: float, intensity: int) -> list[bool]:
    window = RestartWindow()
    verdicts = []
    for instant in instants:
        window, exceeded = add_restart(window, instant, period_s=period_s, intensity=intensity)
        verdicts.append(exceeded)
    return verdicts


@pytest.mark.parametrize(
    ("instants", "period_s", "intensity", "expected"),
    [
        ([0.0], 60.0, 0, [True]),  # OTP: intensity 0 allows none
        ([0.0, 1.0], 60.0, 1, [False, True]),
        ([0.0, 1.0, 2.0], 60.0, 2, [False, False, True]),
        ([0.0, 61.0, 122.0], 60.0, 1, [False, False, False]),
        ([0.0, 60.0], 60.0, 1, [False, True]),  # exactly one period old: it counts still
        ([0.0, 60.001], 60.0, 1, [False, False]),
        ([5.0, 5.0, 5.0], 60.0, 2, [False, False, True]),  # three at once
    ],
)
def test_add_restart_in_time_gives_up_beyond_the_intensity(instants, period_s, intensity, expected):
    assert count(instants, period_s=period_s, intensity=intensity) == expected


def test_add_restart_before_the_newest_is_refused():
    window, _ = add_restart(RestartWindow(), 10.0, period_s=60.0, intensity=3)
    with pytest.raises(ValueError, match="can't follow"):
        add_restart(window, 9.9, period_s=60.0, intensity=3)


gaps = st.lists(st.integers(0, 400).map(lambda n: n / 4), min_size=1, max_size=60)


@given(gaps=gaps, period_s=st.integers(1, 200).map(float), intensity=st.integers(0, 12))
def test_add_restart_any_history_agrees_with_counting_it_whole(gaps, period_s, intensity):
    history: list[float] = []
    window = RestartWindow()
    now = 0.0
    for gap in gaps:
        now += gap
        history.append(now)
        window, exceeded = add_restart(window, now, period_s=period_s, intensity=intensity)
        within = [instant for instant in history if now - instant <= period_s]
        assert exceeded == (len(within) > intensity)
        assert len(window.restarts) <= intensity + 1
        assert list(window.restarts) == within[-(intensity + 1) :]


def test_restart_delay_first_is_none_then_it_doubles_up_to_the_longest():
    delays = [restart_delay_s(n, backoff_s=0.1, max_backoff_s=1.0, jitter=1.0) for n in range(1, 8)]
    assert delays == pytest.approx([0.0, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0])


@given(
    number=st.integers(1, 10**9),
    backoff_s=st.floats(0, 100),
    max_backoff_s=st.floats(0, 1000),
    jitter=st.floats(0, 1, exclude_max=True),
)
def test_restart_delay_any_arguments_stays_within_its_bounds(number, backoff_s, max_backoff_s, jitter):
    delay = restart_delay_s(number, backoff_s=backoff_s, max_backoff_s=max_backoff_s, jitter=jitter)
    assert 0 <= delay <= max_backoff_s
    assert number > 1 or delay == 0
    calm = restart_delay_s(number, backoff_s=backoff_s, max_backoff_s=max_backoff_s, jitter=0.0)
    assert delay >= calm


def test_restart_delay_jitter_spreads_over_half_of_the_pause():
    def pause(jitter: float) -> float:
        return restart_delay_s(3, backoff_s=1.0, max_backoff_s=60.0, jitter=jitter)

    assert (pause(0.0), pause(0.5)) == (1.0, 1.5)


def rests(served: list[float]) -> list[float]:
    previous = None
    found = []
    for each in served:
        previous = rest_s(previous, each, first_s=60.0, longest_s=600.0, period_s=60.0)
        found.append(previous)
    return found


def test_rest_failing_again_soon_doubles_up_to_the_longest():
    assert rests([0.0, 1.0, 0.0, 60.0, 5.0, 0.0]) == [60.0, 120.0, 240.0, 480.0, 600.0, 600.0]


def test_rest_after_a_healthy_period_starts_over():
    assert rests([0.0, 0.0, 61.0, 0.0]) == [60.0, 120.0, 60.0, 120.0]
