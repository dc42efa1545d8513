"""What strategies, restart types and escalation mean for invocations, on a real daemon under real kills."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import hayata
from tests.support.daemon import DEADLINE_S, Daemon
from tests.support.eventually import eventually

APP = "tests.support.apps.supervised:agents"


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    monkeypatch.setenv("SUPERVISED_HOME", str(tmp_path))
    monkeypatch.setenv("HAYATA_NODE_RETRY", "5.0")
    monkeypatch.setenv("HAYATA_DRAIN_TIMEOUT", "0.2")
    with Daemon(APP) as daemon:
        yield daemon


@pytest.fixture
def client(daemon: Daemon) -> Iterator[hayata.Client]:
    with hayata.Client(daemon.socket) as client:
        yield client


def workers(client: hayata.Client) -> dict[str, hayata.client.records.Process]:
    """By name; an agent's own worker has the agent's."""
    (supervisor,) = client.tree().children
    return {each.name: each for each in supervisor.children if each.role in ("agent", "node")}


def kill(client: hayata.Client, name: str, number: int = signal.SIGKILL) -> None:
    """Kill a worker that serves, and wait for its death to be seen."""
    worker = eventually(lambda: next((w for w in [workers(client)[name]] if w.status == "serving"), None), f"{name} up")
    os.kill(worker.pid, number)
    eventually(lambda: workers(client)[name].pid != worker.pid, f"the death of {name}")


def statuses(client: hayata.Client, agent: str) -> set[str]:
    return {each.status for name, each in workers(client).items() if name.partition("/")[0] == agent}


def test_task_cut_off_by_a_siblings_restart_is_interrupted_as_any_other(client, tmp_path):
    once = client.run("all", "held")
    eventually((tmp_path / "began").exists, "its body")
    (tmp_path / "began").unlink()
    again = client.run("all", "again")
    eventually((tmp_path / "began").exists, "its body")
    kill(client, "all/quick")
    with pytest.raises(hayata.InvocationFailed) as failed:
        once.result(timeout=DEADLINE_S)
    assert failed.value.code == "node_crashed"
    assert failed.value.details["reason"] == "sibling_restart"
    assert again.result(timeout=DEADLINE_S) == {"attempt": 2}
    assert workers(client)["all"].strategy == "one_for_all"
    assert workers(client)["all/held"].restart == "permanent"
    assert {each.restarts for name, each in workers(client).items() if name.startswith("all")} == {1}


def test_agent_that_has_failed_refuses_runs_alone_and_serves_again(client):
    kill(client, "fragile/quick")
    kill(client, "fragile/odd")
    eventually(lambda: statuses(client, "fragile") == {"failed"}, "its failing")
    with pytest.raises(hayata.HayataError) as refused:
        client.run("fragile", "quick")
    assert refused.value.code == "agent_crashed"
    assert "node 'odd' of agent 'fragile' does not stay up" in refused.value.message
    (shown,) = [each for each in client.agents() if each.id == "fragile"]
    assert (shown.status, {node.status for node in shown.nodes}) == ("failed", {"failed"})
    assert client.call("all", "quick", timeout=DEADLINE_S) == {"attempt": 1}
    eventually(lambda: statuses(client, "fragile") == {"serving"}, "its return")
    assert client.call("fragile", "quick", timeout=DEADLINE_S) == {"attempt": 1}
    assert client.call("fragile", "odd", timeout=DEADLINE_S) == {"attempt": 1}


def test_temporary_node_that_has_ended_is_shown_as_stopped_and_its_tasks_fail(client):
    assert client.call("kinds", "odd", timeout=DEADLINE_S) == {"attempt": 1}
    kill(client, "kinds/odd")
    eventually(lambda: workers(client)["kinds/odd"].status == "stopped", "its stop")
    (agent,) = [each for each in client.agents() if each.id == "kinds"]
    assert {node.name: node.status for node in agent.nodes}["odd"] == "stopped"
    with pytest.raises(hayata.InvocationFailed) as failed:
        client.call("kinds", "odd", timeout=DEADLINE_S)
    assert failed.value.code == "node_unavailable"
    assert "is temporary: it is not started again" in failed.value.message
    assert client.call("kinds", "quick", timeout=DEADLINE_S) == {"attempt": 1}


def test_node_whose_start_crashes_is_given_up_after_its_intensity_and_the_log_stays_small(daemon, client, tmp_path):
    """P14, supervisor 1285, gunicorn 2504: a restart storm."""
    before = len(daemon.log())
    with pytest.raises(hayata.InvocationFailed) as failed:
        client.call("storm", "odd", timeout=DEADLINE_S)
    assert failed.value.code == "node_unavailable"
    assert "there is no database" in failed.value.message
    assert workers(client)["storm/odd"].status == "failed"
    assert len((tmp_path / "tries").read_text()) == 1 + 3  # the first, and as many restarts as allowed
    assert client.call("storm", "quick", timeout=DEADLINE_S) == {"attempt": 1}
    assert len(daemon.log()) - before < 20_000


@pytest.mark.parametrize("hurried", [False, True])
def test_stop_waits_for_a_node_of_infinite_shutdown_until_somebody_is_in_a_hurry(daemon, client, tmp_path, hurried):
    client.run("patient", "held")
    eventually((tmp_path / "began").exists, "its body")
    daemon.process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        daemon.process.wait(6.5)  # longer than a guard waits that was told nothing
    if hurried:
        daemon.process.send_signal(signal.SIGTERM)
    else:
        (tmp_path / "gate").touch()
    assert daemon.process.wait(DEADLINE_S) == 0
