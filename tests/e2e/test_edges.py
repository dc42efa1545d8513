"""Executions with edges as users see them: inline and with processes, streams, ``hayata show``, export and verify."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import hayata
from hayata import Agent, Finish, HayataError, Next, Node, Reduce, Runtime

WAIT_S = 60.0


def square(state, ctx):
    ctx.stream({"edge": ctx.edge})
    if ctx.input == "bad":
        raise ValueError("no number")
    return {"n": ctx.input**2, "pid": os.getpid()}


async def square_later(state, ctx):
    return {"n": ctx.input**2}


def add_up(results, ctx):
    return {"total": sum(each["n"] for each in results if each), "errors": sorted(ctx.errors)}


def edges_of(given):
    if given == "raise":
        raise LookupError("no edges today")
    return given


def policy(context):
    if context.step == 0:
        return Next(context.input["node"], context.input["edges"])
    return Finish({**context.state, "parallel": context.parallel_results})


agent = Agent(
    id="squares",
    nodes=[
        Node(square, edges=edges_of, reduce=add_up),
        Node(square_later, name="later", edges=edges_of, reduce=add_up),
        Node(square, name="partial", edges=edges_of, reduce=Reduce(add_up, partial=True)),
        Node(square, name="fixed", edges=[1, 2, 3], reduce="tests.e2e.test_edges:add_up"),
    ],
    decision_policy=policy,
)


@pytest.fixture(scope="module", params=["processes", "inline"])
def runtime(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    data_dir = tmp_path_factory.mktemp("data")
    with hayata.start(agent, data_dir=data_dir, inline=request.param == "inline") as runtime:
        yield runtime


def call(runtime: Runtime, node: Any, edges: Any = None) -> Any:
    return runtime.call("squares", {"node": node, "edges": edges}, timeout=WAIT_S)


def failure(runtime: Runtime, node: str, edges: Any) -> HayataError:
    with pytest.raises(HayataError) as failed:
        call(runtime, node, edges)
    return failed.value


@pytest.mark.parametrize(
    ("node", "edges", "total"),
    [
        ("square", [1, 2, 3], 14),
        ("later", [1, 2, 3], 14),
        ("square", [], 0),
        ("fixed", None, 14),
        ("later", list(range(150)), sum(n * n for n in range(150))),
    ],
)
def test_edges_are_reduced(runtime: Runtime, node: str, edges: list[int], total: int):
    assert call(runtime, node, edges) == {"total": total, "errors": [], "parallel": None}


def test_two_branches_with_edges(runtime: Runtime):
    result = call(runtime, ["square", "later"], [1, 2])
    assert [each["total"] for each in result["parallel"]] == [5, 5]


def test_partial_reduction(runtime: Runtime):
    assert call(runtime, "partial", [2, "bad", 3])["errors"] == [1]


@pytest.mark.parametrize(
    ("edges", "code"), [("raise", "invalid_edges"), (7, "invalid_edges"), ([1] * 1001, "invalid_edges")]
)
def test_bad_edges_fail_the_invocation(runtime: Runtime, edges: Any, code: str):
    error = failure(runtime, "square", edges)
    assert error.code == code
    assert error.details.get("type") == ("LookupError" if edges == "raise" else None)


def test_failed_edge_is_named(runtime: Runtime):
    error = failure(runtime, "square", [1, "bad"])
    assert (error.code, error.message) == ("node_exception", "edge 1 of square: ValueError: no number")


def test_events_of_edges_tell_which(runtime: Runtime):
    invocation = runtime.run("squares", {"node": "square", "edges": [1, 2]}, stream=True)
    events = list(invocation.events())
    of_edges = [(event.type, event.data["edge"]) for event in events if "edge" in event.data]
    assert sorted(of_edges) == sorted(
        (kind, edge) for kind in ("node_started", "node_partial_result", "node_completed") for edge in (0, 1)
    )
    chunks = [event.data for event in events if event.type == "node_partial_result"]
    assert all(chunk["result"] == {"edge": chunk["edge"]} for chunk in chunks)
    assert [event.type for event in events][-3:] == ["node_started", "node_completed", "invocation_completed"]
    assert "edge" not in events[-2].data


def test_journal_with_edges_verifies_and_is_exported(runtime: Runtime):
    invocation = runtime.run("squares", {"node": "partial", "edges": [1, "bad"]})
    invocation.result(timeout=WAIT_S)
    records = [line for line in runtime.export(invocation.id) if "facts" in line]
    facts = [fact for record in records for fact in record["facts"]]
    decided = next(fact for fact in facts if fact["fact"] == "decided")
    assert decided["edges"] == {"partial": [1, "bad"]}
    assert {fact["edge"] for fact in facts if fact["fact"] == "marked"} == {0, 1, -1}
    json.dumps(facts, default=repr)
    assert runtime.verify().problems == ()


def test_agent_of_a_script_reduces_too(tmp_path):
    """What a script defines travels by value: its functions for edges and reduction as well."""
    script = tmp_path / "script.py"
    script.write_text(
        "import hayata\n"
        "from hayata import Agent, Node\n"
        "def one(state, ctx):\n    return {'n': ctx.input}\n"
        "def edges(given):\n    return [1, 2, given]\n"
        "def total(results):\n    return {'total': sum(each['n'] for each in results)}\n"
        "agent = Agent('a', [Node(one, edges=edges, reduce=total)])\n"
        "if __name__ == '__main__':\n"
        f"    with hayata.start(agent, data_dir={str(tmp_path / 'data')!r}) as runtime:\n"
        "        print(runtime.call('a', 4, timeout=60)['total'])\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("7\n", "")
