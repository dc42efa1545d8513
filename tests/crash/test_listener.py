"""The listening socket's directory, its lock, and its races."""

import os
import socket

import pytest

from hayata.errors import HayataError
from hayata_supervisor.process import listener, locks


@pytest.fixture
def runtime_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def test_default_directory_is_made_private(runtime_dir):
    opened = listener.listen(f"{runtime_dir}/hayata/hayata.sock")
    assert os.stat(runtime_dir / "hayata").st_mode & 0o777 == 0o700
    assert not os.get_inheritable(opened.sock.fileno())
    opened.close()
    assert os.listdir(runtime_dir / "hayata") == []


def test_default_directory_that_was_open_is_closed_to_others(runtime_dir):
    (runtime_dir / "hayata").mkdir(mode=0o777)
    (runtime_dir / "hayata").chmod(0o777)
    listener.listen(f"{runtime_dir}/hayata/hayata.sock").close()
    assert os.stat(runtime_dir / "hayata").st_mode & 0o777 == 0o700


def test_default_directory_that_is_a_link_is_refused(runtime_dir):
    (runtime_dir / "elsewhere").mkdir()
    (runtime_dir / "hayata").symlink_to(runtime_dir / "elsewhere")
    with pytest.raises(HayataError) as caught:
        listener.listen(f"{runtime_dir}/hayata/hayata.sock")
    assert caught.value.code == "permission_denied"
    assert os.listdir(runtime_dir / "elsewhere") == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user's directory")
def test_default_directory_of_somebody_else_is_refused(runtime_dir):
    (runtime_dir / "hayata").mkdir()
    os.chown(runtime_dir / "hayata", 12345, 12345)
    with pytest.raises(HayataError) as caught:
        listener.listen(f"{runtime_dir}/hayata/hayata.sock")
    assert caught.value.code == "permission_denied"


def test_directory_of_the_users_choice_keeps_its_mode(tmp_path):
    (tmp_path / "run").mkdir(mode=0o755)
    listener.listen(f"{tmp_path}/run/h.sock").close()
    assert os.stat(tmp_path / "run").st_mode & 0o777 == 0o755


def test_umask_is_given_back(tmp_path):
    before = os.umask(0o022)
    try:
        listener.listen(f"{tmp_path}/h.sock").close()
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)


def test_socket_without_its_lock_but_with_a_listener_is_in_use(tmp_path):
    """Somebody removed the lock file, or listens without one: the connection tells."""
    path = f"{tmp_path}/h.sock"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(path)
        other.listen(0)
        with pytest.raises(HayataError) as caught:
            listener.listen(path)
        assert caught.value.code == "socket_in_use"
        assert os.path.exists(path)
        assert not os.path.exists(path + ".lock")


def test_socket_whose_daemon_takes_no_connection_is_in_use(tmp_path):
    path = f"{tmp_path}/h.sock"
    with socket.socket(socket.AF_UNIX) as other, socket.socket(socket.AF_UNIX) as first:
        other.bind(path)
        other.listen(0)
        first.connect(path)
        with pytest.raises(HayataError) as caught:
            listener.listen(path)
        assert caught.value.code == "socket_in_use"


def test_exit_after_the_directory_is_gone_is_quiet(tmp_path):
    opened = listener.listen(f"{tmp_path}/run/h.sock")
    for name in os.listdir(tmp_path / "run"):
        os.unlink(tmp_path / "run" / name)
    os.rmdir(tmp_path / "run")
    opened.close()


def test_lock_file_that_its_holder_unlinked_in_the_race_is_taken_anew(tmp_path, monkeypatch):
    """We opened the old file, its holder unlinked it and left: a lock without a name excludes nobody."""
    path = str(tmp_path / "lock")
    real, opened = os.open, []

    def racing(name, *arguments):
        fd = real(name, *arguments)
        if not opened and name == path:
            os.unlink(path)
        opened.append(fd)
        return fd

    monkeypatch.setattr(os, "open", racing)
    lock = locks.take(path)
    found = os.stat(path)
    assert lock.identity == (found.st_dev, found.st_ino)
    assert len(opened) == 2
    lock.release(unlink=True)
    assert os.listdir(tmp_path) == []


def test_release_leaves_a_file_that_another_put_in_its_place(tmp_path):
    path = tmp_path / "lock"
    lock = locks.take(str(path))
    path.unlink()
    path.touch()
    lock.release(unlink=True)
    assert path.exists()


def test_lock_file_that_is_a_link_is_not_followed(tmp_path):
    (tmp_path / "precious").touch()
    (tmp_path / "h.sock.lock").symlink_to(tmp_path / "precious")
    with pytest.raises(HayataError):
        listener.listen(f"{tmp_path}/h.sock")
