"""Random lives of an agent's workers against a small model: a world of processes that does what it is told, and that
counts the deaths itself.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hayata_supervisor.core import supervision as s

IDS = ("", "n1", "n2", "n3")
PERIOD_S = 10.0
NEVER_AGAIN = {"permanent": (), "transient": ("normal", "shutdown"), "temporary": ("normal", "shutdown", "abnormal")}


class Lives(RuleBasedStateMachine):
    @initialize(
        strategy=st.sampled_from(["one_for_one", "one_for_all", "rest_for_one"]),
        intensity=st.integers(0, 3),
        kinds=st.tuples(*[st.sampled_from(["permanent", "permanent", "transient", "temporary"])] * 3),
    )
    def begin(self, strategy: s.Strategy, intensity: int, kinds: tuple[s.RestartType, ...]) -> None:
        self.strategy, self.intensity = strategy, intensity
        self.kinds = dict(zip(IDS, ("permanent", *kinds), strict=True))
        self.now = 0.0
        self.processes: dict[str, str] = {}  # waiting for its start, starting, or up
        self.ending: str | None = None  # was told to terminate, and has not yet
        self.falling: set[str] = set()  # is restarted with others
        self.resting: dict[str | None, float] = {}  # until when; None: the agent
        self.stopped: set[str] = set()
        self.failing = self.trial = False
        self.trials: set[str] = set()
        self.counted: dict[str | None, list[float]] = {id: [] for id in (None, *IDS)}
        rule = s.Rule(strategy, intensity, PERIOD_S, 0.5, 4.0, 30.0, 300.0)
        self.state = s.State(rule, ())
        self.do(s.define(self.state, rule, [s.ChildSpec(id, self.kinds[id]) for id in IDS]))

    # the world does as it is told

    def do(self, outcome: s.Outcome) -> list[s.Effect]:
        self.state, effects = outcome
        for effect in effects:
            match effect:
                case s.Start():
                    assert list(effect.children) == [id for id in IDS if id in effect.children], "out of order"
                    for id in effect.children:
                        assert id not in self.processes, "two of one child"
                        self.processes[id] = "waiting"
                        self.stopped.discard(id)
                    self.falling.clear()
                case s.Terminate():
                    assert self.ending is None, "two are terminated at once"
                    going = [id for id in IDS if id in self.processes and (self.failing or id in self.falling)]
                    assert effect.child in self.resting or effect.child == going[-1], "not the youngest"
                    self.ending = effect.child
                case s.GaveUp():
                    assert effect.child not in self.processes
                    self.resting[effect.child] = self.now + effect.rest_s
                case s.Escalate():
                    self.failing = True
                    self.falling.clear()
                case s.Rest():
                    assert not self.processes, "somebody lives in a failed agent"
                    self.resting = {None: self.now + effect.rest_s}
                    self.failing = False
                case s.Stopped():
                    assert effect.child not in self.processes
                    self.stopped.add(effect.child)
                case s.Back():
                    assert all(self.processes[id] == "up" for id in effect.children)
        return effects

    def exits(self, id: str, exit: s.ExitClass) -> list[s.Effect]:
        self.processes.pop(id, None)
        if self.ending == id:
            self.ending = None
        return self.do(s.child_exited(self.state, id, exit, self.now, 0.9))

    # what happens to it

    @rule(seconds=st.sampled_from([0.1, 1.0, 9.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: "waiting" in self.processes.values())
    @rule(data=st.data())
    def is_started(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from([id for id, status in self.processes.items() if status == "waiting"]))
        self.processes[id] = "starting"

    @precondition(lambda self: "starting" in self.processes.values())
    @rule(data=st.data())
    def gets_ready(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from([id for id, status in self.processes.items() if status == "starting"]))
        self.ready(id)

    def ready(self, id: str) -> None:
        self.processes[id] = "up"
        if id != self.ending:
            self.trials.discard(id)
        back = [effect for effect in self.do(s.child_ready(self.state, id, self.now)) if isinstance(effect, s.Back)]
        if back and self.trial:
            assert set(back[0].children) == set(self.processes)
            self.trial = False

    @precondition(lambda self: any(status != "waiting" for status in self.processes.values()))
    @rule(data=st.data(), exit=st.sampled_from(["normal", "shutdown", "abnormal"]))
    def dies(self, data: st.DataObject, exit: s.ExitClass) -> None:
        id = data.draw(st.sampled_from([id for id, status in self.processes.items() if status != "waiting"]))
        if self.processes[id] == "starting":
            exit = "never_started"
        if id == self.ending or self.failing or id in self.falling:
            assert not any(isinstance(effect, s.Escalate | s.GaveUp) for effect in self.exits(id, exit)), "counted"
            return
        if exit in NEVER_AGAIN[self.kinds[id]] or (exit, self.kinds[id]) == ("never_started", "temporary"):
            effects = self.exits(id, exit)
            assert effects[0] == s.Stopped(id)
            self.trial = self.trial and not any(isinstance(effect, s.Back) for effect in effects)
            return
        if self.strategy == "one_for_one":
            self.dies_alone(id, exit)
        else:
            self.dies_with_others(id, exit)

    def count(self, id: str | None) -> bool:
        """Note a death and say whether it is one too many."""
        self.counted[id].append(self.now)
        return sum(self.now - at <= PERIOD_S for at in self.counted[id]) > self.intensity

    def dies_alone(self, id: str, exit: s.ExitClass) -> None:
        if self.trial:
            self.fails(self.exits(id, exit))
            return
        given_up = self.count(id) or id in self.trials
        fails = given_up and self.count(None)
        if given_up:
            self.counted[id] = []
            self.trials.discard(id)
        effects = self.exits(id, exit)
        if not given_up:
            assert effects == [s.Start((id,), effects[0].delay_s)]  # type: ignore[union-attr]
            return
        assert isinstance(effects[0], s.GaveUp)
        if fails:
            self.fails(effects[1:])
        else:
            assert len(effects) == 1

    def dies_with_others(self, id: str, exit: s.ExitClass) -> None:
        fails = self.count(None) or self.trial
        if not fails:
            self.falling |= set(IDS if self.strategy == "one_for_all" else IDS[IDS.index(id) :])
        effects = self.exits(id, exit)
        if fails:
            self.fails(effects)
        else:
            assert not any(isinstance(effect, s.Escalate) for effect in effects)

    def fails(self, effects: list[s.Effect]) -> None:
        assert effects[0] == s.Escalate()
        self.trial = False
        self.trials.clear()
        self.counted = {id: [] for id in (None, *IDS)}

    @precondition(lambda self: self.ending is not None)
    @rule()
    def terminated(self) -> None:
        assert self.ending is not None
        self.resting.pop(self.ending, None)
        self.exits(self.ending, "shutdown")

    @precondition(lambda self: self.resting and self.ending is None)
    @rule()
    def rested(self) -> None:
        id = min(self.resting, key=lambda each: self.resting[each])
        self.now = max(self.now, self.resting.pop(id))
        if id is None:
            self.trial = True
        else:
            self.trials.add(id)
        self.do(s.try_again(self.state, id))

    # what must hold

    @invariant()
    def nobody_is_forgotten(self) -> None:
        for id in IDS:
            there = id in self.processes or id in self.stopped or id in self.resting or id == self.ending
            assert there or id in self.falling or self.failing or None in self.resting, f"{id!r} is nowhere"

    def teardown(self) -> None:
        """The deaths stop: all that is not stopped is up in the end, and nothing is left to be done."""
        if not hasattr(self, "state"):
            return
        for _ in range(100):
            if self.ending is not None:
                self.terminated()
            elif unready := [id for id, status in self.processes.items() if status != "up"]:
                self.ready(unready[0])
            elif self.resting:
                self.rested()
            else:
                break
        assert self.state.phase == "serving"
        assert not self.trial
        for id in IDS:
            child = self.state.child(id)
            expected = ("stopped", False) if id in self.stopped else ("up", True)
            assert (child.status, child.ready) == expected
            assert child.unavailable == (id in self.stopped)
            assert self.kinds[id] != "permanent" or child.ready


TestLives = Lives.TestCase
TestLives.settings = settings(
    max_examples=300, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.filter_too_much]
)
