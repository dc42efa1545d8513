"""An app for tests of the stop: it can be met while it is imported, while it works, and while it closes up.

``$STOP_HOME`` is a directory. With ``$STOP_IMPORT`` the import waits for ever, as soon as it has written to the
pipe ``importing`` there; `hold` writes to ``working`` and goes on for ever. ``$STOP_SHUTDOWN`` is the node's.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import contextmanager
from pathlib import Path

from hayata import Agent, Node

HOME = Path(os.environ["STOP_HOME"])
SHUTDOWN = os.environ.get("STOP_SHUTDOWN", "60")
SHUTDOWN = SHUTDOWN if SHUTDOWN.isalpha() or "_" in SHUTDOWN else float(SHUTDOWN)


def say(name):
    with open(HOME / name, "w") as pipe:
        pipe.write("here")


def hold(state, ctx):
    """Neither a signal nor the end of its patience ends it."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if not os.path.exists(HOME / "done"):
        say("working")
        while True:
            time.sleep(600)
    return {}


@contextmanager
def slow_to_close():
    yield
    started = time.monotonic()
    while time.monotonic() - started < float(os.environ["STOP_CLOSES_S"]):
        time.sleep(0.05)
    (HOME / "closed").touch()


if os.environ.get("STOP_IMPORT"):
    say("importing")
    time.sleep(600)

if os.environ.get("STOP_CLOSES_S"):
    agents = [Agent(id="slow", nodes=[Node(hold, shutdown=SHUTDOWN, lifespan=slow_to_close)])]
else:
    agents = [Agent(id="stopping", nodes=[Node(hold, shutdown=0.3)])]
