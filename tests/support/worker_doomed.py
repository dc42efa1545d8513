"""A supervisor with one worker of each kind that writes down their pids and kills itself."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from tests.support.worker_harness import Supervisor


def main() -> None:
    supervisor = Supervisor()
    supervisor.start()
    agent = supervisor.fork("workshop", None)
    node = supervisor.node("single")
    node.run("a", {"do": "spin"})
    pids = {
        "forkserver": supervisor.forkserver.pid,
        "agent": agent.pid,
        "node": node.pid,
        "edge": node.edge().pid,
    }
    Path(sys.argv[1]).write_text("".join(f"{role} {pid}\n" for role, pid in pids.items()))
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
