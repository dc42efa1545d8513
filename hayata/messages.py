"""Every message, in one file: what travels between the processes and over the client socket.

All are msgspec Structs, encoded as msgpack and framed by `hayata.framing`. Values of users (state, updates, inputs,
results, chunks) are `Value`: bytes that `hayata.values` made and that the supervisor never decodes.

The two families differ in shape. Between our own processes, which are always of one version, messages are arrays
and short. On the client socket they are maps with names, unknown fields are refused, and the first message each way
is a `Hello` with the protocol version.

Source: the one header of messages with a version in rabbitmq/ra and in s6.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

from hayata.framing import DEFAULT_CAP_BYTES

PROTOCOL_VERSION = 1

Value: TypeAlias = msgspec.Raw
"""One encoded user value. Opaque to the supervisor."""

Update: TypeAlias = dict[str, msgspec.Raw]
"""Top-level key → encoded value: a state, or a node's updates to it."""

Strategy: TypeAlias = Literal["one_for_one", "one_for_all", "rest_for_one"]
RestartType: TypeAlias = Literal["permanent", "transient", "temporary"]

NIL = msgspec.Raw(b"\xc0")
"""The encoded None."""


class ErrorInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """An error as data. ``details`` is an encoded mapping; the supervisor fills it only for errors of its own."""

    code: str
    message: str
    hint: str = ""
    details: msgspec.Raw = msgspec.Raw(b"\x80")


class Substep(msgspec.Struct, frozen=True, array_like=True):
    """What a function that was called with ``ctx.step`` has returned. ``key``: its position among those without a
    key of their own, or that key; ``name``: the function's.
    """

    key: int | str
    name: str
    value: Value


# --------------------------------------------------------------------------------------------------------------------
# Manifest: what the forkserver tells the supervisor about an app. Data only, so that S never imports the app.
# --------------------------------------------------------------------------------------------------------------------


class RetryManifest(msgspec.Struct, frozen=True, array_like=True):
    """`hayata.Retry` as data; ``on`` is matched in the worker, so it is not here."""

    max_attempts: int
    backoff_s: float
    backoff_factor: float
    max_backoff_s: float
    jitter: float


class ReduceManifest(msgspec.Struct, frozen=True, array_like=True):
    """How the results of a node's edges are reduced: `hayata.Reduce` as data."""

    timeout_s: float | None
    partial: bool


class NodeManifest(msgspec.Struct, frozen=True, array_like=True):
    """One node.

    ``shutdown_s`` is what its edges have to end with the node: 0 kills them, infinite waits for them.
    ``concurrency`` is the most tasks at once; a sync node has that many edge workers, an async node one.
    ``rerun_attempts``: n is ``interrupted=Rerun(max_attempts=n)``; ``probe_attempts``: n is
    ``Probe(fn, max_attempts=n)``; with both 0 it is ``"uncertain"``. The limits are those that the node's worker
    holds its edges to. ``reduce``: it has edges.
    """

    name: str
    is_async: bool
    concurrency: int
    execution_timeout_s: float | None
    retry: RetryManifest | None
    rerun_attempts: int
    fresh: bool
    max_tasks: int
    shutdown_s: float
    probe_attempts: int = 0
    memory_limit_bytes: int | None = None
    cpu_limit_s: float | None = None
    restart: RestartType = "permanent"
    reduce: ReduceManifest | None = None


class SupervisionManifest(msgspec.Struct, frozen=True, array_like=True):
    """How an agent's workers are restarted: with whom, how often at most, and when."""

    intensity: int
    period_s: float
    backoff_s: float
    max_backoff_s: float
    strategy: Strategy = "one_for_one"


class AgentManifest(msgspec.Struct, frozen=True, array_like=True):
    """One agent. ``state`` is the encoded initial state; ``merge`` names only keys that are not replaced;
    ``definition`` is what `hayata.definition` says of it.
    """

    id: str
    version: str
    nodes: list[NodeManifest]
    state: Update
    merge: dict[str, str]
    max_steps: int
    invocation_timeout_s: float | None
    conversation_memory: bool
    default_session: str | None
    resume: Literal["auto", "manual"]
    max_concurrency: int
    on_failure: Literal["fail", "policy"]
    supervision: SupervisionManifest
    definition: dict[str, str] = {}


# --------------------------------------------------------------------------------------------------------------------
# Workers
# --------------------------------------------------------------------------------------------------------------------


class _Wire(msgspec.Struct, array_like=True, frozen=True):
    """Base of the messages between our own processes."""


class WorkerReady(_Wire, frozen=True, tag="ready"):
    """First message of every worker: F after the import, A, N and R after their prologue, E after its lifespan."""

    role: Literal["forkserver", "agent", "node", "edge", "reducer"]
    incarnation: str
    pid: int
    protocol: int = PROTOCOL_VERSION


class WorkerFailed(_Wire, frozen=True, tag="failed"):
    """The last message of a worker that can't start: F's import, E's lifespan."""

    incarnation: str
    error: ErrorInfo


# S → F, on the descriptor channel, with the child's descriptors: stream, descriptor channel, stdout, stderr.
class Fork(_Wire, frozen=True, tag="fork"):
    """Fork a worker. ``node`` is None for an agent worker."""

    request: int
    agent: str
    node: str | None
    incarnation: str


# F → S
class Manifest(_Wire, frozen=True, tag="manifest"):
    """What the app defines. Follows `WorkerReady`. ``code``: a fingerprint of the files that were imported."""

    agents: list[AgentManifest]
    code: str


class Forked(_Wire, frozen=True, tag="forked"):
    """The worker lives as a child of S with this pid."""

    request: int
    pid: int


class ForkFailed(_Wire, frozen=True, tag="fork_failed"):
    """No worker: the system refused."""

    request: int
    error: ErrorInfo


# S → F and N
class Ping(_Wire, frozen=True, tag="ping"):
    """Say that you live. Asked of the workers that run no user code; one that is silent for too long is killed."""


# F and N → S
class Pong(_Wire, frozen=True, tag="pong"):
    """Answer to `Ping`."""


# S → A
class Evaluate(_Wire, frozen=True, tag="evaluate"):
    """Ask the decision policy. Answered by exactly one of the four below; answers come in the order of the asks."""

    evaluation: int
    invocation_id: str
    state: Update
    input: Value
    step: int
    parallel_results: list[Value] | None
    last: str | list[str] | None
    failure: ErrorInfo | None
    session: str | None
    now: float


class CheckUpdate(_Wire, frozen=True, tag="check_update"):
    """Ask whether ``update`` could be the result of ``node``: a mapping that fits the state's type.

    ``parallel``: of a branch; then any mapping will do, as it is not merged into the state. ``edge``: of an edge; then
    it is not the node's result either.
    """

    check: int
    node: str
    update: Value
    parallel: bool = False
    edge: bool = False


# A → S
class DecidedNext(_Wire, frozen=True, tag="next"):
    """Run these nodes. ``parallel`` is False for ``Next("a")`` and True for ``Next(["a"])``. ``edges``: node → the
    values of its edges, for the nodes that have some.
    """

    evaluation: int
    nodes: list[str]
    parallel: bool
    input: Value
    edges: dict[str, list[Value]] = {}


class DecidedFinish(_Wire, frozen=True, tag="finish"):
    """End the invocation with a result."""

    evaluation: int
    result: Value


class DecidedFail(_Wire, frozen=True, tag="fail"):
    """End the invocation with an error: code ``policy_failed``, ``details.reason`` what the policy gave."""

    evaluation: int
    error: ErrorInfo


class PolicyFailed(_Wire, frozen=True, tag="policy_failed"):
    """The policy raised or returned nonsense."""

    evaluation: int
    error: ErrorInfo


class UpdateChecked(_Wire, frozen=True, tag="update_checked"):
    """Answer to `CheckUpdate`: the update as a mapping, or why it isn't one."""

    check: int
    update: Update | None
    error: ErrorInfo | None


# S → N → E. N reads ``execution_id`` and ``timeout_s`` and forwards the frame as it is.
class RunTask(_Wire, frozen=True, tag="run"):
    """Run the node function once. ``cell``: where the edge notes that it begins; -1: nowhere. ``parallel``: it is a
    branch, so that its update is not merged and needs not fit the state's type. ``probe``: not the node function is
    wanted but its probe, about this execution, which was cut off. ``substeps``: what earlier attempts have stored.
    ``edge``: which edge of the execution this is, with its value as ``input``; -1: it has none.
    """

    execution_id: str
    timeout_s: float | None
    invocation_id: str
    attempt: int
    idempotency_key: str
    session: str | None
    stream: bool
    state: Update
    input: Value
    cell: int = -1
    parallel: bool = False
    probe: bool = False
    substeps: list[Substep] = []
    edge: int = -1


# S → N → R. N forwards the frame as it is.
class ReduceTask(_Wire, frozen=True, tag="reduce"):
    """Make one result of those of an execution's edges, in a process of its own.

    ``results``: in the order of the edges, None where there is none. ``errors``: of the edges that have failed. An edge
    with neither was still pending when the time was up. ``input``: the node's. ``cell`` and ``parallel`` as in
    `RunTask`.
    """

    execution_id: str
    timeout_s: float | None
    invocation_id: str
    attempt: int
    session: str | None
    input: Value
    results: list[Update | None]
    errors: dict[int, ErrorInfo] = {}
    cell: int = -1
    parallel: bool = False


TaskOrder: TypeAlias = RunTask | ReduceTask
"""What a node is given to do; answered with exactly one `TaskEnd`."""


class KillTask(_Wire, frozen=True, tag="kill"):
    """End a task now: its edge is killed (sync) or the coroutine is cancelled, then killed (async).

    Answered by `TaskInterrupted`, or by a result that was already on its way.
    """

    execution_id: str
    reason: str


class DescribeEdges(_Wire, frozen=True, tag="describe_edges"):
    """Say what the edges do. Answered by `EdgesDescribed`."""


class PartialAck(_Wire, frozen=True, tag="partial_ack"):
    """Answer to `Partial` and `SubstepDone`: the chunk has its number, the result is durable; or it was refused."""

    execution_id: str
    number: int
    error: ErrorInfo | None


class StopWorker(_Wire, frozen=True, tag="stop"):
    """Take no more work; N stops its edges and exits. A exits after the evaluation in hand.

    ``reason``, in a word, for the tasks that this cuts off.
    """

    reason: str = "stopped"


# E → N → S. N forwards the frame as it is.
class TaskCompleted(_Wire, frozen=True, tag="completed"):
    """The body returned a mapping that fits."""

    execution_id: str
    edge: str
    update: Update


class TaskFailed(_Wire, frozen=True, tag="task_failed"):
    """The body ended with a failure. ``retryable``: the node's ``Retry.on`` matches. ``began``: False if the body
    could not be given its state or its input, and was not called.
    """

    execution_id: str
    edge: str
    error: ErrorInfo
    retryable: bool
    began: bool = True


class TaskProbed(_Wire, frozen=True, tag="probed"):
    """The probe has no result to give: the body had no effect (``not_done``), or nobody knows. A probe that has one
    says `TaskCompleted`, one that fails `TaskFailed`.
    """

    execution_id: str
    edge: str
    not_done: bool


class Partial(_Wire, frozen=True, tag="partial"):
    """A chunk of ``ctx.stream``; the body waits for the `PartialAck` with the same number."""

    execution_id: str
    edge: str
    number: int
    chunk: Value


class SubstepDone(_Wire, frozen=True, tag="substep"):
    """A result to store; the body waits for the `PartialAck` with the same number, as chunks and these are counted
    together.
    """

    execution_id: str
    edge: str
    number: int
    substep: Substep


# E → N only.
class EdgeRetires(_Wire, frozen=True, tag="retires"):
    """E wants no task beyond those it holds; N answers with `StopWorker` when the last of them has ended."""

    edge: str
    reason: str


class TaskStopped(_Wire, frozen=True, tag="stopped"):
    """The coroutine of a task that N told E to kill has ended. Whatever it returned came too late to count."""

    execution_id: str
    edge: str


# N → S
class TaskInterrupted(_Wire, frozen=True, tag="interrupted"):
    """The body was cut off. Sent after the edge is dead, reaped, swept and drained.

    ``started`` is False when no byte of the task had been handed to an edge: then it provably never ran.
    """

    execution_id: str
    edge: str
    error: ErrorInfo
    started: bool = True


class EdgeStarted(_Wire, frozen=True, tag="edge_started"):
    """An edge or a reducer lives. Sent on the descriptor channel, with its pidfd."""

    edge: str
    pid: int
    role: Literal["edge", "reducer"] = "edge"


class EdgeStopped(_Wire, frozen=True, tag="edge_stopped"):
    """Somebody has stopped an edge (SIGSTOP), or it goes on (``stopped`` is False)."""

    edge: str
    stopped: bool


class EdgeEnded(_Wire, frozen=True, tag="edge_ended"):
    """An edge is dead, reaped and swept. ``reason`` says why in a word or two, for people."""

    edge: str
    pid: int
    reason: str


class EdgesDescribed(_Wire, frozen=True, tag="edges_described"):
    """Edge → execution ids of the tasks that it has."""

    tasks: dict[str, list[str]]


class EdgeStartFailed(_Wire, frozen=True, tag="edge_start_failed"):
    """An edge died idle or could not start: counts against the node's restart intensity."""

    edge: str
    error: ErrorInfo


class Output(_Wire, frozen=True, tag="output"):
    """Lines that user code wrote. A line that begins with U+001E is a log record in JSON (`hayata_supervisor.logs`).

    ``dropped``: lines before these that nobody could take. ``slowed_s``: how long user code had to wait with writing.
    """

    edge: str
    execution_id: str | None
    stream: Literal["stdout", "stderr"]
    lines: list[str]
    dropped: int = 0
    slowed_s: float = 0.0


TaskEnd: TypeAlias = TaskCompleted | TaskFailed | TaskProbed | TaskInterrupted
"""How an execution ended: exactly one for each `TaskOrder`."""

ToForkserver: TypeAlias = Ping
FromForkserver: TypeAlias = WorkerReady | WorkerFailed | Manifest | Forked | ForkFailed | Pong
ToAgent: TypeAlias = Evaluate | CheckUpdate | StopWorker
FromAgent: TypeAlias = (
    WorkerReady | WorkerFailed | DecidedNext | DecidedFinish | DecidedFail | PolicyFailed | UpdateChecked
)
ToNode: TypeAlias = RunTask | ReduceTask | KillTask | PartialAck | Ping | StopWorker | DescribeEdges
FromNode: TypeAlias = (
    WorkerReady
    | WorkerFailed
    | TaskCompleted
    | TaskFailed
    | TaskProbed
    | Partial
    | SubstepDone
    | TaskInterrupted
    | EdgeStopped
    | Pong
    | EdgeEnded
    | EdgeStartFailed
    | EdgesDescribed
    | Output
)
ToEdge: TypeAlias = RunTask | ReduceTask | KillTask | PartialAck | StopWorker
FromEdge: TypeAlias = (
    WorkerReady
    | WorkerFailed
    | TaskCompleted
    | TaskFailed
    | TaskProbed
    | Partial
    | SubstepDone
    | EdgeRetires
    | TaskStopped
)


# --------------------------------------------------------------------------------------------------------------------
# Guard ↔ supervisor, and guard ↔ the process that embeds the runtime: SEQPACKET, one message a packet
# --------------------------------------------------------------------------------------------------------------------


class Beat(_Wire, frozen=True, tag="beat"):
    """S's loop turns. ``status`` says in one line what it does."""

    status: str = ""


class Serving(_Wire, frozen=True, tag="serving"):
    """S has recovered and its apps are loaded."""


class Fatal(_Wire, frozen=True, tag="fatal"):
    """S can't go on and exits; so does G, with ``exit_code``."""

    error: ErrorInfo
    exit_code: int


class StopRuntime(_Wire, frozen=True, tag="stop_runtime"):
    """Drain for at most ``drain_s`` seconds, then end."""

    drain_s: float


class Stopping(_Wire, frozen=True, tag="stopping"):
    """S ends its workers, which may take ``grace_s`` seconds by their specs; infinite: as long as they like."""

    grace_s: float


class ReloadRuntime(_Wire, frozen=True, tag="reload_runtime"):
    """G → S: load the apps anew."""


class Reloading(_Wire, frozen=True, tag="reloading"):
    """S → G: the apps are being loaded anew."""


class Reloaded(_Wire, frozen=True, tag="reloaded"):
    """S → G: no reload is under way or waits, however the last one went."""


FromSupervisor: TypeAlias = Beat | Serving | Fatal | StopRuntime | Stopping | Reloading | Reloaded
ToSupervisor: TypeAlias = StopRuntime | ReloadRuntime
FromGuard: TypeAlias = Serving | Fatal | Stopping
ToGuard: TypeAlias = StopRuntime


# --------------------------------------------------------------------------------------------------------------------
# Clients
# --------------------------------------------------------------------------------------------------------------------


class _Named(msgspec.Struct, frozen=True, tag_field="type", forbid_unknown_fields=True, omit_defaults=True):
    """Base of the messages on the client socket."""


class Hello(_Named, frozen=True, tag="hello"):
    """First message each way. Another protocol version is refused with `protocol_error`."""

    protocol: int = PROTOCOL_VERSION
    package: str = ""


# Requests


class Run(_Named, frozen=True, tag="run"):
    """Start an invocation; answered with `InvocationInfo` once it is durable. Safe to send again."""

    agent: str
    invocation_id: str
    input: msgspec.Raw = NIL
    stream: bool = False
    session: str | None = None
    key: str | None = None
    on_busy: Literal["reject", "queue"] = "reject"


class GetInvocation(_Named, frozen=True, tag="get_invocation"):
    """Answered with `InvocationInfo`."""

    invocation_id: str


class AwaitInvocation(_Named, frozen=True, tag="await_invocation"):
    """Answered with `InvocationInfo` when the invocation is terminal, uncertain or recovery_required."""

    invocation_id: str


class ListInvocations(_Named, frozen=True, tag="list_invocations"):
    """Answered with `InvocationList`, newest first; ``after`` is the ``more`` of the page before."""

    agent: str | None = None
    status: str | None = None
    session: str | None = None
    limit: int = 100
    after: str = ""


class ListTasks(_Named, frozen=True, tag="list_tasks"):
    """Answered with `TaskList`, by step and attempt: those behind the task with the id ``after``."""

    invocation_id: str
    after: str = ""


class FollowEvents(_Named, frozen=True, tag="follow_events"):
    """Answered with `EventBatch`es in order, then `Done`.

    ``until``: ``now`` ends with what is recorded; ``settled`` when the invocation is terminal or rests as uncertain or
    recovery_required; ``terminal`` only when it is terminal.
    """

    invocation_id: str
    after: int = 0
    until: Literal["now", "settled", "terminal"] = "settled"


class Recover(_Named, frozen=True, tag="recover"):
    """Recover an agent's resting invocations; answered with `InvocationList` of those it touched."""

    agent: str
    changed: Literal["continue", "restart", "drop"] | None = None


class Reconcile(_Named, frozen=True, tag="reconcile"):
    """Settle one uncertain task with exactly one of ``result``, ``error``, ``retry``; answered with `TaskInfo`.

    ``request_id`` makes it safe to send again; ``by`` names the person or program.
    """

    invocation_id: str
    task_id: str
    request_id: str
    by: str
    result: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET  # msgspec decodes `Raw | None` as None alone
    error: str | None = None
    retry: bool = False


class Cancel(_Named, frozen=True, tag="cancel"):
    """Cancel; answered with `InvocationInfo` when its workers are confirmed dead."""

    invocation_id: str


class ListAgents(_Named, frozen=True, tag="list_agents"):
    """Answered with `AgentList`."""


class StartAgent(_Named, frozen=True, tag="start_agent"):
    """Load an app (``module:attr`` or ``path.py[:attr]``); answered with `AgentList` of what it defines."""

    app: str


class StopAgent(_Named, frozen=True, tag="stop_agent"):
    """Stop an agent's workers; its invocations rest. Answered with `Done`."""

    agent: str


class Reload(_Named, frozen=True, tag="reload"):
    """Load all apps anew; answered with `ReloadReport` when the new code serves. Safe to send again."""


class GetTree(_Named, frozen=True, tag="get_tree"):
    """Answered with `Tree`."""


class GetStats(_Named, frozen=True, tag="get_stats"):
    """Answered with `Stats`."""


class StopDaemon(_Named, frozen=True, tag="stop_daemon"):
    """Stop the daemon; answered with `Done` when it begins to drain."""

    drain_s: float | None = None


class ReadJournal(_Named, frozen=True, tag="read_journal"):
    """Answered with `JournalPage`: records of an invocation from number ``first`` on, as many as a message holds."""

    invocation_id: str
    first: int = 1


class VerifyStore(_Named, frozen=True, tag="verify_store"):
    """Verify a snapshot of the store; answered with `StoreReport`, whatever was found."""


class BackupStore(_Named, frozen=True, tag="backup_store"):
    """Copy the store to ``directory``, an absolute path where nothing is; answered with `StoreReport` of the copy.

    ``request_id`` makes it safe to send again.
    """

    directory: str
    request_id: str


class PruneStore(_Named, frozen=True, tag="prune_store"):
    """Remove invocations that ended more than ``older_than_s`` seconds ago; answered with `Pruned`.

    ``keep``: so many of each agent stay, those that ended last. ``statuses`` (empty: all) and ``agent`` narrow it down.
    """

    older_than_s: float
    keep: int = 0
    statuses: list[str] = []
    agent: str | None = None


Request: TypeAlias = (
    Run
    | GetInvocation
    | AwaitInvocation
    | ListInvocations
    | ListTasks
    | FollowEvents
    | Recover
    | Reconcile
    | Cancel
    | ListAgents
    | StartAgent
    | StopAgent
    | Reload
    | GetTree
    | GetStats
    | StopDaemon
    | ReadJournal
    | VerifyStore
    | BackupStore
    | PruneStore
)


class Ask(_Named, frozen=True, tag="ask"):
    """A request with a number that its answers carry."""

    number: int
    request: Request


# Answers


class InvocationInfo(_Named, frozen=True, tag="invocation"):
    """One invocation. Times are seconds since the epoch. ``error`` is the reason of ``failed`` or of a rest."""

    id: str
    agent: str
    status: str
    version: str
    created_at: float
    session: str | None = None
    key: str | None = None
    stream: bool = False
    step: int = 0
    started_at: float | None = None
    ended_at: float | None = None
    result: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET  # msgspec decodes `Raw | None` as None alone
    error: ErrorInfo | None = None
    restarted_from: str | None = None


class InvocationList(_Named, frozen=True, tag="invocations"):
    """Several invocations; ``more``: one message could not hold them all, ask for those after this place."""

    invocations: list[InvocationInfo]
    more: str = ""


class Reconciliation(msgspec.Struct, frozen=True, omit_defaults=True):
    """Who settled an uncertain task, when and how (``result``, ``error``, ``retry``)."""

    by: str
    at: float
    how: str
    request_id: str


class TaskInfo(_Named, frozen=True, tag="task"):
    """One attempt of one step, or of one of its edges; ``id`` is its execution id. ``substeps``: keys or names of those
    that it has stored. ``edge``: -1 for the execution itself, which is its reduction if it has edges.
    """

    id: str
    node: str
    step: int
    attempt: int
    status: str
    scheduled_at: float | None = None
    started_at: float | None = None
    ended_at: float | None = None
    error: ErrorInfo | None = None
    update: Update | None = None
    reconciled: Reconciliation | None = None
    substeps: list[str] = []
    edge: int = -1


class TaskList(_Named, frozen=True, tag="tasks"):
    """An invocation's tasks; ``more``: one message could not hold them all, ask for those after the last."""

    tasks: list[TaskInfo]
    more: bool = False


class EventInfo(msgspec.Struct, frozen=True, array_like=True):
    """One event; ``data`` is an encoded mapping. Type ``gap`` stands for the numbers ``from`` to ``to`` of its data."""

    sequence: int
    type: str
    time: float
    data: msgspec.Raw


class EventBatch(_Named, frozen=True, tag="events"):
    """Some events, in order."""

    events: list[EventInfo]


class NodeInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """One node of an agent as clients see it."""

    name: str
    status: str
    is_async: bool
    concurrency: int
    busy: int = 0


class AgentInfo(_Named, frozen=True, tag="agent"):
    """One agent: ``status`` is serving, failed, stopped, or gone, if its app does not define it any more."""

    id: str
    version: str
    app: str
    status: str
    nodes: list[NodeInfo]
    running: int = 0
    queued: int = 0
    error: ErrorInfo | None = None


class AgentList(_Named, frozen=True, tag="agents"):
    """The agents."""

    agents: list[AgentInfo]


class ReloadedAgent(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a reload has made of one agent: ``kept``, ``new`` or ``gone``. ``was``: its former version; ``changes`` in
    its definition, in words.
    """

    id: str
    app: str
    outcome: str
    version: str
    was: str = ""
    changes: list[str] = []


class ReloadReport(_Named, frozen=True, tag="reload_report"):
    """All agents after a reload; ``generation`` counts from the supervisor's start."""

    generation: int
    agents: list[ReloadedAgent]


class ProcessInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """One process of the tree. ``role``: guard, supervisor, forkserver, agent, node, edge, reducer. ``status``:
    ``stopped`` is one that somebody has stopped with a signal; or, without a pid, one that has ended and is not started
    again. ``restart``: its restart type, and ``strategy``: its agent's, of agents and nodes.
    ``generation`` of its code; 0 for a process that has none.

    ``tasks``: execution id → seconds since it was handed to its node; a node's own still wait for an edge.
    """

    role: str
    name: str
    pid: int
    status: str
    incarnation: str = ""
    started_at: float | None = None
    restarts: int = 0
    memory_bytes: int | None = None
    last_exit: str = ""
    restart: str = ""
    strategy: str = ""
    tasks: dict[str, float] = {}
    cpu_s: float | None = None
    children: list[ProcessInfo] = []
    generation: int = 0


class Tree(_Named, frozen=True, tag="tree"):
    """The process tree, from the guard down."""

    root: ProcessInfo


class Stats(_Named, frozen=True, tag="stats"):
    """Counters since the supervisor started, and gauges."""

    values: dict[str, float]


class RecordInfo(msgspec.Struct, frozen=True):
    """One record of a journal, with its events. Each fact is an encoded mapping: its kind under ``fact``, and its
    fields by name.
    """

    number: int
    at: float
    sequence: int
    reserved: int
    facts: list[msgspec.Raw]
    events: list[EventInfo]


class JournalPage(_Named, frozen=True, tag="journal"):
    """Some records, in order; ``more``: there are others behind the last one."""

    records: list[RecordInfo]
    more: bool = False


class StoreProblem(_Named, frozen=True, tag="store_problem"):
    """What is wrong with one record of the store; ``record`` names it for a person."""

    record: str
    problem: str


class StoreReport(_Named, frozen=True, tag="store_report"):
    """What was verified. ``problems`` are the first so many of ``found``; none: all of it is whole."""

    counts: dict[str, int]
    problems: list[StoreProblem] = []
    found: int = 0
    directory: str = ""


class Pruned(_Named, frozen=True, tag="pruned"):
    """How many invocations were removed, and records of their journals. Bytes of the file, where it was compacted."""

    invocations: int
    records: int
    bytes_before: int | None = None
    bytes_after: int | None = None


class Stored(_Named, frozen=True, tag="stored"):
    """All that a store has of one invocation."""

    invocation: InvocationInfo
    journal: JournalPage
    tasks: TaskList


class Done(_Named, frozen=True, tag="done"):
    """Nothing more to say."""


class Refused(_Named, frozen=True, tag="refused"):
    """The request failed with an error."""

    error: ErrorInfo


Answer: TypeAlias = (
    InvocationInfo
    | InvocationList
    | TaskInfo
    | TaskList
    | EventBatch
    | AgentList
    | ReloadReport
    | Tree
    | Stats
    | JournalPage
    | StoreReport
    | Pruned
    | Done
    | Refused
)


class Tell(_Named, frozen=True, tag="tell"):
    """An answer to the request with this number. Number 0 speaks of the connection itself, which then closes."""

    number: int
    answer: Answer


ToServer: TypeAlias = Hello | Ask
ToClient: TypeAlias = Hello | Tell


class Finding(msgspec.Struct, frozen=True):
    """What `hayata_supervisor.doctor` has found out; it says so on its stdout, a line of JSON for each.

    ``check`` names what was looked at; ``status`` is ``ok``, ``warn`` or ``fail``.
    """

    check: str
    status: Literal["ok", "warn", "fail"]
    message: str
    hint: str = ""


# What `hayata_supervisor.maintenance` says on its stdout, framed: problems as they are found, then one answer.
FromMaintenance: TypeAlias = StoreProblem | StoreReport | Pruned | Stored | Refused


# --------------------------------------------------------------------------------------------------------------------
# Launch: what the guard is started with, msgpack in a sealed memfd, by `hayata-supervisor` and by `hayata.start`
# --------------------------------------------------------------------------------------------------------------------


class Launch(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Everything the runtime needs to know to start. Paths are absolute. The guard keeps the memfd and gives it to
    each supervisor anew.

    Attributes:
        apps: App references, ``module:attr`` or ``/path.py[:attr]``.
        data_dir: Where the store and the locks live.
        socket: Where clients connect.
        sys_path: The forkserver's ``sys.path``, in front of its own.
        cwd: The forkserver's working directory.
        argv: The forkserver's ``sys.argv``, for scripts that look at it while they are imported.
        value_fd: Number of an inherited, sealed memfd with cloudpickled agents, instead of ``apps``.
        listen_fd: Number of an inherited socket, the service manager's, that listens at ``socket``; None: make one.
        control_fd: Number of an inherited SEQPACKET socket to the process that embeds the runtime; None for a daemon.
        parent_pid: Pid of that process; when it dies the runtime ends at once.
        log_level: Least level of our own log lines: debug, info, warning, error.
        log_format: ``json``, ``console``, or ``plain``: only what user code wrote, as it wrote it, and our warnings.
        drain_timeout_s: How long a stop waits for running executions.
        policy_timeout_s: How long one policy evaluation may take.
        start_timeout_s: How long a worker may take to get ready, a forkserver's import included.
        node_retry_s: How long a given-up node or agent rests before it is tried again; doubles up to 10 times this.
        hang_timeout_s: How long a node worker or forkserver may be silent when it is asked whether it lives.
        stopped_timeout_s: How long a worker may be stopped (SIGSTOP).
        frame_cap_bytes: Largest message.
        retention_s: How long invocations are kept after their end; None: for ever.
    """

    apps: list[str]
    data_dir: str
    socket: str
    sys_path: list[str]
    cwd: str
    argv: list[str] = []
    value_fd: int | None = None
    listen_fd: int | None = None
    control_fd: int | None = None
    parent_pid: int | None = None
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["json", "console", "plain"] = "console"
    drain_timeout_s: float = 25.0
    policy_timeout_s: float = 10.0
    start_timeout_s: float = 60.0
    node_retry_s: float = 60.0
    hang_timeout_s: float = 10.0
    stopped_timeout_s: float = 30.0
    frame_cap_bytes: int = DEFAULT_CAP_BYTES
    retention_s: float | None = None


_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode
"""Any message → bytes of a body."""


def decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """Make a decoder for one of the unions above.

    Its ``decode`` raises `msgspec.DecodeError` (or its subclass `msgspec.ValidationError`) for anything else.
    """
    return msgspec.msgpack.Decoder(kind)
