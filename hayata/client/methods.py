"""Making methods of operations: same parameters, same docstring, another way of performing."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def dress(method: F, operation: Callable[..., Any], returns: str | None = None, *, bound: int = 0) -> F:
    """Give ``method`` the name, docstring and signature of ``operation``, for `help` and for notebooks.

    Args:
        method: The function that will be the class's attribute.
        operation: Whose face it is.
        returns: What it returns, as source text; None: what the operation's generator returns.
        bound: So many of the operation's first parameters are taken from the object.

    Returns:
        ``method`` itself.
    """
    signature = inspect.signature(operation)
    parameters = list(signature.parameters.values())[bound:]
    self_parameter = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    if returns is None:
        returns = str(signature.return_annotation).removeprefix("Operation[").removesuffix("]")
    attributes: Any = method
    attributes.__name__ = operation.__name__
    attributes.__qualname__ = operation.__name__
    attributes.__doc__ = operation.__doc__
    attributes.__signature__ = signature.replace(parameters=[self_parameter, *parameters], return_annotation=returns)
    return method
