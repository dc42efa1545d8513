"""Every system call of commits fails once: ``python -m tests.syscalls``; part of ``make crash``.

The first such call fails, then in another run the second, and so on until a run passes untouched. After each run the
store must hold every batch that was acknowledged, to the byte, and at most the one that was under way beside.
"""

from __future__ import annotations

import itertools
import shutil
import sys
import tempfile
from pathlib import Path

from hayata.errors import HayataError
from hayata_supervisor.store.lmdb_store import open_store
from tests.support.store_child import written
from tests.support.store_rig import run, run_to_end
from tests.support.store_strace import can_strace, strace

CALLS = ("pwrite64", "writev", "fdatasync")
FAULTS = ("signal=SIGKILL", "error=EIO", "error=ENOSPC")
BEFORE, AFTER = 3, 6
"""Batches that are there, and that there shall be."""


def rise(home: Path, call: str, fault: str) -> tuple[int, list[str]]:
    """Have one call after the other fail. Returns how many have, and what was violated."""
    violations: list[str] = []
    run("batches", home / "0", BEFORE)
    for nth in itertools.count(1):
        data_dir = shutil.copytree(home / "0", home / str(nth))
        data = data_dir / "store" / "data.mdb"
        done = run_to_end("batches", data_dir, AFTER, before=strace(f"{call}:{fault}:when={nth}", data))
        acknowledged = [int(line.split()[-1]) for line in done.stdout.splitlines() if line[-1:].isdigit()]
        least = acknowledged[-1] if acknowledged else BEFORE
        found = _found(data_dir)
        if found not in (least, least + 1):
            violations.append(f"{call} {nth}, {fault}: {least} acknowledged, {found} found; {done.stderr[-500:]}")
        shutil.rmtree(data_dir)
        if least == AFTER and done.returncode == 0:
            return nth - 1, violations
    raise AssertionError


def _found(data_dir: Path) -> int | str:
    try:
        store = open_store(data_dir, ballast_bytes=0)
        try:
            return written(store)
        finally:
            store.close()
    except (HayataError, AssertionError) as problem:
        return repr(problem)


def main() -> int:
    """Try all; return 0 when nothing was violated."""
    if not can_strace():
        print("system calls: strace is missing, or may not trace", file=sys.stderr)
        return 2
    count, violations = 0, []
    with tempfile.TemporaryDirectory(prefix="hcalls-") as home:
        for call, fault in itertools.product(CALLS, FAULTS):
            struck, violated = rise(Path(home) / f"{call}-{fault}", call, fault)
            if not struck:
                violated.append(f"{call}, {fault}: nothing was struck")
            count += struck
            violations += violated
    for each in violations:
        print(f"VIOLATED: {each}")
    print(f"system calls: {count} of {', '.join(CALLS)} × {', '.join(FAULTS)}, {len(violations)} violations")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
