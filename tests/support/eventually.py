"""Waiting for what shows only by looking: with a deadline, and an error that says what did not come."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

DEADLINE_S = 20.0


def eventually(look: Callable[[], T], what: str, timeout_s: float = DEADLINE_S) -> T:
    """Look until the answer is true, and return it.

    Raises:
        AssertionError: Not in ``timeout_s`` seconds; tells ``what`` was waited for and what was seen last.
    """
    due = time.monotonic() + timeout_s
    while True:
        seen = look()
        if seen:
            return seen
        assert time.monotonic() < due, f"{what}: not in {timeout_s} s; last seen {seen!r}"
        time.sleep(0.005)
