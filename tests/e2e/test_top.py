"""``hayata top``: on a real terminal (a pty), through a pipe, as JSON; while the daemon goes and comes."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator

import pytest

from tests.support.crash_site import Daemon, Site
from tests.support.eventually import DEADLINE_S

TOP = [sys.executable, "-m", "hayata.cli"]


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    yield site
    site.close()


def held(site: Site, daemon: Daemon) -> str:
    """The execution id of a task that waits in its body."""
    invocation = daemon.client.run("again", {"act_gate": "act"})
    return site.ledger.wait("start", invocation=invocation.id, node="act")["execution"]


def _plain(site: Site) -> dict[str, str]:
    """Without what would overrule the terminal's own size."""
    return {name: value for name, value in site.environ().items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, site: Site, *command: str, columns: int = 200) -> None:
        self.ours, self._theirs = pty.openpty()
        termios.tcsetwinsize(self.ours, (50, columns))
        self.before = termios.tcgetattr(self._theirs)
        self.process = subprocess.Popen(
            command,
            stdin=self._theirs,
            stdout=self._theirs,
            stderr=self._theirs,
            env={**_plain(site), "TERM": "xterm"},
            start_new_session=True,
        )
        self.text = ""

    def see(self, wanted: str) -> None:
        """Read on until this is on the screen."""
        deadline = time.monotonic() + DEADLINE_S
        while re.search(wanted, self.text) is None:
            assert select.select([self.ours], [], [], max(0.0, deadline - time.monotonic()))[0], self.text[-3000:]
            self.text += os.read(self.ours, 65536).decode(errors="replace")

    def forget(self) -> None:
        self.text = ""

    def press(self, key: str) -> None:
        os.write(self.ours, key.encode())

    def end(self) -> int:
        """Wait for its end; the terminal must be as it was."""
        code = self.process.wait(DEADLINE_S)
        while select.select([self.ours], [], [], 0)[0]:
            self.text += os.read(self.ours, 65536).decode(errors="replace")
        assert termios.tcgetattr(self._theirs) == self.before
        assert self.text.rindex("\x1b[?1049l") > self.text.rfind("\x1b[?1049h"), "back from the other screen"
        return code

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.ours)
        os.close(self._theirs)


@pytest.fixture
def terminal(site: Site) -> Iterator[Terminal]:
    daemon = site.daemon(agents="again").start()
    site.execution = held(site, daemon)
    terminal = Terminal(site, *TOP, "--socket", daemon.socket, "top")
    yield terminal
    terminal.close()
    site.open_gate("act")


def test_top_shows_what_runs_and_ends_with_q(site: Site, terminal: Terminal):
    terminal.see(r"steps/s")
    terminal.see(r"again +.*serving")
    terminal.see(re.escape(site.execution))
    terminal.see(r"node again/act")
    terminal.forget()
    terminal.see(r"\d+ %")  # the second picture knows rates
    terminal.press("q")
    assert terminal.end() == 0


def test_numbers_are_whole_on_a_narrow_terminal(site: Site, terminal: Terminal):
    (daemon,) = site._daemons
    narrow = Terminal(site, *TOP, "--socket", daemon.socket, "top", columns=80)
    try:
        narrow.see(rf"guard.*{daemon.guard.pid}")
        narrow.press("q")
        assert narrow.end() == 0
    finally:
        narrow.close()


def test_interrupt_ends_top_and_leaves_the_terminal_as_it_was(terminal: Terminal):
    terminal.see("steps/s")
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.end() == 0


def test_top_waits_for_a_daemon_that_is_gone_and_goes_on(site: Site, terminal: Terminal):
    (daemon,) = site._daemons
    terminal.see("steps/s")
    daemon.guard.send_signal(signal.SIGQUIT)
    assert daemon.guard.wait(DEADLINE_S) == 0
    terminal.forget()
    terminal.see("Waiting for it; q ends")
    daemon.start()
    terminal.forget()
    terminal.see("steps/s")
    terminal.press("q")
    assert terminal.end() == 0


def test_top_without_a_daemon_says_so_at_once(site: Site):
    done = subprocess.run(
        [*TOP, "--socket", f"{site.home}/none", "top"], env=site.environ(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 4
    assert "daemon_unavailable" in done.stderr


def test_top_into_a_pipe_prints_once_and_as_json_a_document_a_line(site: Site):
    daemon = site.daemon(agents="again").start()
    execution = held(site, daemon)
    command = [*TOP, "--socket", daemon.socket, "top"]
    done = subprocess.run(command, env=site.environ(), capture_output=True, text=True, timeout=60, check=True)
    assert "\x1b" not in done.stdout
    assert execution in done.stdout
    assert {"AGENT", "TASK", "PROCESS"} <= {line.split()[0] for line in done.stdout.splitlines() if line}
    with subprocess.Popen([*command, "--json"], env=site.environ(), stdout=subprocess.PIPE, text=True) as stream:
        documents = [json.loads(stream.stdout.readline()) for _ in range(2)]
        stream.send_signal(signal.SIGINT)
        assert stream.wait(DEADLINE_S) == 0
    assert documents[0]["time"] < documents[1]["time"]
    for document in documents:
        assert [task["execution_id"] for task in document["tasks"]] == [execution]
        assert document["rates"]["steps_per_s"] >= 0
        assert document["tree"]["role"] == "guard"
        assert document["agents"][0]["id"] == "again"
    assert documents[1]["tasks"][0]["age_s"] > documents[0]["tasks"][0]["age_s"]
    once = subprocess.run(
        [*command, "--json", "--once"], env=site.environ(), capture_output=True, text=True, check=True
    )
    assert len(once.stdout.splitlines()) == 1
    site.open_gate("act")
