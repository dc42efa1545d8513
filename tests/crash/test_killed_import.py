"""The forkserver killed while it imports the app: that says nothing about the app."""

from __future__ import annotations

import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.support.crash_site import Daemon, Site
from tests.support.eventually import DEADLINE_S, eventually
from tests.support.readiness import wait_ready

APP = """
import os
import signal
from pathlib import Path

from hayata import Agent

home = Path(os.environ["CRASH_HOME"])
with open(home / "imports", "a") as file:
    file.write(f"{os.getpid()}\\n")
while len((home / "imports").read_text().splitlines()) <= int(os.environ["KILLED_IMPORTS"]):
    signal.pause()


def hello(state):
    return {"hello": "world"}


agent = Agent(id="hello", nodes=[hello])
"""


def imports(site: Site) -> list[int]:
    """Pids of the processes that have begun to import the app."""
    path = Path(site.home) / "imports"
    return [int(line) for line in path.read_text().splitlines()] if path.exists() else []


def app_daemon(site: Site) -> Daemon:
    app = Path(site.home) / "app.py"
    app.write_text(APP)
    return site.daemon(str(app))


def kill_imports(site: Site, count: int) -> None:
    """SIGKILL so many importing forkservers, one after the other."""
    for number in range(count):
        pid = eventually(lambda number=number: imports(site)[number : number + 1], "an import")[0]
        os.kill(pid, signal.SIGKILL)


def start(daemon: Daemon, killed: int) -> None:
    """Start it, kill the first imports, and wait until it serves."""
    site = daemon.site
    address = f"{site.home}/ready"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready:
        ready.bind(address)
        daemon.launch(NOTIFY_SOCKET=address, KILLED_IMPORTS=str(killed))
        kill_imports(site, killed)
        assert wait_ready(ready, DEADLINE_S), site.log.read_text()


def test_import_that_was_killed_at_the_first_start_is_tried_again(site: Site):
    daemon = app_daemon(site)
    start(daemon, killed=2)
    assert daemon.client.call("hello", timeout=DEADLINE_S) == {"hello": "world"}


def test_client_that_waits_for_a_restart_whose_import_is_killed_is_served(site: Site):
    daemon = app_daemon(site)
    start(daemon, killed=1)
    (Path(site.home) / "imports").write_text("")  # the next import hangs again
    daemon.kill_supervisor()
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(daemon.client.call, "hello", timeout=DEADLINE_S)
        kill_imports(site, 1)
        assert waiting.result(DEADLINE_S) == {"hello": "world"}


def test_import_that_is_killed_again_and_again_is_a_failed_start(site: Site):
    daemon = app_daemon(site)
    daemon.launch(KILLED_IMPORTS="9")
    kill_imports(site, 3)
    assert daemon.guard.wait(DEADLINE_S) == 2
    assert "ended its process: signal SIGKILL" in site.log.read_text()
    assert len(imports(site)) == 3
