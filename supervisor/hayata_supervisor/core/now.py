"""The time of an event, which the core is told and never looks up."""

from __future__ import annotations

from typing import NamedTuple


class Now(NamedTuple):
    """The time of an event: ``wall`` for people, ``mono`` (monotonic seconds) for what is waited for, ``lasting`` for
    what is due after a restart: about the wall time, but it does not jump within a boot.
    """

    wall: float
    mono: float
    lasting: float
