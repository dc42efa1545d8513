"""Real input: count the words of the text files of a folder, in parallel, and check the sum against ``wc
-w``.

    python examples/word_count.py FOLDER

``find`` lists the files. Then, batch after batch, four nodes count a quarter of a batch each, every one in a
process of its own, and ``add_up`` merges what they found into the state: numbers with ``add``, files with
``union``. Each batch is durable when it is done: after a crash of anything the count goes on with the next
one.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TypedDict

import hayata
from hayata import Add, Agent, Context, Decision, Finish, Next, Node, PolicyContext, Rerun, Union

BRANCHES = 4
BATCH = 64


class State(TypedDict, total=False):
    """The shared state."""

    files: list[str]
    counted: Annotated[int, Add]
    words: Annotated[int, Add]
    longest: Annotated[dict[str, int], Union]


def find(state: State, ctx: Context) -> State:
    return {"files": sorted(text_files(Path(ctx.input["folder"])))}


def count(state: State, ctx: Context) -> dict[str, Any]:
    """Count one share of a batch: all branches get the same input, and take every fourth file of it."""
    share = int(ctx.node.removeprefix("count_"))
    return {"counts": {name: len(read(name).split()) for name in ctx.input["batch"][share::BRANCHES]}}


def add_up(state: State, ctx: Context) -> State:
    counts: dict[str, int] = {}
    for result in ctx.input:
        counts.update(result["counts"])
    ctx.stream({"files": state["counted"] + len(counts), "words": state["words"] + sum(counts.values())})
    longest = sorted(counts, key=lambda name: counts[name])[-3:]
    return {
        "counted": len(counts),
        "words": sum(counts.values()),
        "longest": {name: counts[name] for name in longest},
    }


def policy(context: PolicyContext[State]) -> Decision:
    state = context.state
    if context.last is None:
        return Next("find", context.input)
    if context.parallel_results is not None:
        return Next("add_up", context.parallel_results)
    batch = state["files"][state["counted"] : state["counted"] + BATCH]
    if batch:
        return Next([f"count_{share}" for share in range(BRANCHES)], {"batch": batch})
    return Finish({"files": state["counted"], "words": state["words"], "longest": top(state["longest"])})


def top(longest: dict[str, int], number: int = 3) -> list[tuple[str, int]]:
    return sorted(longest.items(), key=lambda item: -item[1])[:number]


def text_files(folder: Path) -> Iterator[str]:
    """All files below a folder that look like text: the first bytes hold no NUL."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                if b"\0" not in file.read(8192):
                    yield str(path)


def read(name: str) -> str:
    return Path(name).read_text("utf-8", errors="surrogateescape")


counters = {f"count_{share}": Node(count, interrupted=Rerun(max_attempts=5)) for share in range(BRANCHES)}
agent = Agent(
    id="word_count",
    nodes={
        "find": Node(find, interrupted=Rerun(max_attempts=5)),
        **counters,
        "add_up": Node(add_up, interrupted=Rerun(max_attempts=5)),
    },
    decision_policy=policy,
    state={"files": [], "counted": 0, "words": 0, "longest": {}},
    state_type=State,
    max_steps=100_000,
)


def words_by_wc(files: list[str]) -> int:
    """What ``wc -w`` says."""
    total = 0
    for start in range(0, len(files), 200):
        chunk = files[start : start + 200]
        said = subprocess.run(
            ["wc", "-w", "--", *chunk],
            env={**os.environ, "LC_ALL": "C.UTF-8"},
            capture_output=True,
            check=True,
        )
        total += int(said.stdout.splitlines()[-1].split()[0])
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description="Count the words of the text files of a folder.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data-dir", help="keep the store here, so that a count that was cut off goes on")
    options = parser.parse_args()
    if not options.folder.is_dir():
        parser.error(f"there is no folder {options.folder}")
    folder = str(options.folder.resolve())
    with (
        tempfile.TemporaryDirectory() as scratch,
        hayata.start(agent, data_dir=options.data_dir or f"{scratch}/data") as runtime,
    ):
        invocation = runtime.run("word_count", {"folder": folder}, stream=True)
        for event in invocation.events():
            if event.type == "node_partial_result":
                print(f"{event.data['result']['files']} files, {event.data['result']['words']} words")
        result = invocation.result(timeout=60)
    for name, number in result["longest"]:
        print(f"{number:>10}  {name}")
    expected = words_by_wc(sorted(text_files(options.folder.resolve())))
    verdict = "the same as wc -w" if result["words"] == expected else f"but wc -w says {expected}"
    print(f"{result['words']} words in {result['files']} files: {verdict}")
    return 0 if result["words"] == expected else 1


if __name__ == "__main__":
    sys.exit(main())
