"""The guard of the whole run: a process, a temporary file or a socket that a test has left behind fails it.

Whatever the tests start inherits a mark in its environment, and makes its temporary files below a directory
of our own. `tmp_path` lies elsewhere: pytest keeps it for those who want to look.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.crash_site import Daemon, Site

_MARK = "PYTEST_HAYATA_RUN"
_DYING_S = 2.0
_HELPS = "PYTEST_XDIST_WORKER" in os.environ  # one of several processes that share a run: the first one guards
_left_behind = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    for number in (signal.SIGHUP, signal.SIGQUIT):  # whoever runs us behind a script may ignore them, and
        signal.signal(number, signal.SIG_DFL)  # children inherit that; what the tests send must arrive
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if _HELPS:
        return
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    os.environ[_MARK] = uuid.uuid4().hex
    tempfile.tempdir = os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="hrun-")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if _HELPS:
        return
    home = Path(tempfile.gettempdir())
    left = _kept_alive() + [f"temporary {path}" for path in sorted(home.rglob("*"))]
    shutil.rmtree(home, ignore_errors=True)
    session.config.stash[_left_behind] = left
    if left and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_unconfigure() -> None:
    if _HELPS:
        return
    shutil.rmtree(tempfile.gettempdir(), ignore_errors=True)  # of a run without a session: --help


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    left = config.stash.get(_left_behind, [])
    if left:
        terminalreporter.section("left behind by the tests", red=True)
        for line in left:
            terminalreporter.line(line)


def _kept_alive() -> list[str]:
    """Kill what is left of the runtime's processes, and of sockets that listen; name it."""
    due = time.monotonic() + _DYING_S
    while (found := _marked()) and time.monotonic() < due:
        time.sleep(0.02)
    left = []
    for pid in found:
        with suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            left.append(f"process {pid} {command}")
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return left


def _marked() -> list[int]:
    """Pids of all processes but this one that this run has started, directly or not."""
    wanted = f"{_MARK}={os.environ[_MARK]}".encode()
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with suppress(OSError):
                if wanted in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                    found.append(int(name))
    return found


@pytest.fixture
def site() -> Iterator[Site]:
    """A place for daemons, in which nothing may be left."""
    site = Site()
    try:
        yield site
    finally:
        site.close()


@pytest.fixture
def daemon(site: Site) -> Daemon:
    """A daemon that serves the agents of `tests.support.apps.crash`."""
    return site.daemon().start()


def pytest_make_parametrize_id(val: object) -> str | None:
    """Name a function by its name: an address differs between the processes that share a run."""
    return getattr(val, "__name__", None) if callable(val) else None
