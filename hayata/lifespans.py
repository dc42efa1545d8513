"""A node's lifespan in the form that its edge workers can enter.

An agent's lifespan serves all its nodes, whether functions or coroutines, and may itself be either. So a
coroutine node always gets an asynchronous context manager and any other node a synchronous one.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from types import TracebackType
from typing import Any

from hayata.agent import Agent
from hayata.errors import error_for


def node_lifespan(
    agent: Agent, node_name: str
) -> AbstractContextManager[Any] | AbstractAsyncContextManager[Any] | None:
    """Make the context manager of one edge worker; None if the node has no lifespan.

    Raises:
        HayataError: ``invalid_definition``: the lifespan made something else.
        Exception: Whatever the user's function raises.
    """
    node = agent.nodes[node_name]
    lifespan = node.lifespan or agent.lifespan
    if lifespan is None:
        return None
    made: Any = lifespan()
    is_async = hasattr(made, "__aenter__") and hasattr(made, "__aexit__")
    if not is_async and not (hasattr(made, "__enter__") and hasattr(made, "__exit__")):
        raise error_for(
            "invalid_definition",
            f"the lifespan of node {node_name} returned a {type(made).__name__}, not a context manager",
            hint="decorate it with contextlib.contextmanager or contextlib.asynccontextmanager",
        )
    if node.is_async:
        return made if is_async else _Awaitable(made)
    return _Blocking(made) if is_async and not hasattr(made, "__enter__") else made


class _Awaitable(AbstractAsyncContextManager[Any]):
    """A synchronous context manager for a coroutine node. It may block: no task runs before it is entered."""

    def __init__(self, made: AbstractContextManager[Any]) -> None:
        self._made = made

    async def __aenter__(self) -> Any:
        return self._made.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return self._made.__exit__(kind, error, traceback)


class _Blocking(AbstractContextManager[Any]):
    """An asynchronous context manager for a plain node: entered and left in an event loop that rests in
    between.
    """

    def __init__(self, made: AbstractAsyncContextManager[Any]) -> None:
        self._made = made
        self._runner = asyncio.Runner()

    def __enter__(self) -> Any:
        try:
            return self._runner.run(self._made.__aenter__())
        except BaseException:
            self._runner.close()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        with self._runner as runner:
            return runner.run(self._made.__aexit__(kind, error, traceback))
