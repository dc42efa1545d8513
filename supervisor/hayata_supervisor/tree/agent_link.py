"""The supervisor's link to an agent worker: asks it about decision policies and updates.

Asks are written ahead and answered in order, so the oldest one is what the worker is busy with. When the
worker dies it alone may be to blame: it is asked again twice, then fails; the others are asked again as if
nothing had been. A policy is pure, so asking again is always allowed.
"""

from __future__ import annotations

from collections import deque

from hayata.framing import FrameTooLarge
from hayata.messages import (
    AgentManifest,
    CheckUpdate,
    ErrorInfo,
    Evaluate,
    FromAgent,
    PolicyFailed,
    RestartType,
    UpdateChecked,
    decoder,
    encode,
)
from hayata_supervisor.process import clock
from hayata_supervisor.process.patience import LATE_S
from hayata_supervisor.process.reactor import Timer
from hayata_supervisor.tree.incarnation import Incarnation
from hayata_supervisor.tree.port import AgentAnswer, failure
from hayata_supervisor.tree.worker_link import CONGESTED_BYTES, Forks, Ground, Superior, WorkerLink

MOST_CRASHES = 3
"""A worker that dies this often on one ask fails it."""

GRACE_S = 2.0
"""How long an agent worker that is told to end may take with the evaluation in hand."""

_DECODER = decoder(FromAgent)


class _Ask:
    """One ask that is not answered yet."""

    __slots__ = ("crashes", "message")

    def __init__(self, message: Evaluate | CheckUpdate) -> None:
        self.message = message
        self.crashes = 0

    def answered_by(self, answer: AgentAnswer) -> bool:
        message = self.message
        if isinstance(message, Evaluate):
            return not isinstance(answer, UpdateChecked) and answer.evaluation == message.evaluation
        return isinstance(answer, UpdateChecked) and answer.check == message.check

    def failed(self, error: ErrorInfo) -> AgentAnswer:
        if isinstance(self.message, Evaluate):
            return PolicyFailed(self.message.evaluation, error)
        return UpdateChecked(self.message.check, None, error)


class AgentLink(WorkerLink):
    """See the module."""

    role = "agent"
    listens = False

    def __init__(self, ground: Ground, forks: Forks, superior: Superior, manifest: AgentManifest) -> None:
        super().__init__(ground, forks, superior, manifest.id, None, _DECODER)
        self._sent: deque[_Ask] = deque()
        self._waiting: deque[_Ask] = deque()
        self._head_due = 0.0
        self._head_timer: Timer | None = None
        self._overdue: _Ask | None = None

    def ask(self, message: Evaluate | CheckUpdate) -> None:
        """Ask; the listener hears exactly one answer."""
        ask = _Ask(message)
        if self._unavailable is not None:
            error = self._unavailable
            self._reactor.call_soon(lambda: self._answer(ask, error))
            return
        self._waiting.append(ask)
        self._pump()

    def retire(self) -> list[CheckUpdate]:
        """Another generation has taken its place: forget what was asked. Returns the checks, to be asked again; whoever
        wanted a decision asks for another.
        """
        self.retired = True
        asks = [ask.message for ask in (*self._sent, *self._waiting)]
        self._sent.clear()
        self._waiting.clear()
        return [message for message in asks if isinstance(message, CheckUpdate)]

    def _pump(self) -> None:
        incarnation = self.incarnation
        if self.status != "serving" or incarnation is None or not incarnation.alive:
            return
        stream = incarnation.stream
        while self._waiting:
            if stream.queued_bytes > CONGESTED_BYTES:
                self._look_again()
                return
            ask = self._waiting.popleft()
            try:
                stream.send(encode(ask.message))
            except FrameTooLarge as error:
                info = failure(error.code, error.message, hint=error.hint, **error.details)
                self._reactor.call_soon(lambda ask=ask, info=info: self._answer(ask, info))  # type: ignore[misc]
                continue
            self._sent.append(ask)
            if len(self._sent) == 1:
                self._head_begins()

    def _answer(self, ask: _Ask, error: ErrorInfo) -> None:
        self._listener.agent_answered(self.agent, ask.failed(error))

    def _message(self, message: AgentAnswer) -> None:
        sent = self._sent
        if sent and sent[0].answered_by(message):
            sent.popleft()
        else:
            ask = next((ask for ask in sent if ask.answered_by(message)), None)
            if ask is None:
                return  # nobody asked, or it was answered
            sent.remove(ask)
        if sent:
            self._head_begins()
        self._listener.agent_answered(self.agent, message)

    # The time limit of the ask in hand. One timer, armed again when it comes too early: asks are far more
    # frequent than limits that pass.

    def _head_begins(self) -> None:
        self._head_due = clock.monotonic() + self._ground.launch.policy_timeout_s
        if self._head_timer is None:
            self._head_timer = self._reactor.call_at(self._head_due, self._look_at_head)

    def _look_at_head(self) -> None:
        self._head_timer = None
        if not self._sent or self.status != "serving":
            return
        now = clock.monotonic()
        if now - self._head_due > LATE_S:  # we were not there to hear the answer
            self._head_due = now + self._ground.launch.policy_timeout_s
        if now < self._head_due:
            self._head_timer = self._reactor.call_at(self._head_due, self._look_at_head)
            return
        self._overdue = self._sent[0]
        self._ground.log.warning("policy timed out", **self._names(), timeout_s=self._ground.launch.policy_timeout_s)
        assert self.incarnation is not None
        self.incarnation.kill()

    # Death

    def _judge(self, incarnation: Incarnation) -> bool:
        """Settle the ask in hand; the others are asked again. A death on an ask counts against that ask."""
        sent, self._sent = self._sent, deque()
        if self._ending:
            self._waiting.extendleft(reversed(sent))
            return False
        if not sent:
            return True
        head = sent[0]
        error = self._blame(head, incarnation)
        if error is not None:
            sent.popleft()
        self._waiting.extendleft(reversed(sent))
        if error is not None:
            self._answer(head, error)
        return False

    def _blame(self, head: _Ask, incarnation: Incarnation) -> ErrorInfo | None:
        overdue, self._overdue = self._overdue, None
        if head is overdue:
            limit_s = self._ground.launch.policy_timeout_s
            return failure(
                "policy_timeout",
                f"the decision policy of {self} did not return within {limit_s:g} s",
                hint="a policy is a quick, pure function; put work into a node",
                timeout_s=limit_s,
            )
        head.crashes += 1
        if head.crashes < MOST_CRASHES:
            return None
        return self._crash("agent_crashed", incarnation, f"it evaluated a decision, {MOST_CRASHES} times")

    def _tell_unavailable(self, error: ErrorInfo, *, stopped: bool) -> None:
        self._listener.agent_given_up(self.agent, error)

    def _tell_back(self) -> None:
        self._listener.agent_back(self.agent)

    def _refuse_waiting(self, error: ErrorInfo) -> None:
        waiting, self._waiting = self._waiting, deque()
        for ask in waiting:
            self._answer(ask, error)

    # Spec

    @property
    def restart_type(self) -> RestartType:
        """Without its worker an agent can do nothing."""
        return "permanent"

    @property
    def grace_s(self) -> float:
        """Policies are quick."""
        return GRACE_S
