"""Messages → calls of users' code → messages. The agent worker, the edge workers and ``inline=True`` all use
this.

Whatever users' code does, a message comes out: no function here raises an `Exception`. Only what ends a
process on purpose passes: the cancellation of a coroutine by its worker.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import msgspec

from hayata import messages as m
from hayata.agent import Agent
from hayata.context import AsyncContext, Context, PolicyContext
from hayata.decisions import Fail, Finish, Next, NodeReference
from hayata.error_info import error_from, error_info, exception_error, exception_info
from hayata.errors import HayataError, error_for
from hayata.field_types import Unfit, field_type
from hayata.lifespans import node_lifespan
from hayata.nodes import Node
from hayata.reductions import edges_of
from hayata.substeps import StoreSubstep, Substeps
from hayata.supervision import NOT_DONE, UNKNOWN, Probe, ProbeAnswer
from hayata.updates import checked, shown
from hayata.values import decode, decode_mapping, encode

__all__ = ["Outcome", "SendPartial", "TaskCall", "evaluate", "node_lifespan"]

Outcome: TypeAlias = m.TaskCompleted | m.TaskFailed | m.TaskProbed
"""What a `TaskCall` comes to; `TaskProbed` if it was a probe."""

SendPartial = Callable[[m.Value], Any]
"""Hands a chunk to the supervisor and returns, or for coroutines awaits, when it is acknowledged; raises
HayataError.
"""


# ----------------------------------------------------------------------------------------------------- policy


def evaluate(agent: Agent, message: m.Evaluate) -> m.DecidedNext | m.DecidedFinish | m.DecidedFail | m.PolicyFailed:
    """Ask the decision policy."""
    try:
        context = _policy_context(agent, message)
        try:
            decision = agent.decision_policy(context)
        except BaseException as error:  # noqa: BLE001 - SystemExit from users' code is a failure like any other
            return m.PolicyFailed(message.evaluation, exception_info("policy_exception", error))
        return _decided(agent, message.evaluation, decision)
    except HayataError as error:
        return m.PolicyFailed(message.evaluation, error_info(error))
    except Exception as error:  # noqa: BLE001 - reading a decision may call users' __eq__ or __repr__
        return m.PolicyFailed(message.evaluation, exception_info("policy_exception", error))


def _policy_context(agent: Agent, message: m.Evaluate) -> PolicyContext[Any]:
    context: PolicyContext[Any] = PolicyContext()
    results = message.parallel_results
    context._fill(
        agent_id=agent.id,
        invocation_id=message.invocation_id,
        state=agent.types.build(decode_mapping(message.state)),
        input=decode(message.input),
        step=message.step,
        max_steps=agent.max_steps,
        parallel_results=None if results is None else [agent.types.read_branch(decode(result)) for result in results],
        last=tuple(message.last) if isinstance(message.last, list) else message.last,
        failure=None if message.failure is None else error_from(message.failure),
        session=message.session,
        now=message.now,
    )
    return context


def _decided(
    agent: Agent, evaluation: int, decision: object
) -> m.DecidedNext | m.DecidedFinish | m.DecidedFail | m.PolicyFailed:
    declared = agent.types.declared
    match decision:
        case Next(nodes, given):
            names, parallel = _chosen(agent, nodes)
            encoded = msgspec.Raw(encode(given, "input", declared))
            return m.DecidedNext(evaluation, names, parallel, encoded, edges_of(agent, names, encoded))
        case Finish(result):
            return m.DecidedFinish(evaluation, msgspec.Raw(encode(result, "result", declared)))
        case Fail(reason):
            stored = decode(encode(reason, "reason", declared))
            error = error_for("policy_failed", str(reason), details={"reason": stored})
            return m.DecidedFail(evaluation, error_info(error))
    if inspect.iscoroutine(decision):
        decision.close()
    raise _bad_decision(f"the policy returned {shown(decision)}", "return Next(…), Finish(…) or Fail(…)")


def _chosen(agent: Agent, nodes: Any) -> tuple[list[str], bool]:
    """Names of the nodes to run, and whether in parallel."""
    if isinstance(nodes, str) or not isinstance(nodes, Sequence):
        return [_name(agent, nodes)], False
    if not nodes:
        raise _bad_decision("Next needs at least one node", "return Finish(…) to end the invocation")
    names = [_name(agent, reference) for reference in nodes]
    if len(set(names)) < len(names):
        raise _bad_decision(f"Next names a node twice: {', '.join(names)}", "parallel branches are distinct nodes")
    return names, True


def _name(agent: Agent, reference: NodeReference | Any) -> str:
    if not isinstance(reference, str | Node) and not callable(reference):
        raise _bad_decision(f"Next can't run {shown(reference)}", "give the name of a node, a Node, or its function")
    names = agent.names_of(reference)
    if len(names) == 1:
        return names[0]
    wanted = reference if isinstance(reference, str) else getattr(reference, "__name__", None) or shown(reference)
    if names:
        raise _bad_decision(f"several nodes run {wanted}: {', '.join(names)}", "say which by its name")
    raise error_for(
        "unknown_node",
        f"agent {agent.id} has no node {wanted!r}",
        details={"node": str(wanted), "nodes": list(agent.nodes)},
        hint=f"its nodes: {', '.join(agent.nodes)}",
    )


def _bad_decision(message: str, hint: str) -> HayataError:
    return error_for("invalid_policy_decision", message, hint=hint)


# ------------------------------------------------------------------------------------------------------ tasks


class TaskCall:
    """One attempt: the call of a node function, or of its probe, with what a `RunTask` holds."""

    def __init__(
        self,
        agent: Agent,
        node_name: str,
        run: m.RunTask,
        edge_id: str,
        deps: Any,
        send_partial: SendPartial,
        deadline: float | None,
        store_substep: StoreSubstep | None = None,
    ) -> None:
        """Prepare a call; nothing is decoded yet.

        Args:
            agent: The agent.
            node_name: One of its nodes.
            run: What to run.
            edge_id: Id of the edge worker, for the answers.
            deps: What the lifespan yielded.
            send_partial: Called for each chunk, if ``run.stream``.
            deadline: End of the execution, seconds of ``time.monotonic()``.
            store_substep: Called for each sub-step that was run.
        """
        self._agent = agent
        self._node = agent.nodes[node_name]
        self._fn = _probe_of(self._node) if run.probe else self._node.fn
        self._run = run
        self._edge_id = edge_id
        self._deps = deps
        self._send_partial = send_partial
        self._deadline = deadline
        self._raised_by_us: list[BaseException] = []
        self._substeps = Substeps(
            run.substeps,
            None if run.probe else store_substep,
            agent.types.declared,
            self._raised_by_us.append,
        )

    def run(self) -> Outcome:
        """Call a plain node function."""
        arguments = self._arguments(self._stream)
        if isinstance(arguments, m.TaskFailed):
            return arguments
        try:
            result = self._fn(*arguments)
        except BaseException as error:  # noqa: BLE001 - SystemExit and KeyboardInterrupt of a body are failures too
            return self._raised(error)
        return self._returned(result)

    async def run_async(self) -> Outcome:
        """Await a coroutine node function.

        Raises:
            asyncio.CancelledError: The worker cancelled this task.
        """
        arguments = self._arguments(self._stream_async)
        if isinstance(arguments, m.TaskFailed):
            return arguments
        try:
            result = self._fn(*arguments)
            if inspect.isawaitable(result):  # a probe may be a plain function
                result = await result
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return self._raised(error)  # the body let a cancellation of its own escape
        except BaseException as error:  # noqa: BLE001 - as in `run`
            return self._raised(error)
        return self._returned(result)

    def _arguments(self, stream: Callable[[Any], Any]) -> tuple[Any, ...] | m.TaskFailed:
        """What the node function is called with; or why it can't be."""
        try:
            given = self._input()
            if self._run.probe:
                return (self._context(given, stream),)
            state = self._agent.types.build(decode_mapping(self._run.state))
            if self._node.takes_context:
                return state, self._context(given, stream)
            whole = {**self._agent.types.as_mapping(state), "input": given}
            if self._run.stream:
                whole["hayata_streamer"] = stream
            return (MappingProxyType(whole),)
        except HayataError as error:
            return self._failed(error, retryable=False, began=False)
        except Exception as error:  # noqa: BLE001 - a state type's constructor is users' code
            return self._failed(exception_error("invalid_state", error), retryable=False, began=False)

    def _input(self) -> Any:
        given = decode(self._run.input)
        if self._node.input is None:
            return given
        try:
            return field_type(self._node.input).read(given)
        except Unfit as error:
            raise error_for(
                "invalid_node_input",
                f"node {self._node.name} can't be given this input: {error}",
                details={"path": f"input{error.where}", "message": error.why},
            ) from None

    def _context(self, given: Any, stream: Callable[[Any], Any]) -> Context[Any] | AsyncContext[Any]:
        context: Context[Any] | AsyncContext[Any] = AsyncContext() if self._node.is_async else Context()
        run = self._run
        context._fill(
            input=given,
            deps=self._deps,
            agent_id=self._agent.id,
            invocation_id=run.invocation_id,
            execution_id=run.execution_id,
            node=self._node.name,
            edge=run.edge if run.edge >= 0 else None,
            session=run.session,
            attempt=run.attempt,
            idempotency_key=run.idempotency_key,
            deadline=self._deadline,
            _stream=stream,
            _substeps=self._substeps,
            _log=None,
        )
        return context

    # ---------------------------------------------------------------------------------------- partial results

    def _stream(self, chunk: Any) -> None:
        try:
            encoded = self._chunk(chunk)
            if encoded is not None:
                self._send_partial(encoded)
        except HayataError as error:
            self._raised_by_us.append(error)
            raise

    async def _stream_async(self, chunk: Any) -> None:
        try:
            encoded = self._chunk(chunk)
            if encoded is not None:
                sent: Awaitable[None] = self._send_partial(encoded)
                await sent
        except HayataError as error:
            self._raised_by_us.append(error)
            raise

    def _chunk(self, chunk: Any) -> m.Value | None:
        """Encode a chunk; None when nobody reads it. What it is gets checked all the same."""
        if not isinstance(chunk, Mapping):
            raise error_for(
                "invalid_partial_result",
                f"a partial result must be a mapping, not {shown(chunk)}",
                details={"type": type(chunk).__name__},
            )
        if not self._run.stream:
            return None
        return msgspec.Raw(encode(dict(chunk), "chunk", self._agent.types.declared))

    # ----------------------------------------------------------------------------------------------- outcomes

    def _returned(self, result: object) -> Outcome:
        if self._run.probe and isinstance(result, ProbeAnswer):
            return m.TaskProbed(self._run.execution_id, self._edge_id, result is NOT_DONE)
        try:
            run = self._run
            update = checked(self._agent, self._node, result, parallel=run.parallel, edge=run.edge >= 0)
        except HayataError as error:
            return self._failed(error, retryable=self._retryable(error))
        except Exception as error:  # noqa: BLE001 - reading the result may call users' code
            return self._failed(exception_error("invalid_node_result", error), retryable=self._retryable(error))
        return m.TaskCompleted(self._run.execution_id, self._edge_id, update)

    def _raised(self, error: BaseException) -> m.TaskFailed:
        retryable = self._retryable(error)
        if isinstance(error, HayataError) and any(error is ours for ours in self._raised_by_us):
            # A chunk was refused, or a sub-step: that is the reason. One that doesn't match never will.
            return self._failed(error, retryable=retryable and error.code != "step_mismatch")
        return self._failed(exception_error("node_exception", error), retryable=retryable)

    def _retryable(self, error: BaseException) -> bool:
        if self._node.retry is None:
            return False
        try:
            return self._node.retry.matches(error)
        except Exception:  # noqa: BLE001 - a predicate that fails has not said yes
            return False

    def _failed(self, error: HayataError, *, retryable: bool, began: bool = True) -> m.TaskFailed:
        return m.TaskFailed(self._run.execution_id, self._edge_id, error_info(error), retryable, began)


def _probe_of(node: Node) -> Callable[..., Any]:
    """The node's probe; one without, after a reload, can't tell."""
    fn = node.interrupted.fn if isinstance(node.interrupted, Probe) else None
    return fn if callable(fn) else lambda ctx: UNKNOWN
