"""Whether a process is well, was stopped, or hangs: what its parent may conclude, and when.

Two clocks. One runs while the process is stopped (SIGSTOP, a terminal's SIGTSTP), from the parent's
``SIGCHLD`` on. The other runs while a question, "do you live?", is not answered; only a process that runs no
user code is asked, for one that does may hold the interpreter for as long as its own deadline allows. A
stopped process can't answer, so it is not asked, and its silence begins when it goes on.

What counts is the process's own time: on a machine with a hundred times more work than processors it may wait
long for one, and is well. The time that it waited is given to each call that needs it.

A parent that was itself stopped, frozen or starved has heard nothing for that reason; it forgives: both
clocks begin anew.

    asked ──answered──▶ (no clock)        stopped ──went_on──▶ (no clock)
      └───hang_s later──▶ "hung"             └───stopped_s later──▶ "stopped"

Source: the silence that a guard allows its supervisor; prefect 16459, 20887 (heartbeats that kill busy runs).
"""

from __future__ import annotations

from typing import Literal, TypeAlias

Why: TypeAlias = Literal["stopped", "hung"]
"""Why patience with a process is at its end."""

Verdict: TypeAlias = Literal["well", "ask"] | Why


class Pulse:
    """One process's two clocks.

    Instants are monotonic seconds. ``waited_s``: seconds that the process has waited for a processor since its
    birth.

    Attributes:
        asks: Whether it is asked if it lives.
    """

    __slots__ = ("_asked_s", "_stopped_s", "_waited_s", "asks")

    def __init__(self) -> None:
        self.asks = False
        self._asked_s: float | None = None
        self._waited_s = 0.0
        self._stopped_s: float | None = None

    @property
    def is_stopped(self) -> bool:
        """Whether it is stopped."""
        return self._stopped_s is not None

    @property
    def owes_answer(self) -> bool:
        """Whether it was asked and has not answered."""
        return self._asked_s is not None

    def asked(self, now_s: float, waited_s: float = 0.0) -> None:
        """It was asked. An older question is still the one that counts."""
        if self._asked_s is None:
            self._asked_s, self._waited_s = now_s, waited_s

    def silent_s(self, now_s: float, waited_s: float = 0.0) -> float:
        """How much of its own time it has owed an answer."""
        if self._asked_s is None:
            return 0.0
        return now_s - self._asked_s - (waited_s - self._waited_s)

    def answered(self) -> None:
        """It answered, whichever question."""
        self._asked_s = None

    def stopped(self, now_s: float) -> None:
        """It was stopped. Said twice, it went on in between: a stop is told once."""
        self._stopped_s = now_s

    def went_on(self, now_s: float, waited_s: float = 0.0) -> None:
        """It goes on, and is as good as any other."""
        self._stopped_s = None
        self._restart(now_s, waited_s)

    def forgive(self, now_s: float, waited_s: float = 0.0) -> None:
        """Begin both clocks anew: it was the parent who did not listen."""
        if self._stopped_s is not None:
            self._stopped_s = now_s
        self._restart(now_s, waited_s)

    def _restart(self, now_s: float, waited_s: float) -> None:
        if self._asked_s is not None:
            self._asked_s, self._waited_s = now_s, waited_s

    def judge(self, now_s: float, waited_s: float = 0.0, *, hang_s: float, stopped_s: float) -> Verdict:
        """Say what is to be done.

        Args:
            now_s: Now.
            waited_s: As above.
            hang_s: How long an answer may take.
            stopped_s: How long it may be stopped.

        Returns:
            ``ask``: ask it now. ``stopped``, ``hung``: kill it, for this reason. ``well``: nothing.
        """
        if self._stopped_s is not None:
            return "stopped" if now_s - self._stopped_s >= stopped_s else "well"
        if not self.asks:
            return "well"
        if self._asked_s is None:
            return "ask"
        return "hung" if self.silent_s(now_s, waited_s) >= hang_s else "well"
