"""Power cuts, replayed: ``python -m tests.power [--images 2000] [--seed 7]``; part of ``make crash``.

A process commits under strace. After each of its writes and syncs, disks are made up as a power cut could leave
them (`tests.support.store_power`), and the store is opened on each: it must hold every batch that was acknowledged, to
the byte, and at most the one that was under way beside. The control commits with an LMDB that does not sync its
meta page; if none of its disks had lost a batch, the replay would prove nothing.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hayata.errors import HayataError
from hayata_supervisor.store.lmdb_store import open_store
from tests.support.store_child import written
from tests.support.store_power import moments, record
from tests.support.store_rig import run
from tests.support.store_strace import can_strace

BATCHES = 12
"""Of one recording. Each begins with what the last has left."""

SHARES = (0.0, 0.5, 0.5, 1.0)
"""Of the sectors that were not synced: how many of them reach the disk. Which, is chance."""

CONTROL_IMAGES = 400

_MOST_SHOWN = 20


@dataclass
class Verdict:
    """What came of it.

    Attributes:
        images: Disks that were looked at.
        lost: Those on which something that was acknowledged is missing, in words.
        damaged: Those that can't be read, or hold what nobody wrote.
    """

    images: int = 0
    lost: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)

    @property
    def violations(self) -> list[str]:
        """All that is wrong."""
        return self.lost + self.damaged


def cut_power(home: Path, how: str, images: int, seed: int) -> Verdict:
    """Make ``images`` disks, and look at each.

    Args:
        home: An empty directory.
        how: ``batches``, or ``careless`` for the control (`tests.support.store_child`).
        images: How many.
        seed: Of what chance decides.
    """
    verdict = Verdict()
    chance = random.Random(seed)
    data_dir, cut = home / "run", home / "cut"
    run("batches", data_dir, 3)
    stored = 3
    while verdict.images < images:
        shutil.copytree(data_dir, cut)
        before, stored = stored, stored + BATCHES
        calls = record(data_dir, how, stored)
        data = cut / "store" / "data.mdb"
        for acknowledged, disk in moments(data.read_bytes(), calls):
            for share in SHARES[: images - verdict.images]:
                data.write_bytes(disk.after_power_cut(chance, share))
                _look(cut, max(acknowledged, before), verdict)
        shutil.rmtree(cut)
    return verdict


def _look(data_dir: Path, acknowledged: int, verdict: Verdict) -> None:
    verdict.images += 1
    try:
        store = open_store(data_dir, ballast_bytes=0)
        try:
            found = written(store)
        finally:
            store.close()
    except (HayataError, AssertionError) as problem:
        verdict.damaged.append(f"{acknowledged} acknowledged: {problem!r}")
        return
    if found < acknowledged:
        verdict.lost.append(f"{acknowledged} acknowledged, {found} found")
    elif found > acknowledged + 1:
        verdict.damaged.append(f"{acknowledged} acknowledged, {found} found")


def main(arguments: Sequence[str] | None = None) -> int:
    """Replay and print; return 0 when nothing was violated and the control lost something."""
    parser = argparse.ArgumentParser(prog="python -m tests.power", description="Cut the power of a disk's model.")
    parser.add_argument("--images", type=int, default=2000, help="disks to look at")
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args(arguments)
    if not can_strace():
        print("power cut: strace is missing, or may not trace", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="hpower-") as home:
        for name in ("real", "control"):
            (Path(home) / name).mkdir()
        real = cut_power(Path(home) / "real", "batches", options.images, options.seed)
        control = cut_power(Path(home) / "control", "careless", CONTROL_IMAGES, options.seed)
    print("\n".join(_told(real, control)))
    return 0 if control.lost and not real.violations else 1


def _told(real: Verdict, control: Verdict) -> Iterator[str]:
    yield from (f"VIOLATED: {each}" for each in real.violations[:_MOST_SHOWN])
    if not control.lost:
        yield "VIOLATED: the control lost nothing, so this proves nothing"
    yield (
        f"power cut: {real.images} images, {len(real.violations)} violations; control (metasync=False): "
        f"{len(control.lost)} of {control.images} images lost acknowledged commits"
    )


if __name__ == "__main__":
    sys.exit(main())
