"""What the coordinator wants done. Its caller's duties, in the order of the list:

- `Persist`: store the record; when it is durable, and not before, carry out its ``after``. Records of one invocation
  are stored in order; one with ``hold`` may wait up to `HOLD_S` for the invocation's next record, to share its commit.
- Everything else: at once.

If a record is refused, drop the invocation from the coordinator (`Coordinator.forget`) and adopt it from the store.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

import msgspec

from hayata.messages import Answer, Evaluate, EventInfo, InvocationInfo, PartialAck, TaskOrder
from hayata_supervisor.core.facts import Record
from hayata_supervisor.core.invocation import Invocation

HOLD_S = 0.001
"""How long a result waits for its policy's decision, so that one commit holds both."""


class Token(Protocol):
    """A request that waits for its answer."""

    def reply(self, answer: Answer) -> None:
        """Send one answer; does nothing when the client is gone."""


class Persist(msgspec.Struct):
    """Store one record of one invocation.

    ``open``, ``snapshot``, ``memory``: as in the store's commit. ``header``: what to write into the invocation's
    header, as of this record; None when nothing of it has changed. ``subject`` is the live invocation: only what never
    changes may be read from it, since it may be ahead of this record. ``mate``: another invocation, whose last record
    must be in the same transaction as this one, however large that gets.
    """

    subject: Invocation
    number: int
    record: bytes
    header: InvocationInfo | None
    open: bool | None
    snapshot: bytes | None
    memory: tuple[str, bytes] | None
    hold: bool
    after: list[Effect]
    mate: bytes | None = None


class Barrier(msgspec.Struct, frozen=True):
    """Carry out ``after`` once all that has been persisted of the invocation so far is durable."""

    invocation: bytes
    after: list[Effect]


class AskPolicy(msgspec.Struct, frozen=True):
    """Have the agent worker evaluate the policy."""

    agent: str
    request: Evaluate


class Ready(msgspec.Struct, frozen=True):
    """Tell the coordinator (`Coordinator.ready`) that the execution's mark is durable."""

    agent: str
    execution_id: str


class Dispatch(msgspec.Struct, frozen=True):
    """Hand a task to the node's worker."""

    agent: str
    node: str
    task: TaskOrder


class Kill(msgspec.Struct, frozen=True):
    """Have the node's worker end a task."""

    agent: str
    node: str
    execution_id: str
    reason: str


class Acknowledge(msgspec.Struct, frozen=True):
    """Tell the node that a chunk has its number, or why not."""

    agent: str
    node: str
    ack: PartialAck


class Publish(msgspec.Struct, frozen=True):
    """Tell those who follow the invocation the events of a record (`core.invocation.events_of`)."""

    subject: Invocation
    record: Record


class PublishPartial(msgspec.Struct, frozen=True):
    """Tell those who follow the invocation of a chunk."""

    invocation: bytes
    event: EventInfo


class Settled(msgspec.Struct, frozen=True):
    """The invocation is terminal or rests until a person decides: tell those who await it."""

    invocation: bytes
    info: InvocationInfo


class Reply(msgspec.Struct, frozen=True):
    """Answer the request behind ``token``."""

    token: Token
    answer: Answer


class Warn(msgspec.Struct, frozen=True):
    """Log something that an operator may want to look at."""

    event: str
    fields: dict[str, str | int]


class Call(msgspec.Struct, frozen=True):
    """Call something. The coordinator never makes one: it lets a shell wait behind a `Barrier`."""

    callback: Callable[[], None]


Effect: TypeAlias = (
    Persist
    | Barrier
    | AskPolicy
    | Ready
    | Dispatch
    | Kill
    | Acknowledge
    | Publish
    | PublishPartial
    | Settled
    | Reply
    | Warn
    | Call
)
