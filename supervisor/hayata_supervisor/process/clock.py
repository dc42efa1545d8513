"""The clock. Nothing else reads it, so that tests can stand in another and the core never looks at all.

Durations are differences of `monotonic`; `wall` is for people. What is due after a restart is compared with
`since_boot` and an anchor (`process.start_notes`): within a boot it does not jump when somebody sets the clock.
"""

from __future__ import annotations

import time

monotonic = time.monotonic
"""Seconds of CLOCK_MONOTONIC: never jumps, stands still while the machine sleeps, is lost at boot."""

wall = time.time
"""Seconds since the epoch; may jump."""


def since_boot() -> float:
    """Seconds since the boot, sleep included; the same for all processes. Elsewhere than on Linux: `monotonic`."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else monotonic()


def unix_ms() -> int:
    """Milliseconds since the epoch, for ids that sort by time."""
    return time.time_ns() // 1_000_000
