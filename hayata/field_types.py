"""One declared type: does a value fit, what does a node receive, and what of it is stored.

Two engines, chosen when the type is declared. `msgspec.convert` checks TypedDicts, dataclasses, Structs and
everything made of builtins: it converts containers, never ``"3"`` to ``3``. Pydantic checks pydantic models,
by their own rules, and the few types that msgspec has no word for (unions of models, types with pydantic's
constraints).
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec
from pydantic import BaseModel, RootModel, TypeAdapter, ValidationError

from hayata.values import STORED_TYPES

_WRAPPERS = {"Required", "NotRequired", "ReadOnly", "ClassVar", "Final"}
_LISTS = (list, Sequence, MutableSequence)
_MAPPINGS = (dict, Mapping, MutableMapping)


class Unfit(Exception):
    """A value isn't of the declared type; ``where`` leads from it to the culprit, like ``.tags[3]``."""

    def __init__(self, where: str, why: str) -> None:
        super().__init__(f"{where}: {why}" if where else why)
        self.where = where
        self.why = why


class FieldType:
    """A declared type.

    Raises:
        TypeError: Nothing can check this type; the message says why.
    """

    def __init__(self, annotation: Any, *, pydantic_rules: bool = False, strict: bool = False) -> None:
        self.annotation = annotation
        self._strict = strict
        self._adapter: TypeAdapter[Any] | None = None
        self.anything = annotation is Any or annotation is object
        if self.anything:
            return
        if not pydantic_rules and not _has_pydantic_constraints(annotation):
            try:
                _require_checkable(msgspec.inspect.type_info(annotation))
                return
            except TypeError:
                pass
        self._adapter = _adapter(annotation)

    def read(self, plain: Any) -> Any:
        """Make the declared type of a decoded value.

        Raises:
            Unfit: It doesn't fit.
        """
        if self.anything:
            return plain
        if self._adapter is not None:
            return _validate(self._adapter, plain, strict=False)
        return _convert(plain, self.annotation)

    def check(self, given: Any, plain: Any) -> Any:
        """Check what a user gave; ``plain`` is the same, decoded from its encoding.

        Returns:
            The value in its declared type.

        Raises:
            Unfit: It doesn't fit.
        """
        if self._adapter is not None and self._strict:
            return _validate(self._adapter, given, strict=True)
        return self.read(plain)


_known: dict[Any, FieldType] = {}


def field_type(annotation: Any, *, pydantic_rules: bool = False) -> FieldType:
    """Make (once) the `FieldType` of a type that was checked before.

    Raises:
        TypeError: Nothing can check this type.
    """
    try:
        known = _known.get((annotation, pydantic_rules))
    except TypeError:  # metadata that can't be hashed
        return FieldType(annotation, pydantic_rules=pydantic_rules)
    if known is None:
        known = FieldType(annotation, pydantic_rules=pydantic_rules)
        _known[annotation, pydantic_rules] = known
    return known


def element_type(annotation: Any) -> Any:
    """Type of a list's elements; None when ``annotation`` isn't a list."""
    bare = bare_type(annotation)
    if bare is Any or bare is object:
        return Any
    if (get_origin(bare) or bare) in _LISTS:
        return (get_args(bare) or (Any,))[0]
    return None


def is_mapping_type(annotation: Any) -> bool:
    """Whether it is a mapping whose keys may be added one by one."""
    bare = bare_type(annotation)
    return bare is Any or bare is object or (get_origin(bare) or bare) in _MAPPINGS


def is_number_type(annotation: Any) -> bool:
    """Whether it is int, float, or their union."""
    bare = bare_type(annotation)
    options = get_args(bare) if _is_union(bare) else (bare,)
    return bare is Any or bare is object or all(option in (int, float, type(None)) for option in options)


def bare_type(annotation: Any) -> Any:
    """Take Annotated, Required, NotRequired, ReadOnly and ``| None`` off."""
    while True:
        origin = get_origin(annotation)
        if origin is Annotated or getattr(origin, "_name", None) in _WRAPPERS:
            annotation = get_args(annotation)[0]
        elif hasattr(annotation, "__supertype__"):  # NewType
            annotation = annotation.__supertype__
        elif type(annotation).__name__ == "TypeAliasType":
            annotation = annotation.__value__
        elif _is_union(annotation) and len(rest := [a for a in get_args(annotation) if a is not type(None)]) == 1:
            annotation = rest[0]
        else:
            return annotation


def without_wrappers(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    """Split into a type that can be checked and the metadata of its Annotated."""
    metadata: tuple[Any, ...] = ()
    while True:
        origin = get_origin(annotation)
        if origin is Annotated:
            metadata = (*metadata, *annotation.__metadata__)
            annotation = get_args(annotation)[0]
        elif getattr(origin, "_name", None) in _WRAPPERS:
            annotation = get_args(annotation)[0]
        else:
            break
    return (Annotated[(annotation, *metadata)] if metadata else annotation), metadata


def declared_by(*annotations: Any) -> dict[type, Callable[[Any], Any]]:
    """Find the classes that types mention whose instances aren't values; each with its way to builtins."""
    dumps = ((kind, _dump_for(kind)) for kind in mentioned_classes(*annotations))
    return {kind: dump for kind, dump in dumps if dump is not None}


def mentioned_classes(*annotations: Any) -> list[type]:
    """Find all classes that types mention, fields of fields included."""
    found: list[type] = []
    waiting = list(annotations)
    seen: list[Any] = []
    while waiting:
        annotation = bare_type(waiting.pop())
        if isinstance(annotation, str | bytes | int | None) or any(annotation is known for known in seen):
            continue
        seen.append(annotation)
        waiting += get_args(annotation)
        kind = get_origin(annotation) or annotation
        if isinstance(kind, type):
            found.append(kind)
            waiting += _field_annotations(kind)
    return found


def is_typed_dict(kind: Any) -> bool:
    """Also true of typing_extensions' TypedDict, which ``typing.is_typeddict`` doesn't know."""
    return isinstance(kind, type) and issubclass(kind, dict) and hasattr(kind, "__required_keys__")


def _dump_for(kind: type) -> Callable[[Any], Any] | None:
    if issubclass(kind, STORED_TYPES) or kind is object or hasattr(kind, "get_secret_value"):
        return None
    if issubclass(kind, BaseModel):
        return lambda value: dump_model(value, kind)
    if hasattr(kind, "__struct_fields__"):
        return lambda value: _dump_struct(value, kind)
    if dataclasses.is_dataclass(kind):
        return lambda value: _dump_dataclass(value, kind)
    try:
        adapter = _adapter(kind)
    except TypeError:
        return None
    return lambda value: adapter.dump_python(value, mode="json")  # a path, a URL, an IP address


def _field_annotations(kind: type) -> list[Any]:
    if issubclass(kind, BaseModel):
        return [field.annotation for field in kind.model_fields.values()]
    if is_typed_dict(kind) or hasattr(kind, "_fields") or hasattr(kind, "__struct_fields__"):
        return list(get_type_hints(kind, include_extras=True).values())
    if dataclasses.is_dataclass(kind):
        return list(get_type_hints(kind, include_extras=True).values())
    return []


def dump_model(value: BaseModel, kind: type[BaseModel], *, by_alias: bool = True) -> Any:
    """One level of a pydantic model as builtins, in the form that builds it again.

    Not ``model_dump``: what a serializer makes need not validate, and it would print secrets as stars.
    """
    _require_exact(value, kind)
    if isinstance(value, RootModel):
        return value.root
    fields = {
        (alias_of(name, field) if by_alias else name): getattr(value, name) for name, field in kind.model_fields.items()
    }
    return {**fields, **(value.__pydantic_extra__ or {})}


def alias_of(name: str, field: Any) -> str:
    """The key under which a model's constructor takes this field."""
    alias = field.validation_alias or field.alias
    return alias if isinstance(alias, str) else name


def _dump_struct(value: Any, kind: type) -> Any:
    _require_exact(value, kind)
    config = value.__struct_config__
    values = {
        key: getattr(value, name)
        for name, key in zip(value.__struct_fields__, value.__struct_encode_fields__, strict=True)
        if getattr(value, name) is not msgspec.UNSET
    }
    tag = {} if config.tag is None else {config.tag_field: config.tag}
    return [*tag.values(), *values.values()] if config.array_like else {**tag, **values}


def _dump_dataclass(value: Any, kind: type) -> dict[str, Any]:
    _require_exact(value, kind)
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}


def _require_exact(value: Any, kind: type) -> None:
    if type(value) is not kind:
        raise ValueError(
            f"a {type(value).__name__} where {kind.__name__} is declared would come back as {kind.__name__}"
        )


# ---------------------------------------------------------------------------------------------------- engines


_PYTHONS_WORDS = {
    "`array`": "`list`",
    "`object`": "`dict`",
    "`null`": "`None`",
    "`array | ": "`list | ",
    "`object | ": "`dict | ",
}


def _convert(plain: Any, annotation: Any) -> Any:
    try:
        return msgspec.convert(plain, annotation, dec_hook=_custom)
    except msgspec.ValidationError as error:
        why, _, where = str(error).partition(" - at `")
        for theirs, ours in _PYTHONS_WORDS.items():
            why = why.replace(theirs, ours)
        raise Unfit(where.rstrip("`").removeprefix("$"), why) from None
    except RecursionError:
        raise Unfit("", "nested too deep") from None


def _custom(kind: type, value: Any) -> Any:
    """Msgspec's hook for classes it doesn't know: pydantic models, paths, URLs."""
    try:
        return _validate(_adapter(kind), value, strict=False)
    except Unfit as error:
        raise ValueError(str(error)) from None


def _validate(adapter: TypeAdapter[Any], value: Any, *, strict: bool) -> Any:
    try:
        return adapter.validate_python(value, strict=strict or None)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise Unfit("".join(map(_location, first["loc"])), first["msg"]) from None
    except RecursionError:
        raise Unfit("", "nested too deep") from None
    except Exception as error:
        raise Unfit("", f"checking it raised {type(error).__name__}: {error}") from error


def _location(step: int | str) -> str:
    return f"[{step}]" if isinstance(step, int) else f".{step}"


_adapters: dict[Any, TypeAdapter[Any]] = {}


def _adapter(annotation: Any) -> TypeAdapter[Any]:
    """Make (once) what checks ``annotation`` by pydantic's rules.

    Raises:
        TypeError: Pydantic doesn't know it either.
    """
    try:
        known = _adapters.get(annotation)
    except TypeError:  # metadata that can't be hashed
        return _new_adapter(annotation)
    if known is None:
        known = _adapters[annotation] = _new_adapter(annotation)
    return known


def _new_adapter(annotation: Any) -> TypeAdapter[Any]:
    try:
        return TypeAdapter(annotation)
    except Exception as error:  # noqa: BLE001 - pydantic's schema errors have no common base
        raise TypeError(f"{annotation!r} can't be checked: {str(error).splitlines()[0]}") from None


def _has_pydantic_constraints(annotation: Any) -> bool:
    metadata = getattr(annotation, "__metadata__", ())
    if any(type(item).__module__.partition(".")[0] in ("pydantic", "annotated_types") for item in metadata):
        return True
    return any(_has_pydantic_constraints(part) for part in get_args(annotation))


def _require_checkable(info: Any) -> None:
    """Refuse a type that mentions a class which neither engine knows.

    Raises:
        TypeError: It does.
    """
    seen: set[int] = set()
    waiting = [info]
    while waiting:
        item = waiting.pop()
        if isinstance(item, tuple):
            waiting += item
        elif isinstance(item, msgspec.Struct) and id(item) not in seen:
            seen.add(id(item))
            if isinstance(item, msgspec.inspect.CustomType) and item.cls is not object:
                _adapter(item.cls)
            waiting += [getattr(item, name) for name in item.__struct_fields__]


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (typing.Union, types.UnionType)
