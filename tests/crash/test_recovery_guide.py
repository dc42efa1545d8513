"""RECOVERY_TESTS.md, run as it stands: each section's commands in bash, its outputs compared.

In an expected output ``…`` stands for any text, and runs of blanks for one another.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.crash_site import Site

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "RECOVERY_TESTS.md"
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_END = "--- end of block ---"
_TIMEOUT_S = 90


class Step(NamedTuple):
    """Commands, and what they print."""

    commands: str
    output: str


def sections() -> dict[str, list[Step]]:
    """Title of each (sub)section that has commands → its steps."""
    found: dict[str, list[Step]] = {}
    for part in re.split(r"^(?=##)", GUIDE.read_text(), flags=re.MULTILINE):
        blocks = _BLOCK.findall(part)
        steps: list[Step] = []
        for language, text in blocks:
            if language == "sh":
                steps.append(Step(text, ""))
            else:
                assert language == "text"
                assert steps, "an output without commands"
                steps[-1] = Step(steps[-1].commands, text)
        if steps:
            title = part.splitlines()[0].lstrip("# ")
            assert title not in found
            found[title] = steps
    return found


SECTIONS = sections()
WORDS = SECTIONS.pop("Before you begin")


@pytest.mark.parametrize("title", SECTIONS)
def test_guide_does_what_it_says(site: Site, title: str):
    steps = [*WORDS, *SECTIONS[title]]
    script = "".join(f"{step.commands}\necho '{_END}'\n" for step in steps)
    script += 'kill -QUIT "$daemon" 2> /dev/null; wait\n'
    environ = {
        **site.environ(),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "TMPDIR": site.home,
        "LC_ALL": "C.UTF-8",
        "NO_COLOR": "1",
    }
    with open(site.log, "w+b") as output:
        subprocess.run(
            ["bash", "-c", script],
            cwd=ROOT,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            timeout=_TIMEOUT_S,
            check=False,
        )
    printed = site.log.read_text().split(f"{_END}\n")
    assert len(printed) == len(steps) + 1, "bash has given up"
    for step, actual in zip(steps, printed, strict=False):
        assert matches(step.output, actual), f"$ {step.commands}\nexpected:\n{step.output}\ngot:\n{actual}"


def matches(expected: str, actual: str) -> bool:
    """Compare outputs line by line."""
    wanted, got = words(expected), words(actual)
    return len(wanted) == len(got) and all(
        re.fullmatch(".+?".join(map(re.escape, line.split("…"))), found)
        for line, found in zip(wanted, got, strict=True)
    )


def words(text: str) -> list[str]:
    """The lines that aren't blank, with single blanks."""
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


def test_every_scenario_that_was_promised_is_in_the_guide():
    titles = " ".join(SECTIONS).lower()
    for subject in (
        "completed result survives",
        "without a result is uncertain",
        "checkpoint is restored",
        "reuses one branch and runs the other",
        "edge worker",
        "node",
        "agent worker and the forkserver",
        "supervisor, the guard, and all at once",
        "second daemon",
        "copied away",
        "reconcile",
        "definition has changed",
        "disk is full",
        "store is removed",
    ):
        assert subject in titles
