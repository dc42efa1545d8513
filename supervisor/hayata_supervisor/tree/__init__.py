"""The supervisor's side of its workers: forkservers, agent workers, node workers and their edges.

`WorkerTree` is what the engine holds; one link for each worker keeps its process alive and knows what was
handed to it; an `Incarnation` is one process with its descriptors. Nothing here knows invocations or the
store: it is told what to run, and it says how that ended. It imports what `core` says of restarts, supervision,
reloads and definitions, `process` and `hayata`, and only the engine imports it.
"""

from hayata_supervisor.tree.port import Log, WorkerListener
from hayata_supervisor.tree.worker_tree import WorkerTree

__all__ = ["Log", "WorkerListener", "WorkerTree"]
