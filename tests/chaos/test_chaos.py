"""A short run with all roles, and what the command owes whoever uses it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.chaos.ledger import read
from tests.chaos.plan import ROLES, make_plan
from tests.chaos.runtime import ROOT
from tests.support.eventually import eventually

DEADLINE_S = 240.0


def chaos(*arguments: str) -> subprocess.Popen:
    """Start the command."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "supervisor")])
    return subprocess.Popen(
        [sys.executable, "-m", "tests.chaos", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def homes() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("hchaos-*"))


def test_short_run_hurts_every_role_and_finds_no_violation():
    before = homes()
    run = chaos("--minutes", "0.1", "--seed", "1", "--lanes", "8")
    output, _ = run.communicate(timeout=DEADLINE_S)
    assert run.returncode == 0, output
    assert output.splitlines()[-1] == "violations: 0"
    kills = {line.split()[0]: int(line.split()[1]) for line in output.splitlines()[1 : 1 + len(ROLES)]}
    assert set(kills) == set(ROLES)
    assert all(kills.values()), output
    invocations = re.search(r"^invocations acknowledged +(\d+)$", output, re.MULTILINE)
    assert invocations is not None
    assert int(invocations[1]) > 20, output
    assert homes() == before


def test_interrupt_ends_everything_and_leaves_nothing():
    before = homes()
    run = chaos("--minutes", "5", "--seed", "2")
    try:
        home = eventually(lambda: next(iter(homes() - before), None), "a directory")
        eventually(lambda: len(read(home / "faults")) > 5, "faults", timeout_s=60.0)
        run.send_signal(signal.SIGINT)
        output, _ = run.communicate(timeout=DEADLINE_S)
    finally:
        run.kill()
        run.wait()
    assert run.returncode == 130, output
    assert output.splitlines()[-1] == "interrupted"
    assert homes() == before
    # The guard of the whole test run, in conftest.py, looks for processes.


def test_same_seed_prints_the_same_plan_and_another_seed_another():
    plans = []
    for seed in ("7", "7", "8"):
        run = chaos("--minutes", "0.5", "--seed", seed, "--plan")
        plans.append(run.communicate(timeout=DEADLINE_S)[0])
    assert plans[0] == plans[1] != plans[2]
    assert len(plans[0].splitlines()) > 50


@pytest.mark.parametrize("roles", [ROLES, ("edge",), ("supervisor", "guard")])
def test_plan_kills_each_wanted_role_and_no_other(roles: tuple[str, ...]):
    plan = make_plan(3, 6.0, roles)
    assert {fault.role for fault in plan if fault.kind == "kill"} == set(roles)
    assert {fault.role for fault in plan} == set(roles)
    assert [fault.at_s for fault in plan] == sorted(fault.at_s for fault in plan)
    assert all(fault.at_s < 6.0 for fault in plan)


def test_five_minutes_plan_more_than_a_thousand_kills():
    assert sum(fault.kind == "kill" for fault in make_plan(1, 300.0)) > 1100


@pytest.mark.parametrize("arguments", [("--roles", "edge,king"), ("--minutes", "soon")])
def test_bad_arguments_are_usage_errors(arguments: tuple[str, ...]):
    run = chaos(*arguments)
    output, _ = run.communicate(timeout=DEADLINE_S)
    assert run.returncode == 2, output
    assert arguments[1].split(",")[-1] in output
