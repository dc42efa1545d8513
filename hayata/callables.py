"""Functions that authors give us: finding them by name, and what can be said of them without a call."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

_CONTEXT_NAMES = frozenset({"ctx", "context"})


def resolve(reference: str) -> Any:
    """Find what ``pkg.mod:function`` names.

    Raises:
        ValueError: It names nothing; the message says why.
    """
    module_name, colon, name = reference.partition(":")
    if not (module_name and colon and name):
        raise ValueError(f"{reference!r} is not of the form 'pkg.mod:function'")
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        raise ValueError(f"{reference!r} can't be imported: {type(error).__name__}: {error}") from error
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise ValueError(f"{reference!r} can't be found: there is no {part!r} in it") from None
    return found


def is_coroutine_function(fn: Any) -> bool:
    """Whether a call gives a coroutine; also of a partial, a bound method or an object with ``async def
    __call__``.
    """
    while isinstance(fn, functools.partial):
        fn = fn.func
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(fn, "__call__", None))  # noqa: B004


def is_generator_function(fn: Any) -> bool:
    """Whether a call gives a generator, synchronous or not."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn)


def name_of(fn: Any) -> str | None:
    """The function's name; None for what has none, like a partial."""
    name = getattr(fn, "__name__", None)
    return name if isinstance(name, str) else None


def arguments_problem(fn: Callable[..., Any], least: int, most: int) -> str | None:
    """Why ``fn`` can't be called with ``least`` to ``most`` positional arguments; None if it can with some
    number.
    """
    counted = _positional(fn)
    if counted is None:
        return None
    required, possible, keywords = counted
    if keywords:
        return f"needs the keyword argument {keywords[0]!r}"
    if required > most or possible < least:
        wanted = str(most) if least == most else f"{least} or {most}"
        takes = (
            str(possible)
            if required == possible
            else f"at least {required}"
            if possible > 99
            else f"{required} to {possible}"
        )
        return f"takes {takes} positional arguments, must take {wanted}"
    return None


def takes_context(fn: Callable[..., Any]) -> bool:
    """Whether a node function is of the form ``fn(state, ctx)``.

    A second parameter with a default is a context only if it is called or annotated so: ``lambda state, i=i:
    …`` is how Python programmers keep a loop variable.
    """
    counted = _positional(fn)
    if counted is None:
        return True
    required, possible, _ = counted
    if required == 2 or possible < 2:
        return required == 2
    parameters = list(inspect.signature(fn).parameters.values())
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters[:2]):
        return True
    second = parameters[1]
    annotation = getattr(second.annotation, "__name__", None) or str(second.annotation)
    return second.name in _CONTEXT_NAMES or "Context" in annotation


def _positional(fn: Callable[..., Any]) -> tuple[int, int, list[str]] | None:
    """How many positional parameters are required and possible, and which keywords are required; None: can't
    tell.
    """
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return None
    required = possible = 0
    keywords = []
    for parameter in parameters:
        needed = parameter.default is parameter.empty
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            possible += 1
            required += needed
        elif parameter.kind is parameter.VAR_POSITIONAL:
            possible += 100
        elif parameter.kind is parameter.KEYWORD_ONLY and needed:
            keywords.append(parameter.name)
    return required, possible, keywords
