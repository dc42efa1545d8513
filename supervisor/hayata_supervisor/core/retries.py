"""Whether a failed or interrupted attempt is followed by another, and when."""

from __future__ import annotations

import zlib

from hayata.messages import NodeManifest, TaskFailed, TaskInterrupted

REDUCTIONS = 2
"""How often a reduction that is cut off is begun. It is pure, so it may be; whatever kills it twice will again."""


def reduced_again(attempt: int) -> bool:
    """Whether a reduction whose ``attempt`` was cut off is done once more."""
    return attempt < REDUCTIONS


def retry_delay(node: NodeManifest, attempt: int, report: TaskFailed | TaskInterrupted) -> float | None:
    """Seconds until the next attempt; None when there is none.

    A body that ended with a failure is the business of ``retry``; one that was cut off of ``interrupted``; one that
    never began was no attempt that could be repeated: somebody else decided against it.
    """
    if isinstance(report, TaskInterrupted):
        return 0.0 if report.started and attempt < node.rerun_attempts else None
    retry = node.retry
    if retry is None or not report.retryable or attempt >= retry.max_attempts:
        return None
    delay = min(retry.max_backoff_s, retry.backoff_s * retry.backoff_factor ** (attempt - 1))
    # A spread that a replay repeats: pure code has no dice.
    spread = zlib.crc32(report.execution_id.encode()) / 0xFFFFFFFF * 2 - 1
    return max(0.0, delay * (1 + retry.jitter * spread))


def delay_left(node: NodeManifest | None, retry_at: float, lasting: float) -> float:
    """What is left of a retry's delay after a restart: never more than its policy gives, if the clock was set."""
    retry = node.retry if node is not None else None
    longest = retry.max_backoff_s * (1 + retry.jitter) if retry is not None else 0.0
    return min(max(0.0, retry_at - lasting), longest)
