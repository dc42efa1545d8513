"""The points that the source names, and the places that must have one; read from the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import hayata_supervisor

SOURCE = Path(hayata_supervisor.__file__).parent


def named_points() -> list[str]:
    """Names of all points that are written out; those that begin with a dot, and messages', are not among them."""
    return sorted({name for path in SOURCE.rglob("*.py") for name in _names(ast.parse(path.read_text()))})


def _names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "failpoints.hit":
            (name, *_) = node.args
            assert isinstance(name, ast.Constant), ast.unparse(node)
            if not name.value.startswith("."):
                yield name.value
