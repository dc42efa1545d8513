"""A source that was edited a moment ago runs as it stands, whatever bytecode says; and a change of code shows."""

from __future__ import annotations

import os
import py_compile
import subprocess
import sys
import time
from importlib.util import cache_from_source
from pathlib import Path

import pytest

PROGRAM = """
import sys, time
from hayata_supervisor import fresh_code
{rule}
began = time.time_ns() + {later}
sys.path.insert(0, {folder!r})
import edited
print(edited.WHO, fresh_code.fingerprint(began))
"""


def run(folder: Path, *, rule: bool = True, later_s: float = 3600) -> tuple[str, str]:
    """Import ``edited`` in a fresh process: what it says it is, and the fingerprint."""
    fields = {"folder": str(folder), "later": int(later_s * 1e9)}
    text = PROGRAM.format(rule="fresh_code.distrust_young_bytecode()" if rule else "", **fields)
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    said = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True, env=environ).stdout
    who, mark = said.split()
    return who, mark


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A source that changed at a whole second, and has another content of the same size since: only bytecode of the
    first one, from the same second, is there.
    """
    source = tmp_path / "edited.py"
    source.write_text("WHO = 'old'\n")
    second = int(time.time()) - 3600
    os.utime(source, (second, second))
    py_compile.compile(str(source))
    source.write_text("WHO = 'new'\n")
    os.utime(source, (second, second + 0.5))
    return source


def age_bytecode(source: Path, after_s: float) -> None:
    changed = source.stat().st_mtime
    os.utime(cache_from_source(str(source)), (changed + after_s, changed + after_s))


def test_bytecode_of_the_same_second_is_not_believed(source: Path):
    age_bytecode(source, 0.3)
    assert run(source.parent, rule=False)[0] == "old", "Python itself would"
    assert run(source.parent)[0] == "new"


def test_bytecode_that_is_well_younger_than_its_source_is_used(source: Path):
    age_bytecode(source, 10.0)
    assert run(source.parent)[0] == "old", "else each start would compile everything"


def test_no_bytecode_is_written_of_a_source_that_may_still_change(tmp_path: Path):
    source = tmp_path / "edited.py"
    source.write_text("WHO = 'new'\n")
    os.utime(source, (time.time() + 60, time.time() + 60))  # a clock that was set back: young for ever
    assert run(tmp_path, later_s=7200)[0] == "new"
    assert not os.path.exists(cache_from_source(str(source)))
    os.utime(source, (time.time() - 60, time.time() - 60))
    run(tmp_path)
    assert os.path.exists(cache_from_source(str(source)))


def test_fingerprint_changes_with_a_file_and_only_then(source: Path):
    marks = [run(source.parent)[1] for _ in range(2)]
    assert marks[0] == marks[1]
    os.utime(source, (time.time() - 30, time.time() - 30))
    assert run(source.parent)[1] != marks[0]


def test_fingerprint_of_a_file_that_changed_during_the_import_equals_no_other(source: Path):
    os.utime(source)
    marks = {run(source.parent, later_s=-3600)[1] for _ in range(2)}
    assert len(marks) == 2
