"""What a durable step can't do without, bare: one LMDB sync commit, and one round trip between processes.

Prints one line of JSON. Knows nothing of Hayata's own store and messages, so that it stays the same
yardstick when they change. Round trips are over a blocking socketpair, with msgspec on both ends and a
length before each frame.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import time
from dataclasses import dataclass

import lmdb
import msgspec

from bench.measure import end_cleanly_on_sigterm, percentile, print_json

_RECORD_BYTES = 200
_MAP_BYTES = 64 * 1024**3


@dataclass(frozen=True)
class Probes:
    """Milliseconds, of single operations one after another."""

    commit_p50_ms: float
    commit_p99_ms: float
    round_trip_p50_ms: float
    round_trip_p99_ms: float


class Question(msgspec.Struct, array_like=True, tag="question"):
    """As much as a step's dispatch carries: an id, a small state, an input."""

    number: int
    execution: str
    state: dict[str, msgspec.Raw]
    input: msgspec.Raw


class Reply(msgspec.Struct, array_like=True, tag="reply"):
    """As much as a step's result carries."""

    number: int
    execution: str
    update: dict[str, msgspec.Raw]


def commits_ms(data_dir: str, count: int) -> list[float]:
    """Time commits of one record, with the flags of Hayata's store: what is committed is on the disk."""
    environment = lmdb.open(
        os.path.join(data_dir, "probe"),
        lib_version=0,
        map_size=_MAP_BYTES,
        mode=0o700,
        sync=True,
        metasync=True,
        writemap=False,
        map_async=False,
        max_dbs=32,
        max_readers=64,
        max_spare_txns=0,
    )
    record = b"r" * _RECORD_BYTES
    times = []
    with environment:
        for number in range(count):
            begin = time.perf_counter_ns()
            with environment.begin(write=True) as transaction:
                transaction.put(number.to_bytes(8, "big"), record)
            times.append((time.perf_counter_ns() - begin) / 1e6)
    return times


def round_trips_ms(count: int) -> list[float]:
    """Time question and reply between this process and a forked one."""
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        ours.close()
        try:
            _answer(theirs)
        finally:
            os._exit(0)
    theirs.close()
    one = msgspec.Raw(msgspec.msgpack.encode(1))
    times = []
    try:
        encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Reply)
        for number in range(count):
            question = Question(number, "0" * 36, {"count": one}, one)
            begin = time.perf_counter_ns()
            _send(ours, encoder.encode(question))
            body = _receive(ours)
            if body is None or decoder.decode(body).number != number:
                raise SystemExit("bench: the probe's child gave a wrong reply")
            times.append((time.perf_counter_ns() - begin) / 1e6)
    finally:
        ours.close()
        os.waitpid(child, 0)
    return times


def _answer(sock: socket.socket) -> None:
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Question)
    while (body := _receive(sock)) is not None:
        question = decoder.decode(body)
        _send(sock, encoder.encode(Reply(question.number, question.execution, question.state)))


def _send(sock: socket.socket, body: bytes) -> None:
    sock.sendall(len(body).to_bytes(4, "big") + body)


def _receive(sock: socket.socket) -> bytes | None:
    data = sock.recv(65536)
    if not data:
        return None
    while len(data) < 4 or len(data) < 4 + int.from_bytes(data[:4], "big"):
        more = sock.recv(65536)
        if not more:
            return None
        data += more
    return data[4:]


def main() -> None:
    """Measure, print JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data_dir", help="an empty directory")
    parser.add_argument("--count", type=int, default=1000, help="operations of each kind")
    options = parser.parse_args()
    end_cleanly_on_sigterm()
    round_trips_ms(options.count // 10 + 1)  # warms both ends
    trips = round_trips_ms(options.count)
    commits = commits_ms(options.data_dir, options.count)
    print_json(
        Probes(
            commit_p50_ms=statistics.median(commits),
            commit_p99_ms=percentile(commits, 99),
            round_trip_p50_ms=statistics.median(trips),
            round_trip_p99_ms=percentile(trips, 99),
        )
    )


if __name__ == "__main__":
    main()
