"""The loop: whom it calls, and whom it must not call any more."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from hayata_supervisor.process.reactor import Reactor


@pytest.fixture(params=[False, True], ids=["epoll", "poll"])
def reactor(request: pytest.FixtureRequest) -> Iterator[Reactor]:
    reactor = Reactor(forks=request.param)
    yield reactor
    reactor.close()


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_descriptor_is_called_for_what_it_is_watched_for(reactor: Reactor, pair: tuple[socket.socket, socket.socket]):
    ours, theirs = pair
    called: list[str] = []
    reactor.watch_read(ours.fileno(), lambda: called.append("read"))
    reactor.turn(0)
    reactor.watch_write(ours.fileno(), lambda: called.append("write"))
    reactor.turn(0)
    theirs.send(b"x")
    reactor.turn(0)
    reactor.unwatch_write(ours.fileno())
    reactor.turn(0)
    assert called == ["write", "read", "write", "read"]


def test_end_of_the_peer_is_news_for_reader_and_writer(reactor: Reactor, pair: tuple[socket.socket, socket.socket]):
    ours, theirs = pair
    called: list[str] = []
    reactor.watch_read(ours.fileno(), lambda: called.append("read"))
    theirs.close()
    reactor.turn(0)
    reactor.unwatch_read(ours.fileno())
    reactor.watch_write(ours.fileno(), lambda: called.append("write"))
    reactor.turn(0)
    assert called == ["read", "write"]


def test_descriptor_that_was_unwatched_in_this_turn_is_not_called(reactor: Reactor):
    pairs = [socket.socketpair() for _ in range(2)]
    called: list[int] = []

    def watch(number: int) -> None:
        def call() -> None:
            called.append(number)
            reactor.unwatch_read(pairs[1 - number][0].fileno())

        reactor.watch_read(pairs[number][0].fileno(), call)
        pairs[number][1].send(b"x")

    for number in range(2):
        watch(number)
    reactor.turn(0)
    assert len(called) == 1
    for pair in pairs:
        for sock in pair:
            sock.close()


def test_number_that_is_another_descriptors_by_now_is_not_called_for_what_the_first_had(reactor: Reactor):
    """Both are readable; whoever is called first closes the other, whose number a quiet descriptor gets."""
    pairs = [socket.socketpair() for _ in range(2)]
    called: list[str] = []
    quiet: list[tuple[int, int]] = []

    def watch(number: int) -> None:
        def call() -> None:
            called.append("own")
            other = pairs[1 - number][0]
            fd = other.fileno()
            reactor.unwatch_read(fd)
            other.close()
            read, write = os.pipe()
            assert read == fd
            quiet.append((read, write))
            reactor.watch_read(read, lambda: called.append("stranger"))
            reactor.unwatch_read(pairs[number][0].fileno())

        reactor.watch_read(pairs[number][0].fileno(), call)
        pairs[number][1].send(b"x")

    for number in range(2):
        watch(number)
    reactor.turn(0)
    assert called == ["own"]
    os.write(quiet[0][1], b"x")
    reactor.turn(0)
    assert called == ["own", "stranger"]
    for fd in quiet[0]:
        os.close(fd)
    for pair in pairs:
        for sock in pair:
            sock.close()


def test_unwatching_what_is_closed_or_was_never_watched_is_harmless(
    reactor: Reactor, pair: tuple[socket.socket, socket.socket]
):
    ours, _ = pair
    fd = ours.fileno()
    reactor.unwatch_read(fd)
    reactor.watch_read(fd, lambda: None)
    ours.close()
    reactor.unwatch_read(fd)
    reactor.unwatch_read(fd)
    reactor.unwatch_write(fd)


def test_timers_come_in_order_and_not_after_their_cancel(reactor: Reactor):
    called: list[str] = []
    reactor.call_later(0.002, lambda: called.append("second"))
    reactor.call_later(0.001, lambda: called.append("first"))
    reactor.call_later(0.0, lambda: called.append("never")).cancel()
    reactor.call_later(0.003, reactor.stop)
    reactor.run()
    assert called == ["first", "second"]
