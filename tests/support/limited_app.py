"""The app of the tests of limits: nodes that take too much of something."""

from __future__ import annotations

import asyncio
import gc
import mmap
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from hayata import Agent, Context, Finish, Node, PolicyContext

MIB = 2**20
LIMIT_MIB = 96
CPU_S = 0.6
HELD: list[Any] = []
PRELOADED = bytearray(b"x") * (64 * MIB)
"""Shared by all workers, which are forks: each of them is charged a part."""

_ALLOCATE = "import sys, time; held = bytearray(b'x') * int(sys.argv[1]); print('held', flush=True); time.sleep(60)"
_SPIN = "while True: pass"


def _pages(mib: int) -> mmap.mmap:
    """Memory in pages of the kernel's least size, each one touched."""
    memory = mmap.mmap(-1, mib * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for page in range(0, len(memory), mmap.PAGESIZE):
        memory[page] = 1
    return memory


def _daemon(record: str) -> None:
    """Start one that has left its session and its parent, and ignores SIGTERM; write its pid to ``record``."""
    script = (
        "import os, signal, sys, time\n"
        "if os.fork(): os._exit(0)\n"
        "os.setsid()\n"
        "if os.fork(): os._exit(0)\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"open({record!r}, 'a').write(f'{{os.getpid()}}\\n')\n"
        "time.sleep(60)\n"
    )
    subprocess.run([sys.executable, "-S", "-c", script], check=True, close_fds=False)


def _family(record: str) -> None:
    child = subprocess.Popen(["sleep", "60"])
    HELD.append(child)
    child.returncode = 0  # or Popen complains when it is collected
    Path(record).write_text(f"{child.pid}\n")
    _daemon(record)
    while len(Path(record).read_text().split()) < 2:
        time.sleep(0.001)


def echo(given: dict[str, Any]) -> dict[str, Any]:
    return {"pid": os.getpid()}


def hold(given: dict[str, Any]) -> dict[str, Any]:
    """Take memory, and never end."""
    HELD.append(_pages(given["mib"]))
    time.sleep(60)
    return {}


def take(given: dict[str, Any]) -> dict[str, Any]:
    """Take memory, and give it back after a while."""
    memory = _pages(given["mib"])
    time.sleep(given["seconds"])
    memory.close()
    return echo(given)


def leak(given: dict[str, Any]) -> dict[str, Any]:
    HELD.append(_pages(given["mib"]))
    return echo(given)


def map_file(given: dict[str, Any]) -> dict[str, Any]:
    """Have all of a large file in the page tables: the kernel can drop it."""
    with open(given["path"], "r+b") as file:
        file.truncate(3 * LIMIT_MIB * MIB)
        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory:
            total = sum(memory[page] for page in range(0, len(memory), mmap.PAGESIZE))
            time.sleep(given["seconds"])
    return {"total": total}


def share(given: dict[str, Any]) -> dict[str, Any]:
    """Have memory in three processes that share it; with ``copy`` each makes it its own."""
    gc.freeze()
    memory = _pages(LIMIT_MIB // 4)
    children = []
    for _ in range(2):
        child = os.fork()
        if child == 0:
            for page in range(0, len(memory) if given["copy"] else 0, mmap.PAGESIZE):
                memory[page] = 2
            time.sleep(60)
        children.append(child)
    time.sleep(given["seconds"])
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return echo(given)


def hold_in_child(given: dict[str, Any]) -> dict[str, Any]:
    subprocess.run([sys.executable, "-c", _ALLOCATE, str(given["mib"] * MIB)], check=True)
    return {}


def family(given: dict[str, Any]) -> dict[str, Any]:
    """A child and a daemon, and then what is asked for."""
    _family(given["record"])
    print("family", flush=True)
    return ACTIONS[given["then"]](given)


def chain(given: dict[str, Any]) -> dict[str, Any]:
    """A process that is always another one: each forks the next, in a session of its own, and exits."""
    record = given["record"]
    if os.fork() == 0:
        while True:
            os.setsid()
            with open(record, "a") as file:
                file.write(f"{os.getpid()}\n")
            if os.fork():
                os._exit(0)
    while not os.path.exists(record) or os.path.getsize(record) < 200:
        time.sleep(0.001)
    print("chain", flush=True)
    time.sleep(60)
    return {}


def huge(given: dict[str, Any]) -> dict[str, Any]:
    """Zeros that take no memory until somebody looks at them."""
    return {"zeros": bytes(given["bytes"])}


def burn(given: dict[str, Any]) -> dict[str, Any]:
    """Use CPU time until that much is used."""
    before = time.process_time()
    while time.process_time() - before < given["cpu_s"]:
        pass
    return echo(given)


def burn_in_child(given: dict[str, Any]) -> dict[str, Any]:
    subprocess.run([sys.executable, "-S", "-c", _SPIN], check=True)
    return {}


def sleep(given: dict[str, Any]) -> dict[str, Any]:
    time.sleep(given["seconds"])
    return echo(given)


def wait(given: dict[str, Any]) -> dict[str, Any]:
    """End when the test allows it."""
    while not os.path.exists(given["record"] + ".go"):
        time.sleep(0.005)
    return echo(given)


def open_many(given: dict[str, Any]) -> dict[str, Any]:
    files = []
    try:
        while True:
            files.append(open(os.devnull))  # noqa: SIM115
    except OSError as error:
        count = len(files)
        for file in files:
            file.close()
        return {"errno": error.errno, "count": count, "pid": os.getpid()}


def limits(given: dict[str, Any]) -> dict[str, Any]:
    adjustment = int(Path("/proc/self/oom_score_adj").read_text())
    child = subprocess.run(["cat", "/proc/self/oom_score_adj"], capture_output=True, check=True).stdout
    above = int(Path(f"/proc/{os.getppid()}/oom_score_adj").read_text())
    return {
        "address_space": resource.getrlimit(resource.RLIMIT_AS),
        "oom_score_adj": [above, adjustment, int(child)],
    }


ACTIONS = {name: value for name, value in list(globals().items()) if name[0] != "_" and callable(value)}


def act(state: dict[str, Any], ctx: Context) -> dict[str, Any]:
    return ACTIONS[ctx.input["do"]](ctx.input)


async def act_async(state: dict[str, Any], ctx: Any) -> dict[str, Any]:
    if ctx.input["do"] == "wait":
        await asyncio.sleep(ctx.input["seconds"])
        return echo(ctx.input)
    HELD.append(_pages(ctx.input["mib"]))
    await asyncio.sleep(60)
    return {}


def policy(context: PolicyContext) -> Any:
    return Finish(None)


limited = Agent(
    id="workshop",
    nodes=[
        Node(act, name="memory", concurrency=1, memory_limit=LIMIT_MIB * MIB),
        Node(act, name="pair", concurrency=2, memory_limit=LIMIT_MIB * MIB),
        Node(act_async, name="many", concurrency=8, memory_limit=LIMIT_MIB * MIB),
        Node(act, name="cpu", concurrency=1, cpu_limit=CPU_S),
        Node(act, name="files", concurrency=1, open_files=40),
        Node(act, name="space", concurrency=1, address_space_limit=2048 * MIB),
        Node(act, name="spread", concurrency=2, max_tasks=40),
        Node(act, name="free", concurrency=2),
    ],
    decision_policy=policy,
)
