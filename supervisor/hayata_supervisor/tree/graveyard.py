"""Which children of the supervisor are meant to live, and the end of all others.

The supervisor adopts whatever its dead workers leave behind. A child that is in nobody's book is an orphan,
except for a moment: between a fork request and the forkserver's answer there may be a worker whose pid is not
known yet. So a sweep waits until no request is open, and while one waits no new request is made, or it might
wait for ever.
"""

from __future__ import annotations

from collections.abc import Callable

from hayata_supervisor.process.burial import Burial
from hayata_supervisor.process.reactor import Callback, Reactor


class Graveyard:
    """See the module.

    Args:
        reactor: The loop.
        idle: Called whenever the last sweep has ended: forks may be asked for again.
    """

    def __init__(self, reactor: Reactor, idle: Callback) -> None:
        self._reactor = reactor
        self._idle = idle
        self._known: set[int] = set()
        self._open_forks: set[str] = set()
        self._mourners: list[Callback] = []
        self._sweeping = False

    # Children

    def register(self, pid: int) -> None:
        """Note a child of ours; whoever registers it reaps it."""
        self._known.add(pid)

    def strike_out(self, pid: int) -> None:
        """Forget a child that has been reaped; its number may come again."""
        self._known.discard(pid)

    # Fork requests

    @property
    def may_fork(self) -> bool:
        """Whether a fork may be asked for."""
        return not self._sweeping and not self._mourners

    def fork_asked(self, incarnation: str) -> None:
        """From now on there may be a child that nobody knows."""
        self._open_forks.add(incarnation)

    def fork_settled(self, incarnation: str) -> None:
        """That child is registered, or there is none, or it is to be swept. Harmless the second time."""
        self._open_forks.discard(incarnation)

    # Sweeps

    def sweep(self, done: Callable[[], None]) -> None:
        """Kill and reap every child that nobody registered; call ``done``, later, when none is left."""
        self._mourners.append(done)
        if not self._sweeping:
            self._sweeping = True
            self._reactor.call_soon(self._begin)

    def _begin(self) -> None:
        mourners, self._mourners = self._mourners, []
        Burial(
            self._reactor,
            known=self._known.__contains__,
            done=lambda: self._swept(mourners),
            may_judge=lambda: not self._open_forks,
        ).start()

    def _swept(self, mourners: list[Callback]) -> None:
        if self._mourners:
            self._reactor.call_soon(self._begin)
        else:
            self._sweeping = False
        for done in mourners:
            done()
        if self.may_fork:
            self._idle()
