"""An agent's supervision tree as data: who is restarted, with whom, when, and when nobody is any more.

Three levels, as OTP would nest them:

    daemon ── agent (strategy, intensity, period) ── its children in start order: the agent worker, then its nodes

A child that ends is judged by its restart type and by how it ended. Under ``one_for_one`` it is restarted alone and
has a window of restarts of its own; over its intensity it is *given up*, which counts as one restart of the agent.
Under ``one_for_all`` and ``rest_for_one`` its siblings (those started after it) are terminated in reverse start order,
one after the other, and all are started again in start order; the window is the agent's. Over the agent's intensity
the agent *fails*: all children are terminated. The daemon goes on: what was given up rests, and is tried again, longer
each time. A failed agent that is tried again is on trial until all its children are up.

    child   up ──ends──▶ up (restarted) │ failed (given up, rests) │ stopped (not to be restarted)
            up, failed ──told to──▶ terminating ──ends──▶ down ──▶ up, with its siblings │ stopped (temporary)
    agent   serving ──▶ regrouping ──all down──▶ serving;   any ──▶ failing ──all down──▶ failed ──rested──▶ serving

Each function takes the state and what has happened, and gives back the next state with what is to be done. Whoever
does it must carry the effects out in their order, and must report one `child_exited` for each child that was told to
terminate, also for one that has no process at that moment. Time and chance come in as arguments.

Source: OTP ``supervisor``: restart types, strategies, intensity and period, reverse order of termination. Not as there:
pauses before restarts, the rest in place of the end, and children that are started without waiting for their elders.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeAlias

import msgspec

from hayata_supervisor.core.restart import RestartWindow, add_restart, rest_s, restart_delay_s

Strategy: TypeAlias = Literal["one_for_one", "one_for_all", "rest_for_one"]
RestartType: TypeAlias = Literal["permanent", "transient", "temporary"]
ExitClass: TypeAlias = Literal["normal", "shutdown", "abnormal", "never_started"]
"""``normal``: exit code 0. ``shutdown``: SIGTERM, somebody asked for it. ``abnormal``: any other end of a worker that
was up. ``never_started``: any end, or none, of one that was not.
"""

ChildStatus: TypeAlias = Literal["up", "terminating", "down", "failed", "stopped"]
Phase: TypeAlias = Literal["serving", "regrouping", "failing", "failed"]


class ChildSpec(msgspec.Struct, frozen=True):
    """A child and its restart type. How long its end may take is up to whoever terminates it."""

    id: str
    restart: RestartType = "permanent"


class Rule(msgspec.Struct, frozen=True):
    """How an agent's children are restarted.

    Attributes:
        intensity: Most restarts within ``period_s``.
        backoff_s: Pause before the second restart of a window; doubles up to ``max_backoff_s``.
        first_rest_s: How long what was given up rests first; doubles up to ``longest_rest_s``.
    """

    strategy: Strategy
    intensity: int
    period_s: float
    backoff_s: float
    max_backoff_s: float
    first_rest_s: float
    longest_rest_s: float


class Rests(msgspec.Struct, frozen=True):
    """How something that was given up rests.

    Attributes:
        on_trial: It was tried again, and is not up yet.
        last_s: Its last rest; None before the first.
        back_at: When it was up after that.
    """

    on_trial: bool = False
    last_s: float | None = None
    back_at: float = 0.0

    def next(self, now_s: float, rule: Rule) -> Rests:
        """The rests with the one that begins now; its length is ``last_s``."""
        length_s = rest_s(
            self.last_s,
            0.0 if self.on_trial else now_s - self.back_at,
            first_s=rule.first_rest_s,
            longest_s=rule.longest_rest_s,
            period_s=rule.period_s,
        )
        return Rests(False, length_s, self.back_at)


class Child(msgspec.Struct, frozen=True):
    """One child.

    Attributes:
        status: ``up``: a start of it was asked for, and no end has been heard of. ``down``: it waits for its siblings.
        ready: It has come up.
        unavailable: It was given up or stopped, and has not come up since.
        window: Its restarts, under ``one_for_one``.
    """

    spec: ChildSpec
    status: ChildStatus = "down"
    ready: bool = False
    unavailable: bool = False
    window: RestartWindow = RestartWindow()
    rests: Rests = Rests()


class State(msgspec.Struct, frozen=True):
    """One agent.

    Attributes:
        children: In start order.
        window: Restarts of groups; under ``one_for_one``, children given up.
        group: Ids of the children that are restarted together, while ``phase`` is ``regrouping``.
        delay_s: The pause before they are started.
    """

    rule: Rule
    children: tuple[Child, ...]
    window: RestartWindow = RestartWindow()
    phase: Phase = "serving"
    group: frozenset[str] = frozenset()
    delay_s: float = 0.0
    rests: Rests = Rests()

    def child(self, id: str) -> Child:
        """The child of that id.

        Raises:
            KeyError: There is none.
        """
        for child in self.children:
            if child.spec.id == id:
                return child
        raise KeyError(id)


class Start(msgspec.Struct, frozen=True):
    """Start these, in this order, after a pause. All of them are down."""

    children: tuple[str, ...]
    delay_s: float


class Terminate(msgspec.Struct, frozen=True):
    """End this one within its ``shutdown``, or take back its start."""

    child: str


class GaveUp(msgspec.Struct, frozen=True):
    """The child has failed; `try_again` in so many seconds."""

    child: str
    rest_s: float


class Stopped(msgspec.Struct, frozen=True):
    """The child has ended and is not started again by itself."""

    child: str


class Escalate(msgspec.Struct, frozen=True):
    """The agent has failed. Its children are about to be terminated; `Rest` follows when they are."""


class Rest(msgspec.Struct, frozen=True):
    """All children of the failed agent are down; `try_again` in so many seconds."""

    rest_s: float


class Back(msgspec.Struct, frozen=True):
    """These are available again, in this order."""

    children: tuple[str, ...]


Effect: TypeAlias = Start | Terminate | GaveUp | Stopped | Escalate | Rest | Back
Outcome: TypeAlias = tuple[State, list[Effect]]


def must_restart(restart: RestartType, exit: ExitClass) -> bool:
    """Whether a child that ended by itself is started again."""
    return restart == "permanent" or (restart == "transient" and exit in ("abnormal", "never_started"))


# ---- events --------------------------------------------------------------------------------------------------------


def define(state: State, rule: Rule, specs: Iterable[ChildSpec]) -> Outcome:
    """Take a definition, the first or another: new children are started, those that are gone from it stay.

    Of an agent that has failed they are started when it is tried again.
    """
    known = {child.spec.id: child for child in state.children}
    for spec in specs:
        known[spec.id] = msgspec.structs.replace(known.get(spec.id, Child(spec)), spec=spec)
    new = tuple(id for id in known if id not in {child.spec.id for child in state.children})
    state = msgspec.structs.replace(state, rule=rule, children=tuple(known.values()))
    if state.phase in ("failing", "failed"):
        return _put(state, new, unavailable=True), []
    return _start(state, new) if new else (state, [])


def child_ready(state: State, id: str, now_s: float) -> Outcome:
    """A child has come up."""
    child = state.child(id)
    if child.status != "up":
        return state, []  # it is being ended, and got ready meanwhile
    state = _put(state, (id,), ready=True)
    if state.rests.on_trial:
        return _trial_judged(state, now_s)
    if not child.unavailable:
        return state, []
    rests = Rests(False, child.rests.last_s, now_s)
    return _put(state, (id,), unavailable=False, rests=rests), [Back((id,))]


def child_exited(
    state: State,
    id: str,
    exit: ExitClass,
    now_s: float,
    jitter: float,
    *,
    blameless: bool = False,
    hopeless: bool = False,
) -> Outcome:
    """A child has ended, or could not be started.

    Args:
        state: Before.
        id: The child.
        exit: How it ended.
        now_s: Monotonic seconds.
        jitter: A random number in [0, 1).
        blameless: Its end was another's fault, and is accounted for there. Alone, it is restarted at once and not
            counted. Where siblings fall with it, it counts all the same: they must not fall without bound.
        hopeless: It was ended because nothing comes of it, and is given up whatever its window says.
    """
    child = state.child(id)
    awaited = child.status == "terminating" or state.phase == "failing" or id in state.group
    state = _put(state, (id,), status="down", ready=False)
    if awaited:
        return _next_termination(state)
    again = must_restart(child.spec.restart, "abnormal" if hopeless else exit)
    if not again:
        state = _put(state, (id,), status="stopped", unavailable=True)
        return _judge_trial_after(state, [Stopped(id)], now_s)
    if state.rule.strategy != "one_for_one":
        return _restart_group(state, id, now_s, jitter, hopeless=hopeless)
    if blameless:
        return _put(state, (id,), status="up"), [Start((id,), 0.0)]
    if state.rests.on_trial:
        return _fail(state, now_s)
    return _restart_alone(state, id, now_s, jitter, hopeless=hopeless)


def edge_failed(state: State, id: str, now_s: float) -> tuple[State, bool]:
    """An edge of a node that is up could not start. Like a restart it counts; True: the node is hopeless."""
    if state.phase != "serving" or state.child(id).status != "up":
        return state, False
    if state.rule.strategy != "one_for_one":
        return _count_group(state, now_s)
    window, exceeded = _counted(state.child(id).window, state.rule, now_s)
    return _put(state, (id,), window=window), exceeded


def try_again(state: State, id: str | None) -> Outcome:
    """A child, or (None) the whole agent, has rested. Of the agent all children are started, as the first time."""
    if id is None:
        if state.phase != "failed":
            return state, []
        ids = tuple(child.spec.id for child in state.children)
        rests = msgspec.structs.replace(state.rests, on_trial=True)
        return _start(msgspec.structs.replace(state, phase="serving", rests=rests), ids)
    child = state.child(id)
    if child.status != "failed":
        return state, []
    rests = msgspec.structs.replace(child.rests, on_trial=True)
    return _start(_put(state, (id,), rests=rests), (id,))


def _start(state: State, ids: tuple[str, ...]) -> Outcome:
    return _put(state, ids, status="up"), [Start(ids, 0.0)]


# ---- alone ---------------------------------------------------------------------------------------------------------


def _restart_alone(state: State, id: str, now_s: float, jitter: float, *, hopeless: bool) -> Outcome:
    child = state.child(id)
    window, exceeded = _counted(child.window, state.rule, now_s)
    if not (exceeded or hopeless or child.rests.on_trial):
        return _put(state, (id,), status="up", window=window), [Start((id,), _delay_s(window, state.rule, jitter))]
    rests = child.rests.next(now_s, state.rule)
    state = _put(state, (id,), status="failed", unavailable=True, window=RestartWindow(), rests=rests)
    effects: list[Effect] = [GaveUp(id, rests.last_s or 0.0)]
    state, failed = _count_group(state, now_s)
    if failed:
        state, more = _fail(state, now_s)
        effects += more
    return state, effects


# ---- together ------------------------------------------------------------------------------------------------------


def _restart_group(state: State, id: str, now_s: float, jitter: float, *, hopeless: bool) -> Outcome:
    state, exceeded = _count_group(state, now_s)
    if exceeded or hopeless or state.rests.on_trial:
        return _fail(state, now_s)
    ids = [child.spec.id for child in state.children]
    first = 0 if state.rule.strategy == "one_for_all" else ids.index(id)
    # Whoever dies outside of a group that is being restarted is older than all of it: so that group becomes this one,
    # and never are there two.
    group = frozenset(ids[first:])
    delay_s = _delay_s(state.window, state.rule, jitter)
    return _next_termination(msgspec.structs.replace(state, phase="regrouping", group=group, delay_s=delay_s))


def _next_termination(state: State) -> Outcome:
    """Terminate the youngest child that is to go, or go on when none is left."""
    if any(child.status == "terminating" for child in state.children):
        return state, []
    going = state.group if state.phase == "regrouping" else {child.spec.id for child in state.children}
    for child in reversed(state.children):
        if child.spec.id in going and child.status in ("up", "failed"):
            return _put(state, (child.spec.id,), status="terminating", ready=False), [Terminate(child.spec.id)]
    if state.phase == "failing":
        return msgspec.structs.replace(state, phase="failed"), [Rest(state.rests.last_s or 0.0)]
    return _regrouped(state)


def _regrouped(state: State) -> Outcome:
    """All of the group are down: start them, but for the temporary ones. A transient one that had stopped by itself
    starts with the others, as in OTP.
    """
    members = [child for child in state.children if child.spec.id in state.group]
    ended = [child.spec.id for child in members if child.spec.restart == "temporary" and child.status == "down"]
    again = tuple(child.spec.id for child in members if child.spec.restart != "temporary")
    state = _put(state, ended, status="stopped", unavailable=True)
    state = _put(msgspec.structs.replace(state, phase="serving", group=frozenset()), again, status="up")
    effects: list[Effect] = [Stopped(id) for id in ended]
    return state, [*effects, Start(again, state.delay_s)]


# ---- the agent -----------------------------------------------------------------------------------------------------


def _fail(state: State, now_s: float) -> Outcome:
    """Give the agent up."""
    children = tuple(
        msgspec.structs.replace(child, ready=False, unavailable=True, window=RestartWindow(), rests=Rests())
        for child in state.children
    )
    state = msgspec.structs.replace(
        state,
        children=children,
        window=RestartWindow(),
        phase="failing",
        group=frozenset(),
        rests=state.rests.next(now_s, state.rule),
    )
    state, effects = _next_termination(state)
    return state, [Escalate(), *effects]


def _judge_trial_after(state: State, effects: list[Effect], now_s: float) -> Outcome:
    """A child that is not restarted need not come up for the trial to end."""
    if not state.rests.on_trial:
        return state, effects
    state, more = _trial_judged(state, now_s)
    return state, [*effects, *more]


def _trial_judged(state: State, now_s: float) -> Outcome:
    """The agent is back when all its children are up. The agent worker comes last: what it decides finds nodes."""
    if any(child.status != "stopped" and not child.ready for child in state.children):
        return state, []
    back = tuple(child.spec.id for child in reversed(state.children) if child.ready)
    state = msgspec.structs.replace(state, rests=Rests(False, state.rests.last_s, now_s))
    return _put(state, back, unavailable=False), [Back(back)]


# ---- counting ------------------------------------------------------------------------------------------------------


def _counted(window: RestartWindow, rule: Rule, now_s: float) -> tuple[RestartWindow, bool]:
    return add_restart(window, now_s, period_s=rule.period_s, intensity=rule.intensity)


def _count_group(state: State, now_s: float) -> tuple[State, bool]:
    window, exceeded = _counted(state.window, state.rule, now_s)
    return msgspec.structs.replace(state, window=window), exceeded


def _delay_s(window: RestartWindow, rule: Rule, jitter: float) -> float:
    return restart_delay_s(
        len(window.restarts), backoff_s=rule.backoff_s, max_backoff_s=rule.max_backoff_s, jitter=jitter
    )


def _put(state: State, ids: Iterable[str], **changes: object) -> State:
    """The state with these fields of these children exchanged."""
    named = frozenset(ids)
    children = tuple(
        msgspec.structs.replace(child, **changes) if child.spec.id in named else child for child in state.children
    )
    return msgspec.structs.replace(state, children=children)
