"""mypy --strict and pyright accept a user's file, and refuse the lines in it that are wrong."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import hayata

ROOT = Path(hayata.__file__).parents[1]
FILE = Path(__file__).with_name("users_file.py")
WRONG = {number for number, line in enumerate(FILE.read_text().splitlines(), 1) if line.endswith("# wrong")}


def run(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=cwd, capture_output=True, text=True, timeout=600, check=False
    )


def test_mypy_strict_accepts_the_users_file_but_for_its_wrong_lines(tmp_path):
    config = tmp_path / "mypy.ini"
    config.write_text(f"[mypy]\nstrict = true\nmypy_path = {ROOT}\ncache_dir = {tmp_path / 'cache'}\n")
    done = run("mypy", "--config-file", str(config), "--follow-imports=silent", str(FILE), cwd=tmp_path)
    refused = {int(found) for found in re.findall(r"^[^:\n]*users_file\.py:(\d+): error", done.stdout, re.M)}
    assert refused == WRONG, done.stdout + done.stderr
    assert done.stdout.count(": error") == len(WRONG), done.stdout


def test_pyright_strict_accepts_the_users_file_but_for_its_wrong_lines(tmp_path):
    shutil.copy(FILE, tmp_path)
    settings = {
        "extraPaths": [str(ROOT)],
        "typeCheckingMode": "strict",
        "pythonVersion": f"{sys.version_info.major}.{sys.version_info.minor}",
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    done = run("pyright", "--outputjson", "--pythonpath", sys.executable, "--project", str(tmp_path), cwd=tmp_path)
    if not done.stdout.startswith("{"):  # it fetches its own program when it runs for the first time
        pytest.skip(f"pyright can't be run here: {(done.stdout + done.stderr)[-300:]}")
    report = json.loads(done.stdout)
    errors = [each for each in report["generalDiagnostics"] if each["severity"] == "error"]
    refused = {each["range"]["start"]["line"] + 1 for each in errors}
    assert refused == WRONG, "\n".join(f"{each['range']['start']['line'] + 1}: {each['message']}" for each in errors)
