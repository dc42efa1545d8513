"""The client's side of the protocol, without I/O: greeting, numbering, patience, and the two ways of asking.

An operation (`hayata.client.operations`) is a generator that yields `Call`s and receives answers. `drive` and
`follow` turn operations into *effects*, the few things that touch the world: `Exchange`, `Pause`, and for
streams `Open`, `Receive` and `Emit`. A face performs effects, blocking or awaiting, and decides nothing: that
lost connections are made anew, that what was asked is asked again, and when to give up, is written here once.

Sending again is always right: ``run`` carries an id that the client made, ``reconcile`` a request id, a
stream goes on after the last sequence it handed out, and every other request may be granted twice.

Source: h11, whose protocol has no I/O; Cory Benfield, "Building Protocol Libraries The Right Way" (2016).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from typing import Any, NamedTuple, TypeAlias, TypeVar

import msgspec

from hayata import messages as m
from hayata.error_info import error_from
from hayata.errors import HayataError, error_for
from hayata.framing import DEFAULT_CAP_BYTES, HEADER, FrameReader, FrameTooLarge

PATIENCE_S = 30.0
"""How long a call goes on trying to reach the daemon before it says ``daemon_unavailable``."""

STEADY_S = 5.0
"""A connection that lived this long was a good one: losing it starts a new patience."""

ANSWER_S = 120.0
"""How long a request that is answered at once may take. Waiting for an invocation has no such bound."""

_GREETING_CAP_BYTES = 64 * 1024
_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 1.0

_decode: Callable[[bytes], m.Hello | m.Tell] = m.decoder(m.ToClient).decode

T = TypeVar("T")


class Call(NamedTuple):
    """A request, and how many seconds its answer may take; None for the usual bound, infinity for none."""

    request: m.Request
    timeout_s: float | None = None


Operation: TypeAlias = Generator[Call, m.Answer, T]
"""What one method does: it yields calls, is sent the answers, and returns its result.

A refusal is thrown in as a `HayataError`, and the end of a call's time as a `TimeoutError`.
"""


class Lost(Exception):
    """The connection is gone, or was never there.

    Attributes:
        reason: Why, for a person.
        greeted: Whether the daemon had said hello on it.
        refusal: What to tell the caller at once, when trying again is no use.
    """

    def __init__(self, reason: str, *, greeted: bool = False, refusal: HayataError | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.greeted = greeted
        self.refusal = refusal


# ----------------------------------------------------------------------------------------------------------
# One connection
# ----------------------------------------------------------------------------------------------------------


class Frames:
    """Bytes → bodies. The first frame must be as short as a greeting is: another program's bytes read as a
    header announce gigabytes, and would be waited for.
    """

    def __init__(self, cap_bytes: int = DEFAULT_CAP_BYTES) -> None:
        self._reader = FrameReader(cap_bytes)
        self._head = b""
        self._opened = False

    def feed(self, data: bytes) -> list[bytes]:
        """Take bytes in, hand complete bodies out.

        Raises:
            HayataError: ``protocol_error``; the stream can't be read any further.
        """
        if not self._opened:
            data = self._head + data
            if len(data) < HEADER:
                self._head = data
                return []
            if int.from_bytes(data[:HEADER], "big") > _GREETING_CAP_BYTES:
                raise not_ours("its first bytes are no greeting")
            self._opened = True
        try:
            return list(self._reader.feed(data))
        except FrameTooLarge as error:
            raise error_for(
                "protocol_error",
                f"the daemon sent {error.message}",
                hint="raise frame_cap_bytes of the client to that of the daemon",
            ) from None


class Conversation:
    """One connection's talk: says hello, numbers the requests, reads the answers.

    Attributes:
        greeted: Whether the daemon has said hello.
        package: Its version of hayata, once it has.
    """

    def __init__(self) -> None:
        self._number = 0
        self.greeted = False
        self.package = ""

    def hello(self) -> bytes:
        """The first message to send; requests may follow without waiting for the answer."""
        return m.encode(m.Hello(package=_package_version()))

    def ask(self, request: m.Request) -> tuple[int, bytes]:
        """Number a request; return the number and the message.

        Raises:
            HayataError: ``invalid_options``: one of its texts can't be encoded.
        """
        self._number += 1
        try:
            return self._number, m.encode(m.Ask(self._number, request))
        except UnicodeEncodeError as error:
            raise error_for("invalid_options", f"a text can't be sent: {error.reason}") from None

    def receive(self, body: bytes) -> m.Tell | None:
        """Read one message; None for the greeting.

        Raises:
            HayataError: ``protocol_error``, or what the daemon said of the connection itself.
        """
        try:
            message = _decode(body)
        except msgspec.DecodeError as error:
            raise not_ours(f"it sent what can't be read ({error})") from None
        if isinstance(message, m.Hello):
            self._greet(message)
            return None
        if message.number == 0:
            if isinstance(message.answer, m.Refused):
                raise error_from(message.answer.error)
            raise not_ours("it answered what nobody asked")
        if not self.greeted or message.number > self._number:
            raise not_ours("it answered before it was asked")
        return message

    def _greet(self, hello: m.Hello) -> None:
        if self.greeted:
            raise not_ours("it greeted twice")
        if hello.protocol != m.PROTOCOL_VERSION:
            package = hello.package or "of unknown version"
            raise error_for(
                "protocol_error",
                f"the daemon (hayata {package}) speaks protocol {hello.protocol}, "
                f"this client protocol {m.PROTOCOL_VERSION}",
                hint="install the same version of hayata on both sides",
            )
        self.greeted = True
        self.package = hello.package


def not_ours(what: str) -> HayataError:
    """The error for a peer that does not speak our protocol."""
    return error_for(
        "protocol_error",
        f"who listens at the socket is no Hayata daemon of this version: {what}",
        hint="check the socket's path, and that client and daemon are of one version",
    )


def _package_version() -> str:
    import hayata  # here: hayata imports this package

    return str(getattr(hayata, "__version__", ""))


# ----------------------------------------------------------------------------------------------------------
# Patience
# ----------------------------------------------------------------------------------------------------------


class Patience:
    """How long one call goes on trying. Instants are monotonic seconds, and come from outside."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._began = 0.0
        self._losses = 0

    def begin(self, now: float) -> float:
        """Note the start of an attempt; return the seconds in which the daemon must greet."""
        self._began = now
        return PATIENCE_S if self._since is None else max(0.1, self._since + PATIENCE_S - now)

    def lost(self, now: float, loss: Lost) -> float:
        """Note that the attempt failed; return the seconds to wait before the next one.

        Raises:
            HayataError: ``daemon_unavailable`` after `PATIENCE_S` without a steady connection, or at once
                what ``loss.refusal`` says.
        """
        if loss.refusal is not None:
            raise loss.refusal
        if self._since is None or (loss.greeted and now - self._began >= STEADY_S):
            # The time that an attempt itself has taken to fail counts, unless it was a good connection.
            self._since = now if loss.greeted else self._began
            self._losses = 0
        self._losses += 1
        if now - self._since >= PATIENCE_S:
            raise error_for(
                "daemon_unavailable",
                f"no answer from the daemon in {PATIENCE_S:.0f} s: {loss.reason}",
                hint="its log says more; what was asked may have been done, and is safe to ask again",
            )
        pause: float = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(self._losses - 1, 10))
        return pause


# ----------------------------------------------------------------------------------------------------------
# Effects
# ----------------------------------------------------------------------------------------------------------


class Exchange(NamedTuple):
    """Send a request on some connection and return its answer.

    A connection made for it must greet within ``greeting_s``, else `Lost`; the answer must come within
    ``timeout_s``, else `TimeoutError`.
    """

    request: m.Request
    greeting_s: float
    timeout_s: float | None


class Pause(NamedTuple):
    """Wait."""

    seconds: float


class Open(NamedTuple):
    """Send a request on a new connection of its own, in place of the one before."""

    request: m.FollowEvents
    greeting_s: float


class Receive(NamedTuple):
    """Return the next answer on the connection that `Open` made. Nothing is read ahead."""


class Emit(NamedTuple):
    """Hand these events to the caller; go on when he wants more."""

    events: list[m.EventInfo]


def drive(operation: Operation[T], clock: Callable[[], float]) -> Generator[Exchange | Pause, Any, T]:
    """Turn an operation into effects. `Lost` and `TimeoutError` of an effect are to be thrown in."""
    try:
        call = next(operation)
        while True:
            try:
                answer = yield from _persist(call, clock)
            except (HayataError, TimeoutError) as error:
                call = operation.throw(error)
            else:
                call = operation.send(answer)
    except StopIteration as stop:
        result: T = stop.value
        return result


def _persist(call: Call, clock: Callable[[], float]) -> Generator[Exchange | Pause, Any, m.Answer]:
    """Ask until there is an answer. A refusal is raised as the error it names."""
    patience = Patience()
    deadline = None if call.timeout_s is None else clock() + call.timeout_s
    while True:
        now = clock()
        greeting_s = patience.begin(now)
        left = ANSWER_S if deadline is None else max(0.0, deadline - now)
        answer: m.Answer | Lost
        try:
            answer = yield Exchange(call.request, greeting_s, None if left == math.inf else left)
        except TimeoutError:
            if deadline is not None:
                raise
            raise error_for(
                "daemon_unavailable",
                f"the daemon took the request and gave no answer in {ANSWER_S:.0f} s",
                hint="its log says more; what was asked may have been done, and is safe to ask again",
            ) from None
        except Lost as loss:
            answer = loss
        if isinstance(answer, m.Refused):
            raise error_from(answer.error)
        if not isinstance(answer, Lost):
            return answer
        pause = patience.lost(clock(), answer)
        if deadline is not None and clock() + pause >= deadline:
            raise TimeoutError(answer.reason)
        yield Pause(pause)


def follow(request: m.FollowEvents, clock: Callable[[], float]) -> Generator[Open | Receive | Pause | Emit, Any, None]:
    """Read a stream of events to its end, over as many connections as it takes.

    After a loss it goes on behind the last event that was emitted; what had not been emitted is read again.
    """
    patience = Patience()
    while True:
        greeting_s = patience.begin(clock())
        try:
            yield Open(request, greeting_s)
            while True:
                answer: m.Answer = yield Receive()
                if isinstance(answer, m.EventBatch):
                    if answer.events:
                        request = after(request, answer.events)
                        yield Emit(answer.events)
                elif isinstance(answer, m.Done):
                    return
                elif isinstance(answer, m.Refused):
                    raise error_from(answer.error)
                else:
                    raise unexpected(answer)
        except Lost as caught:
            loss = caught
        yield Pause(patience.lost(clock(), loss))


def after(request: m.FollowEvents, events: list[m.EventInfo]) -> m.FollowEvents:
    """The request that goes on behind ``events``. A gap stands for several numbers."""
    last = events[-1]
    number = last.sequence
    if last.type == "gap":
        try:
            number = max(number, msgspec.msgpack.decode(last.data, type=_Gap).to)
        except msgspec.DecodeError as error:
            raise not_ours(f"it sent a gap without bounds ({error})") from None
    return msgspec.structs.replace(request, after=number)


class _Gap(msgspec.Struct):
    to: int


def unexpected(answer: m.Answer) -> HayataError:
    """The error for an answer of the wrong kind."""
    return not_ours(f"it answered with {type(answer).__name__}")
