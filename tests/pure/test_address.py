import os
import socket
import threading

import pytest

from hayata.address import check_socket_path, connect, default_socket, reachable
from hayata.errors import HayataError


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"HAYATA_SOCKET": "/a/b.sock", "XDG_RUNTIME_DIR": "/run/user/7"}, "/a/b.sock"),
        ({"XDG_RUNTIME_DIR": "/run/user/7"}, "/run/user/7/hayata/hayata.sock"),
        ({"XDG_RUNTIME_DIR": "relative"}, "/tmp/hayata-7/hayata.sock"),
        ({"XDG_RUNTIME_DIR": "", "HAYATA_SOCKET": ""}, "/tmp/hayata-7/hayata.sock"),
        ({}, "/tmp/hayata-7/hayata.sock"),
    ],
)
def test_default_socket(environ, expected):
    assert default_socket(environ, 7) == expected


def test_default_socket_from_a_relative_variable_is_absolute():
    assert default_socket({"HAYATA_SOCKET": "x.sock"}, 7) == os.path.abspath("x.sock")


@pytest.mark.parametrize("path", ["/" + "x" * 106, "/" + "é" * 53])
def test_path_of_107_bytes_is_allowed(path):
    assert check_socket_path(path) == path


@pytest.mark.parametrize("path", ["", "/" + "x" * 107, "/" + "é" * 54, "/a\0b"])
def test_path_that_the_system_can_not_take_is_refused(path):
    with pytest.raises(HayataError) as caught:
        check_socket_path(path)
    assert caught.value.code == "invalid_options"
    assert caught.value.details["limit_bytes"] == 107
    assert caught.value.hint


@pytest.fixture
def long_path(tmp_path):
    directory = tmp_path.joinpath(*["d" * 100] * 2)
    directory.mkdir(parents=True)
    return str(directory / "h.sock")


def test_long_path_is_reached_through_its_directory(long_path):
    before = os.listdir("/proc/self/fd")
    with socket.socket(socket.AF_UNIX) as listener:
        with reachable(long_path) as short:
            listener.bind(short)
        listener.listen()
        with connect(long_path, timeout_s=5.0) as client:
            assert client.gettimeout() == 5.0
            accepted, _ = listener.accept()
            accepted.close()
    assert os.listdir("/proc/self/fd") == before


def test_long_name_is_refused(tmp_path):
    with pytest.raises(HayataError, match="the system allows"), reachable(str(tmp_path / ("n" * 120))):
        pass


@pytest.fixture
def full_listener(tmp_path):
    """A daemon that takes nobody: its queue holds one, and that is full."""
    path = str(tmp_path / "h.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(0)
        with connect(path):
            yield path, listener


def test_full_queue_refuses_at_once_without_a_timeout(full_listener):
    with pytest.raises(BlockingIOError):
        connect(full_listener[0], timeout_s=0)


def test_full_queue_is_waited_for_until_the_timeout(full_listener):
    with pytest.raises(TimeoutError):
        connect(full_listener[0], timeout_s=0.05)


def test_full_queue_that_moves_lets_us_in(full_listener):
    path, listener = full_listener
    accepting = threading.Timer(0.05, lambda: listener.accept()[0].close())
    accepting.start()
    try:
        with connect(path, timeout_s=10.0) as client:
            assert client.getsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO) == 0
    finally:
        accepting.join()


def test_nobody_there_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        connect(str(tmp_path / "no.sock"), timeout_s=1.0)
