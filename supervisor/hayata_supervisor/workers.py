"""The workers' port: `WorkerTree` for the engine, `WorkerListener` and `Log` for whoever stands on the other
side.

The work is done in `hayata_supervisor.tree`.
"""

from hayata_supervisor.tree import Log, WorkerListener, WorkerTree

__all__ = ["Log", "WorkerListener", "WorkerTree"]
