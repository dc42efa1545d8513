from datetime import timedelta

import pytest

from hayata import durations


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ("90s", 90), ("2m", 120), ("12h", 43_200), ("30d", 2_592_000), ("2w", 1_209_600), ("1.5h", 5400),
        (" 7 d ", 604_800), ("0s", 0), (0, 0), (2.5, 2.5), (timedelta(hours=1), 3600),
    ],
)  # fmt: skip
def test_duration_is_read(given, seconds):
    assert durations.seconds(given) == seconds


@pytest.mark.parametrize(
    "given",
    [
        "",
        "d",
        "30",
        "30 days",
        "-1d",
        "1d2h",
        "inf",
        -1,
        float("nan"),
        float("inf"),
        True,
        None,
        timedelta(-1),
        "9999999d",
    ],
)
def test_what_is_no_duration_is_refused(given):
    with pytest.raises(ValueError, match="duration"):
        durations.seconds(given)
