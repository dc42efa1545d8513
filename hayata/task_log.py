"""``ctx.log``: structlog in front, the stdlib logger ``hayata.task`` behind, so that one place decides where
lines go.

A record carries the event as its message and everything else as the mapping ``record.hayata_fields``.
"""

from __future__ import annotations

import logging
from typing import Any

import structlog
from structlog.stdlib import BoundLogger
from structlog.typing import EventDict

LOGGER_NAME = "hayata.task"

_KWARGS = ("exc_info", "stack_info", "stacklevel")


def task_logger(**ids: Any) -> BoundLogger:
    """Make a logger bound to a task's ids. Its level is INFO, unless the app has set one for it."""
    logger = logging.getLogger(LOGGER_NAME)
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    wrapped: BoundLogger = structlog.wrap_logger(
        logger,
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.contextvars.merge_contextvars,
            structlog.stdlib.PositionalArgumentsFormatter(),
            _to_logging,
        ],
        wrapper_class=BoundLogger,
        context_class=dict,
        cache_logger_on_first_use=True,
    )
    return wrapped.bind(**ids)


def _to_logging(_: Any, __: str, event: EventDict) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Not structlog's own ``render_to_log_kwargs``: its fields become attributes of the record, and a field
    called ``name`` or ``message`` makes logging raise.
    """
    message = event.pop("event", "")
    kwargs = {name: event.pop(name) for name in _KWARGS if name in event}
    return (message,), {**kwargs, "extra": {"hayata_fields": dict(event)}}
