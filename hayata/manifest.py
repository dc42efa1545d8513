"""An agent as data: all that the supervisor knows of it. Functions stay in the workers."""

from __future__ import annotations

import math
import os

from hayata import messages as m
from hayata.agent import Agent
from hayata.definition import definition_of
from hayata.nodes import Node
from hayata.supervision import Probe, Rerun, Retry, Supervision, as_backoff

SYNC_CONCURRENCY = 4
ASYNC_CONCURRENCY = 64
_SHUTDOWN_S = {"brutal_kill": 0.0, "infinity": math.inf}


def agent_manifest(agent: Agent) -> m.AgentManifest:
    """Describe an agent, with every default filled in."""
    return m.AgentManifest(
        id=agent.id,
        version=agent.version,
        nodes=[_node(agent, node) for node in agent.nodes.values()],
        state=agent.initial_state,
        merge=agent.merge,
        max_steps=agent.max_steps,
        invocation_timeout_s=agent.invocation_timeout,
        conversation_memory=agent.conversation_memory,
        default_session=agent.default_session,
        resume=agent.resume,
        max_concurrency=agent.max_concurrency,
        on_failure=agent.on_failure,
        supervision=_supervision(agent.supervision),
        definition=definition_of(agent),
    )


def default_concurrency(*, is_async: bool) -> int:
    """How many tasks a node runs at once when it doesn't say."""
    if is_async:
        return ASYNC_CONCURRENCY
    return min(
        SYNC_CONCURRENCY,
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
    )


def _node(agent: Agent, node: Node) -> m.NodeManifest:
    timeout = node.execution_timeout if node.execution_timeout is not None else agent.execution_timeout
    return m.NodeManifest(
        name=node.name,
        is_async=node.is_async,
        concurrency=node.concurrency or default_concurrency(is_async=node.is_async),
        execution_timeout_s=timeout,
        retry=None if node.retry is None else _retry(node.retry),
        rerun_attempts=node.interrupted.max_attempts if isinstance(node.interrupted, Rerun) else 0,
        fresh=node.isolation == "fresh",
        max_tasks=node.max_tasks,
        shutdown_s=_SHUTDOWN_S[node.shutdown] if isinstance(node.shutdown, str) else node.shutdown,
        probe_attempts=node.interrupted.max_attempts if isinstance(node.interrupted, Probe) else 0,
        memory_limit_bytes=node.memory_limit,
        cpu_limit_s=node.cpu_limit,
        restart=node.restart,
        reduce=None if node.reduce is None else m.ReduceManifest(node.reduce.timeout, node.reduce.partial),
    )


def _retry(retry: Retry) -> m.RetryManifest:
    backoff = as_backoff(retry.backoff)
    return m.RetryManifest(
        max_attempts=retry.max_attempts,
        backoff_s=backoff.initial,
        backoff_factor=backoff.factor,
        max_backoff_s=backoff.maximum,
        jitter=retry.jitter,
    )


def _supervision(supervision: Supervision) -> m.SupervisionManifest:
    backoff = as_backoff(supervision.backoff)
    return m.SupervisionManifest(
        strategy=supervision.strategy,
        intensity=supervision.intensity,
        period_s=supervision.period,
        backoff_s=backoff.initial,
        max_backoff_s=backoff.maximum,
    )
