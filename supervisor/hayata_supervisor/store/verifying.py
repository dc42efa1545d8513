"""Whether LMDB's structure is whole. Records have checksums of their own (`layout`)."""

from __future__ import annotations

from pathlib import Path

from lmdb.verify import VerifyError, verify


def findings(path: Path) -> list[str]:
    """What is wrong with the structure of a data file, in words; empty when it is whole.

    Reads the file without a map, so that no damage can hurt; about 0.3 s for 100 MB. The file must not be
    open for writing.
    """
    try:
        return list(verify(str(path)))  # type: ignore[no-untyped-call]
    except VerifyError as problem:
        return [str(problem)]
