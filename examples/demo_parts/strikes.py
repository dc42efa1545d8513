"""The three kills, and how long each is felt."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

from hayata import Task
from hayata.client import Process

from .job import COUNTERS, published
from .ledger import Body, Story
from .stage import DemoFailed, Stage, process_of

_ROUNDS_TO_CHOOSE_FROM = 4


def strike_edge(stage: Stage) -> None:
    """Kill an edge worker that is counting."""
    with _caught(stage, lambda story: _counting(story)) as (body, pidfd):
        stage.say(f"kill -9 {body.pid}: the edge worker in which {body.node} counts")
        killed = time.monotonic()
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        stage.ledger.note("kill", at=killed, role="edge", pid=body.pid, node=body.node)
    _say_rerun(stage, body, killed)


def strike_node(stage: Stage) -> None:
    """Kill a node worker whose edge is counting."""
    with _caught(stage, lambda story: _counting(story)) as (body, _):
        node = _in_tree(stage, "node", body.parent)
        stage.say(f"kill -9 {node.pid}: the node worker of {body.node}, with an edge worker that counts")
        killed = _kill(node.pid)
        stage.ledger.note("kill", at=killed, role="node", pid=node.pid, node=body.node)
    _say_rerun(stage, body, killed)


def strike_supervisor(stage: Stage) -> None:
    """Kill the supervisor while a batch is being counted and the last one is published; then settle what is
    uncertain.
    """
    first_batch = max(body.batch for body in stage.ledger.story().bodies)

    def publishing(story: Story) -> Body | None:
        any_will_do = max(body.batch for body in story.bodies) >= first_batch + _ROUNDS_TO_CHOOSE_FROM
        return _publishing(stage, story, any_will_do)

    with _caught(stage, publishing) as (body, _):
        old = _in_tree(stage, "supervisor")
        before = stage.ledger.story()
        names = ", ".join(sorted(each.node for each in before.running()))
        stage.say(f"kill -9 {old.pid}: the supervisor; running below it: {names}")
        killed = _kill(old.pid)
        stage.ledger.note("kill", at=killed, role="supervisor", pid=old.pid, node="")
    new = stage.wait(lambda: _successor(stage, old), "a new supervisor")
    stage.say(f"    {_ms(killed)} ms: supervisor {new.pid} answers, from the store of the old one")
    done = sum(each.end is not None for each in before.bodies)
    stage.say(f"    {done} bodies were done by then; their results are reused")
    _settle(stage, body)


def _settle(stage: Stage, body: Body) -> None:
    """Do what a person would: look whether the batch is out, and say so."""
    job = stage.invocation.id

    def uncertain() -> Task | None:
        return next((task for task in stage.invocation.tasks() if task.status == "uncertain"), None)

    task = stage.wait(uncertain, "the uncertain task")
    if task.id != body.execution:
        raise DemoFailed(f"{task.node} is uncertain, but {body.node} was cut off")
    stage.say(f"    {task.node} was cut off and is not declared Rerun: it is uncertain, and the job rests")
    out = next((line for line in stage.published() if line == published(body.batch, _sum(stage, body))), None)
    if out is None:
        stage.say(f"    '{published(body.batch, _sum(stage, body))}' is not out, so it may run again:")
        stage.say(f"    hayata reconcile {job} {task.id} --retry")
        settled = stage.client.reconcile(job, task.id, retry=True, by="demo")
    else:
        stage.say(f"    '{out}' is out already; run again, it would be out twice. So:")
        stage.say(f"    hayata reconcile {job} {task.id} --result '{{\"receipts\": [\"{out}\"]}}'")
        settled = stage.client.reconcile(job, task.id, result={"receipts": [out]}, by="demo")
    how = settled.reconciled.how if settled.reconciled else ""
    stage.ledger.note("settled", execution=task.id, how=how)


# ----------------------------------------------------------------------------------------------------------
# Whom to kill
# ----------------------------------------------------------------------------------------------------------


def _counting(story: Story) -> Body | None:
    """A body that counts, the latest."""
    return next((body for body in reversed(story.running()) if body.node in COUNTERS), None)


def _publishing(stage: Stage, story: Story, any_will_do: bool) -> Body | None:
    """A body whose batch is out and that waits for the receipt, while one counter of the next batch is still
    busy and, unless any will do, another one is done.
    """
    body = next((each for each in story.running() if each.node == "publish"), None)
    if body is None or published(body.batch, _sum(stage, body)) not in stage.published():
        return None
    beside = [each for each in story.bodies if each.batch == body.batch and each.node in COUNTERS]
    done = [each for each in beside if each.end is not None and each.execution in stage.told]
    return body if len(done) < len(beside) and (done or any_will_do) else None
