"""``hayata verify``, ``backup``, ``prune``, ``export``, and the methods behind them, of every face."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import hayata
from hayata import Agent, Finish, Next
from hayata.cli.root import run_command
from hayata.errors import HayataError
from tests.support.daemon import Daemon
from tests.support.eventually import eventually

WAIT_S = 20.0


@pytest.fixture(scope="module")
def shared() -> Iterator[Daemon]:
    with Daemon() as daemon:
        yield daemon


class Cli:
    """Runs command lines in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        self._capsys.readouterr()
        code = run_command(arguments)
        return code, *self._capsys.readouterr()


@pytest.fixture
def cli(shared: Daemon, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    monkeypatch.setenv("HAYATA_SOCKET", shared.socket)
    return Cli(capsys)


def echoed(cli: Cli, name: str, value: str = '{"a": [1, null]}') -> None:
    assert cli("run", "echo", value, "--id", name)[0] == 0


# ----------------------------------------------------------------------------------------------------- verify


def test_verify_says_what_it_has_looked_at_and_exits_with_0(cli: Cli) -> None:
    echoed(cli, "v")
    code, out, err = cli("verify")
    assert (code, err) == (0, "all of it is whole\n")
    rows = dict(line.split(maxsplit=1) for line in out.splitlines()[1:])
    assert int(rows["invocations"]) >= 1
    code, out, _ = cli("verify", "--json")
    report = json.loads(out)
    assert (code, report["found"], report["problems"]) == (0, 0, [])
    assert report["counts"]["records"] >= 4


def test_verify_of_a_directory_in_use_is_refused_and_the_daemon_named(cli: Cli, shared: Daemon) -> None:
    code, out, err = cli("verify", "--data-dir", shared.data_dir)
    assert (code, out) == (5, "")
    assert "data_dir_in_use" in err
    assert "leave --data-dir out" in err


def test_verify_of_a_damaged_store_names_the_record_and_exits_with_1(cli: Cli, shared: Daemon, tmp_path: Path) -> None:
    echoed(cli, "planted", '{"word": "PLANTED"}')
    assert cli("backup", str(tmp_path / "b"))[0] == 0
    data = tmp_path / "b" / "store" / "data.mdb"
    data.write_bytes(data.read_bytes().replace(b"PLANTED", b"planted"))
    code, out, err = cli("verify", "--data-dir", str(tmp_path / "b"))
    assert code == 1
    assert "problem: journal of invocation" in out
    assert "its checksum is wrong" in out
    assert "problems" in err
    code, out, _ = cli("verify", "--data-dir", str(tmp_path / "b"), "--json")
    assert (code, json.loads(out)["found"] > 0) == (1, True)


def test_commands_of_the_store_without_a_daemon_say_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HAYATA_SOCKET", str(tmp_path / "s"))
    lonely = Cli(capsys)
    for words in (["verify"], ["backup", "b"], ["prune", "--older-than", "1d"], ["export", "x"]):
        assert lonely(*words)[0] == 4
    for words in (["verify"], ["backup", "b"], ["prune", "--older-than", "1d"]):
        code, _, err = lonely(*words, "--data-dir", str(tmp_path / "nothing"))
        assert (code, "there is no store" in err) == (2, True)
    assert os.listdir(tmp_path) == []


# ----------------------------------------------------------------------------------------------------- backup


def test_backup_names_its_directory_and_refuses_one_that_is_taken(cli: Cli, tmp_path: Path) -> None:
    echoed(cli, "b")
    target = tmp_path / "b"
    code, out, _ = cli("backup", str(target))
    assert code == 0
    assert f"backup in {target}" in out
    code, _, err = cli("backup", str(target))
    assert (code, "exists already" in err) == (2, True)
    code, out, _ = cli("backup", str(tmp_path / "b2"), "--data-dir", str(target), "--json")
    assert (code, json.loads(out)["directory"]) == (0, str(tmp_path / "b2"))


def test_backup_to_a_relative_directory_goes_where_the_client_is(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli("backup", "here")[0] == 0
    assert (tmp_path / "here" / "store" / "data.mdb").exists()


# ------------------------------------------------------------------------------------------------------ prune


def test_prune_removes_and_says_how_many(cli: Cli) -> None:
    cli("prune", "--older-than", "0s")
    for name in ("p1", "p2", "p3"):
        echoed(cli, name)
    assert cli("run", "fail", "--id", "p4")[0] == 1
    assert cli("prune", "--older-than", "1d")[1] == "0 invocations removed, 0 records\n"
    assert cli("prune", "--older-than", "0s", "--status", "failed")[1].startswith("1 invocations removed")
    assert cli("prune", "--older-than", "0s", "--agent", "nobody")[1].startswith("0 invocations removed")
    code, out, _ = cli("prune", "--older-than", "0s", "--keep", "1", "--json")
    assert (code, json.loads(out)["invocations"]) == (0, 2)
    assert cli("show", "p2")[0] == 5
    assert cli("show", "p3")[0] == 0
    echoed(cli, "p2", '"again"')
    assert cli("export", "p2")[1].count('"kind": "record"') == 4


@pytest.mark.parametrize(
    "words",
    [
        ["prune"],
        ["prune", "--older-than", "soon"],
        ["prune", "--older-than", "-1s"],
        ["prune", "--older-than", "1d", "--keep", "-1"],
        ["prune", "--older-than", "1d", "--status", "running"],
        ["prune", "--compact"],
        ["prune", "--older-than", "1d", "--data-dir", "d", "--socket", "s"],
        ["verify", "--data-dir", "d", "--socket", "s"],
        ["backup"],
    ],
)
def test_wrong_usage_exits_with_2_and_asks_nobody(cli: Cli, words: list[str]) -> None:
    assert cli(*words)[0] == 2


def test_compact_without_a_daemon_shrinks_the_file(cli: Cli, tmp_path: Path) -> None:
    echoed(cli, "c")
    assert cli("backup", str(tmp_path / "b"))[0] == 0
    code, out, _ = cli("prune", "--older-than", "0s", "--compact", "--data-dir", str(tmp_path / "b"))
    assert (code, "file: " in out) == (0, True)
    assert cli("verify", "--data-dir", str(tmp_path / "b"))[0] == 0


# ----------------------------------------------------------------------------------------------------- export


def test_export_prints_header_records_tasks_and_events_as_json_lines(cli: Cli) -> None:
    echoed(cli, "e", '{"n": 7}')
    code, out, err = cli("export", "e")
    assert (code, err) == (0, "")
    lines = [json.loads(line) for line in out.splitlines()]
    kinds = [line["kind"] for line in lines]
    assert kinds == ["header", *["record"] * 4, "task", *["event"] * 4]
    assert (lines[0]["id"], lines[0]["status"], lines[0]["result"]) == ("e", "completed", {"echo": {"n": 7}})
    facts = [fact["fact"] for line in lines if line["kind"] == "record" for fact in line["facts"]]
    assert facts == ["accepted", "started", "decided", "marked", "completed", "finished"]
    assert lines[3]["facts"][0]["update"] == {"echo": {"n": 7}}
    assert lines[5]["update"] == {"echo": {"n": 7}}
    assert [line["sequence"] for line in lines[6:]] == [1, 2, 3, 4]
    assert lines[6]["data"] == {"input": {"n": 7}}
    code, _, err = cli("export", "nobody")
    assert (code, "unknown_invocation" in err) == (5, True)


def test_export_without_a_daemon_prints_the_same_and_changes_nothing(cli: Cli, tmp_path: Path) -> None:
    echoed(cli, "off")
    online = cli("export", "off")[1]
    assert cli("backup", str(tmp_path / "b"))[0] == 0
    before = (tmp_path / "b" / "store" / "data.mdb").read_bytes()
    assert cli("export", "off", "--data-dir", str(tmp_path / "b")) == (0, online, "")
    assert (tmp_path / "b" / "store" / "data.mdb").read_bytes() == before
    for name, exit_code, told in (("nobody", 5, "unknown_invocation"), ("--", 2, "invalid_options")):
        code, _, err = cli("export", "--data-dir", str(tmp_path / "b"), "--", name)
        assert (code, told in err) == (exit_code, True), err
    (tmp_path / "b" / "store" / "data.mdb").write_bytes(before[: len(before) // 2])
    code, _, err = cli("export", "off", "--data-dir", str(tmp_path / "b"))
    assert (code, "store_corrupt" in err) == (5, True)


# ------------------------------------------------------------------------------------------------------ faces


def _double(state: Any) -> dict[str, Any]:
    return {"twice": state["input"] * 2}


def _policy(context: Any) -> Any:
    return Next("double", context.input) if context.last is None else Finish(context.state["twice"])


agent = Agent("double", nodes={"double": _double}, decision_policy=_policy)


def test_async_client_has_the_same_methods(shared: Daemon, tmp_path: Path) -> None:
    async def use() -> None:
        async with hayata.AsyncClient(shared.socket) as client:
            assert await client.call("echo", {"when": timedelta(1)}, invocation_id="async", timeout=WAIT_S)
            lines = await client.export("async")
            assert lines[0]["result"] == {"echo": {"when": timedelta(1)}}  # as it was, not as JSON has it
            assert (await client.verify()).problems == ()
            assert (await client.backup(tmp_path / "b")).counts["invocations"] >= 1
            assert (await client.prune(timedelta(days=1))).invocations == 0

    asyncio.run(use())


def test_inline_runtime_is_maintained_in_the_same_way(tmp_path: Path) -> None:
    with hayata.start(agent, data_dir=tmp_path / "d", inline=True) as runtime:
        for number in range(3):
            assert runtime.call("double", number, timeout=WAIT_S) == 2 * number
        assert runtime.verify().counts["invocations"] == 3
        assert runtime.backup(tmp_path / "b").counts["records"] == 12
        assert len(runtime.export(runtime.invocations()[0].id)) == 10
        assert runtime.prune(0, keep=1).invocations == 2
        assert runtime.verify().counts["invocations"] == 1
        with pytest.raises(HayataError, match="exists already"):
            runtime.backup(tmp_path / "b")
    with hayata.start(agent, data_dir=tmp_path / "b", inline=True) as restored:
        assert sorted(each.result(timeout=WAIT_S) for each in restored.invocations()) == [0, 2, 4]


def test_export_of_a_long_journal_comes_in_pages(tmp_path: Path) -> None:
    def again(context: Any) -> Any:
        return Next("double", "x" * 3000) if context.step < 40 else Finish(None)

    many = Agent("many", nodes={"double": _double}, decision_policy=again)
    with hayata.start(many, data_dir=tmp_path / "d", inline=True, frame_cap_bytes=1 << 16) as runtime:
        invocation = runtime.run("many")
        invocation.result(timeout=WAIT_S)
        lines = runtime.export(invocation.id)
    numbers = [line["number"] for line in lines if line["kind"] == "record"]
    assert numbers == list(range(1, len(numbers) + 1))
    assert len([line for line in lines if line["kind"] == "task"]) == 40
    assert [line["sequence"] for line in lines if line["kind"] == "event"] == list(range(1, 83))
    assert sum(len(json.dumps(line, default=str)) for line in lines) > 2 * (1 << 16)


# ----------------------------------------------------------------------------------------- settings of a start


@pytest.mark.parametrize("inline", [True, False])
def test_start_with_a_retention_removes_what_has_ended_for_that_long(tmp_path: Path, inline: bool) -> None:
    with hayata.start(agent, data_dir=tmp_path, inline=inline) as runtime:
        assert runtime.call("double", 1, invocation_id="old", timeout=WAIT_S) == 2
    with hayata.start(agent, data_dir=tmp_path, inline=inline, retention="1d") as runtime:
        assert [each.id for each in runtime.invocations()] == ["old"]
    with hayata.start(agent, data_dir=tmp_path, inline=inline, retention=timedelta(0)) as runtime:
        eventually(lambda: not runtime.invocations(), "it is removed")
    for wrong in ("soon", -1, True):
        with pytest.raises(HayataError, match="retention"):
            hayata.start(agent, data_dir=tmp_path, inline=inline, retention=wrong)


@pytest.mark.parametrize("place", ["input", "update", "state", "chunk", "decision"])
def test_inline_runtime_has_the_frame_cap_of_a_daemon(tmp_path: Path, place: str) -> None:
    cap = 1 << 16

    def large(state: Any) -> dict[str, Any]:
        if place == "chunk":
            state["hayata_streamer"]({"chunk": "x" * cap})
        return {"grown": ("x" * cap if place == "update" else "x" * (cap // 4))}

    def again(context: Any) -> Any:
        if context.step == 0:
            return Next("large", "x" * cap if place == "decision" else None)
        return Next("large") if place == "state" else Finish(None)

    greedy = Agent("greedy", nodes={"large": large}, decision_policy=again, merge={"grown": "append"})
    with hayata.start(greedy, data_dir=tmp_path, inline=True, frame_cap_bytes=cap) as runtime:
        with pytest.raises(HayataError) as refused:
            runtime.call("greedy", "x" * cap if place == "input" else None, stream=True, timeout=WAIT_S)
        assert refused.value.code == "frame_too_large"
    with pytest.raises(HayataError, match="frame_cap_bytes"):
        hayata.start(greedy, data_dir=tmp_path, inline=True, frame_cap_bytes=10)
