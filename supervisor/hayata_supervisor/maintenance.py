"""Maintenance of a store, as a program that does one thing and ends: verify, backup, prune, export.

``python -m hayata_supervisor.maintenance COMMAND --parent PID --data-dir DIR …`` is started by `hayata`, for
a store that no daemon has open, and by the supervisor, with ``--shared``, for its own. It is a process of its
own for three reasons: a damaged file can end whoever gives it to LMDB, a copy takes long, and the map of the
supervisor's store can't grow while a thread reads it.

It says on its stdout what `hayata.messages.FromMaintenance` lists, framed: problems when they are found, then
one answer. It dies with its parent.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from hayata import maintenance
from hayata import messages as m
from hayata.errors import CallerError, HayataError, Unavailable
from hayata.framing import frame
from hayata.values import decode
from hayata_supervisor import failpoints
from hayata_supervisor.core.invocation import info
from hayata_supervisor.core.views import journal_page, tasks
from hayata_supervisor.process import clock, data_dir, prctl
from hayata_supervisor.store import backup, retention
from hayata_supervisor.store.directory import DATA, STORE, StoreLock
from hayata_supervisor.store.exporting import read_invocation
from hayata_supervisor.store.lmdb_store import open_store
from hayata_supervisor.store.verifying import verify_file
from hayata_supervisor.stored import check_stored, restored

_LOWER_PRIORITY = 10


def main(arguments: Sequence[str]) -> int:
    """Do what the command line says; return the exit code, 0 whenever there was an answer."""
    options = _parser().parse_args(arguments)
    failpoints.enter("maintenance")
    if sys.platform == "linux":
        prctl.set_name("hayata-maint")
        prctl.die_with_parent()
        if os.getppid() != options.parent:
            return 1
    if options.shared:
        os.nice(_LOWER_PRIORITY)
    answer: m.StoreReport | m.Pruned | m.Stored | m.Refused
    try:
        path = _existing(Path(options.data_dir))
        with _claimed(path, options):
            match options.command:
                case "verify":
                    answer = m.StoreReport(_verify(path, shared=options.shared))
                case "backup":
                    answer = _back_up(path, options)
                case "export":
                    answer = _export(path, options.name)
                case _:
                    answer = _prune(path, options)
    except HayataError as error:
        details = msgspec.Raw(msgspec.msgpack.encode(error.details))
        answer = m.Refused(m.ErrorInfo(error.code, error.message, error.hint, details))
    _say(answer)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=maintenance.PROGRAM)
    parser.add_argument("command", choices=["verify", "backup", "prune", "export"])
    parser.add_argument("--parent", type=int, required=True, help="whom to die with")
    parser.add_argument("--data-dir", required=True)
    whose = parser.add_mutually_exclusive_group()
    whose.add_argument("--shared", action="store_true", help="another process has the store open")
    whose.add_argument("--private", action="store_true", help="nobody else knows of it: lock nothing")
    parser.add_argument("--to")
    parser.add_argument("--request-id", default="")
    parser.add_argument("--older-than-s", type=float)
    parser.add_argument("--keep", type=int, default=0)
    parser.add_argument("--status", action="append", default=[])
    parser.add_argument("--agent")
    parser.add_argument("--name", default="", help="of an invocation")
    parser.add_argument("--compact", action="store_true")
    return parser


def _say(message: m.FromMaintenance) -> None:
    body = m.encode(message)
    failpoints.message("before_send", body)
    data = memoryview(frame(body, maintenance.CAP_BYTES))
    while data:
        data = data[os.write(1, data) :]
    failpoints.message("after_send", body)


def _existing(path: Path) -> Path:
    """The directory, if there is a store in it."""
    path = Path(os.path.abspath(path))
    if not (path / STORE).is_dir():
        raise CallerError(
            "invalid_options",
            f"there is no store in {path}",
            details={"data_dir": str(path)},
            hint="name the directory that a daemon was started with: --data-dir",
        )
    return path


@contextmanager
def _claimed(path: Path, options: argparse.Namespace) -> Iterator[None]:
    """Have the directory for oneself: neither a guard nor a supervisor is there, and none can start."""
    if options.shared or options.private:
        yield
        return
    try:
        guard_lock = data_dir.claim(str(path))
        try:
            store_lock = StoreLock(path)
            if options.command == "prune":
                store_lock.release()  # the store takes it when it is opened
            try:
                yield
            finally:
                store_lock.release()
        finally:
            guard_lock.release()
    except HayataError as error:
        if error.code == "data_dir_in_use":
            error.hint = "stop its daemon first; or leave --data-dir out, and the daemon does it"
        raise


def _verify(path: Path, *, shared: bool) -> dict[str, int]:
    """Verify the store of a data directory, or a snapshot of one that is in use."""

    def tell(record: str, problem: str) -> None:
        _say(m.StoreProblem(record, problem))

    def check(file: Path) -> dict[str, int]:
        return verify_file(file, fold=check_stored, decode=decode, tell=tell)

    if shared:
        with backup.snapshot(path) as file:
            return check(file)
    try:
        return check(path / STORE / DATA)
    except FileNotFoundError:
        tell(DATA, "it is missing")
        return {}


def _back_up(path: Path, options: argparse.Namespace) -> m.StoreReport:
    note = backup.back_up(
        path,
        Path(options.to),
        shared=options.shared,
        request_id=options.request_id,
        now_s=clock.wall(),
        verify=_verify_apart,
    )
    return m.StoreReport(note.counts, directory=options.to)


def _verify_apart(path: Path) -> dict[str, int]:
    """Verify a copy in another process.

    Raises:
        Unavailable: ``store_corrupt``: it is not whole.
    """
    report = maintenance.run("verify", ["--private", "--data-dir", str(path)])
    assert isinstance(report, m.StoreReport)
    if not report.found:
        return report.counts
    first = report.problems[0]
    raise Unavailable(
        "store_corrupt",
        f"the copy is not whole: {first.record}: {first.problem}",
        details={"record": first.record, "problem": first.problem},
        hint="hayata verify tells more of the store itself",
    )


def _prune(path: Path, options: argparse.Namespace) -> m.Pruned:
    pruned = retention.Pruned(0, 0)
    if options.older_than_s is not None:
        rule = retention.Rule(
            clock.wall() - options.older_than_s, frozenset(options.status), options.agent, options.keep
        )
        store = open_store(path, ballast_bytes=0)
        try:
            pruned = retention.run(retention.prune(store, rule))
        finally:
            store.close()
    if not options.compact:
        return m.Pruned(*pruned)
    lock = StoreLock(path)
    try:
        before, after = backup.compact(path, _verify_apart)
    finally:
        lock.release()
    return m.Pruned(*pruned, bytes_before=before, bytes_after=after)


def _export(path: Path, name: str) -> m.Stored:
    loaded, records = read_invocation(path, name)
    id = loaded.header.id
    return m.Stored(
        info(restored(loaded)),
        journal_page(id, records, 1, maintenance.CAP_BYTES),
        m.TaskList(tasks(id, (record for _, record in records))),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
