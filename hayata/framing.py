"""Bytes ↔ frames, without I/O: a frame is four bytes of length (big-endian) and that many bytes of body.

The cap is checked on both sides: the sender gets `FrameTooLarge` before a byte is written, so that its peer and
its connection stay usable; the receiver refuses a header that announces more without allocating it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator

from hayata.errors import NodeError

HEADER = 4
DEFAULT_CAP_BYTES = 64 * 1024 * 1024
ENVELOPE_BYTES = 8 * 1024
"""A result must be so much smaller than the cap: whatever it travels in later, with names around it, fits as well."""


class FrameTooLarge(NodeError):
    """A frame over the cap."""

    def __init__(self, size_bytes: int, cap_bytes: int) -> None:
        super().__init__(
            "frame_too_large",
            f"a message of {size_bytes:,} bytes is over the cap of {cap_bytes:,}",
            details={"size_bytes": size_bytes, "cap_bytes": cap_bytes},
            hint="keep large data in a file or an object store and pass a reference, or raise frame_cap_bytes",
        )

    def __reduce__(self) -> tuple[type[FrameTooLarge], tuple[int, int]]:
        return (FrameTooLarge, (self.details["size_bytes"], self.details["cap_bytes"]))


def frame(body: bytes, cap_bytes: int = DEFAULT_CAP_BYTES) -> bytes:
    """Put the length before ``body``.

    Raises:
        FrameTooLarge: ``body`` is longer than ``cap_bytes``.
    """
    size = len(body)
    if size > cap_bytes:
        raise FrameTooLarge(size, cap_bytes)
    return size.to_bytes(HEADER, "big") + body


class FrameReader:
    """Collects bytes and hands out the bodies of complete frames.

    A partial frame stays until the rest comes; `pending` says whether one does.
    """

    def __init__(self, cap_bytes: int = DEFAULT_CAP_BYTES) -> None:
        self._cap = cap_bytes
        self._buffer = bytearray()

    @property
    def pending(self) -> bool:
        """Whether bytes of an incomplete frame are held."""
        return bool(self._buffer)

    def feed(self, data: bytes | bytearray) -> Iterator[bytes]:
        """Take bytes in; yield each body that is now complete, in order.

        Raises:
            FrameTooLarge: A header announces more than the cap. The stream can't be read any further.
        """
        if not self._buffer and isinstance(data, bytes):
            # The usual case, frames that came whole: each body is copied once.
            taken = yield from self._whole(data)
            self._buffer += data[taken:] if taken else data
            return
        self._buffer += data
        taken = yield from self._whole(self._buffer)
        del self._buffer[:taken]

    def _whole(self, data: bytes | bytearray) -> Generator[bytes, None, int]:
        """Yield the bodies that are complete in ``data``; return how many bytes they took."""
        start, available = 0, len(data)
        while available - start >= HEADER:
            size = int.from_bytes(data[start : start + HEADER], "big")
            if size > self._cap:
                raise FrameTooLarge(size, self._cap)
            end = start + HEADER + size
            if available < end:
                break
            with memoryview(data) as view:
                body = bytes(view[start + HEADER : end])
            yield body
            start = end
        return start
