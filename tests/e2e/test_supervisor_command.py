"""``hayata-supervisor`` as a process, up to the moment at which it is the guard."""

import fcntl
import os
import subprocess
import sys

import pytest

from tests.support.guard_rig import ROOT

COMMAND = [sys.executable, "-m", "hayata_supervisor.main"]


@pytest.fixture
def run(tmp_path):
    (tmp_path / "app.py").touch()
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HAYATA_")}
    environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "supervisor")])

    def run(*arguments, command=COMMAND, **more):
        return subprocess.run(
            [*command, *arguments],
            cwd=tmp_path,
            env={**environ, **more},
            capture_output=True,
            text=True,
            timeout=60,
        )

    return run


def test_help_and_version_are_quick_and_clean(run):
    assert "Exit codes: 0 stopped" in run("--help").stdout
    version = run("--version")
    assert (version.returncode, version.stderr) == (0, "")
    assert version.stdout.startswith("hayata-supervisor")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "no APP is given"),
        (["nosuch.py"], "there is no such file"),
        (["app.py", "--no-such-option"], "No such option"),
        (["app.py", "--log-format", "xml"], "'xml' is not one of"),
        (["app.py", "--config", "no.toml"], "no.toml can't be used"),
        (["app.py", "--socket", "/" + "s" * 200], "the system allows"),
    ],
)
def test_usage_errors_have_a_code_a_hint_and_exit_2(run, tmp_path, arguments, said):
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("hayata-supervisor: invalid_options: ")
    assert said in done.stderr
    assert "hint: " in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / ".hayata").exists()


def test_other_system_is_told_and_nothing_else_happens(run):
    """Where there is no Linux, importing the program must still work."""
    script = (
        "import sys; sys.platform = 'darwin'; import os; del os.pidfd_open; sys.modules['fcntl'] = None;"
        "from hayata_supervisor.main import main; main()"
    )
    done = run("app.py", command=[sys.executable, "-c", script])
    assert done.returncode == 2
    assert "unsupported_platform" in done.stderr
    assert "inline=True" in done.stderr
    assert "Traceback" not in done.stderr


def test_program_becomes_the_guard_with_its_own_pid_and_its_exit_code(run, tmp_path):
    """The data directory is ours here, so the guard ends by itself and says whose it is."""
    directory = tmp_path / ".hayata"
    directory.mkdir()
    with open(directory / "guard.lock", "w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        done = run("app.py", command=["sh", "-c", 'echo $$ >pid; exec "$@"', "sh", *COMMAND])
        assert done.returncode == 5
        assert f"data_dir_in_use: another runtime (process {os.getpid()}) uses {directory}" in done.stderr
        assert os.listdir(directory) == ["guard.lock"]


def test_closed_standard_streams_are_no_trap(run):
    """Descriptors 0 to 2 would else be given to our own files and sockets: the launch, here."""
    script = (
        "import os, hayata_supervisor.main as program;"
        "os.execv = lambda path, command: os._exit(int(command[-1]));"
        "program.main()"
    )
    done = run("app.py", command=["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", script])
    assert done.returncode > 2


def test_usage_error_with_closed_standard_streams_is_still_one(run):
    assert run(command=["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *COMMAND]).returncode == 2


def test_signal_during_configuration_is_kept_for_the_guard(run):
    script = (
        "import os, signal, sys, hayata_supervisor.main as program, hayata_supervisor.config as config;"
        "load = config.load;"
        "config.load = lambda *a: (os.kill(os.getpid(), signal.SIGTERM), load(*a))[1];"
        "program.main()"
    )
    done = run("app.py", "--socket", "h.sock", command=[sys.executable, "-c", script])
    assert done.returncode == 0
    assert "stopping why=SIGTERM" in done.stderr


def test_misspelt_variable_is_pointed_out(run):
    done = run(command=COMMAND, HAYATA_DRAIN_TIMOUT="3", HAYATA_APPS="m:x", HAYATA_DATA_DIR="/sys/hayata")
    assert "HAYATA_DRAIN_TIMOUT in the environment is no setting" in done.stderr
    assert "permission_denied" in done.stderr
    assert done.returncode == 5


def test_module_names_of_the_standard_library_in_the_working_directory_do_no_harm(run, tmp_path):
    for name in ("signal", "socket", "logging", "uuid", "msgspec", "hayata"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong module')")
    command = [sys.executable, "-P", "-m", "hayata_supervisor.main"]
    done = run("app.py", "--data-dir", "/sys/hayata", command=command)
    assert done.returncode == 5
