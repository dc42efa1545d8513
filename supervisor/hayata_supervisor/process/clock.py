"""The clock. Nothing else reads it, so that tests can stand in another and the core never looks at all.

Durations are differences of `monotonic`; `wall` is for people and for what must be compared after a restart.
"""

from __future__ import annotations

import time

monotonic = time.monotonic
"""Seconds of CLOCK_MONOTONIC: never jumps, stands still while the machine sleeps, is lost at boot."""

wall = time.time
"""Seconds since the epoch; may jump."""


def unix_ms() -> int:
    """Milliseconds since the epoch, for ids that sort by time."""
    return time.time_ns() // 1_000_000
