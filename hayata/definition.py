"""What of an agent's definition a checkpoint depends on, as text: so that a change can be noticed, and named.

It travels in the manifest and is stored with each invocation. After a restart, one that differs from the
definition of the day says that ``version=`` should have been changed with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints
from zlib import crc32

from pydantic import BaseModel

from hayata.agent import Agent
from hayata.field_types import mentioned_classes, without_wrappers
from hayata.nodes import Node

_LONGEST = 200
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def definition_of(agent: Agent) -> dict[str, str]:
    """Describe an agent: path → text.

    ``nodes.N``: what kind of node it is, and the types of its input and output if it declares them;
    ``state.K``: the type of that key; ``merge.K``: its operation, if it isn't replaced; ``types.C``: a digest
    of the fields of a class that one of these types mentions. Never raises.
    """
    fields = agent.types.annotations
    described = {f"nodes.{name}": _node(node) for name, node in agent.nodes.items()}
    described |= {f"state.{key}": type_text(annotation) for key, annotation in fields.items()}
    described |= {f"merge.{key}": operation for key, operation in agent.merge.items()}
    types = [type for node in agent.nodes.values() for type in (node.input, node.output) if type is not None]
    return described | dict(_classes(*fields.values(), *types))


def _node(node: Node) -> str:
    kind = ("coroutine" if node.is_async else "function") + ("" if node.edges is None else " of edges, reduced")
    given = "" if node.input is None else f"({type_text(node.input)})"
    return kind + given + ("" if node.output is None else f" -> {type_text(node.output)}")


def _classes(*annotations: Any) -> Iterator[tuple[str, str]]:
    """The classes with fields that these types mention, each with a digest of its fields."""
    try:
        classes = mentioned_classes(*annotations)
    except Exception:  # noqa: BLE001 - annotations are users' code
        return
    for kind in classes:
        fields = _fields(kind)
        if fields:
            text = "; ".join(f"{name}: {type_text(annotation)}" for name, annotation in fields.items())
            yield f"types.{kind.__qualname__}", f"{crc32(text.encode(errors='backslashreplace')):08x}"


def _fields(kind: type) -> dict[str, Any]:
    if issubclass(kind, BaseModel):
        return {name: field.annotation for name, field in kind.model_fields.items()}
    if any(hasattr(kind, name) for name in ("__required_keys__", "_fields", "__struct_fields__")) or hasattr(
        kind, "__dataclass_fields__"
    ):
        try:
            return get_type_hints(kind)
        except Exception:  # noqa: BLE001 - annotations are users' code
            return {}
    return {}


def type_text(annotation: Any) -> str:
    """Write a type as one would, without modules: where a class lives may change with how a script is run."""
    try:
        text = _text(annotation)
    except Exception:  # noqa: BLE001 - a user's metaclass, say
        text = "?"
    return _ADDRESS.sub("", text)[:_LONGEST].encode(errors="backslashreplace").decode()


def _text(annotation: Any) -> str:
    annotation, _ = without_wrappers(annotation)
    origin, args = get_origin(annotation), get_args(annotation)
    if annotation is None or annotation is NoneType:
        return "None"
    if origin is Annotated:  # metadata is for checks, and may have no stable text
        return _text(args[0])
    if origin in (Union, UnionType):
        return " | ".join(map(_text, args))
    if origin is Literal:
        return f"Literal[{', '.join(map(repr, args))}]"
    if origin is not None:
        name = getattr(origin, "__qualname__", str(origin))
        return f"{name}[{', '.join('...' if arg is ... else _argument(arg) for arg in args)}]"
    return str(getattr(annotation, "__qualname__", annotation))


def _argument(argument: Any) -> str:
    return f"[{', '.join(map(_text, argument))}]" if isinstance(argument, list) else _text(argument)
