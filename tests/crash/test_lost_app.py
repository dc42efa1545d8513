"""An app that no longer imports when the supervisor is replaced: its agents are shown, and why they don't run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hayata import HayataError, RecoveryNeeded
from tests.support.crash_site import Site
from tests.support.eventually import eventually

APPS = Path(__file__).parents[1] / "support" / "apps"
WAIT_S = 30.0


def test_agents_of_an_app_that_no_longer_imports_are_failed_until_it_does(site: Site):
    app = Path(site.home) / "app.py"
    shutil.copy(APPS / "crash.py", app)
    daemon = site.daemon(f"{app}:agents", agents="line again").start()
    client = daemon.client
    done = client.run("again")
    done.result(timeout=WAIT_S)
    invocation = client.run("line", {"act_gate": "act"})
    site.ledger.wait("start", invocation=invocation.id, node="act")

    app.write_text("import no_such_module\n")
    daemon.kill_supervisor()
    agents = {agent.id: agent for agent in client.agents()}
    assert sorted(agents) == ["again", "line"], "one has something open, one had"
    for agent in agents.values():
        assert (agent.status, agent.app) == ("failed", f"{app}:agents")
        assert agent.error is not None
        assert "no_such_module" in agent.error.message
    with pytest.raises(RecoveryNeeded, match="no_such_module"):
        invocation.result(timeout=WAIT_S)
    assert invocation.status() == "recovery_required"
    for refused in (lambda: client.run("again"), lambda: client.recover("line"), invocation.cancel):
        with pytest.raises(HayataError, match="no_such_module"):
            refused()
    assert done.result(timeout=WAIT_S)["act"], "what the store has is shown"

    shutil.copy(APPS / "crash.py", app)
    eventually(lambda: {agent.status for agent in client.agents()} == {"serving"}, "the app is imported again")
    site.open_gate("act")
    with pytest.raises(RecoveryNeeded, match="lost"):  # now for what has become of its task
        invocation.result(timeout=WAIT_S)
    (task,) = [task for task in invocation.tasks() if task.status == "uncertain"]
    client.reconcile(invocation.id, task.id, retry=True)
    assert invocation.result(timeout=WAIT_S)["act"]
    assert site.ledger.attempts(invocation.id, "act") == [1, 2]
