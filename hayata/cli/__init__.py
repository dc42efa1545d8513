"""The command line: ``hayata``.

One file for each group of commands, imported when one of them is called, so that a command costs little more
than its answer. Nothing imports this package.
"""

from __future__ import annotations

from hayata.cli.root import main

__all__ = ["main"]
