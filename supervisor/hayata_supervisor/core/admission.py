"""Who may run: one invocation at a time in a session, at most ``max_concurrency`` in all, the others in line.

An invocation that rests (uncertain, recovery_required) holds its session but does not count as running: it has no
process, and sixty-four of them must not stop the agent.
"""

from __future__ import annotations


class Admission:
    """See the module. Volatile: made anew from the open invocations after a restart."""

    def __init__(self) -> None:
        self.running = 0
        self.queue: dict[bytes, str] = {}
        self._holders: dict[str, bytes] = {}
        self._members: dict[str, int] = {}
        self._memories: dict[str, bytes | None] = {}

    def holder(self, session: str) -> bytes | None:
        """The invocation that holds the session."""
        return self._holders.get(session)

    def hold(self, session: str, id: bytes) -> None:
        """Give the session to an invocation."""
        self._holders[session] = id

    def enqueue(self, id: bytes, session: str) -> None:
        """Put an invocation in line."""
        self.queue[id] = session

    def next_ready(self) -> bytes | None:
        """Take the first in line whose session is free out of it; None when there is none."""
        for id, session in self.queue.items():
            if session not in self._holders:
                del self.queue[id]
                return id
        return None

    def leave(self, session: str, id: bytes) -> None:
        """An invocation has ended."""
        self.queue.pop(id, None)
        if self._holders.get(session) == id:
            del self._holders[session]
        self._members[session] -= 1
        if not self._members[session]:
            del self._members[session]
            self._memories.pop(session, None)

    def remember(self, session: str, memory: bytes | None) -> None:
        """Count an invocation of the session in, with the memory that the store has; a newer one here stays."""
        self._members[session] = self._members.get(session, 0) + 1
        if self._memories.get(session) is None:
            self._memories[session] = memory

    def keep(self, session: str, memory: bytes) -> None:
        """Replace the session's memory."""
        self._memories[session] = memory

    def memory(self, session: str) -> bytes | None:
        """The session's memory, encoded messages."""
        return self._memories.get(session)
