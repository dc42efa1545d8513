"""No process is signalled by its number where a pidfd can name it: the source itself is read."""

from __future__ import annotations

import ast

from tests.matrix.sites import SOURCE

BY_NUMBER = {
    "doctor/machine.py:check_kernel": "pidfds can't be used, which is what it finds out; a child that is not reaped",
    "failpoints.py:_strike": "a test's own murder, of itself or its parent",
    "node_edge.py:_died": "the group of an edge that is not reaped; the kernel has pidfds of groups only since 6.9",
    "process/pidfd.py:open_child": "no descriptor is left for a pidfd, and the child is not reaped",
    "process/sweep.py:kill_children": "descriptors may be few; children that nobody but this thread reaps",
}
"""Functions that signal by number, and why they may."""

_CALLS = {"os.kill", "os.killpg", "signal.pthread_kill"}


def test_only_those_signal_by_number_that_have_a_reason():
    found = set()
    for path in SOURCE.rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                calls = {ast.unparse(node.func) for node in ast.walk(function) if isinstance(node, ast.Call)}
                if calls & _CALLS:
                    found.add(f"{path.relative_to(SOURCE)}:{function.name}")
    assert found == BY_NUMBER.keys()
