"""``import hayata`` is light, and every public name is there."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import hayata

HEAVY = [
    "pydantic",
    "pydantic_core",
    "asyncio",
    "click",
    "lmdb",
    "psutil",
    "structlog",
    "cloudpickle",
    "hayata_supervisor",
]
LIGHT = ["messages", "errors", "ids", "framing", "error_info", "values"]


@pytest.mark.parametrize("module", ["hayata", *(f"hayata.{name}" for name in LIGHT)])
def test_what_the_supervisor_imports_is_light(module):
    code = f"import sys, {module}; print([name for name in {HEAVY!r} if name in sys.modules])"
    root = str(Path(hayata.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == "[]"


def test_every_public_name_is_there_and_listed():
    for name in hayata.__all__:
        assert getattr(hayata, name) is not None
        assert name in dir(hayata)
    assert set(hayata.__all__) == {*hayata._HOME_OF, "__version__"}


def test_static_tools_see_the_same_names():
    tree = ast.parse(Path(hayata.__file__).read_text())
    imported = {
        alias.asname: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("hayata.")
        for alias in node.names
    }
    assert imported == {name: f"hayata.{module}.{name}" for name, module in hayata._HOME_OF.items()}


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="Agnet"):
        hayata.Agnet  # noqa: B018
