"""The work of `bench.steps` on Hayata, embedded, with a store on disk. Prints one line of JSON."""

from __future__ import annotations

import time

import hayata
from bench import app
from bench.measure import (
    INVOCATION_STEPS,
    WARM_UP_STEPS,
    Outcome,
    Stamps,
    Work,
    end_cleanly_on_sigterm,
    outcome,
    parse_work,
    print_json,
    require,
    work_parser,
)

_TIMEOUT_S = 300.0


def run(todo: Work, agent: hayata.Agent) -> Outcome:
    """Do the work with one of the agents of `bench.app`."""
    stamps = Stamps(todo.sequential_steps)
    with hayata.start(agent, data_dir=todo.data_dir) as runtime:
        _finish(runtime.run(agent.id, app.work(WARM_UP_STEPS)), WARM_UP_STEPS)

        begin = time.perf_counter()
        for number in range(todo.invocations):
            first = number * INVOCATION_STEPS
            _finish(
                runtime.run(agent.id, app.work(INVOCATION_STEPS, stamps=stamps.path, first=first)),
                INVOCATION_STEPS,
            )
        sequential_s = time.perf_counter() - begin

        concurrent_s = None
        if todo.concurrent:
            begin = time.perf_counter()
            running = [runtime.run(agent.id, app.work(INVOCATION_STEPS)) for _ in range(todo.concurrent)]
            for invocation in running:
                _finish(invocation, INVOCATION_STEPS)
            concurrent_s = time.perf_counter() - begin
    return outcome(todo, f"Hayata {hayata.__version__}, LMDB", stamps, sequential_s, concurrent_s)


def _finish(invocation: hayata.Invocation, steps: int) -> None:
    done = invocation.result(timeout=_TIMEOUT_S)
    require(done == steps, f"Hayata ran {done} of {steps} steps")


def main() -> None:
    """Do the work, print JSON."""
    parser = work_parser(__doc__)
    parser.add_argument("--async", dest="coroutine", action="store_true", help="steps are coroutines")
    options = parser.parse_args()
    end_cleanly_on_sigterm()
    print_json(run(parse_work(options), app.async_agent if options.coroutine else app.agent))


if __name__ == "__main__":
    main()
