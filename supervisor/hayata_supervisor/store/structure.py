"""Whether a data file is what LMDB would have written, page by page, without giving it to LMDB.

LMDB trusts its file: one that is damaged can end the process. py-lmdb's verifier reads it as bytes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

_LEAK = "-- a leak"


class Structure(NamedTuple):
    """What was found.

    Attributes:
        problems: What is wrong, in words; at most 200.
        leaks: Pages that belong to nobody: wasted, and harmless.
        readable: False when it is no LMDB file at all, or lacks its meta pages.
    """

    problems: list[str]
    leaks: list[str]
    readable: bool = True


def examine(path: Path) -> Structure:
    """Examine the data file at ``path``, which nobody may be writing.

    Raises:
        OSError: It can't be read.
    """
    from lmdb import verify  # a thousand lines that only this needs

    try:
        found: list[str] = verify.verify(str(path), subdir=False)  # type: ignore[no-untyped-call]
    except verify.VerifyError as error:
        return Structure([str(error)], [], readable=False)
    leaks = [each for each in found if _LEAK in each]
    return Structure([each for each in found if each not in leaks], leaks)


def lacks_only_free_pages(path: Path) -> bool:
    """Whether a data file that is shorter than its count of pages has lost nothing.

    Raises:
        OSError: It can't be read.
    """
    from lmdb import verify

    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        # The function beside it keeps to itself which pages are in use, and of a value that spans several it
        # looks for the first alone. Where a later py-lmdb has no such class, the file is refused.
        walker: Any = getattr(verify, "_Verifier", None)
        if walker is None:
            return False
        walk = walker(file, size)
        try:
            problems = [each for each in walk.verify() if _LEAK not in each]
            return not problems and not any(walk.live[size // walk.psize :])
        except (verify.VerifyError, AttributeError):
            return False
