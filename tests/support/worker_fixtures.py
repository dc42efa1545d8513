"""Fixtures of the tests of the workers. One forkserver for a module; fresh workers for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.worker_harness import Supervisor


@pytest.fixture(scope="module")
def _shared_supervisor() -> Iterator[Supervisor]:
    supervisor = Supervisor()
    try:
        supervisor.start()
        yield supervisor
    finally:
        supervisor.close()


@pytest.fixture
def supervisor(_shared_supervisor: Supervisor) -> Iterator[Supervisor]:
    """A supervisor with the workshop loaded; what it forks is gone after the test."""
    try:
        yield _shared_supervisor
    finally:
        _shared_supervisor.release()
