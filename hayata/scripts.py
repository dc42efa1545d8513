"""The name that a script's module has in the workers.

A script that a person runs is ``__main__`` there and can't be ``__main__`` in a worker, or its ``if __name__
== "__main__"`` block would run. It is imported under a name derived from its path, so that every process
derives the same one, and an Enum of the script that travels is found again on both sides.

Source: ``multiprocessing``, which calls it ``__mp_main__``.
"""

from __future__ import annotations

import os
import re
import sys
import zlib
from types import ModuleType

_PREFIX = "hayata_script_"


def script_module_name(path: str) -> str:
    """Name the module of the script at ``path``: the same for every spelling of the same file."""
    real = os.path.realpath(path)
    stem = re.sub(r"\W", "_", os.path.splitext(os.path.basename(real))[0])
    return f"{_PREFIX}{stem}_{zlib.crc32(os.fsencode(real)):08x}"


def portable_module_name(name: str) -> str:
    """The name under which other processes know module ``name``: it differs for a script that is
    ``__main__``.
    """
    if name == "__main__":
        path = getattr(sys.modules.get(name), "__file__", None)
        if isinstance(path, str):
            return script_module_name(path)
    return name


def imported_module(name: str) -> ModuleType | None:
    """The module that goes by the portable ``name``, if this process has imported it. Never imports."""
    module = sys.modules.get(name)
    if module is None and name.startswith(_PREFIX) and portable_module_name("__main__") == name:
        return sys.modules["__main__"]
    return module
