"""When a worker that died is started again: intensity, backoff, and the rest after giving up.

OTP's rule says *whether*: more than ``intensity`` restarts within ``period`` seconds, and the supervisor
gives the child up. OTP restarts at once, which turns a child that can't start into a storm, so a growing
pause says *when*: the first restart of a window is immediate, the later ones wait. A child that was given up
is not lost: it rests, is tried again, and rests longer each time it fails again.

Time and chance come in as arguments.

Source: OTP ``supervisor``, intensity and period; "equal jitter" of the AWS Architecture Blog, 2015.
"""

from __future__ import annotations

import msgspec


class RestartWindow(msgspec.Struct, frozen=True):
    """The restarts that still count.

    Attributes:
        restarts: Instants in monotonic seconds, oldest first, all within one period of the newest.
    """

    restarts: tuple[float, ...] = ()


def add_restart(window: RestartWindow, now_s: float, *, period_s: float, intensity: int) -> tuple[RestartWindow, bool]:
    """Count one restart and say whether the intensity is exceeded.

    Args:
        window: Earlier restarts, at most ``intensity + 1`` of them.
        now_s: Monotonic seconds; never wall time.
        period_s: How long a restart counts. One that is exactly this old still does.
        intensity: Most restarts within the period.

    Returns:
        The new window, and True when the child must be given up.

    Raises:
        ValueError: ``now_s`` is earlier than the newest restart.
    """
    if window.restarts and now_s < window.restarts[-1]:
        raise ValueError(f"a restart at {now_s} can't follow one at {window.restarts[-1]}")
    threshold = now_s - period_s
    kept = [instant for instant in window.restarts if instant >= threshold]
    kept.append(now_s)
    return RestartWindow(tuple(kept[-(intensity + 1) :])), len(kept) > intensity


def restart_delay_s(number: int, *, backoff_s: float, max_backoff_s: float, jitter: float) -> float:
    """How long to wait before a restart.

    Args:
        number: 1 for the first restart of a window, 2 for the next …
        backoff_s: Pause before the second; doubles with each further one.
        max_backoff_s: Longest pause.
        jitter: A random number in [0, 1): children that died together don't come back together.

    Returns:
        0 for the first; else between half of the pause and the whole of it.
    """
    if number <= 1:
        return 0.0
    # 2.0**1024 overflows; long before that the pause is at its longest.
    pause_s = min(max_backoff_s, backoff_s * 2.0 ** min(number - 2, 64))
    return pause_s * (0.5 + 0.5 * jitter)


def rest_s(previous_s: float | None, served_s: float, *, first_s: float, longest_s: float, period_s: float) -> float:
    """How long a child that was given up rests before it is tried again.

    Args:
        previous_s: Its last rest; None when this is the first.
        served_s: How long it has been up since that rest.
        first_s: The first rest.
        longest_s: The longest.
        period_s: Having been up for longer than this, it counts as healed, and its rests start over.
    """
    if previous_s is None or served_s > period_s:
        return first_s
    return min(longest_s, 2 * previous_s)
