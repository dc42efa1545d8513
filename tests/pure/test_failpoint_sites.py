"""Whatever sends, receives, commits or starts a process has failpoints around it: the source itself is read."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import pytest

from hayata.messages import Beat, EdgeStarted, WorkerReady, encode
from hayata_supervisor import failpoints
from hayata_supervisor.process.blocking import BlockingStream
from hayata_supervisor.process.channel import Channel
from hayata_supervisor.process.descriptors import PacketSender, receive_packet
from hayata_supervisor.process.loop_stream import LoopStream
from hayata_supervisor.process.packets import Packets
from hayata_supervisor.process.reactor import Reactor
from tests.matrix.sites import Module, modules, named_points

EXEMPT = {
    "admin.py:Admin._drive.go_on": "a generator's",
    "doctor/memory.py:oom_policy": "asks systemd, and changes nothing",
    "edge_async.py:OwnSteps.send": "a coroutine's",
    "inline.py:_Partials.send_async": "calls send",
    "logs.py:_write_all": "a line of the log",
    "store/backup.py:_rebuild": "what is written counts when it is renamed",
    "process/channel.py:Channel._send_head": "send and _written have them",
    "process/loop_stream.py:LoopStream._write": "send has them",
    "process/notify.py:ServiceManager.tell": "the service manager's ear, which nobody relies upon",
    "process/reactor.py:Reactor.call_from_thread": "wakes the loop's own thread",
    "process/stderr.py:Stderr._write": "a line of the log",
    "store/lmdb_store.py:LmdbStore._transact_without_bad": "a trial that is thrown away",
    "store/retention.py:run": "a generator's",
    "worker_logging.py:WorkerLogHandler.emit": "a line of the log",
}
"""Functions with sites that need none, and why."""

READY = encode(WorkerReady("edge", "e", 1))
STARTED = encode(EdgeStarted("e", 1))
AROUND_SEND = ["before_send", "after_send"]
AROUND_RECEIVE = ["before_receive", "after_receive"]


def test_every_site_has_its_failpoints():
    unguarded = [site for module in modules() for site in module.unguarded() if site.function not in EXEMPT]
    assert not unguarded, "no failpoint at:\n" + "\n".join(map(str, unguarded))


def test_exemptions_are_needed():
    unguarded = {site.function for module in modules() for site in module.unguarded()}
    assert EXEMPT.keys() <= unguarded


def test_all_kinds_of_sites_are_found():
    """Else the test above would be content with nothing."""
    kinds = [site.kind for module in modules() for site in module.sites()]
    assert {kind: kinds.count(kind) >= 2 for kind in ("send", "receive", "commit", "start")} == dict.fromkeys(
        ("send", "receive", "commit", "start"), True
    )


@pytest.mark.parametrize(
    "text",
    [
        "def f(txn):\n    {before}\n    txn.commit()\n    {after}",
        "def f(env):\n    with env.begin(write=True) as txn:\n        txn.put(b'', b'')\n        {before}\n    {after}",
        "def f(sock):\n    {before}\n    sock.sendall(b'')\n    {after}",
        "def f(sock):\n    {before}\n    sock.send(b'')\n    {after}",
        "def f(new):\n    {before}\n    new.rename('old')\n    {after}",
        "def f():\n    {before}\n    pid = os.fork()\n    {after}",
    ],
)
def test_site_without_one_of_its_failpoints_is_found(text: str):
    point, none = "failpoints.hit('a.b')", "pass"
    found = {
        (before, after): bool([*Module("x.py", text.format(before=before, after=after)).unguarded()])
        for before in (point, none)
        for after in (point, none)
    }
    assert found == {(point, point): False, (point, none): True, (none, point): True, (none, none): True}


def test_what_is_received_has_a_failpoint_behind_it():
    text = "def f(sock):\n    {before}\n    data = sock.recv(1)\n    {after}"
    point = "failpoints.message('before_receive', data)"
    assert not [*Module("x.py", text.format(before="pass", after=point)).unguarded()]
    assert [*Module("x.py", text.format(before=point, after="pass")).unguarded()]


def test_names_say_when():
    for name in named_points():
        _, dot, rest = name.partition(".")
        assert dot, name
        assert rest.startswith(("before_", "after_")), name


# What the channels do for each message


@pytest.fixture
def hits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is come by, and with which message."""
    found: list[str] = []

    def message(when: str, body: bytes | None, fault: object = None, skip: int = 0, /) -> None:
        if body is not None:
            assert body[skip:] in (READY, STARTED, encode(Beat())), "the whole message, and nothing else"
            found.append(when)

    monkeypatch.setattr(failpoints, "message", message)
    return found


class Peer:
    """Hears a channel."""

    def __init__(self, hits: list[str]) -> None:
        self.hits = hits

    def received(self, body: bytes) -> None:
        self.hits.append("received")

    def closed(self, reason: object) -> None:
        """Not here."""


def test_channel_has_failpoints_around_each_message(hits: list[str]):
    reactor = Reactor()
    ours, theirs = socket.socketpair()
    one, other = (Channel(reactor, end, Peer(hits)) for end in (ours, theirs))
    one.send(READY)
    assert hits == ["before_send"], "queued, not written"
    one.flush()
    assert hits == AROUND_SEND
    reactor.turn(1.0)
    assert hits == [*AROUND_SEND, "before_receive", "received", "after_receive"]
    one.close()
    other.close()
    reactor.close()


def test_channel_passes_after_send_only_when_all_is_written(hits: list[str], monkeypatch: pytest.MonkeyPatch):
    large = encode(WorkerReady("edge", "e" * 4_000_000, 1))
    monkeypatch.setattr("tests.pure.test_failpoint_sites.READY", large)
    reactor = Reactor()
    ours, theirs = socket.socketpair()
    one = Channel(reactor, ours, Peer(hits))
    one.send(large)
    one.flush()
    assert hits == ["before_send"], "in parts"
    one.close()
    theirs.close()
    reactor.close()


def test_blocking_stream_has_failpoints_around_each_message(hits: list[str]):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        BlockingStream(ours, 1000).send(READY, before=READY)
        assert hits == ["before_send", "before_send", "after_send"]
        hits.clear()
        reader = BlockingStream(theirs, 1000)
        assert [reader.receive(), reader.receive()] == [READY, READY]
        assert hits == ["before_receive", "before_receive"]  # what follows is up to who has received it


def test_loop_stream_has_failpoints_around_each_message(hits: list[str]):
    async def exchange(ours: socket.socket, theirs: socket.socket) -> None:
        heard = asyncio.Event()

        def received(body: bytes) -> None:
            hits.append("received")
            heard.set()

        LoopStream(ours, 1000, received, heard.set).send(READY)
        LoopStream(theirs, 1000, received, heard.set)
        await asyncio.wait_for(heard.wait(), 10)

    ours, theirs = socket.socketpair()
    with ours, theirs:
        asyncio.run(exchange(ours, theirs))
    assert hits == [*AROUND_SEND, "before_receive", "received", "after_receive"]


def test_packets_have_failpoints_around_each_message(hits: list[str]):
    reactor = Reactor()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    one, other = (
        Packets(reactor, end, Beat, lambda message: hits.append("received"), lambda: None) for end in (ours, theirs)
    )
    assert one.send(Beat())
    reactor.turn(1.0)
    assert hits == [*AROUND_SEND, "before_receive", "received", "after_receive"]
    one.close()
    other.close()
    reactor.close()


def test_descriptor_packets_have_failpoints(hits: list[str]):
    reactor = Reactor()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        PacketSender(reactor, ours).send(STARTED, [])
        assert hits == AROUND_SEND
        receive: Callable[..., object] = receive_packet
        assert receive(theirs, 1) is not None
        assert hits == [*AROUND_SEND, "before_receive"]
    reactor.close()
