"""``python -m hayata_supervisor.doctor``: prints one finding a line, as JSON."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from hayata.address import default_socket
from hayata.errors import HayataError
from hayata.messages import Finding
from hayata_supervisor import config as configuration
from hayata_supervisor.doctor import data, findings, machine, memory
from hayata_supervisor.doctor.findings import Check


def examine(arguments: argparse.Namespace) -> Iterator[Finding]:
    """All findings, in the order in which they matter."""
    yield from findings.run([("platform", machine.check_system)])
    settings = configuration.Config.model_construct()
    try:
        settings = configuration.load({}, arguments.config)
        yield findings.ok("settings", "they can be read")
    except HayataError as error:
        yield findings.of_error("settings", error)
    for name in configuration.unknown_variables(os.environ):
        yield findings.warn("settings", f"{name} in the environment is no setting", "see hayata-supervisor --help")
    data_dir = Path(os.path.abspath(arguments.data_dir or settings.data_dir))
    yield from findings.run(_checks(data_dir, _socket(arguments.socket, settings.socket, data_dir)))


def _socket(given: str | None, setting: str, data_dir: Path) -> str:
    """As the daemon chooses it; a runtime that a program embeds listens in its data directory."""
    embedded = data_dir / "hayata.sock"
    if not given and not setting and embedded.is_socket():
        return str(embedded)
    return os.path.abspath(given or setting or default_socket())


def _checks(data_dir: Path, socket: str) -> list[tuple[str, Check]]:
    guard = data.holder(data_dir)
    return [
        ("kernel", machine.check_kernel),
        ("memfd", machine.check_memfd),
        ("ulimit", machine.check_ulimits),
        ("memory limit", lambda: memory.check_memory(guard)),
        ("clock", machine.check_clock),
        ("data dir", lambda: data.check_data_dir(data_dir)),
        ("socket", lambda: data.check_socket(socket)),
        ("daemon", lambda: data.check_daemon(socket, guard)),
        ("store", lambda: data.check_store(data_dir, guard)),
    ]


def main(arguments: Sequence[str]) -> None:
    """Examine and print."""
    parser = argparse.ArgumentParser(prog="hayata_supervisor.doctor")
    parser.add_argument("--data-dir")
    parser.add_argument("--socket")
    parser.add_argument("--config")
    encode = msgspec.json.Encoder().encode
    for finding in examine(parser.parse_args(arguments)):
        sys.stdout.write(encode(finding).decode() + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
