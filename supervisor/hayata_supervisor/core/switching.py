"""Another generation of the agent's code: what goes on with it, what rests, what is asked or scheduled again.

An invocation goes on with the new code at its next step if its version is the same. One of another version, or of an
agent that is gone, is *halted*: bodies that have begun run to their end with the code they began with, and count;
nothing else of it begins, and it rests when the last of them has ended. What is derived is looked at again with each
generation: a version that comes back takes its invocations up.
"""

from __future__ import annotations

from hayata.messages import AgentManifest, ErrorInfo
from hayata_supervisor.core import facts as f
from hayata_supervisor.core import reasons
from hayata_supervisor.core.definitions import encode_definition
from hayata_supervisor.core.effects import Effect
from hayata_supervisor.core.now import Now
from hayata_supervisor.core.recovering import Recovering
from hayata_supervisor.core.slots import Slots


class Switching(Recovering):
    """See the module."""

    def take_manifest(self, manifest: AgentManifest, now: Now) -> list[Effect]:
        """Go on with a new generation's definition; its workers are fresh, and slots in use stay counted.

        Every question to the old generation's policy is asked again of the new one: an answer that comes from the old
        one is late.
        """
        halted = [each for each in self.invocations.values() if self._goes_on(each) and self._halted(each)]
        self.manifest = manifest
        self.definition = encode_definition(manifest.definition)
        self._gone, self._unavailable = None, None
        self._unfit.clear()
        gone = self.executions.take_nodes(manifest.nodes, reasons.node_gone(manifest))
        if self.draining:
            return self._effects()
        self._warn_of_changes(self.invocations.values())
        self._halt(now)
        for id in list(self._evaluating):
            self._forget_question(id)
            self._ask_policy(self.invocations[id], now)
        for slots in gone:
            assert slots.unavailable is not None
            self._node_unavailable(slots, slots.unavailable, now)
        self._look_at_rests(now)
        for invocation in halted:  # of those that may go on before they have come to rest, who waited was forgotten
            if self._may_begin(invocation):
                self._arm_edges(invocation, now)
                self._take_up(invocation, [task for task in invocation.tasks if task.status == "scheduled"], now)
        for slots in list(self.executions.slots.values()):
            self._grant(slots, now)
            self._hand_out(slots, now)
        self._start_queued(now)
        return self._effects()

    def retire(self, error: ErrorInfo, now: Now) -> list[Effect]:
        """The agent is gone from its app: what runs ends, everything rests with ``error``, nothing new is accepted."""
        self._gone = error
        if not self.draining:
            self._halt(now)
            self._look_at_rests(now)
            for slots in self.executions.slots.values():
                self._grant(slots, now)  # to nobody: who waits is forgotten
        return self._effects()

    def _halt(self, now: Now) -> None:
        """Take back what was marked for halted invocations and not handed out, and have those rest that can."""
        for invocation in list(self.invocations.values()):
            if invocation.status not in ("running", "uncertain") or invocation.id in self.resting:
                continue
            if self._halted(invocation) is None:
                continue
            self._forget_question(invocation.id)
            for task in invocation.tasks:
                if task.status == "running" and self.executions.waits(invocation.execution(task)):
                    self._take_back(invocation.execution(task), now)
            self._rest_if_due(invocation, now)

    def _forget_question(self, id: bytes) -> None:
        number = self._evaluating.pop(id, None)
        if number is not None:
            del self._evaluations[number]

    def _taken_back(self, name: str, now: Now) -> bool:
        """Whether an execution whose mark is durable by now has meanwhile been halted; it is taken back then."""
        execution = self.executions.get(name)
        invocation = self.invocations.get(execution.invocation) if execution is not None else None
        if invocation is None or self._halted(invocation) is None or self.draining:
            return False
        self._take_back(name, now)
        self._rest_if_due(invocation, now)
        self._grant_again(invocation, now)
        return True

    def _take_back(self, name: str, now: Now) -> None:
        """It is durably marked, was not handed out, and must not be: the same attempt is scheduled again."""
        execution = self.executions.take_back(name)
        invocation = self.invocations[execution.invocation]
        task = invocation.task(execution.step, execution.edge)
        halted = self._halted(invocation)
        assert task is not None
        assert halted is not None
        if execution.cause is not None:
            self._uncertain(invocation, task, reasons.no_answer(halted), now)
        else:
            self._persist(invocation, [f.Unmarked(task.step, task.attempt, task.node, task.edge)], now)

    def _node_unavailable(self, slots: Slots, error: ErrorInfo, now: Now) -> None:
        """A node does not stay up, or is gone: what it was not handed, and what waits for it, fails with ``error``."""
        dropped, waiting = self.executions.give_up(slots, error)
        for execution in dropped:
            self._given_up(execution, error, now)
        for claim in waiting:
            invocation, task = self._claimed(claim)
            if invocation is not None and task is not None and self._may_begin(invocation):
                self._final_failure(invocation, task, error, now)

    def _look_at_rests(self, now: Now) -> None:
        """Rests are derived, as at a start: one whose reason is gone goes on, others are told today's reason."""
        for id, rest in list(self.resting.items()):
            invocation = self.invocations[id]
            halted = self._halted(invocation)
            if halted is None and (self.manifest.resume == "manual" or rest.error.code == "recovery_required"):
                halted = reasons.by_hand(self.manifest) if rest.error.code != "invalid_state" else rest.error
            if halted is not None:
                self.resting[id] = rest._replace(error=halted)
            else:
                del self.resting[id]
                self._recover(invocation, [], now, paused_s=now.wall - rest.since_wall)
