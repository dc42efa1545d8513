"""What stands in deploy/ agrees with the code: names, exit codes, limits."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
from pathlib import Path

import click
import pytest

from hayata import Node
from hayata.cli.root import Commands
from hayata_supervisor import guard, main, supervisor
from hayata_supervisor.config import Config, unknown_variables
from hayata_supervisor.process import activation
from hayata_supervisor.process.supervised import Limits

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
CODES = {0, 1, guard.EXIT_USAGE, guard.EXIT_REFUSED, guard.EXIT_CORRUPT, guard.EXIT_CRASH_LOOP}


def unit(name: str) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, delimiters=("=",), comment_prefixes=("#",))
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(DEPLOY / name)
    return parser


@pytest.fixture
def service() -> configparser.SectionProxy:
    return unit("hayata.service")["Service"]


def test_unit_does_not_restart_what_would_end_the_same_way(service):
    assert {int(code) for code in service["RestartPreventExitStatus"].split()} == guard._FINAL
    assert service["Restart"] == "on-failure"


def test_unit_gives_the_stop_and_a_hung_supervisor_the_time_that_they_take(service):
    limits, shutdown_s = Limits(), Node(print).shutdown
    assert float(service["TimeoutStopSec"]) > Config().drain_timeout + shutdown_s + 1 + limits.stop_grace
    assert float(service["TimeoutStartSec"]) > Config().start_timeout
    assert float(service["WatchdogSec"]) / 2 > limits.silence
    assert (service["Type"], service["KillMode"], service["OOMPolicy"]) == ("notify", "mixed", "continue")


def test_unit_reloads_by_the_signal_that_the_guard_takes(service):
    assert service["ExecReload"] == "/bin/kill -HUP $MAINPID"
    assert "SIGHUP" in guard._SIGNALS


def test_unit_calls_the_command_as_it_is(service):
    program, *options = service["ExecStart"].split()
    assert Path(program).name == main.command.name or Path(program).name == "hayata-supervisor"
    known = {name for option in main.command.params for name in option.opts}
    assert {option for option in options if option.startswith("--")} <= known
    name, _, _ = service["Environment"].partition("=")
    assert name.startswith("HAYATA_")
    assert unknown_variables({name: "x"}) == []


def test_socket_unit_fits_the_service_and_the_code():
    sock, manifest = unit("hayata.socket")["Socket"], unit("hayata.service")["Unit"]
    assert manifest["Requires"] == "hayata.socket"
    assert sock["FileDescriptorName"] == activation.NAME
    assert sock["SocketUser"] == unit("hayata.service")["Service"]["User"]
    assert "Accept" not in sock


def test_units_pass_the_check_of_systemd(tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze here")
    for name in ("hayata.service", "hayata.socket"):
        text = (DEPLOY / name).read_text().replace("/opt/hayata/bin/hayata-supervisor", "/bin/true")
        (tmp_path / name).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *map(str, sorted(tmp_path.iterdir()))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_system_calls_that_we_live_by_pass_the_filter():
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze here")
    ours = "pidfd_open pidfd_send_signal waitid prctl setsid memfd_create fdatasync mmap mremap fallocate setrlimit"
    ours += " clone fork execve kill umask fcntl flock sendmsg recvmsg socketpair poll epoll_wait copy_file_range"
    allowed: set[str] = set()
    wanted = ["@system-service"]
    while wanted:
        done = subprocess.run(
            ["systemd-analyze", "syscall-filter", wanted.pop()], capture_output=True, text=True, check=True
        )
        names = [line.strip() for line in done.stdout.splitlines()[1:] if line.strip() and "#" not in line]
        wanted += [name for name in names if name.startswith("@")]
        allowed |= set(names)
    assert set(ours.split()) <= allowed


def test_exit_codes_are_documented_as_they_are():
    table = re.findall(r"^\| ([\d, ]+) \|", (ROOT / "docs" / "operations.md").read_text(), re.MULTILINE)
    documented = {int(code) for codes in table for code in codes.split(",")}
    assert documented == CODES | {128 + 15, 128 + 2}
    told = {int(code) for code in re.findall(r"\b(\d+) [a-z]", (main.command.help or "").partition("Exit codes:")[2])}
    assert told == CODES - {1}
    assert {*supervisor._EXIT_CODES.values(), *guard._EXIT_CODES.values()} == guard._FINAL


def test_container_runs_the_guard_itself_as_a_user_with_its_data_on_a_volume():
    lines = (DEPLOY / "Containerfile").read_text()
    assert 'ENTRYPOINT ["hayata-supervisor"]' in lines, "a shell in between would keep the signals"
    assert re.search(r"^USER hayata$", lines, re.MULTILINE)
    settings = dict(re.findall(r"(HAYATA_\w+)=(\S+)", lines))
    assert unknown_variables(settings) == []
    assert f'VOLUME ["{settings["HAYATA_DATA_DIR"]}"]' in lines
    check = re.search(r'HEALTHCHECK .*CMD \["hayata", "(\w+)"\]', lines)
    assert check is not None
    assert check[1] in Commands().list_commands(click.Context(click.Command("hayata")))
    assert (ROOT / re.findall(r"^COPY (\S+) app.py", lines, re.MULTILINE)[0]).exists()


def test_containers_get_the_time_that_a_stop_takes():
    for name, pattern in (("compose.yaml", r"stop_grace_period: (\d+)s"), ("README.md", r"--stop-timeout (\d+)")):
        found = re.search(pattern, (DEPLOY / name).read_text())
        assert found is not None
        assert found[1] == unit("hayata.service")["Service"]["TimeoutStopSec"]
