"""New code without losing an invocation: files are rewritten under a real daemon."""

from __future__ import annotations

import os
import signal
import threading

import pytest

import hayata
from hayata import HayataError, InvocationFailed, RecoveryNeeded
from tests.support.crash_site import Site
from tests.support.eventually import eventually
from tests.support.ledger import audit, check_events
from tests.support.reloading import Later, ReloadApp

WAIT_S = 40.0


@pytest.fixture
def app(site: Site) -> ReloadApp:
    app = ReloadApp(site)
    app.daemon.start()
    return app


def both(*codes: str) -> list[list[str]]:
    """The log that bodies of these codes make: the app's, and that of the module that it imports."""
    return [[code, code] for code in codes]


def test_running_invocation_ends_its_step_with_the_old_code_and_goes_on_with_the_new(app: ReloadApp, site: Site):
    client = app.daemon.client
    invocation = client.run("app", {"act_gate": "g", "act_chunks": 2}, stream=True)
    app.wait_body(invocation)
    old = app.serving("node")
    site.open_gate("g1")
    site.open_gate("g2")
    app.write("2")
    report = client.reload()
    assert (report.generation, [(each.id, each.outcome) for each in report.agents]) == (2, [("app", "kept")])
    statuses = {each.pid: (each.status, each.generation) for each in app.processes("node")}
    assert statuses[old.pid] == ("draining", 1)
    assert client.call("app", {"steps": 1}, timeout=WAIT_S) == {"log": both("2"), "policy": "2"}
    site.open_gate("g0")
    assert invocation.result(timeout=WAIT_S) == {"log": both("1", "2", "2"), "policy": "2"}
    app.wait_drained()
    assert [each.generation for each in app.processes("forkserver")] == [2]
    chunks = [event.data["result"]["code"] for event in invocation.events() if event.type == "node_partial_result"]
    assert chunks == ["1", "1", "2", "2", "2", "2"]
    audit(client, site.ledger, [invocation.id], reruns={})


def test_twenty_reloads_under_load_lose_fail_and_repeat_nothing(app: ReloadApp, site: Site):
    """The code has the same size each time, and mostly the same second."""
    client, ids, results, over = app.daemon.client, [], {}, threading.Event()

    def load() -> None:
        with hayata.Client(app.daemon.socket) as mine:
            while not over.is_set():
                invocation = mine.run("app", {"steps": 4})
                ids.append(invocation.id)
                results[invocation.id] = invocation.result(timeout=WAIT_S)

    threads = [Later(load) for _ in range(3)]
    try:
        for number in range(20):
            code = "ABCDEFGHIJKLMNOPQRSTU"[number]
            app.write(code)
            assert client.reload().generation == number + 2
            assert client.call("app", {"steps": 2}, timeout=WAIT_S) == {"log": both(code, code), "policy": code}
    finally:
        over.set()
    assert [each.result() for each in threads] == [None, None, None]
    assert len(ids) > 40
    assert len(results) == len(ids)
    tasks = audit(client, site.ledger, ids, reruns={})
    assert {task.status for each in tasks.values() for task in each} == {"completed"}
    assert {len(each) for each in tasks.values()} == {4}
    app.wait_drained()


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        ({"import_line": "import no_such_module"}, "agent_start_failed", "No module named 'no_such_module'"),
        ({"import_line": "1 +"}, "agent_start_failed", "SyntaxError"),
        ({"import_line": "import os; os._exit(3)"}, "agent_start_failed", "ended its process: exit code 3"),
        ({"import_line": "import os; os.kill(os.getpid(), 9)"}, "agent_start_failed", "signal SIGKILL"),
        ({"more": "agents = [agent, Agent('app', [node], policy)]"}, "agent_start_failed", "two agents have the id"),
        ({"more": "Agent('bad', [node], policy, max_steps=0)"}, "invalid_definition", "max_steps"),
    ],
)
def test_code_that_can_not_be_loaded_leaves_the_old_serving_and_says_why(app: ReloadApp, change, code, said):
    client = app.daemon.client
    before = app.serving("node"), app.serving("forkserver")
    app.write("2", **change)
    with pytest.raises(HayataError, match="goes on serving") as refused:
        client.reload()
    assert refused.value.code == code
    assert said in refused.value.message
    assert client.call("app", {"steps": 1}, timeout=WAIT_S) == {"log": both("1"), "policy": "1"}
    assert (app.serving("node").pid, app.serving("forkserver").pid) == tuple(each.pid for each in before)
    app.write("3")
    assert client.reload().generation == 2
    assert client.call("app", {"steps": 1}, timeout=WAIT_S)["policy"] == "3"


def test_agent_that_another_app_defines_too_is_refused_and_all_stay_as_they_were(app: ReloadApp):
    client = app.daemon.client
    other = app.path.with_name("other.py")
    other.write_text("from hayata import Agent\ndef n(state): return {}\nagent = Agent('other', [n])\n")
    client.start_agent(f"{other}:agent")
    app.write("2")
    other.write_text(other.read_text().replace("'other'", "'app'"))
    with pytest.raises(HayataError, match="is defined by") as refused:
        client.reload()
    assert refused.value.code == "invalid_definition"
    assert client.call("app", {"steps": 1}, timeout=WAIT_S)["policy"] == "1"
    assert client.call("other", timeout=WAIT_S) is not None
    other.write_text(other.read_text().replace("'app'", "'more'"))
    report = client.reload()
    assert {each.id: each.outcome for each in report.agents} == {"app": "kept", "more": "new", "other": "gone"}
    assert client.call("more", timeout=WAIT_S) is not None


@pytest.mark.parametrize("changed", ["continue", "restart", "drop"])
def test_invocation_of_another_version_ends_its_step_and_rests_until_somebody_decides(app: ReloadApp, site, changed):
    client = app.daemon.client
    invocation = client.run("app", {"act_gate": "g"})
    app.wait_body(invocation)
    app.write("2", version="2")
    (report,) = client.reload().agents
    assert (report.version, report.was) == ("2", "1")
    assert invocation.status() == "running"
    assert client.call("app", {"steps": 1}, timeout=WAIT_S)["policy"] == "2"
    for step in range(3):
        site.open_gate(f"g{step}")
    with pytest.raises(RecoveryNeeded) as needed:
        invocation.result(timeout=WAIT_S)
    assert needed.value.code == "definition_changed"
    assert [task.status for task in invocation.tasks()] == ["completed"], "what has begun counts"
    (touched,) = client.recover("app", changed=changed)
    assert touched.id == invocation.id
    if changed == "continue":
        assert invocation.result(timeout=WAIT_S) == {"log": both("1", "2", "2"), "policy": "2"}
    elif changed == "drop":
        assert invocation.status() == "cancelled"
    else:
        (fresh,) = [each for each in client.invocations() if each.record.restarted_from == invocation.id]
        assert fresh.result(timeout=WAIT_S) == {"log": both("2", "2", "2"), "policy": "2"}


def test_version_that_comes_back_takes_its_invocations_up(app: ReloadApp, site: Site):
    client = app.daemon.client
    invocation = client.run("app", {"act_gate": "g"})
    app.wait_body(invocation)
    app.write("2", version="2")
    client.reload()
    for step in range(3):
        site.open_gate(f"g{step}")
    with pytest.raises(RecoveryNeeded):
        invocation.result(timeout=WAIT_S)
    app.write("3")
    client.reload()
    assert invocation.result(timeout=WAIT_S) == {"log": both("1", "3", "3"), "policy": "3"}


def test_agent_that_is_gone_rests_and_comes_back(app: ReloadApp, site: Site):
    client = app.daemon.client
    running = client.run("app", {"act_gate": "g"})
    app.wait_body(running)
    app.write("2", id="other")
    report = client.reload()
    assert {each.id: each.outcome for each in report.agents} == {"app": "gone", "other": "new"}
    with pytest.raises(HayataError) as refused:
        client.run("app")
    assert refused.value.code == "unknown_agent"
    assert {each.id: each.status for each in client.agents()} == {"app": "gone", "other": "serving"}
    assert client.call("other", {"steps": 1}, timeout=WAIT_S)["policy"] == "2"
    for step in range(3):
        site.open_gate(f"g{step}")
    with pytest.raises(RecoveryNeeded) as needed:
        running.result(timeout=WAIT_S)
    assert needed.value.code == "unknown_agent"
    assert running.status() == "recovery_required"
    app.wait_drained()
    app.write("3")
    client.reload()
    assert running.result(timeout=WAIT_S) == {"log": both("1", "3", "3"), "policy": "3"}
    audit(client, site.ledger, [running.id], reruns={})


def test_node_that_is_gone_fails_what_still_wants_it_and_ends_what_it_runs(app: ReloadApp, site: Site):
    client = app.daemon.client
    app.write("1", concurrency=1)
    client.reload()
    running = client.run("app", {"act_gate": "g"})
    app.wait_body(running)
    waiting = client.run("app", {"steps": 1})
    eventually(lambda: waiting.tasks(), "a scheduled task")
    app.write("2", node="more")
    (report,) = client.reload().agents
    assert report.changes == ("node act is gone", "node more is new")
    with pytest.raises(InvocationFailed) as failed:
        waiting.result(timeout=WAIT_S)
    assert failed.value.code == "unknown_node"
    for step in range(3):
        site.open_gate(f"g{step}")
    assert running.result(timeout=WAIT_S) == {"log": both("1", "2", "2"), "policy": "2"}
    app.wait_drained()


def test_concurrency_holds_over_both_generations(app: ReloadApp, site: Site):
    client = app.daemon.client
    app.write("1", concurrency=1)
    client.reload()
    first = client.run("app", {"act_gate": "g", "steps": 1})
    app.wait_body(first)
    app.write("2", concurrency=1)
    client.reload()
    second = client.run("app", {"steps": 1})
    assert app.serving("node").generation == 3
    eventually(lambda: second.tasks(), "a scheduled task")
    assert not site.ledger.lines("start", invocation=second.id)
    site.open_gate("g0")
    assert second.result(timeout=WAIT_S)["policy"] == "2"
    assert first.result(timeout=WAIT_S) == {"log": both("1"), "policy": "2"}
    lines = [(line["what"], line["invocation"]) for line in site.ledger.lines() if line["what"] != "import"]
    assert lines == [(what, each.id) for each in (first, second) for what in ("start", "end")]


def test_cancel_reaches_a_task_of_the_old_generation(app: ReloadApp):
    client = app.daemon.client
    invocation = client.run("app", {"act_gate": "never"})
    app.wait_body(invocation)
    app.write("2")
    client.reload()
    assert invocation.cancel() == "cancelled"
    app.wait_drained()
    check_events(list(invocation.events()), "cancelled")


def test_reloads_that_are_asked_for_meanwhile_are_one_more(app: ReloadApp, site: Site):
    client = app.daemon.client
    app.write("2", import_line="wait_for_gate('import2')")
    first = Later(client.reload)
    app.wait_import("2")
    app.write("3")
    others = [Later(hayata.Client(app.daemon.socket).reload) for _ in range(3)]
    app.daemon.guard.send_signal(signal.SIGHUP)
    eventually(lambda: "reload asked for" in site.log.read_text(), "the signal")
    assert client.call("app", {"steps": 1}, timeout=WAIT_S)["policy"] == "1"
    site.open_gate("import2")
    assert first.result().generation == 2
    generations = {each.result().generation for each in others}
    assert generations <= {3, 4}, "those who came in time, and one who was late"
    assert client.call("app", {"steps": 1}, timeout=WAIT_S)["policy"] == "3"
    assert app.imports("3") == max(generations) - 2


def test_reload_waits_while_an_older_generation_drains(app: ReloadApp, site: Site):
    client = app.daemon.client
    invocation = client.run("app", {"act_gate": "g", "steps": 1})
    app.wait_body(invocation)
    app.write("2")
    client.reload()
    app.write("3")
    waiting = Later(client.reload)
    assert client.call("app", {"steps": 1}, timeout=WAIT_S)["policy"] == "2"
    assert not waiting.done
    assert app.imports("3") == 0
    site.open_gate("g0")
    assert waiting.result().generation == 3
    assert client.call("app", {"steps": 1}, timeout=WAIT_S)["policy"] == "3"


def test_agent_that_was_stopped_stays_stopped(app: ReloadApp):
    client = app.daemon.client
    app.write("2", more="agents.append(Agent('more', [node], policy))")
    client.reload()
    client.stop_agent("app")
    app.write("3", more="agents.append(Agent('more', [node], policy))")
    assert [each.id for each in client.reload().agents] == ["more"]
    app.wait_drained()
    assert [each.name for each in app.processes("agent")] == ["more"]


# Deaths


def test_forkserver_that_is_killed_while_it_imports_is_started_again(app: ReloadApp, site: Site):
    client = app.daemon.client
    app.write("2", import_line="wait_for_gate('import2')")
    reload = Later(client.reload)
    app.wait_import("2")
    before = {each.pid for each in app.processes("forkserver")}
    (new,) = [seen for seen in site.marked() if seen.name == "h:forkserver" and seen.pid not in before]
    new.kill()
    app.wait_import("2", 2)
    assert client.call("app", {"steps": 1}, timeout=WAIT_S)["policy"] == "1"
    site.open_gate("import2")
    assert reload.result().generation == 2
    assert client.call("app", {"steps": 1}, timeout=WAIT_S)["policy"] == "2"


def test_node_that_is_killed_while_it_drains_interrupts_its_tasks_and_does_not_come_back(app: ReloadApp, site: Site):
    client = app.daemon.client
    invocation = client.run("app", {"act_gate": "never"})
    app.wait_body(invocation)
    app.write("2")
    client.reload()
    (old,) = [each for each in app.processes("node") if each.status == "draining"]
    os.kill(old.pid, signal.SIGKILL)
    with pytest.raises(InvocationFailed) as failed:
        invocation.result(timeout=WAIT_S)
    assert failed.value.code == "node_crashed"
    app.wait_drained()
    assert [each.generation for each in app.processes("node")] == [2]


@pytest.mark.parametrize("victim", ["agent", "node", "forkserver"])
def test_worker_of_the_old_generation_that_dies_meanwhile_is_replaced_as_ever(app: ReloadApp, site: Site, victim: str):
    client = app.daemon.client
    app.write("2", import_line="wait_for_gate('import2')")
    reload = Later(client.reload)
    app.wait_import("2")
    os.kill(app.serving(victim).pid, signal.SIGKILL)
    assert client.call("app", {"steps": 1}, timeout=WAIT_S)["policy"] == "1"
    site.open_gate("import2")
    assert reload.result().generation in (2, 3)
    assert client.call("app", {"steps": 1}, timeout=WAIT_S)["policy"] == "2"


def test_supervisor_that_is_killed_meanwhile_comes_back_with_the_code_on_the_disk(app: ReloadApp, site: Site):
    client = app.daemon.client
    running = client.run("app", {"act_gate": "g", "steps": 2})
    app.wait_body(running)
    app.write("2", import_line="wait_for_gate('import2')")
    reload = Later(client.reload)
    app.wait_import("2")
    app.daemon.kill_supervisor()
    app.wait_import("2", 2)
    site.open_gate("import2")
    assert reload.result().generation in (1, 2), "the client has asked again"
    assert running.status() == "uncertain", "its body was cut off"
    assert client.call("app", {"steps": 1}, timeout=WAIT_S)["policy"] == "2"
    site.open_gate("g0")
    site.open_gate("g1")
    (task,) = running.tasks()
    client.reconcile(running.id, task.id, retry=True)
    assert running.result(timeout=WAIT_S) == {"log": both("2", "2"), "policy": "2"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_end_of_the_daemon_does_not_wait_for_a_reload(app: ReloadApp, site: Site, number: int):
    client = app.daemon.client
    app.write("2", import_line="wait_for_gate('import2')")
    reload = Later(hayata.Client(app.daemon.socket).reload)
    app.wait_import("2")
    app.daemon.guard.send_signal(number)
    assert app.daemon.guard.wait(WAIT_S) == (0 if number == signal.SIGTERM else -number)
    eventually(lambda: not site.marked(), "the end of all")
    site.open_gate("import2")
    app.daemon.start()
    assert client.call("app", {"steps": 1}, timeout=WAIT_S)["policy"] == "2"
    outcome = reload.result()
    assert getattr(outcome, "generation", 0) in (1, 2) or outcome.code == "daemon_unavailable"


def test_stop_ends_a_draining_generation_at_once_and_its_task_is_uncertain(app: ReloadApp, site: Site):
    client = app.daemon.client
    invocation = client.run("app", {"act_gate": "never"})
    app.wait_body(invocation)
    app.write("2")
    client.reload()
    app.daemon.stop()
    assert not site.marked()
    app.daemon.start()
    with pytest.raises(RecoveryNeeded) as needed:
        invocation.result(timeout=WAIT_S)
    assert needed.value.code == "task_execution_uncertain"


# A forkserver that is started anew


def test_forkserver_that_dies_after_the_files_have_changed_takes_over_with_the_new_code(app: ReloadApp, site: Site):
    client = app.daemon.client
    invocation = client.run("app", {"act_gate": "g", "steps": 2})
    app.wait_body(invocation)
    app.write("2")
    os.kill(app.serving("forkserver").pid, signal.SIGKILL)
    eventually(lambda: client.call("app", {"steps": 1}, timeout=WAIT_S)["policy"] == "2", "the new code")
    assert client.call("app", {"steps": 1}, timeout=WAIT_S) == {"log": both("2"), "policy": "2"}
    site.open_gate("g0")
    site.open_gate("g1")
    assert invocation.result(timeout=WAIT_S) == {"log": both("1", "2"), "policy": "2"}
    app.wait_drained()


def test_forkserver_that_dies_while_the_files_stay_takes_nothing_over(app: ReloadApp, site: Site):
    agent, node = app.serving("agent"), app.serving("node")
    old = app.serving("forkserver")
    os.kill(old.pid, signal.SIGKILL)
    eventually(lambda: app.serving("forkserver").pid != old.pid, "another forkserver")
    assert (app.serving("agent").pid, app.serving("node").pid) == (agent.pid, node.pid)
    assert app.serving("forkserver").generation == 1
