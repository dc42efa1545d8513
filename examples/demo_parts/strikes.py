"""The three kills, and how long each is felt."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hayata import Task
from hayata.client import Process

from .job import COUNTERS
from .ledger import Body, Story
from .stage import DemoFailed, Stage, process_of

_ROUNDS_TO_CHOOSE_FROM = 4


def strike_edge(stage: Stage) -> None:
    """Kill an edge worker that is counting."""
    with _caught(stage, _counting) as (body, pidfd):
        stage.say(f"kill -9 {body.pid}: the edge worker in which {body.node} counts")
        killed = time.monotonic()
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        stage.ledger.note("kill", at=killed, role="edge", pid=body.pid, node=body.node)
    _say_rerun(stage, body, killed)


def strike_node(stage: Stage) -> None:
    """Kill a node worker whose edge is counting."""
    with _caught(stage, _counting) as (body, _):
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
    stage.say("    publish was cut off and is not declared Rerun: it is uncertain, and the job rests")
    out = _published(stage, body)
    since = time.monotonic()
    if out is None:
        stage.say(f"    the sum of {body.batch} batches is not out, so it may be published again:")
        stage.say(f"    hayata reconcile {job} {task.id} --retry")
        settled = stage.client.reconcile(job, task.id, retry=True, by="demo")
    else:
        stage.say(f"    '{out}' is out already; run again, it would be out twice. So:")
        stage.say(f'    hayata reconcile {job} {task.id} --result \'{{"receipts": ["{out}"]}}\'')
        settled = stage.client.reconcile(job, task.id, result={"receipts": [out]}, by="demo")
    how = settled.reconciled.how if settled.reconciled else ""
    stage.ledger.note("settled", execution=task.id, how=how)

    def begun() -> list[Body]:
        return [each for each in stage.ledger.story().bodies if each.start > since]

    first = stage.wait(begun, "the next task")[0]
    after_ms = _ms(since, first.start)
    stage.say(f"    settled; after {after_ms} ms the job goes on with {first.node}, attempt {first.attempt}")


# ----------------------------------------------------------------------------------------------------------
# Whom to kill
# ----------------------------------------------------------------------------------------------------------


def _counting(story: Story) -> Body | None:
    """A body that counts, the latest."""
    return next((body for body in reversed(story.running()) if body.node in COUNTERS), None)


def _publishing(stage: Stage, story: Story, any_will_do: bool) -> Body | None:
    """A body that has published and waits for the receipt, while a counter of the next batch is still busy
    and, unless any will do, another one is done.
    """
    body = next((each for each in story.running() if each.node == "publish"), None)
    if body is None or _published(stage, body) is None:
        return None
    beside = [each for each in story.bodies if each.batch == body.batch and each.node in COUNTERS]
    done = [each for each in beside if each.end is not None and each.execution in stage.told]
    return body if len(done) < len(beside) and (done or any_will_do) else None


def _published(stage: Stage, body: Body) -> str | None:
    """The line that this body was to send out, if it is out."""
    return next((line for line in stage.published() if line.endswith(f" in {body.batch} batches")), None)


@contextmanager
def _caught(stage: Stage, choose: Callable[[Story], Body | None]) -> Iterator[tuple[Body, int]]:
    """Wait for such a body, stop it, and give it with a pidfd of its edge worker.

    It is stopped (SIGSTOP) so that it can't end between the look and the kill, however slow this machine is.
    """

    def caught() -> tuple[Body, int] | None:
        body = choose(stage.ledger.story())
        pidfd = None if body is None else process_of(body.pid, body.parent)
        if body is None or pidfd is None:
            return None
        signal.pidfd_send_signal(pidfd, signal.SIGSTOP)
        now = choose(stage.ledger.story())
        if now is not None and now.execution == body.execution:
            return body, pidfd
        signal.pidfd_send_signal(pidfd, signal.SIGCONT)
        os.close(pidfd)
        return None

    body, pidfd = stage.wait(caught, "a task to interrupt")
    try:
        yield body, pidfd
    finally:
        os.close(pidfd)


def _kill(pid: int) -> float:
    """SIGKILL; return the instant of it."""
    killed = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    return killed


# ----------------------------------------------------------------------------------------------------------
# What comes after
# ----------------------------------------------------------------------------------------------------------


def _say_rerun(stage: Stage, cut: Body, killed: float) -> None:
    """Wait until the task that was cut off has been run again, and say how long that took."""

    def rerun() -> Body | None:
        again = [body for body in stage.ledger.story().bodies if body.key == cut.key and body.start > killed]
        return again[-1] if again and again[-1].end is not None else None

    body = stage.wait(rerun, f"the next result of {cut.node}")
    stage.say(
        f"    {_ms(killed, body.start)} ms: attempt {body.attempt} begins in edge worker {body.pid}; "
        f"its result after {_ms(killed, body.end)} ms"
    )


def _successor(stage: Stage, old: Process) -> Process | None:
    """The supervisor that answers now, if it is another one."""
    new = _in_tree(stage, "supervisor")
    return new if new.pid not in (0, old.pid) else None


def _in_tree(stage: Stage, role: str, pid: int | None = None) -> Process:
    """The process of this role in the supervision tree.

    Raises:
        DemoFailed: There is none.
    """
    for process in flat(stage.client.tree()):
        if process.role == role and pid in (None, process.pid):
            return process
    raise DemoFailed(f"the supervision tree has no {role} with pid {pid}")


def flat(process: Process) -> Iterator[Process]:
    """A process and all below it."""
    yield process
    for child in process.children:
        yield from flat(child)


def _ms(since: float, until: float | None = None) -> int:
    return round(1000 * ((time.monotonic() if until is None else until) - since))
