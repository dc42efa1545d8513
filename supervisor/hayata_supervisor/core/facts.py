"""What is durable: an invocation is the fold of its facts, and nothing else.

Each commit of an invocation is one `Record`: the facts that became true together. The live state machine and
recovery use the same fold (`core.invocation`), so what is recovered is what was committed. Lifecycle events are not
stored beside the facts: each fact is at most one event, and the record says the number of its first. So a fact
names all that its event tells, and an event can be read from the middle of a journal.

Source: event sourcing; FoundationDB's rule that recovery runs the code that normal operation runs.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from hayata.messages import ErrorInfo, Substep, Update, Value
from hayata_supervisor.core.definitions import EMPTY


class _Fact(msgspec.Struct, array_like=True, frozen=True):
    """Base of the facts. Fields may be added at the end, with a default; tags are never reused."""


class Accepted(_Fact, frozen=True, tag="accepted"):
    """First fact of an invocation: it exists, and is queued until `Started`."""

    input: Value


class Started(_Fact, frozen=True, tag="started"):
    """It runs, from this state, by this definition (`core.definitions`), since this time (``Now.lasting``; 0 in old
    journals). Event ``invocation_started``.
    """

    state: Update
    definition: msgspec.Raw = EMPTY
    lasting: float = 0.0


class Decided(_Fact, frozen=True, tag="decided"):
    """The policy said ``Next``: steps ``step … step + len(nodes) - 1`` are scheduled, attempt 1 each. ``edges``: node →
    the values of its edges, for the nodes that have some, and ``since``: from when their time counts (``Now.lasting``,
    less the time that the invocation has rested).
    """

    step: int
    nodes: list[str]
    parallel: bool
    input: Value
    edges: dict[str, list[Value]] | None = None
    since: float | None = None


class Marked(_Fact, frozen=True, tag="marked"):
    """From now on the body may have run. ``cell``: where its worker notes that it begins (`core.cells`).
    Event ``node_started``.
    """

    step: int
    attempt: int
    node: str
    cell: int
    edge: int = -1


class Unmarked(_Fact, frozen=True, tag="unmarked"):
    """It was marked, and provably never began: it is scheduled again, the same attempt."""

    step: int
    attempt: int
    node: str
    edge: int = -1


class Completed(_Fact, frozen=True, tag="completed"):
    """The body ended well. ``merge`` names the operation of each key that is not replaced, so that the fold does not
    depend on what the definition says later. A branch's update is kept for ``parallel_results``, not merged.
    Event ``node_completed``.
    """

    step: int
    attempt: int
    node: str
    update: Update
    merge: dict[str, str]
    edge: int = -1


class SubstepDone(_Fact, frozen=True, tag="substep"):
    """The body called a function with ``ctx.step``, and this is what it returned: later attempts get it from here."""

    step: int
    attempt: int
    node: str
    substep: Substep
    edge: int = -1


class Failed(_Fact, frozen=True, tag="failed"):
    """The body ended with a failure or was cut off. ``retry_at``: when (``Now.lasting``) attempt + 1 may run, 0 for at
    once, None for a final failure. Event ``node_failed``.
    """

    step: int
    attempt: int
    node: str
    error: ErrorInfo
    retry_at: float | None
    edge: int = -1


class Cancelled(_Fact, frozen=True, tag="cancelled"):
    """Not wanted any more. Event ``node_cancelled``."""

    step: int
    attempt: int
    node: str
    edge: int = -1


class Uncertain(_Fact, frozen=True, tag="uncertain"):
    """It was marked and has no result, and nobody is left who could know: the supervisor that ran it is gone, or the
    node's probe can't tell (then ``error`` says why). Event ``node_uncertain``.
    """

    step: int
    attempt: int
    node: str
    error: ErrorInfo | None = None
    edge: int = -1


class Reconciled(_Fact, frozen=True, tag="reconciled"):
    """A person settled it: a result (``update``), an error, or neither: attempt + 1 is scheduled.
    Event ``node_reconciled``.
    """

    step: int
    attempt: int
    node: str
    by: str
    request_id: str
    update: Update | None
    merge: dict[str, str]
    error: ErrorInfo | None
    edge: int = -1


class Recovered(_Fact, frozen=True, tag="recovered"):
    """It runs again. ``paused_s``: for how long its timeout has stood still. Event ``invocation_recovered``."""

    paused_s: float


class Reversioned(_Fact, frozen=True, tag="reversioned"):
    """It goes on with this version of its definition."""

    version: str
    definition: msgspec.Raw = EMPTY


class Finished(_Fact, frozen=True, tag="finished"):
    """Ended as completed. Event ``invocation_completed``."""

    result: Value


class Aborted(_Fact, frozen=True, tag="aborted"):
    """Ended as failed. Event ``invocation_failed``."""

    error: ErrorInfo


class Dropped(_Fact, frozen=True, tag="dropped"):
    """Ended as cancelled. Event ``invocation_cancelled``."""

    reason: str


Fact: TypeAlias = (
    Accepted
    | Started
    | Decided
    | Marked
    | Unmarked
    | Completed
    | SubstepDone
    | Failed
    | Cancelled
    | Uncertain
    | Reconciled
    | Recovered
    | Reversioned
    | Finished
    | Aborted
    | Dropped
)

TaskFact: TypeAlias = Marked | Unmarked | Completed | SubstepDone | Failed | Cancelled | Uncertain | Reconciled
"""Those that are about one attempt: of a step, or of one of its edges (``edge``; -1 for none)."""

Status: TypeAlias = Literal[
    "queued", "running", "waiting", "recovery_required", "uncertain", "completed", "failed", "cancelled"
]
TERMINAL = frozenset({"completed", "failed", "cancelled"})


class Record(msgspec.Struct, array_like=True, frozen=True):
    """One commit of one invocation.

    Attributes:
        at: Wall time, seconds.
        sequence: Number of the first event among ``facts``; the others follow without a gap.
        reserved: No event, partial results included, has been numbered beyond this.
        facts: What became true.
    """

    at: float
    sequence: int
    reserved: int
    facts: list[Fact]


encode_record = msgspec.msgpack.Encoder().encode
decode_record = msgspec.msgpack.Decoder(Record).decode


def interrupted_details(reason: str) -> msgspec.Raw:
    """Details of an error that cut a body off."""
    return msgspec.Raw(encode_record({"interrupted": True, "reason": reason}))
