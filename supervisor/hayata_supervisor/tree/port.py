"""What the tree of workers tells, and to whom."""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

import msgspec

from hayata.messages import (
    AgentManifest,
    DecidedFail,
    DecidedFinish,
    DecidedNext,
    ErrorInfo,
    Output,
    Partial,
    PolicyFailed,
    SubstepDone,
    TaskEnd,
    UpdateChecked,
    encode,
)

AgentAnswer: TypeAlias = DecidedNext | DecidedFinish | DecidedFail | PolicyFailed | UpdateChecked
TaskReport: TypeAlias = TaskEnd | Partial | SubstepDone


class WorkerListener(Protocol):
    """Who hears of the workers. Called in the loop's thread; may call the tree from within."""

    def app_loaded(self, index: int, reference: str, manifests: list[AgentManifest]) -> None:
        """An app was imported, for the first time, or by a new forkserver which has found it as it was."""

    def apps_switched(self, loaded: list[tuple[str, list[AgentManifest]]], gone: list[str]) -> None:
        """Another generation of these apps, by reference, has taken over, with fresh workers; ``gone``: ids of agents
        that no app defines any more. What the old generation was asked to decide is not answered.
        """

    def app_failed(self, index: int, reference: str, error: ErrorInfo) -> None:
        """An app can't be imported. Its forkserver is gone; it is tried again unless `load_app` asked for it
        first.
        """

    def agent_answered(self, agent_id: str, answer: AgentAnswer) -> None:
        """One `evaluate` or `check_update` is answered, exactly once; in their order, if none failed."""

    def task_reported(self, agent_id: str, node: str, report: TaskReport) -> None:
        """A task sent a chunk or sub-step, or ended: once for each `dispatch`, its process dead or free."""

    def node_given_up(self, agent_id: str, node: str, error: ErrorInfo) -> None:
        """The node's worker does not stay up, and rests."""

    def node_stopped(self, agent_id: str, node: str, error: ErrorInfo) -> None:
        """The node's worker has ended, and its restart type says that it is not started again."""

    def node_back(self, agent_id: str, node: str) -> None:
        """The worker of a node that was given up, or stopped, is up again."""

    def agent_given_up(self, agent_id: str, error: ErrorInfo) -> None:
        """The agent's worker does not stay up, and rests."""

    def agent_back(self, agent_id: str) -> None:
        """A given-up agent's worker is up again."""


class Log(Protocol):
    """The part of `hayata_supervisor.logs` that the tree writes to. No method blocks."""

    def output(self, output: Output, *, agent: str, node: str) -> None:
        """Lines that user code wrote in a worker."""

    def info(self, event: str, **fields: Any) -> None:
        """A fact."""

    def warning(self, event: str, **fields: Any) -> None:
        """Something that an operator may want to look at."""

    def error(self, event: str, **fields: Any) -> None:
        """Something that an operator has to look at."""


def failure(code: str, message: str, *, hint: str = "", **details: Any) -> ErrorInfo:
    """Make an error of the supervisor's own; ``details`` are plain values."""
    return ErrorInfo(code, message, hint, msgspec.Raw(encode(details)))
