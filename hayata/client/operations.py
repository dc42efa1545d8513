"""What a client can do, each thing written once: generators that yield `Call`s and receive answers.

`hayata.client.blocking` and `hayata.client.asynchronous` make methods of them, with the same parameters and
docstrings. Options are checked here, before anything is sent, with the errors that the daemon would give.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import msgspec

from hayata import messages as m
from hayata.client import records
from hayata.client.core import Call, Operation, unexpected
from hayata.client.options import (
    ABSENT,
    FOREVER,
    STATUSES,
    absolute_reference,
    check_author,
    check_choice,
    check_count,
    check_flag,
    check_optional_name,
    check_seconds,
    check_verdict,
    invalid,
    new_id,
)
from hayata.client.outcomes import outcome
from hayata.errors import HayataError
from hayata.ids import check_name
from hayata.values import encode

A = TypeVar("A")

_GRACE_S = 1.0
_MOST_LISTED = 10_000


def ask(request: m.Request, kind: type[A], timeout_s: float | None = None) -> Operation[A]:
    """Ask once; the answer must be of that kind."""
    answer = yield Call(request, timeout_s)
    if not isinstance(answer, kind):
        raise unexpected(answer)
    return answer


# ----------------------------------------------------------------------------------------------------------
# Running and results
# ----------------------------------------------------------------------------------------------------------


def run(
    agent_id: str,
    input: Any = None,
    *,
    stream: bool = False,
    session: str | None = None,
    invocation_id: str | None = None,
    key: str | None = None,
    on_busy: Literal["reject", "queue"] = "reject",
) -> Operation[m.InvocationInfo]:
    """Start an invocation, and return when it is durable.

    Args:
        agent_id: Id of the agent.
        input: Its input, any value that can be stored; usually a mapping.
        stream: Publish partial results as events.
        session: Name of the session it belongs to; one of its own without.
        invocation_id: Its id, to be chosen once; made up without.
        key: Idempotency key: the same key and input give the same invocation.
        on_busy: What to do when the session is held by another one: fail with ``session_busy``, or wait in
            line.

    Raises:
        HayataError: ``unknown_agent``, ``session_busy``, ``session_required``, ``recovery_required``,
            ``key_reused``, ``invocation_exists``, ``invalid_options``, ``unserializable_value``,
            ``store_full``, ``daemon_unavailable`` and others.
    """
    check_name("agent", agent_id)
    check_optional_name("session", session)
    check_optional_name("key", key)
    check_optional_name("invocation id", invocation_id)
    check_choice("on_busy", on_busy, ("reject", "queue"))
    request = m.Run(
        agent=agent_id,
        invocation_id=new_id() if invocation_id is None else invocation_id,
        input=msgspec.Raw(encode(input, "input")),
        stream=check_flag("stream", stream),
        session=session,
        key=key,
        on_busy=on_busy,
    )
    return (yield from ask(request, m.InvocationInfo))


def call(
    agent_id: str,
    input: Any = None,
    *,
    stream: bool = False,
    session: str | None = None,
    invocation_id: str | None = None,
    key: str | None = None,
    on_busy: Literal["reject", "queue"] = "reject",
    timeout: float | None = None,
) -> Operation[Any]:
    """Start an invocation, wait for its end and return its result: `run` and ``result`` in one.

    Args:
        agent_id: Id of the agent.
        input: Its input.
        stream: As for `run`.
        session: As for `run`.
        invocation_id: As for `run`.
        key: As for `run`.
        on_busy: As for `run`.
        timeout: Seconds to wait for the end; None waits as long as it takes.

    Raises:
        HayataError: As `run` and ``Invocation.result``.
        TimeoutError: It has not ended; it goes on, and the message names it.
    """
    check_seconds("timeout", timeout)
    started = yield from run(
        agent_id, input, stream=stream, session=session, invocation_id=invocation_id, key=key, on_busy=on_busy
    )
    return (yield from result(started.id, timeout))


def result(invocation_id: str, timeout: float | None = None) -> Operation[Any]:
    """Wait for the invocation's end, at most ``timeout`` seconds (None: as long as it takes), and return its
    result.

    Raises:
        InvocationFailed: It has failed; code, message and details are those of the reason.
        InvocationCancelled: It was cancelled.
        RecoveryNeeded: It rests until somebody decides: ``task_execution_uncertain``, ``recovery_required``
            or ``definition_changed``.
        TimeoutError: It has not ended; nothing is changed.
    """
    check_name("invocation id", invocation_id)
    check_seconds("timeout", timeout)
    try:
        request = m.AwaitInvocation(invocation_id)
        info = yield from ask(request, m.InvocationInfo, FOREVER if timeout is None else timeout)
    except TimeoutError:
        info = yield from _late(invocation_id, timeout)
    return outcome(info)


def _late(invocation_id: str, timeout: float | None) -> Operation[m.InvocationInfo]:
    """After the time has passed: it may have ended before, when the time was too short for the answer."""
    waited = TimeoutError(f"invocation {invocation_id} has not ended in {timeout} s; it goes on")
    try:
        info = yield from ask(m.GetInvocation(invocation_id), m.InvocationInfo, _GRACE_S)
    except TimeoutError:
        raise waited from None
    if info.status not in records.TERMINAL | records.RESTING:
        raise waited
    return info


def get_result(invocation_id: str) -> Operation[Any]:
    """Return the result if there is one, without waiting.

    Args:
        invocation_id: Id of the invocation.

    Raises:
        InvocationFailed: It has failed.
        InvocationCancelled: It was cancelled.
        RecoveryNeeded: It rests until somebody decides.
        HayataError: ``result_not_ready``, ``unknown_invocation``.
    """
    check_name("invocation id", invocation_id)
    info = yield from ask(m.GetInvocation(invocation_id), m.InvocationInfo)
    return outcome(info)


# ----------------------------------------------------------------------------------------------------------
# Looking
# ----------------------------------------------------------------------------------------------------------


def invocation(invocation_id: str) -> Operation[m.InvocationInfo]:
    """Look an invocation up.

    Args:
        invocation_id: Its id.

    Raises:
        HayataError: ``unknown_invocation``.
    """
    check_name("invocation id", invocation_id)
    return (yield from ask(m.GetInvocation(invocation_id), m.InvocationInfo))


def status(invocation_id: str) -> Operation[str]:
    """Ask for the status, one of those that `InvocationRecord` names."""
    return (yield from invocation(invocation_id)).status


def invocations(
    agent: str | None = None, status: str | None = None, session: str | None = None, limit: int = 100
) -> Operation[list[m.InvocationInfo]]:
    """List invocations, newest first.

    Args:
        agent: Only those of this agent.
        status: Only those with this status.
        session: Only those of this session.
        limit: At most so many, 1 to 10,000.
    """
    check_optional_name("agent", agent)
    check_optional_name("session", session)
    if status is not None:
        check_choice("status", status, STATUSES)
    left = check_count("limit", limit, 1, _MOST_LISTED)
    found: list[m.InvocationInfo] = []
    after = ""
    while True:
        request = m.ListInvocations(agent, status, session, left - len(found), after)
        page = yield from ask(request, m.InvocationList)
        found += page.invocations
        after = page.more
        if not after or len(found) >= left:
            return found[:left]


def tasks(invocation_id: str) -> Operation[list[records.Task]]:
    """List the invocation's tasks, by step and attempt."""
    check_name("invocation id", invocation_id)
    found: list[m.TaskInfo] = []
    while True:
        page = yield from ask(m.ListTasks(invocation_id, found[-1].id if found else ""), m.TaskList)
        found += page.tasks
        if not page.more or not page.tasks:
            return [records.task(info) for info in found]


def follow_request(
    invocation_id: str, after: int = 0, until: Literal["now", "settled", "terminal"] = "settled"
) -> m.FollowEvents:
    """Check the options of ``events`` and make its request."""
    check_name("invocation id", invocation_id)
    check_choice("until", until, ("now", "settled", "terminal"))
    return m.FollowEvents(invocation_id, check_count("after", after, 0, 2**63 - 1), until)


# ----------------------------------------------------------------------------------------------------------
# Deciding
# ----------------------------------------------------------------------------------------------------------


def cancel(invocation_id: str) -> Operation[str]:
    """Cancel an invocation, and return when its workers are confirmed dead.

    Returns:
        Its status: ``cancelled``, or how it had ended before.
    """
    check_name("invocation id", invocation_id)
    return (yield from ask(m.Cancel(invocation_id), m.InvocationInfo)).status


def recover(
    agent_id: str, changed: Literal["continue", "restart", "drop"] | None = None
) -> Operation[list[m.InvocationInfo]]:
    """Let an agent's resting invocations go on.

    Args:
        agent_id: Id of the agent.
        changed: What to do with those that began under another version of its definition: go on by the new
            one, start anew, or cancel. None leaves them.

    Returns:
        Those that were touched; of very many, as many as one message holds.
    """
    check_name("agent", agent_id)
    if changed is not None:
        check_choice("changed", changed, ("continue", "restart", "drop"))
    return (yield from ask(m.Recover(agent_id, changed), m.InvocationList)).invocations


def reconcile(
    invocation_id: str,
    task_id: str,
    *,
    result: Mapping[str, Any] = ABSENT,
    error: str | None = None,
    retry: bool = False,
    by: str | None = None,
) -> Operation[records.Task]:
    """Settle an uncertain task: say what it returned, or that it failed, or that it may run again.

    Exactly one of ``result``, ``error`` and ``retry`` is given.

    Args:
        invocation_id: Id of the invocation.
        task_id: Id of the task, as ``tasks()`` gives it.
        result: What the node would have returned: a mapping of updates.
        error: Why it failed.
        retry: Run it once more.
        by: Who says so, for the record; the login name without.

    Raises:
        HayataError: ``not_uncertain``, ``already_reconciled``, ``unknown_task``, ``invalid_node_result``,
            ``invalid_options``.
    """
    check_name("invocation id", invocation_id)
    check_name("task id", task_id)
    verdict = check_verdict(result, error, retry)
    return (yield from _reconcile(invocation_id, task_id, verdict, check_author(by)))


def reconcile_all(
    agent_id: str,
    node: str | None = None,
    *,
    result: Mapping[str, Any] = ABSENT,
    error: str | None = None,
    retry: bool = False,
    by: str | None = None,
) -> Operation[list[records.Task]]:
    """Settle all uncertain tasks of an agent, or of one of its nodes, in the same way.

    A task that somebody else settles meanwhile is left out.

    Args:
        agent_id: Id of the agent.
        node: Only tasks of this node.
        result: As for `reconcile`.
        error: As for `reconcile`.
        retry: As for `reconcile`.
        by: As for `reconcile`.

    Returns:
        The tasks that were settled.
    """
    check_name("agent", agent_id)
    check_optional_name("node", node)
    verdict, author = check_verdict(result, error, retry), check_author(by)
    settled: list[records.Task] = []
    seen: set[str] = set()
    while True:
        found = yield from invocations(agent_id, "uncertain", limit=_MOST_LISTED)
        unseen = [info.id for info in found if info.id not in seen]
        if not unseen:
            return settled
        for invocation_id in unseen:
            seen.add(invocation_id)
            for task in (yield from tasks(invocation_id)):
                if task.status != "uncertain" or node not in (None, task.node):
                    continue
                try:
                    settled.append((yield from _reconcile(invocation_id, task.id, verdict, author)))
                except HayataError as refusal:
                    if refusal.code not in ("already_reconciled", "not_uncertain", "unknown_invocation"):
                        raise


def _reconcile(invocation_id: str, task_id: str, verdict: dict[str, Any], by: str) -> Operation[records.Task]:
    request = m.Reconcile(invocation_id=invocation_id, task_id=task_id, request_id=new_id(), by=by, **verdict)
    return records.task((yield from ask(request, m.TaskInfo)))


# ----------------------------------------------------------------------------------------------------------
# Agents and the daemon
# ----------------------------------------------------------------------------------------------------------


def agents() -> Operation[list[records.AgentRecord]]:
    """List the agents."""
    return records.agents((yield from ask(m.ListAgents(), m.AgentList)).agents)


def start_agent(app: str) -> Operation[list[records.AgentRecord]]:
    """Load an app into the running daemon.

    Args:
        app: ``module:attr`` or ``path.py[:attr]``; a relative path is taken from this process's directory.

    Returns:
        The agents that it defines.

    Raises:
        HayataError: ``agent_start_failed``, with the traceback in its details.
    """
    if not isinstance(app, str) or not app:
        raise invalid("app is no reference", "app", "module:attr or path.py[:attr]")
    request = m.StartAgent(absolute_reference(app))
    # The import has a time limit of its own, on the daemon's side.
    return records.agents((yield from ask(request, m.AgentList, FOREVER)).agents)


def stop_agent(agent_id: str) -> Operation[None]:
    """Stop an agent's workers. Its invocations rest until it is started again.

    Args:
        agent_id: Id of the agent.
    """
    check_name("agent", agent_id)
    yield from ask(m.StopAgent(agent_id), m.Done)


def reload() -> Operation[records.ReloadReport]:
    """Load all apps anew, without losing an invocation; return when the new code serves.

    Bodies that have begun run to their end with the code they began with, and count. Invocations of the same
    version go on with the new code at their next step; those of another one rest as ``recovery_required``.
    While something of an older generation still runs, this waits.

    Raises:
        HayataError: The code that was loaded before goes on serving. ``agent_start_failed`` or the code of a
            definition that is refused: an app can't be loaded, ``details.traceback`` says where;
            ``daemon_unavailable``: it is stopping.
    """
    return records.reload_report((yield from ask(m.Reload(), m.ReloadReport, FOREVER)))


def tree() -> Operation[records.Process]:
    """Ask for the supervision tree, from the guard down."""
    return records.process((yield from ask(m.GetTree(), m.Tree)).root)


def stats() -> Operation[dict[str, float]]:
    """Ask for the counters since the supervisor's start, and the gauges."""
    return dict((yield from ask(m.GetStats(), m.Stats)).values)


def stop(drain: float | None = None) -> Operation[None]:
    """Stop the daemon, and return when it begins to drain.

    Args:
        drain: Seconds that running executions are given to end; None: as the daemon is configured.
    """
    check_seconds("drain", drain)
    if drain == FOREVER:
        raise invalid("drain can't be endless", "drain", "seconds, 0 or more")
    yield from ask(m.StopDaemon(drain), m.Done)
