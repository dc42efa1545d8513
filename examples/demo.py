"""The point of Hayata in half a minute: a real job, in which an edge worker, a node and the supervisor are
killed.

    python examples/demo.py

It counts the words of this machine's Python standard library. On a terminal it shows the process tree beside
the tasks' timeline; otherwise, or with NO_COLOR or CI set, plain lines. It ends with counts from an outside
ledger, which the task bodies write, and with exit code 1 if a completed task ran twice or a word is missing.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from contextlib import nullcontext
from types import FrameType
from typing import Any, NoReturn

from demo_parts import corpus, job
from demo_parts.counts import Counts, count, lines, problems
from demo_parts.ledger import Ledger
from demo_parts.stage import DEADLINE_S, DemoFailed, Stage
from demo_parts.strikes import strike_edge, strike_node, strike_supervisor
from rich.console import Console

import hayata

_STRIKES = {2: strike_edge, 4: strike_node, 6: strike_supervisor}
"""How many batches are counted before each."""


class Viewer:
    """Whoever looks on. Lines get the seconds since the start in front; a live view stays below them."""

    def __init__(self) -> None:
        self.console = Console(highlight=False, soft_wrap=True)
        self.began = time.monotonic()
        self.is_live = (
            self.console.is_terminal
            and not self.console.is_dumb_terminal
            and self.console.encoding == "utf-8"
            and not os.environ.get("NO_COLOR")
            and not os.environ.get("CI")
        )

    def say(self, line: str) -> None:
        """Show a line."""
        line = f"{time.monotonic() - self.began:6.2f} s  {line}"
        try:
            if self.is_live:
                self.console.print(line, style="bold red" if "kill -9" in line else "", markup=False)
            else:
                print(line, flush=True)
        except BrokenPipeError:  # nobody looks on any more; it may be any thread that finds out
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            os.kill(os.getpid(), signal.SIGHUP)


def run(viewer: Viewer, folder: str) -> int:
    """Run the job, kill, count; return the exit code."""
    ledger = Ledger(f"{folder}/ledger")
    outbox = f"{folder}/published"
    # Our own lines say what happens, so the runtime's warnings are left out.
    with hayata.start(job.agent, data_dir=f"{folder}/data", log_level="error") as runtime:
        viewer.say(f"the runtime serves; its guard is process {runtime.pid}")
        invocation = runtime.run("word_count", job.input_for(ledger.path, outbox))
        viewer.say(f"invocation {invocation.id} is accepted: from now on nothing of it can be lost")
        stage = Stage(runtime, invocation, ledger, outbox, viewer.say)
        with _live(viewer, stage):
            for batches, strike in _STRIKES.items():
                _wait_counted(stage, batches)
                strike(stage)
            result = invocation.result(timeout=2 * DEADLINE_S)
            stage.wait_read()
            viewer.say("the job is done")
        counts = count(ledger.story(), invocation.tasks(), stage.told)
    return _verdict(counts, result, stage.published())


def _live(viewer: Viewer, stage: Stage) -> Any:
    if not viewer.is_live:
        return nullcontext()
    from demo_parts.screen import live

    return live(viewer.console, stage, viewer.began)


def _wait_counted(stage: Stage, batches: int) -> None:
    def counted() -> bool:
        bodies = stage.ledger.story().bodies
        return sum(body.node == "add_up" and body.end is not None for body in bodies) >= batches

    stage.wait(counted, f"batch {batches}")


def _verdict(counts: Counts, result: dict[str, Any], published: list[str]) -> int:
    """Print the counts and say whether all is as promised: 0, or 1."""
    print("\nwhat the outside ledger says")
    for line in lines(counts):
        print(line)
    expected = corpus.words_by_wc(result["files"])
    said = {None: "there is no wc here to compare with", result["words"]: "the same as wc -w"}
    print(
        f"\n{result['words']} words in {len(result['files'])} files, {len(published)} sums published:",
        said.get(expected, f"but wc -w says {expected}"),
    )
    found = problems(counts, result, published, expected)
    for problem in found:
        print(f"NOT AS PROMISED: {problem}")
    return 1 if found else 0


def _end(number: int, frame: FrameType | None) -> NoReturn:
    """End as after Ctrl-C, so that everything is cleaned up."""
    raise SystemExit(128 + number)


def main() -> int:
    """Run the demo in a folder that is removed at the end."""
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGHUP, _end)
    viewer = Viewer()
    try:
        with tempfile.TemporaryDirectory(prefix="hayata-demo-") as folder:
            return run(viewer, folder)
    except KeyboardInterrupt:
        print("\nstopped; nothing is left behind", file=sys.stderr)
        return 130
    except (DemoFailed, hayata.HayataError, TimeoutError) as error:
        print(f"the demo failed: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
