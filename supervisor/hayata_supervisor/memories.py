"""What conversations have left that a reader of the store may not have seen.

An invocation that ends frees its session at once, for the next one to start; its memory is durable a moment later. So
whoever reads a session's memory for a new invocation may read it before that commit, and use it after the ending. It
holds the session before it reads, and asks `newest` afterwards.
"""

from __future__ import annotations

from typing import TypeAlias

Session: TypeAlias = tuple[str, str]
"""Agent and session."""


class Memories:
    """Keeps the newest memory of each session that is held: by an ending that is not durable, or by a reader."""

    def __init__(self) -> None:
        self._holds: dict[Session, int] = {}
        self._newest: dict[Session, bytes] = {}

    def hold(self, session: Session) -> None:
        """From now on a memory that is kept stays, until `release`."""
        self._holds[session] = self._holds.get(session, 0) + 1

    def release(self, session: Session) -> None:
        """Whoever reads the store from now on sees what the holder cared for."""
        self._holds[session] -= 1
        if not self._holds[session]:
            del self._holds[session]
            self._newest.pop(session, None)

    def keep(self, session: Session, memory: bytes) -> None:
        """An invocation has ended and left this; the session is held."""
        self._newest[session] = memory

    def lose(self, session: Session) -> None:
        """The ending was refused: what it left is not to be, and its hold is over."""
        self._newest.pop(session, None)
        self.release(session)

    def newest(self, session: Session, stored: bytes | None) -> bytes | None:
        """The session's memory, given what the store had when it was read."""
        return self._newest.get(session, stored)
