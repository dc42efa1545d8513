"""What happens after something went wrong: retries of bodies that ended, reruns of bodies cut off, restarts
of workers.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, Literal, TypeAlias

from hayata.callables import arguments_problem, is_coroutine_function, is_generator_function, resolve
from hayata.problems import Amount, Count, Fields, Pause, Problems, Seconds

RestartType: TypeAlias = Literal["permanent", "transient", "temporary"]
Strategy: TypeAlias = Literal["one_for_one", "one_for_all", "rest_for_one"]
Shutdown: TypeAlias = float | Literal["brutal_kill", "infinity"]
RetryOn: TypeAlias = "type[BaseException] | tuple[type[BaseException], ...] | Callable[[BaseException], bool]"


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses that grow: ``initial``, ``initial * factor``, … but at most ``maximum`` seconds.

    Raises:
        DefinitionError: ``invalid_definition``.
    """

    initial: float = 0.1
    factor: float = 2.0
    maximum: float = 60.0

    def __post_init__(self) -> None:
        problems = Problems()
        problems.check(_BackoffFields, {"initial": self.initial, "factor": self.factor, "maximum": self.maximum})
        problems.raise_any("Backoff")


class _BackoffFields(Fields):
    initial: Pause
    factor: Pause
    maximum: Pause


def as_backoff(backoff: float | Backoff) -> Backoff:
    """A number of seconds is the first pause; the next ones double."""
    if isinstance(backoff, Backoff):
        return backoff
    return Backoff(initial=backoff, maximum=max(backoff, Backoff().maximum))


@dataclass(frozen=True, slots=True)
class Retry:
    """Run a node's body again after it *ended* with a failure.

    Attributes:
        max_attempts: All attempts, the first included.
        backoff: Pause before the second attempt in seconds, doubled for each further one; or a `Backoff`.
        jitter: Each pause is made longer or shorter by up to this share of it, 0 to 1.
        on: Which failures: an exception class, a tuple of them, or a function of the exception. What the body
            returns and can't be stored counts as a `HayataError`.

    Raises:
        DefinitionError: ``invalid_definition``.
    """

    max_attempts: int = 3
    backoff: float | Backoff = 0.1
    jitter: float = 0.1
    on: RetryOn = Exception

    def __post_init__(self) -> None:
        problems = Problems()
        problems.check(_RetryFields, {"max_attempts": self.max_attempts, "jitter": self.jitter})
        if not isinstance(self.backoff, Backoff):
            problems.check(_BackoffOnly, {"backoff": self.backoff})
        if isinstance(self.jitter, int | float) and self.jitter > 1:
            problems.add("jitter", "Input should be less than or equal to 1")
        kinds = self.on if isinstance(self.on, tuple) else (self.on,)
        are_classes = all(isinstance(kind, type) and issubclass(kind, BaseException) for kind in kinds)
        if not are_classes and (isinstance(self.on, tuple | type) or not callable(self.on)):
            problems.add("on", "is neither an exception class, nor a tuple of them, nor a function")
        problems.raise_any("Retry")

    def matches(self, error: BaseException) -> bool:
        """Whether ``error`` is to be retried.

        Raises:
            Exception: Whatever the function in ``on`` raises.
        """
        if isinstance(self.on, tuple | type):
            return isinstance(error, self.on)
        return bool(self.on(error))


class _RetryFields(Fields):
    max_attempts: Count
    jitter: Pause


class _BackoffOnly(Fields):
    backoff: Pause


@dataclass(frozen=True, slots=True)
class Rerun:
    """Let a body that was *cut off* run again, as it may: a model call, a read, an idempotent write.

    Attributes:
        max_attempts: All attempts, the first included.

    Raises:
        DefinitionError: ``invalid_definition``.
    """

    max_attempts: int = 3

    def __post_init__(self) -> None:
        problems = Problems()
        problems.check(_RerunFields, {"max_attempts": self.max_attempts})
        problems.raise_any("Rerun")


class _RerunFields(Fields):
    max_attempts: Count


class ProbeAnswer(Enum):
    """What a probe says when it has no result to give."""

    NOT_DONE = "not_done"
    UNKNOWN = "unknown"


NOT_DONE: Final = ProbeAnswer.NOT_DONE
"""A probe's answer: what the body does outside has not happened and will not. The body is run again."""

UNKNOWN: Final = ProbeAnswer.UNKNOWN
"""A probe's answer: it can't be told. The task is uncertain, and a person decides."""

ProbeResult: TypeAlias = Mapping[str, Any] | ProbeAnswer
ProbeFunction: TypeAlias = Callable[[Any], ProbeResult | Awaitable[ProbeResult]]


@dataclass(frozen=True, slots=True)
class Probe:
    """Ask outside what became of a body that was *cut off*: whether the payment went through, say.

    The function runs in an edge worker of the node, with the node's deadline. Its ``ctx`` is that of the
    attempt that was cut off, so ``ctx.idempotency_key`` is what the body gave to the service. It must be safe
    to ask twice: a probe that is cut off together with the supervisor is asked again. One that raises, dies,
    takes too long or returns what can't be the node's result counts as `UNKNOWN`.

    Attributes:
        fn: ``fn(ctx)``, or ``"pkg.mod:function"``; of a coroutine node it may be a coroutine function. It
            returns the result, a mapping of updates as the node function would have; or `NOT_DONE`; or
            `UNKNOWN`.
        max_attempts: All attempts of the body, the first included; a last one that was not done has failed.

    Raises:
        DefinitionError: ``invalid_definition``.
    """

    fn: ProbeFunction | str
    max_attempts: int = 3

    def __post_init__(self) -> None:
        problems = Problems()
        problems.check(_RerunFields, {"max_attempts": self.max_attempts})
        if isinstance(self.fn, str):
            try:
                object.__setattr__(self, "fn", resolve(self.fn))
            except ValueError as error:
                problems.add("fn", str(error))
        if not callable(self.fn):
            if not isinstance(self.fn, str):
                problems.add("fn", f"{self.fn!r} is not a function")
        elif is_generator_function(self.fn):
            problems.add("fn", "is a generator; a probe returns its answer")
        elif problem := arguments_problem(self.fn, 1, 1):
            problems.add("fn", f"{problem}: (ctx)")
        problems.raise_any("Probe")

    @property
    def is_async(self) -> bool:
        """Whether the function is a coroutine function."""
        return is_coroutine_function(self.fn)


@dataclass(frozen=True, slots=True)
class Supervision:
    """How an agent's workers are restarted: its own first, then its nodes, in the order of their definition.

    Attributes:
        strategy: With whom a worker that has ended is restarted. ``one_for_one``: alone; ``one_for_all``: with all
            others; ``rest_for_one``: with those that were started after it. The others are ended first, the last
            one first, each within its ``shutdown``; what they then still run is cut off with ``node_crashed``,
            reason ``sibling_restart``.
        intensity: Most restarts within ``period``. ``one_for_one``: of each worker; one more gives it up for a
            while, and more given up than that, the agent. Else: of the group; one more gives the agent up. What was
            given up is tried again after ``node_retry``, longer each time.
        period: Seconds.
        backoff: Pause before the second restart in a row, doubled for each further one; or a `Backoff` with
            factor 2.

    Raises:
        DefinitionError: ``invalid_definition``.

    Source:
        OTP ``supervisor``.
    """

    strategy: Strategy = "one_for_one"
    intensity: int = 10
    period: float = 60.0
    backoff: float | Backoff = field(default_factory=lambda: Backoff(initial=0.1, maximum=5.0))

    def __post_init__(self) -> None:
        problems = Problems()
        values: dict[str, Any] = {
            "strategy": self.strategy,
            "intensity": self.intensity,
            "period": self.period,
        }
        problems.check(_SupervisionFields, values)
        if not isinstance(self.backoff, Backoff):
            problems.check(_BackoffOnly, {"backoff": self.backoff})
        elif self.backoff.factor != 2.0:
            problems.add("backoff.factor", "the pause between restarts doubles: factor can only be 2")
        problems.raise_any("Supervision")


class _SupervisionFields(Fields):
    strategy: Strategy
    intensity: Amount
    period: Seconds
