"""Burial: after a death, no descendant of the dead may live on.

A process that is a subreaper becomes the parent of whatever a dead worker leaves behind, also of what that
worker's children had double-forked. So every child that the process does not know is an orphan: it is killed,
reaped, and the list is read again, for the death of an orphan brings its own children here.

Source: PR_SET_CHILD_SUBREAPER, prctl(2); ray 42861 (a killed worker leaves its subprocesses).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

from hayata_supervisor.process.descriptors import close_own, own
from hayata_supervisor.process.pidfd import children_of, open_pidfd, reap, send_signal
from hayata_supervisor.process.reactor import Reactor

_CLEAN_LISTINGS = 2
_LOOK_AGAIN_S = 0.002
_BLIND_S = 0.02


def _always() -> bool:
    return True


class Burial:
    """Kill and reap the orphans of this process, then call ``done`` once.

    The kernel's list of children may skip one while another exits, so the burial ends only after two listings
    in a row without an orphan.

    Args:
        reactor: The loop that waits for the deaths.
        known: Whether a pid is a child of ours that must live, or that somebody else reaps.
        done: Called when no orphan is left; from `start` itself when there was none.
        may_judge: False while a child may exist whose pid `known` can't know yet; the burial waits.
    """

    def __init__(
        self,
        reactor: Reactor,
        known: Callable[[int], bool],
        done: Callable[[], None],
        may_judge: Callable[[], bool] = _always,
    ) -> None:
        self._reactor = reactor
        self._known = known
        self._done = done
        self._may_judge = may_judge
        self._dying: set[int] = set()
        self.buried = 0

    def start(self) -> None:
        """Begin."""
        clean = 0
        while clean < _CLEAN_LISTINGS:
            if not self._may_judge():
                self._reactor.call_later(_LOOK_AGAIN_S, self.start)
                return
            try:
                if self._kill_orphans():
                    return
            except OSError:
                # No descriptors are left to look with, or to hold an orphan by: there may be one.
                if not self._dying:
                    self._reactor.call_later(_BLIND_S, self.start)
                return
            clean += 1
        self._done()

    def _kill_orphans(self) -> bool:
        """Kill the children that nobody knows; say whether there were any to wait for."""
        for pid in children_of(os.getpid()):
            if self._known(pid):
                continue
            try:
                # Ours and unreaped, so the number can't have passed to another process.
                pidfd = own(open_pidfd(pid))
            except ProcessLookupError:
                continue  # another burial has reaped it since the listing
            send_signal(pidfd)
            self._dying.add(pidfd)
            self._reactor.watch_read(pidfd, partial(self._dead, pidfd))
        return bool(self._dying)

    def _dead(self, pidfd: int) -> None:
        try:
            if reap(pidfd) is None:
                return
        except ChildProcessError:
            pass  # another burial was first
        self.buried += 1
        self._reactor.unwatch_read(pidfd)
        close_own(pidfd)
        self._dying.discard(pidfd)
        if not self._dying:
            self.start()
