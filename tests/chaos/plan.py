"""What goes wrong, and when: a plan made from a seed, before anything runs.

The same arguments make the same plan. It names a victim by a number from 0 to 1, its place among those that
live when its time has come: on another day the same plan meets other processes.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import Literal, NamedTuple

ROLES = ("edge", "reducer", "node", "agent", "forkserver", "supervisor", "guard")
Kind = Literal["kill", "stop", "squeeze"]

_USUAL_RATE = {
    "edge": 2.8,
    "reducer": 0.2,
    "node": 1.2,
    "agent": 0.3,
    "forkserver": 0.1,
    "supervisor": 0.2,
    "guard": 0.05,
}
_MOST_RATE = {
    "edge": 6.0,
    "reducer": 1.0,
    "node": 6.0,
    "agent": 3.0,
    "forkserver": 0.3,
    "supervisor": 0.5,
    "guard": 0.25,
}
"""Faults a second. A forkserver that dies again and again is started later each time; after the death of a
supervisor or a guard it takes half a second or a second until the next one serves."""

_SHARES: dict[Kind, float] = {"kill": 0.86, "stop": 0.1, "squeeze": 0.04}
_LONGEST_S = {"guard": 1.0, "supervisor": 1.5}
_FIRST_S = 0.3


class Fault(NamedTuple):
    """One thing that goes wrong.

    Attributes:
        at_s: When, in seconds from the start of the load.
        kind: ``kill``: SIGKILL. ``stop``: SIGSTOP, and SIGCONT later. ``squeeze``: few more descriptors.
        role: Of the victim.
        pick: Which of the living processes of that role, from 0 to 1.
        for_s: How long it is stopped or squeezed; how long after a guard's death the next one is started.
        spare: Descriptors that a squeezed process may still open.
    """

    at_s: float
    kind: Kind
    role: str
    pick: float
    for_s: float
    spare: int

    def __str__(self) -> str:
        more = {
            "kill": "",
            "stop": f" for {self.for_s:.2f} s",
            "squeeze": f" to {self.spare} for {self.for_s:.2f} s",
        }
        after = f", the next after {self.for_s:.2f} s" if (self.kind, self.role) == ("kill", "guard") else ""
        return f"{self.at_s:9.3f} {self.kind:7} {self.role:10} {self.pick:.4f}{more[self.kind]}{after}"


def make_plan(seed: int, duration_s: float, roles: Collection[str] = ROLES) -> list[Fault]:
    """Make the plan: the same for the same arguments. Each role is killed once at least."""
    share = sum(_USUAL_RATE.values()) / sum(_USUAL_RATE[role] for role in roles)
    faults: list[Fault] = []
    for role in ROLES:
        if role in roles:
            faults += _of_role(role, random.Random(f"{seed}:{role}"), duration_s, min(share, 4.0))
    return sorted(faults)


def _of_role(role: str, dice: random.Random, duration_s: float, share: float) -> list[Fault]:
    rate = min(_MOST_RATE[role], _USUAL_RATE[role] * share)
    found: list[Fault] = []
    at_s = _FIRST_S + dice.expovariate(rate)
    while at_s < duration_s:
        found.append(_fault(role, dice, at_s, _kind(dice)))
        at_s += dice.expovariate(rate)
    if not any(fault.kind == "kill" for fault in found):
        found.append(_fault(role, dice, dice.uniform(_FIRST_S, 0.8 * duration_s), "kill"))
    return found


def _kind(dice: random.Random) -> Kind:
    return dice.choices(list(_SHARES), list(_SHARES.values()))[0]


def _fault(role: str, dice: random.Random, at_s: float, kind: Kind) -> Fault:
    longest_s = 0.5 if kind == "kill" else _LONGEST_S.get(role, 2.0)
    return Fault(at_s, kind, role, dice.random(), dice.uniform(0.05, longest_s), dice.randrange(0, 4))
