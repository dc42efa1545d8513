"""The agent worker: answers what needs the agent's own code but is no node: policies, and checks of updates.

One question at a time, in order, each answer written before the next question is looked at: if a policy never
returns, the supervisor knows by the missing answer which one it was.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, TypeAlias

from hayata import calls, updates
from hayata.error_info import exception_info
from hayata.messages import (
    CheckUpdate,
    DecidedFail,
    DecidedFinish,
    DecidedNext,
    ErrorInfo,
    Evaluate,
    PolicyFailed,
    StopWorker,
    ToAgent,
    UpdateChecked,
    WorkerReady,
    decoder,
    encode,
)
from hayata_supervisor import worker_logging
from hayata_supervisor.caps import over_cap
from hayata_supervisor.process.blocking import BlockingStream
from hayata_supervisor.process.prologue import flush_standard_streams

if TYPE_CHECKING:
    from hayata.agent import Agent

Answer: TypeAlias = DecidedNext | DecidedFinish | DecidedFail | PolicyFailed | UpdateChecked

_decode = decoder(ToAgent).decode


def run(agent: Agent, incarnation: str, sock: socket.socket, cap_bytes: int) -> None:
    """Answer until told to stop or the supervisor is gone."""
    worker_logging.install(agent.id)
    stream = BlockingStream(sock, cap_bytes)
    stream.send(encode(WorkerReady("agent", incarnation, os.getpid())))
    while (body := stream.receive()) is not None:
        question = _decode(body)
        if isinstance(question, StopWorker):
            break
        _send(stream, question, _answer(agent, question))
    flush_standard_streams()


def _answer(agent: Agent, question: Evaluate | CheckUpdate) -> Answer:
    try:
        if isinstance(question, Evaluate):
            return calls.evaluate(agent, question)
        return updates.check_update(agent, question)
    except BaseException as error:  # noqa: BLE001 - user code may raise SystemExit; the worker stays usable
        return _failed(question, exception_info("policy_exception", error))


def _failed(question: Evaluate | CheckUpdate, error: ErrorInfo) -> Answer:
    if isinstance(question, Evaluate):
        return PolicyFailed(question.evaluation, error)
    return UpdateChecked(question.check, None, error)


def _send(stream: BlockingStream, question: Evaluate | CheckUpdate, answer: Answer) -> None:
    body = encode(answer)
    error = over_cap(body, stream.cap_bytes)
    if error is not None:
        body = encode(_failed(question, error))
    stream.send(body)
