"""``hayata doctor``: what it finds, on real directories, sockets and daemons, and that it leaves them as they are."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hayata
from hayata import messages as m
from hayata.cli import doctor as command
from hayata.cli.root import run_command
from hayata.framing import frame
from tests.support.daemon import Daemon
from tests.support.fake_server import FakeServer


class Doctor:
    """Runs the command in this process; `found` is by check, each with the worst that was said of it."""

    def __init__(self, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.home = home
        self.data_dir = home / "data"
        self.socket = str(home / "s")
        self._capsys = capsys
        self.found: dict[str, dict[str, str]] = {}

    def __call__(self, *arguments: str, data_dir: Path | str | None = None, socket: str | None = None) -> int:
        self._capsys.readouterr()
        where = ["--data-dir", str(data_dir or self.data_dir), "--socket", socket or self.socket]
        code = run_command(["doctor", "--json", *where, *arguments])
        self.take(self._capsys.readouterr().out)
        return code

    def take(self, output: str) -> None:
        said = json.loads(output)
        order = ["ok", "warn", "fail"]
        checks = said["checks"]
        assert said["status"] == max((check["status"] for check in checks), key=order.index)
        self.found = {check["check"]: check for check in sorted(checks, key=lambda check: order.index(check["status"]))}

    def statuses(self, *checks: str) -> list[str]:
        return [self.found[check]["status"] for check in checks]

    def failures(self) -> list[str]:
        return [name for name, check in self.found.items() if check["status"] == "fail"]


@pytest.fixture
def doctor(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Doctor:
    short = Path(os.path.realpath(tmp_path))
    monkeypatch.chdir(short)  # no hayata.toml there
    return Doctor(short, capsys)


@pytest.fixture(scope="module")
def stopped() -> Iterator[Daemon]:
    """A daemon that has run something and is stopped; its data directory is whole."""
    with Daemon() as daemon:
        with hayata.Client(daemon.socket) as client:
            client.call("echo", {"a": 1}, timeout=20)
        daemon.process.send_signal(signal.SIGTERM)
        daemon.process.wait(30)
        yield daemon


def copied(stopped: Daemon, home: Path) -> Path:
    data_dir = home / "data"
    subprocess.run(["cp", "-a", stopped.data_dir, str(data_dir)], check=True)
    return data_dir


def picture(directory: Path) -> dict[str, Any]:
    """Names, sizes, times and contents of all below a directory."""
    found = {}
    for path in sorted(directory.rglob("*")):
        state = path.lstat()
        body = path.read_bytes() if path.is_file() else b""
        found[str(path)] = (state.st_mode, state.st_size, state.st_mtime_ns, state.st_ino, body)
    return found


def test_doctor_of_a_good_machine_has_no_failure_and_makes_nothing(doctor: Doctor) -> None:
    assert doctor() == 0
    assert doctor.failures() == []
    expected = {"platform", "settings", "kernel", "proc", "memfd", "ulimit nofile", "processes", "memory limit"}
    expected |= {"clock", "data dir", "file system", "disk", "socket", "daemon", "store"}
    assert expected <= doctor.found.keys()
    assert list(doctor.home.iterdir()) == []


def test_doctor_prints_a_line_for_each_check_and_counts(doctor: Doctor, capsys: pytest.CaptureFixture[str]) -> None:
    (doctor.home / "f").touch()
    assert run_command(["doctor", "--data-dir", str(doctor.home / "f"), "--socket", doctor.socket]) == 1
    out, err = capsys.readouterr()
    assert any(line.startswith("ok    platform") for line in out.splitlines())
    assert any(line.startswith("fail  data dir") for line in out.splitlines())
    assert "hint: name another with --data-dir" in out
    assert err.endswith("1 failures\n")


def test_doctor_with_a_running_daemon_leaves_it_as_it_is(doctor: Doctor) -> None:
    with Daemon() as daemon:
        with hayata.Client(daemon.socket) as client:
            client.call("echo", {"a": 1}, timeout=20)
            before = client.tree().children[0].pid
            assert doctor(data_dir=daemon.data_dir, socket=daemon.socket) == 0
            assert doctor.statuses("daemon", "store", "socket", "data dir") == ["ok"] * 4
            assert f"version {hayata.__version__}" in doctor.found["daemon"]["message"]
            assert client.tree().children[0].pid == before
        assert doctor(data_dir=daemon.data_dir, socket=str(doctor.home / "elsewhere")) == 1
        assert doctor.failures() == ["daemon"]
        assert str(daemon.process.pid) in doctor.found["daemon"]["message"]


def test_doctor_of_a_stopped_store_reads_all_of_it_and_changes_no_byte(doctor: Doctor, stopped: Daemon) -> None:
    copied(stopped, doctor.home)
    before = picture(doctor.home)
    assert doctor() == 0
    assert doctor.found["store"]["message"].endswith("all of it whole: 1 invocations")
    assert picture(doctor.home) == before


@pytest.mark.parametrize("how", ["truncated", "emptied", "flipped"])
def test_doctor_of_a_damaged_store_fails(doctor: Doctor, stopped: Daemon, how: str) -> None:
    file = copied(stopped, doctor.home) / "store/data.mdb"
    body = file.read_bytes()
    if how == "flipped":
        place = body.rindex(b"echo")  # in a record
        body = body[:place] + b"\xff" + body[place + 1 :]
    file.write_bytes({"truncated": body[: len(body) // 2], "emptied": b""}.get(how, body))
    before = picture(doctor.home)
    assert doctor() == 1
    assert doctor.failures() == ["store"]
    assert picture(doctor.home) == before


def test_doctor_of_a_daemon_of_another_version_warns(doctor: Doctor) -> None:
    with FakeServer(doctor.socket, lambda connection, ask: None, greeting=frame(m.encode(m.Hello(package="9.9")))):
        os.chmod(doctor.socket, 0o600)
        assert doctor() == 0
    assert doctor.statuses("daemon") == ["warn"]
    assert "9.9" in doctor.found["daemon"]["message"]


@pytest.mark.parametrize("greeting", [frame(m.encode(m.Hello(protocol=99, package="9.9"))), b"HTTP/1.1 400\r\n\r\n"])
def test_doctor_of_what_is_no_daemon_of_ours_fails(doctor: Doctor, greeting: bytes) -> None:
    with FakeServer(doctor.socket, lambda connection, ask: None, greeting=greeting):
        assert doctor() == 1
    assert doctor.failures() == ["daemon"]


def test_doctor_of_a_silent_daemon_fails_in_time(doctor: Doctor) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(doctor.socket)
        listener.listen(1)
        assert doctor() == 1
    assert "does not answer" in doctor.found["daemon"]["message"]


def test_doctor_names_what_is_wrong_with_a_data_dir(doctor: Doctor) -> None:
    doctor.data_dir.mkdir(mode=0o700)
    assert doctor() == 0
    doctor.data_dir.chmod(0o755)
    assert doctor() == 0
    assert doctor.statuses("data dir") == ["warn"]
    (doctor.data_dir / "letters.txt").touch()
    assert doctor() == 1
    assert "letters.txt" in doctor.found["data dir"]["message"]
    (doctor.home / "f").touch()
    assert doctor(data_dir=doctor.home / "f/below") == 1
    assert doctor.statuses("data dir") == ["fail"]


def test_doctor_names_what_is_wrong_with_a_socket(doctor: Doctor) -> None:
    assert doctor(socket=str(doctor.home / ("s" * 120))) == 1
    assert doctor.failures() == ["socket", "daemon"]
    Path(doctor.socket).touch()
    assert doctor() == 1
    assert "is no socket" in doctor.found["socket"]["message"]
    shared = doctor.home / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    assert doctor(socket=str(shared / "s")) == 1
    assert "everybody" in doctor.found["socket"]["message"]
    with FakeServer(str(doctor.home / "open"), lambda connection, ask: None):
        os.chmod(doctor.home / "open", 0o666)
        doctor(socket=str(doctor.home / "open"))
    assert doctor.statuses("socket") == ["warn"]


def test_doctor_finds_an_embedded_runtime_by_its_data_dir(
    doctor: Doctor, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HAYATA_SOCKET", raising=False)
    doctor.data_dir.mkdir(mode=0o700)
    with FakeServer(str(doctor.data_dir / "hayata.sock"), lambda connection, ask: None):
        assert run_command(["doctor", "--json", "--data-dir", str(doctor.data_dir)]) == 0
    doctor.take(capsys.readouterr().out)
    assert doctor.statuses("daemon") == ["warn"], "it says that it is of version fake"


def test_doctor_goes_on_after_bad_settings_and_unknown_ones(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    (doctor.home / "hayata.toml").write_text("drain_timeot = 3\n")
    assert doctor() == 1
    assert doctor.failures() == ["settings"]
    assert "drain_timeot" in doctor.found["settings"]["message"]
    (doctor.home / "hayata.toml").unlink()
    monkeypatch.setenv("HAYATA_DRAIN_TIMEOT", "3")
    assert doctor() == 0
    assert doctor.statuses("settings") == ["warn"]


def test_doctor_sees_low_limits_of_the_user(doctor: Doctor) -> None:
    def lower() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, 1 << 30))
        resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))

    arguments = ["doctor", "--json", "--data-dir", str(doctor.data_dir), "--socket", doctor.socket]
    ended = subprocess.run(
        [sys.executable, "-m", "hayata.cli", *arguments], preexec_fn=lower, capture_output=True, text=True
    )
    doctor.take(ended.stdout)
    assert ended.returncode == 1
    assert doctor.failures() == ["ulimit nofile"]
    assert doctor.statuses("ulimit fsize", "ulimit as") == ["warn", "warn"]


def test_doctor_of_an_installation_without_the_runtime_fails(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_PROGRAM", "hayata_supervisor.no_such_thing")
    assert doctor() == 1
    assert doctor.failures() == ["installation"]
    assert "no_such_thing" in doctor.found["installation"]["message"]
