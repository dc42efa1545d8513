"""Reloading by the command line, by the signal, and in a program."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

import hayata
from hayata import Agent, HayataError
from tests.support.crash_site import Site
from tests.support.eventually import eventually
from tests.support.reloading import ReloadApp

WAIT_S = 40.0


def node(state):
    return {}


def cli(app: ReloadApp, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``hayata``."""
    command = [sys.executable, "-m", "hayata.cli", "--socket", app.daemon.socket, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)


def test_command_says_what_has_changed_and_refuses_with_the_reason(site: Site):
    app = ReloadApp(site)
    app.daemon.start()
    app.write("2", version="2", node="more")
    done = cli(app, "reload")
    assert done.returncode == 0, done.stderr
    assert "1 -> 2" in done.stdout
    assert "node act is gone; node more is new" in done.stdout
    assert "generation 2 serves" in done.stderr
    app.write("3", import_line="import no_such_module")
    refused = cli(app, "reload")
    assert (refused.returncode, refused.stdout) == (5, "")
    assert "agent_start_failed: the code that was loaded before goes on serving" in refused.stderr
    assert "ModuleNotFoundError" in refused.stderr
    app.write("4", version="2", node="more")
    report = json.loads(cli(app, "reload", "--json").stdout)
    assert report["generation"] == 3
    assert report["agents"][0] == {
        "id": "app",
        "app": f"{app.path}:agents",
        "outcome": "kept",
        "version": "2",
        "was": None,
        "changes": [],
    }
    heads, *rows = cli(app, "tree").stdout.splitlines()
    assert "CODE" in heads.split()
    assert [row for row in rows if "forkserver" in row and " 3 " in row]


def test_signal_to_the_guard_and_to_the_supervisor_loads_the_apps_anew(site: Site):
    app = ReloadApp(site)
    app.daemon.start()
    for generation, code in ((2, "2"), (3, "3")):
        app.write(code)
        victim = app.daemon.guard if generation == 2 else app.daemon.supervisor()
        getattr(victim, "send_signal", getattr(victim, "kill", None))(signal.SIGHUP)
        eventually(lambda now=generation: app.serving("forkserver").generation == now, f"generation {generation}")
        assert app.daemon.client.call("app", {"steps": 1}, timeout=WAIT_S)["policy"] == code


@pytest.mark.parametrize("inline", [False, True])
def test_agents_that_are_no_file_are_refused_with_a_hint(tmp_path, inline: bool):
    agent = Agent("local", {"node": lambda state: node(state)})
    with hayata.start(agent, data_dir=tmp_path, inline=inline) as runtime:
        with pytest.raises(HayataError) as refused:
            runtime.reload()
        assert refused.value.code == "agent_start_failed"
        assert refused.value.hint
        assert runtime.call("local", timeout=WAIT_S) is not None


PROGRAM = """
import hayata
from hayata import Agent, Finish
CODE = "1"
agent = Agent("scripted", {"node": lambda state: {}}, lambda context: Finish(CODE))
if __name__ == "__main__":
    with hayata.start(agent, data_dir="data") as runtime:
        print(runtime.call("scripted", timeout=40))
        text = open(__file__).read()
        open(__file__, "w").write(text.replace('CODE = "1"', 'CODE = "2"', 1))
        print(runtime.reload().generation, runtime.call("scripted", timeout=40))
"""


def test_program_that_embeds_its_agents_by_reference_loads_them_anew(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.split() == ["1", "2", "2"], done.stderr
