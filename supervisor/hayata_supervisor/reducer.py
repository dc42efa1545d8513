"""The reducer: makes one result of those of an execution's edges, and ends.

A process of its own for each reduction, forked by the node as edges are, and never used again. It is given all it
needs with its one task; if it is lost, another is given the same.
"""

from __future__ import annotations

import contextvars
import os
import socket

from hayata import reductions
from hayata.messages import EdgeRetires, ReduceTask, StopWorker, TaskCompleted, TaskFailed, WorkerReady, encode
from hayata_supervisor import failpoints, worker_logging
from hayata_supervisor.edge_worker import EdgeJob, deadline_of, decode, encode_result, ids_of, limit_resources
from hayata_supervisor.process import prologue
from hayata_supervisor.process.blocking import BlockingStream


def run(job: EdgeJob, name: str, sock: socket.socket) -> None:
    """Do one reduction, unless the node goes first."""
    limit_resources(job)
    stream = BlockingStream(sock, job.cap_bytes)
    stream.send(encode(WorkerReady("reducer", name, os.getpid())))
    while (body := stream.receive()) is not None:
        message = decode(body)
        if type(message) is StopWorker:
            return
        if type(message) is ReduceTask:
            result = contextvars.copy_context().run(_reduce, job, name, message)
            prologue.flush_standard_streams()
            if not stream.belonging.in_process:
                os._exit(prologue.EXIT_OK)  # a child that the function has forked falls through to here
            failpoints.hit("reducer.after_body")
            retires = encode(EdgeRetires(name, "a process for each reduction"))
            stream.send(encode_result(result, name, job.cap_bytes), before=retires)


def _reduce(job: EdgeJob, name: str, task: ReduceTask) -> TaskCompleted | TaskFailed:
    worker_logging.current_task.set(ids_of(task))
    failpoints.hit("reducer.before_note")
    job.notes.begins(task.cell, task.execution_id)
    failpoints.hit("reducer.after_note")
    return reductions.reduce(job.agent, job.node.name, task, name, deadline_of(task))
