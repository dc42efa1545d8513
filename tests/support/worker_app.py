"""The app of the tests of the workers: nodes that do what no node should."""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from hayata import Agent, Context, Fail, Finish, Next, Node, PolicyContext

# Opened at import: the workers must not close it, nor let a socket of theirs take its number.
APP_FILE = open(__file__, "rb")  # noqa: SIM115
atexit.register(APP_FILE.close)

HELD: list[Any] = []


class NeedsKeyword(Exception):
    """Can't be rebuilt from its arguments."""

    def __init__(self, *, reason: str) -> None:
        super().__init__(reason)


def _double_fork_sleep(record: str, seconds: str = "60") -> None:
    """Start a daemon that has left its session and its parent; write its pid to ``record``."""
    script = (
        "import os, sys, time\n"
        "if os.fork(): os._exit(0)\n"
        "os.setsid()\n"
        "if os.fork(): os._exit(0)\n"
        f"open({record!r}, 'a').write(f'{{os.getpid()}}\\n')\n"
        f"time.sleep({seconds})\n"
    )
    subprocess.run([sys.executable, "-S", "-c", script], check=True, close_fds=False)


def echo(ctx: Context) -> dict[str, Any]:
    return {"value": ctx.input["value"]}


def facts(ctx: Context) -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "ppid": os.getppid(),
        "sid": os.getsid(0),
        "cwd": os.getcwd(),
        "umask": os.umask(os.umask(0)),
        "color": os.environ.get("COLOR"),
        "threads": threading.active_count(),
        "usr1": str(signal.getsignal(signal.SIGUSR1)),
        "alarm": signal.getitimer(signal.ITIMER_REAL)[0],
        "blocked": len(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "deps": ctx.deps,
        "stdin": sys.stdin.read() if sys.stdin is not None else None,
        "random": __import__("random").random(),
        "app_file": os.pread(APP_FILE.fileno(), 3, 0).decode(),
    }


def make_a_mess(ctx: Context) -> dict[str, Any]:
    os.chdir("/")
    os.umask(0o077)
    os.environ["COLOR"] = "red"
    os.environ.pop("PATH", None)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.alarm(1)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    return {"pid": os.getpid()}


def leave_thread(ctx: Context) -> dict[str, Any]:
    threading.Thread(target=time.sleep, args=(60,), name="straggler", daemon=True).start()
    return {"pid": os.getpid()}


def leave_child(ctx: Context) -> dict[str, Any]:
    child = subprocess.Popen(["sleep", "60"])
    child.returncode = 0  # or Popen complains when it is collected
    return {"pid": os.getpid(), "child": child.pid}


def start_family(ctx: Context) -> dict[str, Any]:
    """A child, and a daemon; then wait to be killed."""
    child = subprocess.Popen(["sleep", "60"])
    Path(ctx.input["record"]).write_text(f"{child.pid}\n")
    _double_fork_sleep(ctx.input["record"])
    print("family", flush=True)
    time.sleep(60)
    return {}


def abort(ctx: Context) -> dict[str, Any]:
    os.abort()


def kill_self(ctx: Context) -> dict[str, Any]:
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def segfault(ctx: Context) -> dict[str, Any]:
    ctypes.string_at(0)
    return {}


def exit_hard(ctx: Context) -> dict[str, Any]:
    os._exit(3)


def exit_soft(ctx: Context) -> dict[str, Any]:
    sys.exit("enough")


def spin(ctx: Context) -> dict[str, Any]:
    while True:
        pass


def sleep(ctx: Context) -> dict[str, Any]:
    print("asleep", flush=True)
    time.sleep(ctx.input["seconds"])
    return {"slept": True}


def wander(ctx: Context) -> dict[str, Any]:
    os.chdir("/")
    print("away", flush=True)
    time.sleep(ctx.input["seconds"])
    return {"more_than_one_read": b"x" * 100_000}


def overlap(ctx: Context) -> dict[str, Any]:
    """Write begin to a file; a child of the task writes on until it is dead."""
    with open(ctx.input["record"], "a") as record:
        record.write(f"begin {os.getpid()}\n")
        record.flush()
        if ctx.input["hang"]:
            os.fork()
            while True:
                record.write(f"alive {os.getpid()}\n")
                record.flush()
                time.sleep(0.001)
    return {"pid": os.getpid()}


def raises(ctx: Context) -> dict[str, Any]:
    raise NeedsKeyword(reason="no reason")


def fork_and_fall_through(ctx: Context) -> dict[str, Any]:
    child = os.fork()
    if child:
        os.waitpid(child, 0)
    return {"child": child == 0}


def close_everything(ctx: Context) -> dict[str, Any]:
    """Let a socket of the task's get the number of the edge's; record what arrives at its other end."""
    os.closerange(3, 200)
    pairs = [socket.socketpair() for _ in range(60)]
    HELD.extend(pairs)

    def listen() -> None:
        ready, _, _ = select.select([end for pair in pairs for end in pair], [], [])
        Path(ctx.input["record"]).write_bytes(ready[0].recv(1000))

    threading.Thread(target=listen, daemon=True).start()
    return {}


def big(ctx: Context) -> dict[str, Any]:
    return {"bytes": b"x" * ctx.input["size"]}


def prints(ctx: Context) -> dict[str, Any]:
    print(f"out {ctx.input['name']}")
    print(f"err {ctx.input['name']}", file=sys.stderr)
    print("no end", end="")
    logging.getLogger("app").warning("logged %s", ctx.input["name"])
    return {}


def flood(ctx: Context) -> dict[str, Any]:
    line = "x" * 1000 + "\n"
    while True:
        sys.stdout.write(line)


def streams(ctx: Context) -> dict[str, Any]:
    """Stream from several threads at once."""
    count = ctx.input["count"]
    errors = []

    def send(first: int) -> None:
        try:
            for number in range(count):
                ctx.stream({"number": first + number})
        except Exception as error:
            errors.append(getattr(error, "code", repr(error)))

    threads = [threading.Thread(target=send, args=(start * count,)) for start in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"errors": errors}


def stream_late(ctx: Context) -> dict[str, Any]:
    """A thread of the lifespan streams on when the task is over, and says what it is told."""

    def send() -> str:
        begun.set()
        while True:
            try:
                ctx.stream({"late": True})
            except Exception as error:
                return getattr(error, "code", repr(error))

    begun = threading.Event()
    ctx.deps["answer"] = ctx.deps["pool"].submit(send)
    begun.wait()
    return {}


def late_answer(ctx: Context) -> dict[str, Any]:
    return {"told": ctx.deps["answer"].result()}


ACTIONS = {name: value for name, value in list(globals().items()) if name[0] != "_" and callable(value)}


def act(state: dict[str, Any], ctx: Context) -> dict[str, Any]:
    return ACTIONS[ctx.input["do"]](ctx)


@types.coroutine
def _one_turn() -> Any:
    """Let the loop turn once. Unlike asyncio's own ways it does not notice that the process is another."""
    yield


async def _fork_and_stay() -> None:
    if os.fork() == 0:
        for _ in range(1000):
            await _one_turn()


async def _tick(path: str) -> None:
    for _ in range(20):
        with open(path, "a") as record:
            record.write(f"{os.getpid()}\n")
        await _one_turn()


async def act_async(state: dict[str, Any], ctx: Any) -> dict[str, Any]:
    do = ctx.input["do"]
    if do == "wait":
        await asyncio.sleep(ctx.input["seconds"])
    elif do == "stubborn":
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                print("never", flush=True)
    elif do == "swallow":
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return {"swallowed": True}
    elif do == "cancel_self":
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(1)
    elif do == "stream":
        for number in range(ctx.input["count"]):
            await ctx.stream({"number": number})
    elif do == "fork":
        if os.fork() == 0:
            await asyncio.sleep(0)
            return {"child": True}
        await asyncio.sleep(0.05)
        return {"child": False}
    elif do == "fork_and_stay":
        await _fork_and_stay()
        await asyncio.sleep(0.3)
    elif do == "fork_below":
        await asyncio.create_task(_fork_and_stay())
        await asyncio.sleep(0.3)
    elif do == "tick":
        await _tick(ctx.input["record"])
    elif do == "tick_below":
        await asyncio.create_task(_tick(ctx.input["record"]))
    elif do == "subprocess":
        process = await asyncio.create_subprocess_exec("sleep", "60")
        return {"pid": os.getpid(), "child": process.pid}
    elif do in ACTIONS:
        return ACTIONS[do](ctx)
    return {"pid": os.getpid(), "deps": ctx.deps}


def trivial(state: dict[str, Any], ctx: Context) -> dict[str, Any]:
    return {"n": 1}


async def trivial_async(state: dict[str, Any], ctx: Any) -> dict[str, Any]:
    return {"n": 1}


@contextmanager
def deps() -> Iterator[dict[str, Any]]:
    print("enter")
    yield {"made_in": os.getpid()}
    print("leave")


@contextmanager
def pool() -> Iterator[dict[str, Any]]:
    with ThreadPoolExecutor(1) as threads:
        threads.submit(int).result()
        yield {"pool": threads}


@asynccontextmanager
async def async_deps() -> Any:
    await asyncio.sleep(0)
    print("enter")
    yield {"made_in": os.getpid()}
    print("leave")


@contextmanager
def broken_deps() -> Iterator[None]:
    raise RuntimeError("no database")
    yield


@contextmanager
def deadly_deps() -> Iterator[None]:
    os._exit(9)
    yield


def policy(context: PolicyContext) -> Any:
    step = context.input
    if step == "next":
        return Next("single", {"do": "echo", "value": 1})
    if step == "fail":
        return Fail("because")
    if step == "raise":
        raise NeedsKeyword(reason="policy")
    if step == "exit":
        sys.exit(5)
    if step == "big":
        return Finish(b"x" * 2_000_000)
    if step == "fork":
        os.fork()
    if step == "hang":
        time.sleep(60)
    if step == "crash":
        os.abort()
    print("policy says finish")
    return Finish({"pid": os.getpid()})


workshop = Agent(
    id="workshop",
    nodes=[
        Node(act, name="single", concurrency=1),
        Node(act, name="pair", concurrency=2),
        Node(act, name="fresh", concurrency=1, isolation="fresh"),
        Node(act, name="limited", concurrency=1, max_tasks=3),
        Node(act, name="held", concurrency=1, shutdown=0.3),
        Node(act, name="with_deps", concurrency=1, lifespan=deps),
        Node(act, name="with_pool", concurrency=1, lifespan=pool),
        Node(act, name="broken", concurrency=1, lifespan=broken_deps),
        Node(act, name="deadly", concurrency=1, lifespan=deadly_deps),
        Node(act_async, name="many", concurrency=8),
        Node(act_async, name="many_with_deps", concurrency=8, lifespan=async_deps),
        Node(act_async, name="many_limited", concurrency=4, max_tasks=3),
        Node(trivial, name="trivial", concurrency=1, max_tasks=1_000_000),
        Node(trivial_async, name="trivial_async", concurrency=64, max_tasks=1_000_000),
    ],
    decision_policy=policy,
)
