"""An app that can be imported only when the test says so."""

import os
import time
from pathlib import Path

from hayata import Agent

broken = Path(os.environ["TREE_RIG_BROKEN"])
if broken.exists():
    match broken.read_text():
        case "slow":
            time.sleep(1000)
        case "die":
            os.kill(os.getpid(), 9)
        case _:
            raise ImportError("no module for today")


def act(state, ctx):
    return {}


agent = Agent(id="mended", nodes=[act])
