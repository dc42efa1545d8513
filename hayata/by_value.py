"""Agents as bytes: how a REPL, a notebook or a function hands its agents to the workers.

cloudpickle takes functions and classes that can't be imported along. Three things it can't do are done here:
it fails on what msgspec notes on classes, it loses the fields of Structs, and annotations that are text
(``from __future__ import annotations``) have lost the globals that they are looked up in where they arrive.
"""

from __future__ import annotations

import gc
import io
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any, get_type_hints

import cloudpickle  # type: ignore[import-untyped]
import msgspec
from pydantic import BaseModel

from hayata.agent import Agent
from hayata.field_types import mentioned_classes

_STRUCT_OPTIONS = (
    *("frozen", "eq", "order", "array_like", "omit_defaults", "forbid_unknown_fields"),
    *("gc", "weakref", "dict", "cache_hash", "tag", "tag_field"),
)


def pickle_agents(agents: Sequence[Agent]) -> bytes:
    """Pickle agents with what they refer to, except what the other process can import itself.

    Raises:
        Exception: Something can't be pickled; of any class.
    """
    classes = [kind for agent in agents for kind in mentioned_classes(*_annotations(agent))]
    nodes = [node for agent in agents for node in agent.nodes.values()]
    functions = [agent.decision_policy for agent in agents] + [node.fn for node in nodes]
    functions += [part for node in nodes if node.reduce is not None for part in (node.edges, node.reduce.fn)]
    with _by_value({getattr(part, "__module__", None) for part in [*classes, *functions]}) as is_by_value:
        _resolve_annotations(kind for kind in classes if is_by_value(kind))
        _forget_caches()
        buffer = io.BytesIO()
        _Pickler(buffer, is_by_value).dump(list(agents))
        return buffer.getvalue()


def is_importable(module: ModuleType) -> bool:
    """Whether the import system of another process with the same ``sys.path`` would find this very file."""
    path = getattr(module, "__file__", None)
    name = module.__name__
    try:
        package = sys.modules.get(name.rpartition(".")[0])
        paths = getattr(package, "__path__", None) if "." in name else None
        for finder in sys.meta_path:  # not importlib.util.find_spec: it answers from sys.modules
            find = getattr(finder, "find_spec", None)
            spec = None if find is None else find(name, paths)
            if spec is not None:
                return bool(spec.origin == path or spec.origin in ("built-in", "frozen"))
    except (ImportError, ValueError, AttributeError, TypeError):
        pass
    return False


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle, and Structs."""

    def __init__(self, file: io.BytesIO, is_by_value: Any) -> None:
        super().__init__(file)
        self._is_by_value = is_by_value

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type) and issubclass(obj, msgspec.Struct) and self._is_by_value(obj):
            return _reduce_struct(obj)
        return super().reducer_override(obj)


@contextmanager
def _by_value(modules: Iterable[str | None]) -> Iterator[Any]:
    """Make cloudpickle take the contents of modules that can't be imported along; gives what tells which
    classes.
    """
    strangers = [
        module
        for name in modules
        if name not in (None, "__main__") and (module := sys.modules.get(str(name))) and not is_importable(module)
    ]
    names = {"__main__", *(module.__name__ for module in strangers)}

    def is_by_value(kind: type) -> bool:
        return kind.__module__ in names or "<locals>" in kind.__qualname__ or kind.__module__ not in sys.modules

    registered = []
    try:
        for module in strangers:
            if module.__name__ not in cloudpickle.list_registry_pickle_by_value():
                cloudpickle.register_pickle_by_value(module)
                registered.append(module)
        yield is_by_value
    finally:
        for module in registered:
            cloudpickle.unregister_pickle_by_value(module)


def _annotations(agent: Agent) -> list[Any]:
    declared = [
        agent.state_type,
        *(kind for node in agent.nodes.values() for kind in (node.input, node.output)),
    ]
    return [kind for kind in declared if kind is not None]


def _resolve_annotations(classes: Iterable[type]) -> None:
    """Put types in the place of text: what the class would hold without ``from __future__ import
    annotations``.
    """
    for kind in classes:
        own = vars(kind).get("__annotations__")
        if not own or issubclass(kind, BaseModel | msgspec.Struct):  # pydantic has resolved its own
            continue
        hints = get_type_hints(kind, include_extras=True)
        kind.__annotations__ = {name: hints[name] for name in own}


def _forget_caches() -> None:
    """Drop what msgspec has noted on classes that it converted to: it can't be pickled, and is made again."""
    for kind in gc.get_objects():
        if isinstance(kind, type) and "__msgspec_cache__" in vars(kind):
            del kind.__msgspec_cache__  # type: ignore[attr-defined]


def _reduce_struct(kind: type[msgspec.Struct]) -> Any:
    hints = get_type_hints(kind, include_extras=True)
    fields = []
    for field in msgspec.structs.fields(kind):
        defaults: dict[str, Any] = {"name": field.encode_name}
        if field.default_factory is not msgspec.NODEFAULT:
            defaults["default_factory"] = field.default_factory
        elif field.default is not msgspec.NODEFAULT:
            defaults["default"] = field.default
        fields.append((field.name, hints[field.name], defaults))
    config = kind.__struct_config__
    options = {name: getattr(config, name) for name in _STRUCT_OPTIONS}
    methods = {name: value for name, value in vars(kind).items() if _is_behaviour(value)}
    made_from = (kind.__name__, kind.__qualname__, kind.__module__, fields, options)
    return _make_struct, made_from, methods, None, None, _add


def _is_behaviour(value: Any) -> bool:
    return isinstance(value, FunctionType | property | classmethod | staticmethod)


def _make_struct(name: str, qualified_name: str, module: str, fields: list[Any], options: dict[str, Any]) -> type:
    given = [(key, kind, msgspec.field(**defaults)) for key, kind, defaults in fields]
    made = msgspec.defstruct(name, given, **options)
    made.__qualname__ = qualified_name
    made.__module__ = module
    return made


def _add(kind: type, methods: dict[str, Any]) -> None:
    for name, value in methods.items():
        setattr(kind, name, value)
