"""Agents for tests of the worker tree: bodies and policies do what their input says, and tell the test."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

from hayata import Agent, Fail, Finish, Next, Node, Supervision


def tell(event, **fields):
    """Tell the test, which listens on a datagram socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.connect(os.environ["TREE_RIG_SOCKET"])
        sock.send(json.dumps({"event": event, "pid": os.getpid(), **fields}).encode())


def act(state, ctx):
    told = ctx.input or {}
    if "ledger" in told:
        with open(told["ledger"], "a") as ledger:
            ledger.write(f"{ctx.execution_id}\n")
    else:
        tell("body", execution=ctx.execution_id)
    match told.get("do"):
        case "block":
            signal.pause()
        case "block_until":
            while not Path(told["gate"]).exists():
                time.sleep(0.001)
            tell("returning")
        case "spawn":
            spawn(ignoring=told.get("ignoring", False))
            signal.pause()
        case "print":
            print("said by a body")
            print("said to stderr", file=sys.stderr)
        case "stream":
            ctx.stream({"chunk": 1})
        case "raise":
            raise RuntimeError("as told")
        case "echo":
            return {"value": state["filler"]}
    return {"value": told.get("value")}


def spawn(*, ignoring):
    """Leave a child, and a daemon that has forked itself away."""
    child = subprocess.Popen(
        [sys.executable, "-c", "import signal; signal.signal(15, signal.SIG_IGN); signal.pause()"]
        if ignoring
        else ["sleep", "1000"]
    )
    shell = subprocess.run(
        ["sh", "-c", "setsid sleep 1000 >/dev/null 2>&1 & echo $!"],
        capture_output=True,
        text=True,
        check=True,
    )
    tell("spawned", child=child.pid, daemon=int(shell.stdout))


async def act_async(state, ctx):
    told = ctx.input or {}
    tell("body", execution=ctx.execution_id)
    if told.get("do") == "block":
        await asyncio.Event().wait()
    return {"value": told.get("value")}


def policy(context):
    told = context.input or {}
    if not told.get("quiet"):
        tell("policy", step=context.step)
    match told.get("policy"):
        case "hang":
            time.sleep(1000)
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "die_until":
            marks = Path(told["marks"])
            with marks.open("a") as file:
                file.write("x")
            if len(marks.read_text()) <= told["times"]:
                os.kill(os.getpid(), signal.SIGKILL)
        case "wait":
            while not Path(told["gate"]).exists():
                time.sleep(0.001)
        case "print":
            print("said by a policy")
        case "write":
            write_to_supervisor(bytes.fromhex(told["bytes"]))
        case "next":
            return Next("act", told)
        case "fail":
            return Fail("as told")
        case "raise":
            raise RuntimeError("as told")
    return Finish(told.get("result"))


def write_to_supervisor(data):
    """Write what is no frame, or one that nobody asked for, where only our own code should write."""
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        if os.path.exists(f"/proc/self/fd/{fd}") and os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
            os.write(fd, data)


@contextmanager
def gated():
    """A lifespan that fails, or takes its time, for as long as the test wants it to."""
    broken = Path(os.environ["TREE_RIG_BROKEN"])
    if broken.exists():
        match broken.read_text():
            case "slow":
                while broken.exists():
                    time.sleep(0.01)
            case _:
                raise RuntimeError("no database")
    yield None


FORKSERVER = os.getpid()


print("said while the app was imported")


def after_fork():
    """A worker, or the process between the forks, that gets stuck before our own code has a say."""
    broken = Path(os.environ["TREE_RIG_BROKEN"])
    stuck = broken.read_text() if broken.exists() else ""
    if stuck == ("stuck between" if os.getppid() == FORKSERVER else "stuck worker"):
        signal.pause()


os.register_at_fork(after_in_child=after_fork)

tree = Agent(
    id="tree",
    nodes=[Node(act, concurrency=4, shutdown=1.0), Node(act_async, shutdown=1.0)],
    decision_policy=policy,
    supervision=Supervision(intensity=1000, period=60.0, backoff=0.0),
)

fragile = Agent(
    id="fragile",
    nodes=[Node(act, concurrency=1, lifespan=gated, shutdown=1.0)],
    decision_policy=policy,
    supervision=Supervision(intensity=2, period=60.0, backoff=0.0),
)

agents = [tree, fragile]
