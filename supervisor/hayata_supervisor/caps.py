"""What a worker says must fit into all that it travels in later, up to a client's message."""

from __future__ import annotations

from hayata.error_info import error_info
from hayata.framing import ENVELOPE_BYTES, FrameTooLarge
from hayata.messages import ErrorInfo


def over_cap(body: bytes, cap_bytes: int) -> ErrorInfo | None:
    """The error of a result or decision, encoded, that is too large to travel on; None if it fits."""
    most_bytes = cap_bytes - ENVELOPE_BYTES
    return error_info(FrameTooLarge(len(body), most_bytes)) if len(body) > most_bytes else None
