"""The histories of the coordinator's model, with engine, committer, hub, start notes and a real LMDB store."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

from hayata.messages import AgentManifest
from tests.model.test_coordinator_model import Histories
from tests.support.engine_shell import EngineShell


class StoredHistories(Histories):
    """A crash is at any moment: before a batch is written, and between that and its effects."""

    def new_shell(self, manifest: AgentManifest) -> EngineShell:
        return EngineShell(manifest)

    def teardown(self) -> None:
        if not hasattr(self, "shell"):
            return
        try:
            super().teardown()
        finally:
            self.shell.close()


TestStoredHistories = StoredHistories.TestCase
TestStoredHistories.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck), database=None
)
