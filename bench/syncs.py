"""Is every step really on the disk? Counts each contender's syncs a step, with strace.

    python -m bench.syncs [--no-peers] [--dir D]

It runs the sequential work twice, with 4 and with 8 invocations, and divides the difference: what
starting and stopping cost cancels out. Times under strace mean nothing and are not shown. A contender
that acknowledges steps before they are durable shows less than one sync a step. LMDB's second write of a
commit goes through a descriptor that was opened with O_DSYNC and needs no sync of its own.
"""

from __future__ import annotations

import argparse
import re
import shutil
import tempfile
from collections import Counter

from bench.contenders import Contender, DataDirs, contenders, data_dirs, filesystem, run
from bench.measure import INVOCATION_STEPS, Work, end_cleanly_on_sigterm

_FEW, _MANY = 4, 8
_CALLS = ("fsync", "fdatasync")
_ROW = re.compile(r"^\s*[\d.]+\s+[\d.]+\s+\d+\s+(?P<calls>\d+)\s+(?:\d+\s+)?(?P<name>\w+)$", re.MULTILINE)


def count(contender: Contender, invocations: int, dirs: DataDirs) -> Counter[str]:
    """Count the syncs of all processes of one contender, from its start to its end."""
    with dirs.fresh() as path, tempfile.NamedTemporaryFile("r") as summary:
        before = [
            "strace",
            "-f",
            "--seccomp-bpf",
            "-c",
            "-e",
            f"trace={','.join(_CALLS)}",
            "-o",
            summary.name,
        ]
        run(contender, Work(path, invocations, concurrent=0), before=before)
        text = summary.read()
    counts: Counter[str] = Counter(dict.fromkeys(_CALLS, 0))
    for row in _ROW.finditer(text):
        if row["name"] in counts:
            counts[row["name"]] += int(row["calls"])
    return counts


def main() -> None:
    """Count, print one line for each contender."""
    parser = argparse.ArgumentParser(prog="python -m bench.syncs", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--no-peers", action="store_true", help="Hayata alone")
    parser.add_argument("--dir", default="/var/tmp", help="where the data goes (default /var/tmp)")
    options = parser.parse_args()
    if shutil.which("strace") is None:
        raise SystemExit("bench: strace is not installed")
    end_cleanly_on_sigterm()
    filesystem(options.dir)
    steps = (_MANY - _FEW) * INVOCATION_STEPS
    with data_dirs(options.dir) as dirs:
        for contender in contenders(peers=not options.no_peers):
            few, many = count(contender, _FEW, dirs), count(contender, _MANY, dirs)
            each = ", ".join(f"{(many[name] - few[name]) / steps:.2f} {name}" for name in _CALLS)
            print(f"{contender.name}: {each} a step")


if __name__ == "__main__":
    main()
