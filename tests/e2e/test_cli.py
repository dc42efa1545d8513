"""The command line: each command against a real daemon, exit codes, output for people and for programs."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Any

import click
import pytest

from hayata import Client
from hayata import messages as m
from hayata.cli.output import ago, jsonable, took
from hayata.cli.root import commands, run_command
from hayata.client import Process
from hayata.errors import HayataError
from tests.support.daemon import ROOT, Daemon, assert_all_gone, environment
from tests.support.fake_server import Connection, FakeServer, info

DEADLINE_S = 20.0


class Outcome:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()


class Cli:
    """Runs command lines in this process, against one socket."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: str) -> Outcome:
        self._capsys.readouterr()
        code = run_command(arguments)
        out, err = self._capsys.readouterr()
        return Outcome(code, out, err)


@pytest.fixture(scope="module")
def shared() -> Iterator[Daemon]:
    with Daemon() as daemon:
        yield daemon


@pytest.fixture
def cli(shared: Daemon, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    monkeypatch.setenv("HAYATA_SOCKET", shared.socket)
    return Cli(capsys)


@pytest.fixture
def lonely(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Without a daemon."""
    monkeypatch.setenv("HAYATA_SOCKET", str(tmp_path / "s"))
    return Cli(capsys)


def await_file(path: Path) -> str:
    deadline = time.monotonic() + DEADLINE_S
    while not path.exists() or not path.read_text():
        assert time.monotonic() < deadline, f"{path} does not appear"
        time.sleep(0.005)
    return path.read_text()


def held(tmp_path: Path) -> tuple[dict[str, str], Path, Path]:
    started, go = tmp_path / f"started-{uuid.uuid4().hex}", tmp_path / f"go-{uuid.uuid4().hex}"
    return {"started": str(started), "go": str(go)}, started, go


def spawn(environ: dict[str, str], *arguments: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "hayata.cli", *arguments],
        env=environ,
        cwd=ROOT,
        stdout=options.pop("stdout", subprocess.PIPE),
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def supervisor_of(root: Process) -> int:
    return next(child.pid for child in root.children if child.role == "supervisor")


# ------------------------------------------------------------------------------------------------------------
# run
# ------------------------------------------------------------------------------------------------------------


def test_run_prints_the_result_alone(cli: Cli) -> None:
    done = cli("run", "echo", '{"a": [1, null]}')
    assert (done.code, done.err) == (0, "")
    assert done.lines == ['{"echo": {"a": [1, null]}}']


def test_run_without_input_gives_none(cli: Cli) -> None:
    assert cli("run", "echo").json == {"echo": None}


def test_run_reads_input_from_stdin_and_file(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO('{"from": "stdin"}'))
    assert cli("run", "echo", "-").json == {"echo": {"from": "stdin"}}
    (tmp_path / "in.json").write_text('{"from": "file"}')
    assert cli("run", "echo", f"@{tmp_path}/in.json").json == {"echo": {"from": "file"}}


def test_run_stream_prints_events_then_the_result(cli: Cli) -> None:
    done = cli("run", "stream", "--stream")
    assert done.code == 0
    *events, result = done.lines
    assert json.loads(result) == {"streamed": 3}
    assert "invocation_started" in events[0]
    assert [line.split("  ")[-1] for line in events if "node_partial_result" in line] == [
        f'{{"number": {number}}}' for number in range(3)
    ]
    assert "invocation_completed" in events[-1]


def test_run_stream_json_prints_one_object_a_line(cli: Cli) -> None:
    *events, result = [json.loads(line) for line in cli("run", "stream", "--stream", "--json").lines]
    assert result == {"streamed": 3}
    assert [event["sequence"] for event in events] == list(range(1, len(events) + 1))
    assert set(events[0]) == {"sequence", "type", "time", "invocation_id", "data"}


def test_run_of_a_failing_agent_exits_1_with_the_reason(cli: Cli) -> None:
    done = cli("run", "fail")
    assert (done.code, done.out) == (1, "")
    assert done.err.splitlines()[0] == "error: node_exception: ValueError: no such luck"
    assert "Traceback" not in done.err
    assert cli("run", "die").code == 1


def test_run_past_its_timeout_exits_124_and_names_the_invocation(cli: Cli, tmp_path: Path) -> None:
    given, _, go = held(tmp_path)
    done = cli("run", "wait", json.dumps(given), "--timeout", "0.2", "--id", f"late-{uuid.uuid4().hex}")
    assert done.code == 124
    assert "late-" in done.err
    assert "it goes on" in done.err
    go.write_text("go")


def test_run_with_the_same_key_is_one_invocation(cli: Cli) -> None:
    key = uuid.uuid4().hex
    assert cli("run", "echo", "1", "--key", key).code == 0
    assert cli("run", "echo", "1", "--key", key).json == {"echo": 1}
    assert cli("run", "echo", "2", "--key", key).code == 5


@pytest.mark.parametrize(
    "arguments",
    [
        ["run"],
        ["run", "echo", "{bad"],
        ["run", "echo", "@/does/not/exist"],
        ["run", "echo", "1", "--colour", "red"],
        ["run", "echo", "--timeout", "-1"],
        ["run", "echo", "--timeout", "soon"],
        ["run", "", "1"],
        ["run", "a b"],
        ["run", "echo", "36893488147419103232"],
        ["run", "echo", "--data-dir", "x"],
        ["run", "echo", "--app", "x", "--socket", "y"],
        ["run", "echo", "--on-busy", "wait"],
        ["ps", "--status", "done"],
        ["ps", "--limit", "0"],
        ["events", "x", "--after", "-1"],
        ["reconcile"],
        ["reconcile", "i", "t"],
        ["reconcile", "i", "t", "--retry", "--error", "x"],
        ["reconcile", "i", "t", "--result", "[1]"],
        ["reconcile", "i", "--retry"],
        ["reconcile", "--agent", "a", "--retry"],
        ["reconcile", "--all", "--retry"],
        ["reconcile", "i", "t", "--agent", "a", "--all", "--retry"],
        ["recover", "echo", "--changed", "perhaps"],
        ["frobnicate"],
        ["--frobnicate"],
        ["stop", "--drain", "-1"],
    ],
    ids=" ".join,
)
def test_wrong_usage_exits_2_with_one_error_and_a_hint(lonely: Cli, arguments: list[str]) -> None:
    done = lonely(*arguments)
    assert (done.code, done.out) == (2, "")
    first, *rest = done.err.splitlines()
    assert first.startswith(("error: invalid_options: ", "error: unserializable_value: "))
    assert rest == [] or rest[0].startswith("hint: ")
    assert "Traceback" not in done.err


def test_run_app_runs_without_a_daemon(lonely: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = uuid.uuid4().hex
    for name, value in environment(mark).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(ROOT)
    data_dir = str(tmp_path / "data")
    app = ["--app", "tests/support/client_app.py:agents", "--data-dir", data_dir]
    assert lonely("run", "echo", "1", *app).json == {"echo": 1}
    assert lonely("run", "fail", *app).code == 1
    broken = tmp_path / "broken.py"
    broken.write_text("raise RuntimeError('broken at import')")
    done = lonely("run", "echo", "--app", str(broken), "--data-dir", data_dir)
    assert done.code == 2
    assert "agent_start_failed" in done.err
    assert_all_gone(mark)


def test_interrupted_run_leaves_the_invocation_running_and_says_so(shared: Daemon, tmp_path: Path) -> None:
    given, started, go = held(tmp_path)
    with spawn(shared.environ, "run", "wait", json.dumps(given)) as process:
        await_file(started)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, out) == (130, "")
    assert "goes on" in err
    assert "Traceback" not in err
    name = err.split("invocation ")[1].split()[0]
    go.write_text("go")
    with Client(shared.socket) as client:
        assert client.invocation(name).result(timeout=DEADLINE_S) == {"waited": True}


# ------------------------------------------------------------------------------------------------------------
# Looking
# ------------------------------------------------------------------------------------------------------------


def test_ps_show_and_events_tell_of_an_invocation(cli: Cli) -> None:
    session, name = uuid.uuid4().hex, f"x-{uuid.uuid4().hex}"
    assert cli("run", "stream", "--stream", "--session", session, "--id", name).code == 0
    (row,) = cli("ps", "--session", session, "--json").json
    assert (row["id"], row["agent"], row["status"], row["session"]) == (name, "stream", "completed", session)
    table = cli("ps", "--agent", "stream", "--status", "completed", "--limit", "1000").lines
    assert table[0].split() == ["INVOCATION", "AGENT", "STATUS", "STEP", "CREATED", "TOOK", "SESSION"]
    assert any(line.startswith(name) for line in table)
    shown = cli("show", name, "--json").json
    assert shown["result"] == {"streamed": 3}
    (task,) = shown["tasks"]
    assert (task["node"], task["status"], task["update"]) == ("stream", "completed", {"streamed": 3})
    timeline = cli("show", name).out
    assert task["id"] in timeline
    assert "█" in timeline
    events = cli("events", name, "--after", "1", "--json").lines
    assert [json.loads(line)["sequence"] for line in events] == list(range(2, 2 + len(events)))
    assert cli("events", name, "--follow").lines[-1].split()[2] == "invocation_completed"


def test_show_of_a_failure_has_its_traceback(cli: Cli) -> None:
    name = f"x-{uuid.uuid4().hex}"
    cli("run", "fail", "--id", name)
    shown = cli("show", name)
    assert "node_exception: ValueError: no such luck" in shown.out
    assert 'raise ValueError("no such luck")' in shown.out
    assert cli("show", name, "--json").json["error"]["details"]["type"] == "ValueError"


def test_unknown_names_are_refused_with_5(cli: Cli) -> None:
    for arguments in (
        ["show", "x"],
        ["events", "x"],
        ["cancel", "x"],
        ["run", "nobody"],
        ["recover", "nobody"],
    ):
        done = cli(*arguments)
        assert done.code == 5
        assert done.err.startswith("error: unknown_")


def test_tree_agents_and_stats_describe_the_daemon(cli: Cli, shared: Daemon) -> None:
    cli("run", "echo", "1")
    root = cli("tree", "--json").json
    assert (root["role"], root["pid"]) == ("guard", shared.process.pid)
    lines = cli("tree").lines
    assert lines[1].split()[:2] == ["guard", str(shared.process.pid)]
    assert any("node echo" in line and line.startswith("   ├─ ") for line in lines)
    assert {agent["id"] for agent in cli("agents", "--json").json} >= {"echo", "wait"}
    assert cli("agents").lines[0].split()[0] == "AGENT"
    values = cli("stats", "--json").json
    assert all(isinstance(value, int | float) for value in values.values())
    assert len(cli("stats").lines) == len(values) + 1


def test_tables_without_rows_say_so_on_stderr(cli: Cli) -> None:
    done = cli("ps", "--session", "nobody")
    assert (done.code, done.out, done.err) == (0, "", "no invocations\n")
    assert cli("ps", "--session", "nobody", "--json").json == []


# ------------------------------------------------------------------------------------------------------------
# Deciding
# ------------------------------------------------------------------------------------------------------------


def test_cancel_prints_the_status(cli: Cli, shared: Daemon, tmp_path: Path) -> None:
    given, started, _ = held(tmp_path)
    with Client(shared.socket) as client:
        invocation = client.run("wait", given)
        await_file(started)
        assert cli("cancel", invocation.id).lines == ["cancelled"]
        assert cli("cancel", invocation.id, "--json").json["status"] == "cancelled"
        echo = client.run("echo", 1)
        echo.result(timeout=DEADLINE_S)
        assert cli("cancel", echo.id).lines == ["completed"], "too late: how it had ended"


def test_uncertain_invocation_exits_3_and_reconcile_settles_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with Daemon() as daemon, Client(daemon.socket) as client:
        monkeypatch.setenv("HAYATA_SOCKET", daemon.socket)
        cli = Cli(capsys)
        given, started, _ = held(tmp_path)
        with spawn(daemon.environ, "run", "wait", json.dumps(given), "--id", "unsure") as process:
            await_file(started)
            os.kill(supervisor_of(client.tree()), signal.SIGKILL)
            _, err = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 3, err
        assert "error: task_execution_uncertain: " in err
        following = spawn(daemon.environ, "events", "unsure", "--follow")
        assert following.stdout is not None
        assert any("node_uncertain" in line for line in following.stdout)
        shown = cli("show", "unsure")
        (task,) = cli("show", "unsure", "--json").json["tasks"]
        assert task["status"] == "uncertain"
        assert f"hayata reconcile unsure {task['id']}" in shown.err
        assert cli("reconcile", "unsure", task["id"], "--result", '{"by": "hand"}', "--by", "me").code == 0
        assert client.invocation("unsure").result(timeout=DEADLINE_S) == {"by": "hand"}
        with following:
            assert following.stdout.read().splitlines()[-1].split()[2] == "invocation_completed"
        assert cli("reconcile", "unsure", task["id"], "--retry").code == 5
        assert 'reconciled by me (result {"by": "hand"}) ' in cli("show", "unsure").out
        settled = cli("show", "unsure", "--json").json["tasks"][0]["reconciled"]
        assert (settled["by"], settled["how"], settled["at"] > task["started_at"]) == ("me", "result", True)

        second, started, go = held(tmp_path)
        client.run("wait", second, invocation_id="again")
        await_file(started)
        os.kill(supervisor_of(client.tree()), signal.SIGKILL)
        with pytest.raises(HayataError):
            client.invocation("again").result(timeout=DEADLINE_S)
        go.write_text("go")
        settled = cli("reconcile", "--agent", "wait", "--node", "wait", "--all", "--retry", "--json").json
        assert [task["node"] for task in settled] == ["wait"]
        assert client.invocation("again").result(timeout=DEADLINE_S) == {"waited": True}
        assert cli("reconcile", "--agent", "wait", "--all", "--retry").err == "no uncertain tasks\n"
        assert cli("recover", "wait").code == 0


def test_stop_ends_the_daemon_and_waits_for_its_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Daemon() as daemon:
        monkeypatch.setenv("HAYATA_SOCKET", "/nowhere")
        cli = Cli(capsys)
        assert cli("--socket", daemon.socket, "stop", "--drain", "0").code == 0
        assert not os.path.exists(daemon.socket)
        daemon.process.wait(DEADLINE_S)
        done = cli("ps", "--socket", daemon.socket)
        assert done.code == 4
        assert done.err.startswith("error: daemon_unavailable: no daemon listens at")
        assert "hint: start one" in done.err


# ------------------------------------------------------------------------------------------------------------
# Output
# ------------------------------------------------------------------------------------------------------------


class Colour(Enum):
    RED = "red"


def test_values_that_json_lacks_are_shown_as_the_help_says() -> None:
    value = {
        "datetime": datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
        "date": date(2026, 1, 2),
        "duration": timedelta(seconds=1.5),
        "bytes": b"\x00\xff",
        "set": {3, 1, 2},
        "tuple": (1, (2,)),
        "decimal": Decimal("1.10"),
        "uuid": uuid.UUID(int=1),
        "enum": Colour.RED,
        "nan": float("nan"),
        "inf": [float("inf"), float("-inf")],
        (1, 2): "tuple key",
        True: "bool key",
    }
    shown = jsonable(value)
    assert json.loads(json.dumps(shown, allow_nan=False)) == {
        "datetime": "2026-01-02T03:04:05+00:00",
        "date": "2026-01-02",
        "duration": 1.5,
        "bytes": "AP8=",
        "set": [1, 2, 3],
        "tuple": [1, [2]],
        "decimal": "1.10",
        "uuid": "00000000-0000-0000-0000-000000000001",
        "enum": "red",
        "nan": "NaN",
        "inf": ["Infinity", "-Infinity"],
        "[1, 2]": "tuple key",
        "True": "bool key",
    }


def test_durations_and_ages_are_short() -> None:
    assert [took(0, end) for end in (0.0123, 3.44, 125)] == ["12 ms", "3.4 s", "2 m 5 s"]
    assert took(None, 1) == "-"
    assert ago(time.time() - 7200) == "2h ago"
    assert ago(None) == "-"


def test_help_of_every_command_is_there(lonely: Cli) -> None:
    overview = lonely("--help")
    assert overview.code == 0
    for text in ("Exit codes", "Completion", "reconcile", "base64"):
        assert text in overview.out
    for name in commands.list_commands(click.Context(commands)):
        shown = lonely(name, "-h")
        assert shown.code == 0
        assert shown.out.startswith(f"Usage: hayata {name}")
        assert "--socket" in shown.out


def test_command_starts_without_the_heavy_packages(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom hayata.cli.root import commands, run_command\n"
        "assert run_command(['ps']) == 4\n"
        "print(sorted({'pydantic', 'rich', 'asyncio', 'cloudpickle', 'lmdb', 'psutil'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment("x", HAYATA_SOCKET=str(tmp_path / "s")),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    """As ``hayata events ID --follow | head -1`` does."""
    path = str(tmp_path / "s")
    event = m.EventInfo(1, "node_started", 1.0, type(m.NIL)(b"\x80"))

    def handler(connection: Connection, ask: m.Ask) -> None:
        if isinstance(ask.request, m.GetInvocation):
            connection.tell(ask.number, info("i"))
        while isinstance(ask.request, m.FollowEvents) and not connection.closed.is_set():
            connection.tell(ask.number, m.EventBatch([event] * 100))

    with FakeServer(path, handler):
        process = spawn(environment("x", HAYATA_SOCKET=path), "events", "i", "--follow")
        with process:
            assert process.stdout is not None
            assert process.stderr is not None
            process.stdout.readline()
            process.stdout.close()
            assert process.wait(DEADLINE_S) == 141
            assert process.stderr.read() == ""


@pytest.mark.parametrize(("no_color", "coloured"), [("", True), ("1", False)])
def test_colour_only_on_a_terminal_and_not_with_no_color(shared: Daemon, no_color: str, coloured: bool) -> None:
    def on_terminal(*arguments: str) -> bytes:
        ours, theirs = pty.openpty()
        environ = {**shared.environ, "NO_COLOR": no_color, "TERM": "xterm"}
        with spawn(environ, *arguments, stdout=theirs) as process:
            os.close(theirs)
            seen = b""
            while True:
                try:
                    part = os.read(ours, 65536)
                except OSError:  # how a terminal says that its other side is closed
                    break
                if not part:
                    break
                seen += part
            process.wait(DEADLINE_S)
        os.close(ours)
        return seen

    assert (b"\x1b[" in on_terminal("agents")) is coloured
    with spawn(shared.environ, "agents") as piped:
        out, _ = piped.communicate(timeout=DEADLINE_S)
    assert "\x1b[" not in out


def test_completion_script_is_offered(shared: Daemon) -> None:
    with spawn({**shared.environ, "_HAYATA_COMPLETE": "bash_source"}) as process:
        out, _ = process.communicate(timeout=DEADLINE_S)
    assert "_HAYATA_COMPLETE=bash_complete" in out
