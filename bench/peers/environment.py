"""The peers' own virtual environment, made when it is first needed and again when its requirements change."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_ENVIRONMENT = _HERE / ".venv"
_REQUIREMENTS = _HERE / "requirements.txt"
_INSTALLED = _ENVIRONMENT / "installed"


def interpreter() -> str:
    """Path of the environment's Python; the environment is made if it is missing, unfinished or out of date.

    Raises:
        SystemExit: The peers could not be installed.
    """
    python = _ENVIRONMENT / "bin" / "python"
    wanted = f"{sys.version}\n{hashlib.sha256(_REQUIREMENTS.read_bytes()).hexdigest()}\n"
    if _INSTALLED.exists() and _INSTALLED.read_text() == wanted:
        return str(python)
    print("bench: installing the peers in bench/peers/.venv", file=sys.stderr)
    shutil.rmtree(_ENVIRONMENT, ignore_errors=True)
    _run(sys.executable, "-m", "venv", str(_ENVIRONMENT))
    _run(str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check", "-r", str(_REQUIREMENTS))
    _INSTALLED.write_text(wanted)  # last: an environment without it is unfinished
    return str(python)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(
            f"bench: the peers could not be installed\n{done.stdout}{done.stderr}\n"
            "  hint: `python -m bench.steps --no-peers` measures Hayata alone"
        )
