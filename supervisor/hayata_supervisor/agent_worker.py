"""The agent worker: answers what needs the agent's own code but is no node: policies, and checks of updates.

One question at a time, in order, each answer written before the next question is looked at: if a policy never
returns, the supervisor knows by the missing answer which one it was.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, TypeAlias

from hayata import calls
from hayata.error_info import error_info, exception_info
from hayata.framing import ENVELOPE_BYTES, FrameTooLarge
from hayata.messages import (
    CheckUpdate,
    DecidedFail,
    DecidedFinish,
    DecidedNext,
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
        return calls.check_update(agent, question)
    except BaseException as error:  # noqa: BLE001 - user code may raise SystemExit; the worker stays usable
        info = exception_info("policy_exception", error)
        if isinstance(question, Evaluate):
            return PolicyFailed(question.evaluation, info)
        return UpdateChecked(question.check, None, info)


def _send(stream: BlockingStream, question: Evaluate | CheckUpdate, answer: Answer) -> None:
    body = encode(answer)
    most_bytes = stream.cap_bytes - ENVELOPE_BYTES
    if len(body) > most_bytes:
        info = error_info(FrameTooLarge(len(body), most_bytes))
        if isinstance(question, Evaluate):
            body = encode(PolicyFailed(question.evaluation, info))
        else:
            body = encode(UpdateChecked(question.check, None, info))
    stream.send(body)
