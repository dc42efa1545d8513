"""How fast the edges of a killed node die, with a thousand edges watched, and without the kernel's help.

    python -m bench.watchers [--nodes N] [--edges N] [--samples N] [--pdeathsig]

PDEATHSIG is off (a test switch) unless ``--pdeathsig`` is given, so the supervisor's edge watcher is alone. All
edges are real and busy. Each sample kills one node worker and reads, from the moment of the signal, when each of
its edges is dead, by pidfd; then the node has as many edges again before the next sample.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter

import hayata
from bench import watchers_app
from bench.contenders import data_dirs
from bench.measure import end_cleanly_on_sigterm, percentile
from bench.processes import Deaths, Process, wait_for_tree, with_role
from bench.recovery import kill

AIM_MS = 50.0
_FILL_S = 120.0
_NO_DEATH_SIGNAL = "HAYATA_TEST_NO_PDEATHSIG"


def fill(runtime: hayata.Client, edges: int) -> Process:
    """Give each node as many tasks as it may have edges; return the tree when all are there."""
    root = runtime.tree()
    have = Counter({node.name: len(node.children) for node in with_role(root, "node")})
    for name in watchers_app.node_names():
        for _ in range(edges - have[f"crowd/{name}"]):
            runtime.run("crowd", name)
    wanted = edges * len(watchers_app.node_names())
    return wait_for_tree(runtime.tree, lambda root: len(with_role(root, "edge")) == wanted, _FILL_S)


def measure(runtime: hayata.Client, edges: int, samples: int) -> tuple[list[float], list[float]]:
    """Kill a node ``samples`` times; milliseconds to the death of its last edge, and of each."""
    last_ms, each_ms = [], []
    for number in range(samples):
        root = fill(runtime, edges)
        nodes = with_role(root, "node")
        node = nodes[number % len(nodes)]
        print(f"bench: sample {number + 1} of {samples}: {len(with_role(root, 'edge'))} edges", file=sys.stderr)
        with Deaths(edge.pid for edge in node.children) as deaths:
            begin_s = kill(node)
        last_ms.append((deaths.last_s - begin_s) * 1e3)
        each_ms += [(at_s - begin_s) * 1e3 for at_s in deaths.all_s]
    return last_ms, each_ms


def main() -> None:
    """Measure, print a table."""
    parser = argparse.ArgumentParser(prog="python -m bench.watchers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", type=int, default=20, help="node workers (default 20)")
    parser.add_argument("--edges", type=int, default=50, help="edge workers of each (default 50)")
    parser.add_argument("--samples", type=int, default=20, help="kills (default 20)")
    parser.add_argument("--pdeathsig", action="store_true", help="leave PDEATHSIG on, to compare")
    parser.add_argument("--dir", default="/var/tmp", help="where the data goes (default /var/tmp)")
    options = parser.parse_args()
    if min(options.nodes, options.edges, options.samples) < 1:
        parser.error("--nodes, --edges and --samples must be at least 1")
    end_cleanly_on_sigterm()
    os.environ[watchers_app.NODES], os.environ[watchers_app.EDGES] = str(options.nodes), str(options.edges)
    if not options.pdeathsig:
        os.environ[_NO_DEATH_SIGNAL] = "1"
    with (
        data_dirs(options.dir) as dirs,
        dirs.fresh() as path,
        hayata.start("bench.watchers_app:agent", data_dir=path, drain_timeout_s=0.0) as runtime,
    ):
        last_ms, each_ms = measure(runtime, options.edges, options.samples)
    helper = "on" if options.pdeathsig else "off"
    print(f"{options.nodes * options.edges} edges watched, {options.edges} of the killed node, PDEATHSIG {helper}\n")
    print("| node killed →              | p50, ms | p99, ms | most, ms |")
    print("|----------------------------|---------|---------|----------|")
    for text, values in (("the last of its edges dead", last_ms), ("one of its edges dead", each_ms)):
        figures = f"{percentile(values, 50):7.1f} | {percentile(values, 99):7.1f} | {max(values):8.1f}"
        print(f"| {text:26} | {figures} |")
    verdict = "met" if percentile(last_ms, 50) <= AIM_MS else "not met"
    print(f"\naim ≤ {AIM_MS:.0f} ms (p50 of the last): {verdict}")


if __name__ == "__main__":
    main()
