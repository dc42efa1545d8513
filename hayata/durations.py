"""Durations as people write them: ``30d``, ``12h``, ``90s``."""

from __future__ import annotations

import re
from datetime import timedelta

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_TEXT = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw])")
_MOST_S = 1000 * 365 * 86400.0

FORMS = "a number and s, m, h, d or w: 90s, 12h, 30d"


def seconds(value: object) -> float:
    """Seconds of a text, of a `timedelta`, or of a number of seconds.

    Raises:
        ValueError: It is none of these, or below zero, or more than a thousand years.
    """
    found: float
    if isinstance(value, timedelta):
        found = value.total_seconds()
    elif isinstance(value, str):
        match = _TEXT.fullmatch(value.strip())
        if match is None:
            raise ValueError(f"{value!r} is no duration: {FORMS}")
        found = float(match[1]) * _UNITS_S[match[2]]
    elif isinstance(value, int | float) and not isinstance(value, bool):
        found = float(value)
    else:
        raise ValueError(f"{value!r} is no duration: {FORMS}")
    if not 0 <= found <= _MOST_S:
        raise ValueError(f"{value!r} can't be a duration here: 0 to a thousand years")
    return found
