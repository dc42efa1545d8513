"""`Agent`: nodes, a decision policy, and the shared state they work on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, Never, TypeAlias

from pydantic import Field, InstanceOf

from hayata.callables import arguments_problem, is_coroutine_function, is_generator_function, resolve
from hayata.context import PolicyContext
from hayata.decisions import Decision, Finish, Next, NodeReference
from hayata.errors import DefinitionError, HayataError
from hayata.ids import check_name
from hayata.merging import MERGE_NAMES, MergeName
from hayata.messages import Update
from hayata.nodes import Lifespan, Node, NodeFunction, as_node, lifespan_problem
from hayata.problems import Count, Fields, Flag, Name, Problems, Seconds, reserved
from hayata.state_types import StateType
from hayata.supervision import Supervision
from hayata.values import decode_mapping

NodeLike: TypeAlias = Node | NodeFunction | str
DecisionPolicy: TypeAlias = Callable[[PolicyContext[Any]], Decision]


class Agent:
    """An agent.

    Args:
        id: 1 to 128 ASCII characters.
        nodes: A list of nodes, named by their functions, or a mapping from names; a node is a function, a
            coroutine function, ``"pkg.mod:function"`` or a `Node`.
        decision_policy: Pure function of a `PolicyContext`; by default the nodes run once each in the order
            given and the state is the result.
        state: Initial shared state of each invocation.
        state_type: TypedDict, pydantic model, msgspec Struct or dataclass; every update is checked against
            it, and node functions and the policy get the state as this type.
        merge: Key → ``replace``, ``append``, ``extend``, ``add`` or ``union`` (see `hayata.merging`).
        max_steps: Most node executions of one invocation.
        execution_timeout: Seconds for one node execution; then its worker is killed.
        invocation_timeout: Seconds for an invocation.
        conversation_memory: Carry the key ``messages`` from one invocation of a session to the next.
        default_session: Session of a ``run`` that names none.
        resume: After a restart, ``"auto"`` recovers at once, ``"manual"`` waits for ``recover``.
        max_concurrency: Invocations that run at once; more are queued.
        version: A checkpoint of another version is never resumed silently.
        lifespan: Makes the (async) context manager of each edge worker; what it yields is ``ctx.deps``.
        on_failure: ``"policy"``: a node's final failure goes to the policy as ``context.failure``.
        supervision: How workers are restarted.

    Raises:
        DefinitionError: ``invalid_definition`` or ``duplicate_nodes``; all problems at once, each with its
            path, in details ``problems``.

    Attributes:
        nodes: Name → `Node`, in order.
        state: The initial state as plain values; with a model as state type it is complete, defaults
            included.
        merge: Key → operation, also those declared in the state's type; keys that are replaced are left out.
    """

    def __init__(
        self,
        id: str,
        nodes: Mapping[str, NodeLike] | Sequence[NodeLike],
        decision_policy: DecisionPolicy | str | None = None,
        *,
        state: Any = None,
        state_type: Any = None,
        merge: Mapping[str, MergeName] | None = None,
        max_steps: int = 100,
        execution_timeout: float | None = None,
        invocation_timeout: float | None = None,
        conversation_memory: bool = False,
        default_session: str | None = None,
        resume: Literal["auto", "manual"] = "auto",
        max_concurrency: int = 64,
        version: str = "1",
        lifespan: Lifespan | None = None,
        on_failure: Literal["fail", "policy"] = "fail",
        supervision: Supervision | None = None,
        **unknown: Never,
    ) -> None:
        problems = Problems()
        self.id = id
        self.state_type = state_type
        self.max_steps = max_steps
        self.execution_timeout = execution_timeout
        self.invocation_timeout = invocation_timeout
        self.conversation_memory = conversation_memory
        self.default_session = default_session
        self.resume = resume
        self.max_concurrency = max_concurrency
        self.version = version
        self.lifespan = lifespan
        self.on_failure = on_failure
        self.supervision = Supervision() if supervision is None else supervision
        simple = {key: value for key, value in vars(self).items() if key in _AgentFields.model_fields}
        problems.check(_AgentFields, {**simple, **unknown})
        problem = lifespan_problem(lifespan)
        if problem:
            problems.add("lifespan", problem)
        self._references: list[tuple[Any, str]] = []
        self.nodes = self._name_nodes(nodes, problems)
        self.decision_policy = self._policy(decision_policy, problems)
        self._given_merge = _merge_names(merge, problems)
        self._types: StateType | None = self._state_type(problems)
        self.merge = self._types.merge
        self.initial_state: Update = self._types.initial({} if state is None else state, problems)
        self.state = decode_mapping(self.initial_state)
        self._check_memory(problems)
        problems.raise_any(f"agent {id!r}")

    def __repr__(self) -> str:
        return f"Agent({self.id!r}, nodes={list(self.nodes)})"

    def __getstate__(self) -> dict[str, Any]:
        """What pickle takes: not what checks the state's type, it is made again where it is needed."""
        return {**self.__dict__, "_types": None}

    @property
    def types(self) -> StateType:
        """What checks the state. For the runtime."""
        if self._types is None:
            problems = Problems()
            self._types = self._state_type(problems)
            problems.raise_any(f"agent {self.id!r}")
        return self._types

    def names_of(self, reference: NodeReference) -> list[str]:
        """Names of the nodes that a policy means by ``reference``. For the runtime."""
        if isinstance(reference, str):
            return [reference] if reference in self.nodes else []
        return list(dict.fromkeys(name for known, name in self._references if _same(known, reference)))

    def _name_nodes(self, given: Any, problems: Problems) -> dict[str, Node]:
        named: dict[str, Node] = {}
        if isinstance(given, Mapping):
            entries = [(f"nodes.{key}", key, value) for key, value in given.items()]
        elif isinstance(given, Sequence) and not isinstance(given, str | bytes):
            entries = [(f"nodes[{index}]", None, value) for index, value in enumerate(given)]
        else:
            problems.add("nodes", "is neither a mapping nor a list of nodes")
            return named
        if not entries:
            problems.add("nodes", "there is none")
        for path, key, value in entries:
            try:
                node = as_node(value, key)
            except DefinitionError as error:
                for problem in error.details["problems"]:
                    problems.add(f"{path}.{problem['path']}", problem["message"])
                continue
            problem_of_name = _name_problem(node, key)
            if problem_of_name:
                problems.add(path, problem_of_name)
            elif node.name in named:
                problems.add(path, f"there is another node {node.name!r}", "duplicate_nodes")
            else:
                named[node.name] = node
                self._references += [(value, node.name), (node, node.name), (node.fn, node.name)]
        return named

    def _policy(self, policy: Any, problems: Problems) -> DecisionPolicy:
        if isinstance(policy, str):
            try:
                policy = resolve(policy)
            except ValueError as error:
                problems.add("decision_policy", str(error))
                return _InOrder([])
        if policy is None:
            if isinstance(self.max_steps, int) and self.max_steps < len(self.nodes):
                problems.add("max_steps", f"the {len(self.nodes)} nodes run once each: at least as many steps")
            return _InOrder(list(self.nodes))
        if not callable(policy) or isinstance(policy, type):
            problems.add("decision_policy", f"{policy!r} is not a function")
        elif is_coroutine_function(policy) or is_generator_function(policy):
            problems.add("decision_policy", "must be a plain function: it decides, and does nothing that takes time")
        else:
            problem = arguments_problem(policy, 1, 1)
            if problem:
                problems.add("decision_policy", problem)
        chosen: DecisionPolicy = policy
        return chosen

    def _state_type(self, problems: Problems) -> StateType:
        more = [kind for node in self.nodes.values() for kind in (node.input, node.output) if kind is not None]
        return StateType(self.state_type, self._given_merge, problems, *more)

    def _check_memory(self, problems: Problems) -> None:
        if self.conversation_memory is True and not self.types.has_key("messages"):
            problems.add("conversation_memory", "the state's type has no key 'messages'")


class _AgentFields(Fields):
    id: Name
    max_steps: Count
    execution_timeout: Seconds | None
    invocation_timeout: Seconds | None
    conversation_memory: Flag
    default_session: Name | None
    resume: Literal["auto", "manual"]
    max_concurrency: Count
    version: Annotated[str, Field(strict=True, min_length=1, max_length=128)]
    on_failure: Literal["fail", "policy"]
    supervision: InstanceOf[Supervision]


class _InOrder:
    """The default policy."""

    def __init__(self, names: list[str]) -> None:
        self._names = names

    def __call__(self, context: PolicyContext[Any]) -> Decision:
        if context.step < len(self._names):
            return Next(self._names[context.step], context.input)
        return Finish(context.state)


def _merge_names(merge: Any, problems: Problems) -> dict[str, str]:
    if merge is None:
        return {}
    if not isinstance(merge, Mapping):
        problems.add("merge", f"is a {type(merge).__name__}, not a mapping")
        return {}
    names: dict[str, str] = {}
    for key, operation in merge.items():
        if operation in MERGE_NAMES:
            names[key] = operation
        else:
            problems.add(f"merge.{key}", f"{operation!r} is not one of {', '.join(MERGE_NAMES)}")
    return names


def _name_problem(node: Node, key: Any) -> str | None:
    """Why the node can't be called so; None if it can."""
    if key is not None and node.explicit_name not in (None, key):
        return f"the node's own name is {node.explicit_name!r}"
    try:
        check_name("the name", node.name)
    except HayataError as error:
        return f"{error.message}: {error.hint}; name it with a mapping or Node(name=…)"
    return reserved(node.name)


def _same(known: Any, reference: Any) -> bool:
    if known is reference:
        return True
    try:
        return type(known) is type(reference) and bool(known == reference)  # bound methods are equal, never identical
    except Exception:  # noqa: BLE001 - a user's __eq__
        return False
