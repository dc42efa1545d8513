"""Settings and places that can't be: told with a code and a hint before anything is made or touched."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import hayata
from hayata import Client
from tests.support.crash_site import Seen, Site
from tests.support.eventually import eventually
from tests.support.shared_daemon import WAIT_S, app, refused

APP = app("bad_input")


@pytest.mark.parametrize(
    ("arguments", "toml", "said"),
    [
        (["--data-dri", "x"], "", "data-dri"),
        (["--log-format", "xml"], "", "xml"),
        ([], "data_dri = 'x'", "data_dri: there is no such setting"),
        ([], "policy_timeout = 'soon'", "policy_timeout"),
        ([], "[policy_timeout]\n", "policy_timeout"),
        ([], "frame_cap_bytes = 1", "frame_cap_bytes"),
        ([], "this is not toml", "can't be used"),
        (["--socket", "/tmp/" + "s" * 103], "", "107"),
    ],
)
def test_setting_that_cannot_be_ends_with_2_before_anything_is_made(
    site: Site, arguments: list[str], toml: str, said: str
):
    (Path(site.home) / "hayata.toml").write_text(toml)
    before = sorted(os.listdir(site.home))
    done = supervisor_command(site, APP, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("hayata-supervisor: invalid_options: ")
    assert said in done.stderr
    assert "hint: " in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(os.listdir(site.home)) == before


def supervisor_command(site: Site, *arguments: str, before: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*before, sys.executable, "-m", "hayata_supervisor.main", *arguments],
        cwd=site.home,
        env=site.environ(),
        capture_output=True,
        text=True,
        timeout=WAIT_S * 3,
        check=False,
    )


def test_second_daemon_is_refused_and_the_first_goes_on_p16(site: Site):
    """P16, supervisor 613, as the command says it."""
    daemon = site.daemon(APP).start()
    tree = daemon.tree()
    for data_dir, sock, code in (("d", "s2", "data_dir_in_use"), ("d2", "s", "socket_in_use")):
        done = supervisor_command(site, APP, "--data-dir", data_dir, "--socket", f"{site.home}/{sock}")
        assert done.returncode == 5
        assert f"{code}: " in done.stderr
        assert "hint: " in done.stderr
        assert "Traceback" not in done.stderr
    refused("data_dir_in_use", lambda: hayata.start(APP, data_dir=f"{site.home}/d"))
    assert daemon.client.call("echo", 1, timeout=WAIT_S) == {"echo": 1}
    assert not [seen for seen in tree if seen.dead()]
    eventually(lambda: pids(site.marked()) == pids(daemon.tree()), "there is nothing of the others")


def pids(processes: list[Seen]) -> set[int]:
    return {seen.pid for seen in processes}


def not_ours(path: Path) -> None:
    path.mkdir()
    (path / "thesis.txt").write_text("the only copy")


def a_file(path: Path) -> None:
    path.write_text("the only copy")


def below_a_file(path: Path) -> None:
    path.parent.write_text("the only copy")


def another_format(path: Path) -> None:
    (path / "store").mkdir(parents=True)
    (path / "store" / "data.mdb").write_bytes(b"the only copy" * 1000)


@pytest.mark.parametrize(
    ("make", "exit_code", "code"),
    [
        (not_ours, 2, "invalid_options"),
        (a_file, 2, "invalid_options"),
        (below_a_file, 2, "invalid_options"),
        (another_format, 65, "store_corrupt"),
    ],
)
def test_data_directory_that_is_not_ours_is_refused_and_left_alone(
    site: Site, make: Callable[[Path], None], exit_code: int, code: str
):
    place = Path(site.home) / "place"
    make(place / "data" if make is below_a_file else place)
    data_dir = place / "data" if make is below_a_file else place
    before = content(place)
    done = supervisor_command(site, APP, "--data-dir", str(data_dir), "--socket", f"{site.home}/s")
    assert done.returncode == exit_code, done.stderr
    assert f"{code}: " in done.stderr
    assert "hint: " in done.stderr
    assert "Traceback" not in done.stderr
    assert content(place) == before
    assert not os.path.lexists(f"{site.home}/s")
    assert not site.marked()


def content(path: Path) -> dict[str, bytes]:
    """All files below that are not our locks."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return {str(file): file.read_bytes() for file in files if file.name not in ("guard.lock", "store.lock")}


@pytest.mark.parametrize("there", [True, False], ids=["there", "missing"])
def test_data_directory_that_is_read_only_is_refused(site: Site, there: bool):
    place = Path(site.home) / "read-only"
    data_dir = place / "data"
    (data_dir if there else place).mkdir(parents=True)
    before: list[str] = []
    if os.geteuid() == 0:  # root may write anything, but not on a file system that is mounted read-only
        script = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'
        before = ["unshare", "-m", "sh", "-c", script, str(place)]
        if subprocess.run([*before, "true"], capture_output=True, check=False).returncode != 0:
            pytest.skip("may not mount")
    (data_dir if there else place).chmod(0o555)
    arguments = ["--data-dir", str(data_dir), "--socket", f"{site.home}/s"]
    done = supervisor_command(site, APP, *arguments, before=before)
    (data_dir if there else place).chmod(0o755)
    assert done.returncode == 5, done.stderr
    assert "permission_denied: " in done.stderr
    assert "hint: " in done.stderr
    assert "Traceback" not in done.stderr
    assert [path for path in place.rglob("*") if path.is_file()] == []
    assert not os.path.lexists(f"{site.home}/s")


@pytest.mark.parametrize("make", [Path.touch, Path.mkdir])
def test_socket_path_that_something_else_has_is_refused_and_left_alone(site: Site, make: Callable[[Path], None]):
    place = Path(site.home) / "s"
    make(place)
    done = supervisor_command(site, APP, "--data-dir", f"{site.home}/d", "--socket", str(place))
    assert done.returncode == 2
    assert "invalid_options: " in done.stderr
    assert "is not a socket" in done.stderr
    assert place.exists()
    place.unlink() if place.is_file() else place.rmdir()


def test_client_of_a_socket_path_that_is_too_long_is_told(site: Site):
    directory = Path(site.home) / ("d" * 100)
    directory.mkdir()
    with Client(directory / "s") as client:
        refused("daemon_unavailable", client.stats)
    with Client(directory / ("s" * 108)) as client:
        refused("invalid_options", client.stats)
