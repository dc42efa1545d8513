"""Agents for storms of kills: tasks that kill themselves, steps that each take a new process, and user code that starts
processes of its own. See `crash` for its surroundings.
"""

import os
import signal
import subprocess
from contextlib import asynccontextmanager, contextmanager

from crash import HOME, node, note, once

from hayata import NOT_DONE, Agent, Backoff, Finish, Next, Node, Probe, Rerun, Supervision

PATIENT = Supervision(intensity=1_000_000, backoff=Backoff(initial=0.001, maximum=0.01))
EXIT = 7


def die(state, ctx):
    """Leave a zombie, a child and a daemon behind, say something, and die; the last attempt lives."""
    if ctx.attempt == ctx.input["deaths"] + 1:
        return {"attempts": ctx.attempt}
    if ctx.attempt % 10 == 0:
        subprocess.Popen(["true"])
        subprocess.Popen(["sleep", "600"])
        subprocess.run(["sh", "-c", "setsid sleep 600 &"], check=True)
    print("about to die", ctx.execution_id)
    os.kill(os.getpid(), signal.SIGKILL)
    return None


def count(state, ctx):
    return {"pids": os.getpid()}


def thirty_two(context):
    return Next("count", None) if context.step < 32 else Finish(len(set(context.state["pids"])))


# ---- user code with children of its own ------------------------------------------------------------------------


def own_exit(where):
    """Start children, and have each one's own exit status: nobody else may have reaped it."""
    for number in range(5):
        child = subprocess.Popen(["sh", "-c", f"sleep 0.0{number}; exit {EXIT}"])
        code = child.wait()
        note("child", where=where, code=code, pid=os.getpid())
        assert code == EXIT, f"{where}: {code}"


@contextmanager
def lifespan():
    own_exit("lifespan")
    yield None


@asynccontextmanager
async def async_lifespan():
    own_exit("async lifespan")
    yield None


def body(state, ctx):
    own_exit("body")
    return {}


async def async_body(state, ctx):
    own_exit("async body")
    return {}


def cut_off(state, ctx):
    """Die in the first attempt, so that it is asked about; be alone in the second."""
    if not (HOME / ctx.invocation_id).exists():
        (HOME / ctx.invocation_id).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return {}


def probe(ctx):
    own_exit("probe")
    return NOT_DONE


def asking(context):
    own_exit("policy")
    names = ["body", "async_body", "cut_off"]
    return Next(names[context.step], context.input) if context.step < 3 else Finish("all mine")


agents = [
    Agent(
        "die",
        nodes=[Node(die, concurrency=4, interrupted=Rerun(max_attempts=1_000))],
        decision_policy=lambda context: Next("die", context.input) if context.step == 0 else Finish(context.state),
        supervision=PATIENT,
    ),
    Agent(
        "count",
        nodes=[Node(count, concurrency=4, max_tasks=1)],
        decision_policy=thirty_two,
        state={"pids": []},
        merge={"pids": "append"},
        supervision=PATIENT,
    ),
    Agent(
        "own",
        nodes=[
            Node(body, concurrency=2, lifespan=lifespan, max_tasks=2),
            Node(async_body, lifespan=async_lifespan, max_tasks=2),
            Node(cut_off, concurrency=2, interrupted=Probe(probe)),
        ],
        decision_policy=asking,
        supervision=PATIENT,
    ),
    Agent("echo", nodes=[node("echo")], decision_policy=once("echo"), supervision=PATIENT),
]
