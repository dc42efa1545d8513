"""The blocking face: `Client` and `Invocation`.

Safe to use from several threads: each call has a connection to itself while it lasts, taken from a pool. Safe
after a
fork: the child makes connections of its own. Events are read from the socket when the caller asks for the
    next one, so a slow reader holds back the daemon's buffer and not this process's.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Concatenate, Literal, ParamSpec, Self, TypeVar

from hayata import address
from hayata import messages as m
from hayata.client import operations, records, upkeep
from hayata.client.core import (
    Emit,
    Exchange,
    Lost,
    Operation,
    Pause,
    drive,
    follow,
)
from hayata.client.lines import Pool, Stream
from hayata.client.methods import dress
from hayata.client.transport import SocketTransport, Transport, connect
from hayata.errors import HayataError, error_for
from hayata.framing import DEFAULT_CAP_BYTES

P = ParamSpec("P")
T = TypeVar("T")


# ----------------------------------------------------------------------------------------------------------
# Methods from operations
# ----------------------------------------------------------------------------------------------------------


def _method(operation: Callable[P, Operation[T]]) -> Callable[Concatenate[Client, P], T]:
    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._perform(operation(*args, **kwargs))

    return dress(method, operation)


def _one(operation: Callable[P, Operation[m.InvocationInfo]]) -> Callable[Concatenate[Client, P], Invocation]:
    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> Invocation:
        return Invocation(self, self._perform(operation(*args, **kwargs)))

    return dress(method, operation, "Invocation")


def _many(
    operation: Callable[P, Operation[list[m.InvocationInfo]]],
) -> Callable[Concatenate[Client, P], list[Invocation]]:
    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> list[Invocation]:
        return [Invocation(self, info) for info in self._perform(operation(*args, **kwargs))]

    return dress(method, operation, "list[Invocation]")


def _of_invocation(
    operation: Callable[Concatenate[str, P], Operation[T]],
) -> Callable[Concatenate[Invocation, P], T]:
    def method(self: Invocation, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._client._perform(operation(self.id, *args, **kwargs))

    return dress(method, operation, bound=1)


# ----------------------------------------------------------------------------------------------------------
# Public
# ----------------------------------------------------------------------------------------------------------


class Client:
    """A daemon's client.

    It connects when it is first used, and anew when the connection is lost: a call waits out a restart of the
    daemon's supervisor, and raises ``daemon_unavailable`` when nobody listens, or after 30 s.

    Args:
        socket: Path of the daemon's socket; None: ``$HAYATA_SOCKET`` or the default.
        frame_cap_bytes: Largest message, if the daemon's was changed.
    """

    def __init__(
        self, socket: str | os.PathLike[str] | None = None, *, frame_cap_bytes: int = DEFAULT_CAP_BYTES
    ) -> None:
        self._socket = address.default_socket() if socket is None else os.path.abspath(os.fspath(socket))
        self._cap = frame_cap_bytes
        self._pool = Pool()  # not told how to connect: in a reference cycle, close() would come too late

    @property
    def socket(self) -> str:
        """Path of the daemon's socket."""
        return self._socket

    run = _one(operations.run)
    call = _method(operations.call)
    get_result = _method(operations.get_result)
    invocation = _one(operations.invocation)
    invocations = _many(operations.invocations)
    cancel = _method(operations.cancel)
    recover = _many(operations.recover)
    reconcile = _method(operations.reconcile)
    reconcile_all = _method(operations.reconcile_all)
    agents = _method(operations.agents)
    start_agent = _method(operations.start_agent)
    stop_agent = _method(operations.stop_agent)
    reload = _method(operations.reload)
    tree = _method(operations.tree)
    stats = _method(operations.stats)
    verify = _method(upkeep.verify)
    backup = _method(upkeep.backup)
    prune = _method(upkeep.prune)
    export = _method(upkeep.export)
    stop = _method(operations.stop)

    def close(self) -> None:
        """Close the connections. Invocations go on."""
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        pool: Pool | None = getattr(self, "_pool", None)
        if pool is not None:
            pool.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} at {self._socket}>"

    # performing

    def _connect(self) -> Transport:
        return SocketTransport(connect(self._socket), self._cap)

    def _check_open(self) -> None:
        if self._pool.closed:
            raise error_for("daemon_unavailable", "this client is closed")

    def _explain(self, error: HayataError) -> HayataError:
        """What to raise for an error; a runtime knows more about why its daemon is gone."""
        return error

    def _perform(self, operation: Operation[T]) -> T:
        """Run an operation to its end."""
        self._check_open()
        steps = drive(operation, time.monotonic)
        try:
            effect = next(steps)
            while True:
                failure: Exception | None = None
                outcome = None
                try:
                    outcome = self._do(effect)
                except (Lost, TimeoutError, HayataError) as error:
                    failure = error
                effect = steps.send(outcome) if failure is None else steps.throw(failure)
        except StopIteration as stop:
            result: T = stop.value
            return result
        except HayataError as error:
            raise self._explain(error) from None

    def _do(self, effect: Exchange | Pause) -> m.Answer | None:
        if isinstance(effect, Pause):
            time.sleep(effect.seconds)
            return None
        with self._pool.lease(self._connect) as line:
            line.ask(effect.request)
            return line.answer(effect.greeting_s, effect.timeout_s)

    def _events(self, request: m.FollowEvents) -> Iterator[records.Event]:
        self._check_open()
        stream = Stream(self._connect)
        steps = follow(request, time.monotonic)
        try:
            effect = next(steps)
            while True:
                failure: Exception | None = None
                outcome = None
                try:
                    if isinstance(effect, Emit):
                        for info in effect.events:
                            yield records.event(request.invocation_id, info)
                    else:
                        outcome = stream.do(effect)
                except (Lost, HayataError) as error:
                    failure = error
                effect = steps.send(outcome) if failure is None else steps.throw(failure)
        except StopIteration:
            return
        except HayataError as error:
            raise self._explain(error) from None
        finally:
            stream.close()


class Invocation:
    """An invocation: what `Client.run` started, or one that was looked up.

    Attributes:
        id: Its id.
        record: All that was known of it when this object was made, or last refreshed.
    """

    def __init__(self, client: Client, info: m.InvocationInfo) -> None:
        self._client = client
        self._info = info
        self.id = info.id

    @property
    def record(self) -> records.InvocationRecord:
        """As it was when this object was made, or last refreshed; asks nobody."""
        return records.invocation_record(self._info)

    result = _of_invocation(operations.result)
    status = _of_invocation(operations.status)
    tasks = _of_invocation(operations.tasks)
    cancel = _of_invocation(operations.cancel)

    def refresh(self) -> records.InvocationRecord:
        """Ask again, keep what is known now as `record`, and return it."""
        self._info = self._client._perform(operations.invocation(self.id))
        return self.record

    def events(
        self, after: int = 0, *, until: Literal["now", "settled", "terminal"] = "settled"
    ) -> Iterator[records.Event]:
        """Read the events in order, waiting for those to come.

        Args:
            after: Go on behind this sequence number; 0 from the first.
            until: End with what there is (``now``), when the invocation has ended or rests until somebody
                decides (``settled``), or only when it has ended (``terminal``).

        Returns:
            An iterator. A reader that is slow is given a ``gap`` in place of partial results.
        """
        return self._client._events(operations.follow_request(self.id, after, until))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} of {self._info.agent}>"
