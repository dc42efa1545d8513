"""What the README shows is run as a reader would run it."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pure.test_docs import ROOT, blocks, example
from tests.support.readiness import wait_ready

DEADLINE_S = 60.0
COMMANDS = {
    "hayata": [sys.executable, "-m", "hayata.cli"],
    "hayata-supervisor": [sys.executable, "-m", "hayata_supervisor.main"],
}


@pytest.fixture
def folder() -> Iterator[Path]:
    """A directory with a short path that has the project's examples."""
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "examples").symlink_to(ROOT / "examples")
        yield Path(name)


def environment(**more: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HAYATA_")}
    return {**inherited, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "supervisor")]), **more}


def test_readme_example_runs(folder):
    (folder / "letters.py").write_text(example())
    done = subprocess.run(
        [sys.executable, "letters.py"],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    letter = "Dear Ada, all is well."
    assert sorted(done.stdout.splitlines()) == sorted([f"sending: {letter}", str({"letter": letter})])


def test_readme_quick_start_runs_in_two_terminals(folder):
    lines = [line for block in blocks("README.md", "sh") for line in block.splitlines()]
    first = shlex.split(next(line for line in lines if line.startswith("hayata-supervisor ")))
    second = shlex.split(next(line for line in lines if line.startswith("hayata run ")))
    ready_path = str(folder / "ready")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready, open(folder / "log", "w") as log:
        ready.bind(ready_path)
        environ = environment(HAYATA_SOCKET=str(folder / "s"), NOTIFY_SOCKET=ready_path)
        daemon = subprocess.Popen([*COMMANDS[first[0]], *first[1:]], cwd=folder, env=environ, stdout=log, stderr=log)
        try:
            assert wait_ready(ready, DEADLINE_S), (folder / "log").read_text()
            done = subprocess.run(
                [*COMMANDS[second[0]], *second[1:]],
                cwd=folder,
                env=environ,
                capture_output=True,
                text=True,
                timeout=DEADLINE_S,
                check=False,
            )
        finally:
            daemon.terminate()
            assert daemon.wait(DEADLINE_S) == 0
    assert done.returncode == 0, done.stderr
    assert "invocation_completed" in done.stdout + done.stderr
    result = done.stdout[done.stdout.rindex("\n{") if "\n{" in done.stdout else 0 :]
    assert json.loads(result)["messages"][1] == {"role": "user", "content": "Hello"}
