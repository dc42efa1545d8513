"""`ctx.step`: sub-steps of a node whose results are stored, and reused when the node runs again.

Each result is durable before the body goes on. So when the task has another attempt (`Retry`, `Rerun`, a
probe's `NOT_DONE`, ``reconcile(retry=True)``), what was stored is not run again, and the first sub-step that
was not stored is run: one that was cut off in its middle runs twice. Whether the task may have another
attempt at all, its sub-steps don't change.

A sub-step is known by its ``key``, or else by its position among those without one. Positions must mean the
same in every attempt: the function's name is stored with the result, and another one in its place is
``step_mismatch``.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec

from hayata.callables import name_of
from hayata.errors import HayataError, error_for
from hayata.messages import Substep
from hayata.values import Declared, decode, encode

LONGEST_KEY = 512
"""Characters."""

StoreSubstep = Callable[[Substep], Any]
"""Hands a result to the supervisor and returns, or for coroutines awaits, when it is durable; raises
HayataError.
"""


class _Due(NamedTuple):
    """A sub-step that is wanted: what it is known by, and its result, if that is stored."""

    key: int | str
    name: str
    stored: Substep | None


class Substeps:
    """The sub-steps of one attempt, in the worker."""

    def __init__(
        self,
        stored: Iterable[Substep],
        store: StoreSubstep | None,
        declared: Declared,
        raised: Callable[[HayataError], object],
    ) -> None:
        """Begin an attempt.

        Args:
            stored: The sub-steps of earlier attempts.
            store: Stores one; None where there can be none.
            declared: Classes whose instances may be stored.
            raised: Hears of each error that is ours, and not the function's.
        """
        self._stored = {each.key: each for each in stored}
        self._store = store
        self._declared = declared
        self._raised = raised
        self._positions = itertools.count()

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...], key: str | None) -> Any:
        """Run a function, or give what it returned before. Errors: see `hayata.Context.step`."""
        with self._ours():
            due = self._due(fn, key)
        if due.stored is not None:
            return decode(due.stored.value)
        value = fn(*args)
        with self._ours():
            if inspect.iscoroutine(value):
                value.close()
                raise _invalid(f"step {due.name} is a coroutine function", "only coroutine nodes await steps")
            done = self._done(due, value)
            assert self._store is not None
            self._store(done)
        return self._kept(done)

    def run_async(self, fn: Callable[..., Any], args: tuple[Any, ...], key: str | None) -> Coroutine[Any, Any, Any]:
        """Like `run`, to be awaited. Its position is that of the call, so that ``gather`` changes nothing."""
        with self._ours():
            due = self._due(fn, key)
        return self._run_async(due, fn, args)

    async def _run_async(self, due: _Due, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if due.stored is not None:
            return decode(due.stored.value)
        value = fn(*args)
        if inspect.isawaitable(value):
            value = await value
        with self._ours():
            done = self._done(due, value)
            assert self._store is not None
            await self._store(done)
        return self._kept(done)

    @contextmanager
    def _ours(self) -> Iterator[None]:
        try:
            yield
        except HayataError as error:
            self._raised(error)
            raise

    def _due(self, fn: Callable[..., Any], key: str | None) -> _Due:
        if self._store is None:
            raise _invalid("a probe has no steps", "ask by ctx.idempotency_key, or by what is in ctx.input")
        if not callable(fn):
            raise _invalid(f"a step needs a function, not a {type(fn).__name__}", "ctx.step(fn, *args)")
        name = (name_of(fn) or type(fn).__name__)[:LONGEST_KEY]
        if key is not None:
            return _Due(_checked(key), name, self._stored.get(key))
        position = next(self._positions)
        stored = self._stored.get(position)
        if stored is not None and stored.name != name:
            raise error_for(
                "step_mismatch",
                f"step {position} is {name} now, and was {stored.name} in an earlier attempt",
                details={"position": position, "name": name, "stored": stored.name},
                hint="call the same steps in the same order in every attempt, or give each a key=",
            )
        return _Due(position, name, stored)

    def _done(self, due: _Due, value: object) -> Substep:
        return Substep(due.key, due.name, msgspec.Raw(encode(value, f"step {due.name}", self._declared)))

    def _kept(self, done: Substep) -> Any:
        """What a later attempt will get, this one gets, too."""
        self._stored[done.key] = done
        return decode(done.value)


def _checked(key: object) -> str:
    if not isinstance(key, str) or not 1 <= len(key) <= LONGEST_KEY:
        raise _invalid("the key of a step can't be this", f"a str of 1 to {LONGEST_KEY} characters")
    try:
        key.encode()
    except UnicodeEncodeError:
        raise _invalid("the key of a step holds a lone surrogate", "it must be text that can be stored") from None
    return key


def _invalid(message: str, hint: str) -> HayataError:
    return error_for("invalid_options", message, hint=hint)
