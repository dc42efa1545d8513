"""The examples run as a person runs them, and say what they promise."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hayata

EXAMPLES = Path(hayata.__file__).parents[1] / "examples"


def run_example(name: str, *arguments: str, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert done.stderr == "" or code
    return done.stdout


def test_hello_gives_the_messages_of_the_quick_start():
    said = run_example("hello.py").splitlines()
    assert said[:4] == [
        "1 invocation_started",
        "2 node_started",
        "3 node_completed",
        "4 invocation_completed",
    ]
    assert said[4] == repr(
        {"messages": [{"role": "ai", "content": "Hello, world!"}, {"role": "user", "content": "Hello"}]}
    )


def test_customers_brings_two_parallel_results_together():
    said = run_example("customers.py")
    assert "{'summary': {'name': 'Ada', 'orders': 2, 'total': 16}}" in said
    assert said.count("completed") == 3


def test_edges_are_reduced_without_the_one_that_failed():
    assert run_example("edges.py").splitlines() == [
        "{'words': 9, 'unread': [2]}",
        "edge 0 completed",
        "edge 1 completed",
        "edge 2 failed",
        "edge 3 completed",
        "reduction completed",
    ]


def test_streaming_prints_the_chunks_in_order():
    first, last = run_example("streaming.py").splitlines()
    assert last == f"result: {first.strip()}"


def test_chat_memory_remembers_over_a_restart():
    assert "You said before: I like tea." in run_example("chat_memory.py")


def test_word_count_agrees_with_wc(tmp_path):
    total = 0
    for number in range(150):
        folder = tmp_path / f"part {number % 3}"
        folder.mkdir(exist_ok=True)
        text = "word écrit\t— 字\n\n" * number + "x" * (number % 2)
        (folder / f"file {number}.txt").write_text(text)
        total += len(text.split())
    (tmp_path / "image.bin").write_bytes(b"\x89PNG\0\0 not text at all")
    said = run_example("word_count.py", str(tmp_path))
    assert f"{total} words in 150 files: the same as wc -w" in said
    assert len(re.findall(r"^\d+ files, \d+ words$", said, re.M)) == 3


def test_word_count_of_an_empty_folder_is_nothing(tmp_path):
    assert "0 words in 0 files: the same as wc -w" in run_example("word_count.py", str(tmp_path))


@pytest.mark.parametrize("arguments", [[], ["/no/such/folder"], ["a", "b"], ["--no-such-option", "."]])
def test_word_count_with_wrong_arguments_is_a_usage_error(arguments):
    run_example("word_count.py", *arguments, code=2)
