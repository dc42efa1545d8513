"""The shared state's type: what fits it, what of it is stored, and what a node function receives.

Updates are checked key by key, as they arrive from one node and don't hold the whole state. A value in its
declared form (a pydantic model in a TypedDict, say) is stored as builtins and built again for each node.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, get_type_hints

import msgspec
from pydantic import BaseModel

from hayata.errors import HayataError, error_for
from hayata.field_types import (
    FieldType,
    Unfit,
    alias_of,
    declared_by,
    dump_model,
    element_type,
    field_type,
    is_mapping_type,
    is_number_type,
    is_typed_dict,
    without_wrappers,
)
from hayata.merging import MergeOperation
from hayata.messages import Update
from hayata.problems import RESERVED_KEY, Problems, reserved
from hayata.values import Declared, decode, encode

_ANYTHING = FieldType(Any)


class StateType:
    """What an agent's state is made of.

    Attributes:
        merge: Key → operation, for keys that aren't replaced.
        declared: Classes whose instances nodes and policies may hand over.
    """

    def __init__(self, kind: type | None, merge: Mapping[str, str], problems: Problems, *more: Any) -> None:
        """Read the type's fields; what is wrong goes to ``problems``.

        Args:
            kind: TypedDict, pydantic model, msgspec Struct, dataclass, or None: any mapping.
            merge: The agent's ``merge``.
            problems: Where to note what can't be.
            more: Other types that the agent declares (of inputs and outputs).
        """
        annotations = _annotations(kind, problems)
        if annotations is None:  # refused: check the rest as if nothing were declared
            kind, annotations = None, {}
        self._kind = kind
        self._fields: dict[str, FieldType] = {}
        self._elements: dict[str, FieldType] = {}
        self._open = kind is None
        self.merge = _merged_operations(merge, annotations, problems, any_key=kind is None)
        self.declared: Declared = _declared([kind, *more], problems)
        pydantic_rules = isinstance(kind, type) and issubclass(kind, BaseModel)
        config = kind.model_config if pydantic_rules else {}  # type: ignore[union-attr]
        self._open = self._open or config.get("extra") == "allow"
        for key, annotation in annotations.items():
            try:
                checked, _ = without_wrappers(annotation)
                self._fields[key] = FieldType(checked, pydantic_rules=pydantic_rules, strict=bool(config.get("strict")))
                if self.merge.get(key) == "append":
                    self._elements[key] = FieldType(element_type(annotation) or Any, pydantic_rules=pydantic_rules)
            except TypeError as error:
                problems.add(f"state_type.{key}", str(error))

    @property
    def annotations(self) -> dict[str, Any]:
        """Key → its declared type."""
        return {key: field.annotation for key, field in self._fields.items()}

    def has_key(self, key: str) -> bool:
        """Whether the state may have this key."""
        return self._open or key in self._fields

    # ---------------------------------------------------------------------------------------- for users' code

    def build(self, state: dict[str, Any]) -> Any:
        """Make what nodes and the policy get.

        Args:
            state: The shared state, decoded.

        Raises:
            HayataError: ``invalid_state``.
        """
        if self._kind is None:
            return state
        if issubclass(self._kind, BaseModel):
            return self._build_model(self._kind, state)
        typed = {key: self._read(key, value, self._fields) for key, value in state.items()}
        if is_typed_dict(self._kind):
            return typed
        try:
            return self._kind(**typed)
        except Exception as error:
            raise _invalid("state", f"{type(error).__name__}: {error}") from error

    def as_mapping(self, typed: Any) -> dict[str, Any]:
        """The keys of what `build` made."""
        if isinstance(typed, dict):
            return typed
        if isinstance(typed, BaseModel):
            return dict(dump_model(typed, type(typed), by_alias=False))
        names = (name for name in self._fields if getattr(typed, name, msgspec.UNSET) is not msgspec.UNSET)
        return {name: getattr(typed, name) for name in names}

    def read_branch(self, update: dict[str, Any]) -> dict[str, Any]:
        """Put the values of a parallel branch's update into the types of their keys, where they fit."""
        typed = dict(update)
        for key, value in update.items():
            field = self._elements.get(key) or self._fields.get(key)
            if field is not None:
                with suppress(Unfit):
                    typed[key] = field.read(value)
        return typed

    def _read(self, key: str, value: Any, types: Mapping[str, FieldType]) -> Any:
        field = types.get(key)
        if field is None:  # an open model, or a key of an older version
            return value
        try:
            return field.read(value)
        except Unfit as error:
            raise _invalid(f"state.{key}{error.where}", error.why) from None

    def _build_model(self, kind: type[BaseModel], state: dict[str, Any]) -> BaseModel:
        fields = kind.model_fields
        given = {alias_of(key, fields[key]) if key in fields else key: value for key, value in state.items()}
        try:
            return field_type(kind, pydantic_rules=True).read(given)  # type: ignore[no-any-return]
        except Unfit as error:
            raise _invalid(f"state{error.where}", error.why) from None

    # --------------------------------------------------------------------------------------- from users' code

    def check_update(self, update: Mapping[Any, Any]) -> Update:
        """Check what a node returned and encode it.

        Raises:
            HayataError: ``invalid_node_result`` (its keys can't be), ``invalid_state`` (a value doesn't fit),
                ``unserializable_value``.
        """
        encoded: Update = {}
        for key, value in update.items():
            _require_key(key)
            encoded[str.__str__(key)] = msgspec.Raw(self._check(key, value, self.merge.get(key, "replace")))
        return encoded

    def encode_branch(self, update: Mapping[Any, Any]) -> Update:
        """Encode what a parallel branch returned: it is not merged, and needs not fit.

        Raises:
            HayataError: ``invalid_node_result`` (its keys can't be), ``unserializable_value``.
        """
        encoded: Update = {}
        for key, value in update.items():
            _require_key(key)
            encoded[str.__str__(key)] = msgspec.Raw(encode(value, f"state.{key}", self.declared))
        return encoded

    def initial(self, state: Any, problems: Problems) -> Update:
        """Check and encode an agent's initial state: a mapping, or an instance of the state's type.

        A model is built once and stored in full, defaults included, so that ``add`` and ``extend`` begin with
        them.
        """
        if self._kind is not None and type(state) is self._kind:
            state = self.as_mapping(state)
        if not isinstance(state, Mapping):
            problems.add("state", f"is a {type(state).__name__}, not a mapping")
            return {}
        encoded = self._initial_keys(state, problems)
        if self._kind is None or is_typed_dict(self._kind) or len(encoded) < len(state):
            return encoded
        try:
            built = self.as_mapping(self.build({key: decode(raw) for key, raw in encoded.items()}))
        except HayataError as error:
            problems.add(error.details.get("path", "state"), error.message)
            return {}
        return self._initial_keys(built, problems)

    def _initial_keys(self, state: Mapping[Any, Any], problems: Problems) -> Update:
        encoded: Update = {}
        for key, value in state.items():
            problem = _key_problem(key)
            if problem is not None:
                problems.add(f"state.{key}", problem)
                continue
            try:
                encoded[str.__str__(key)] = msgspec.Raw(self._check(key, value, "initial"))
                self._require_mergeable(key, encoded[key])
            except HayataError as error:
                problems.add(error.details["path"], error.message.partition(": ")[2] or error.message)
        return encoded

    def _require_mergeable(self, key: str, raw: msgspec.Raw) -> None:
        operation = self.merge.get(key, "replace")
        value = decode(raw)
        _require_shape(f"state.{key}", "extend" if operation == "append" else operation, value)

    def _check(self, key: str, value: Any, operation: str) -> bytes:
        """Encode one value of an update, in the form in which nodes will see it."""
        path = f"state.{key}"
        field = (self._elements if operation == "append" else self._fields).get(key)
        if field is None and not self._open:
            raise _invalid(path, "the state's type has no such key")
        raw = encode(value, path, self.declared)
        if operation == "replace" and (field is None or field.anything):
            return raw
        plain = decode(raw)
        if field is not None and not field.anything:
            try:
                plain = field.check(value, plain)
            except Unfit as error:
                raise _invalid(path + error.where, error.why) from None
        if operation == "extend" and isinstance(plain, tuple):
            plain = list(plain)
        _require_shape(path, operation, plain)
        return encode(plain, path, self.declared)


def _declared(annotations: list[Any], problems: Problems) -> Declared:
    try:
        return declared_by(*annotations)
    except Exception as error:  # noqa: BLE001 - annotations are users' code
        problems.add("state_type", f"annotations within it can't be read: {error}")
        return {}


def _annotations(kind: Any, problems: Problems) -> dict[str, Any] | None:
    """Names of the state's keys and their types; None if it is no type for a state."""
    if kind is None:
        return {}
    try:
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            kind.model_rebuild()
            return {name: _with_metadata(field) for name, field in kind.model_fields.items()}
        if is_typed_dict(kind):
            return get_type_hints(kind, include_extras=True)
        hints = get_type_hints(kind, include_extras=True) if isinstance(kind, type) else {}
    except Exception as error:  # noqa: BLE001 - annotations are users' code
        problems.add("state_type", f"its annotations can't be read: {error}")
        return None
    if isinstance(kind, type) and hasattr(kind, "__struct_fields__"):
        return {name: hints[name] for name in kind.__struct_fields__}
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return {field.name: hints[field.name] for field in dataclasses.fields(kind) if field.init}
    problems.add("state_type", f"{kind!r} is not a TypedDict, pydantic model, msgspec Struct or dataclass")
    return None


def _with_metadata(field: Any) -> Any:
    from typing import Annotated

    return Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation


def _merged_operations(
    given: Mapping[str, str], annotations: Mapping[str, Any], problems: Problems, *, any_key: bool
) -> dict[str, str]:
    """Join ``merge=`` with the markers in the state's type."""
    operations = dict(given)
    for key in given:
        if not any_key and key not in annotations:
            problems.add(f"merge.{key}", "the state's type has no such key")
    for key, annotation in annotations.items():
        markers = [item.name for item in without_wrappers(annotation)[1] if isinstance(item, MergeOperation)]
        if len({*markers, operations.get(key, markers[0] if markers else "replace")}) > 1:
            problems.add(f"merge.{key}", "more than one operation is declared for this key")
        elif markers:
            operations[key] = markers[0]
        fits = _FITTING.get(operations.get(key, "replace"))
        if fits is not None and not fits[0](annotation):
            problems.add(f"merge.{key}", f"{operations[key]} needs {fits[1]}")
    return {key: name for key, name in operations.items() if name != "replace"}


_FITTING: dict[str, tuple[Callable[[Any], bool], str]] = {
    "append": (lambda annotation: element_type(annotation) is not None, "a list"),
    "extend": (lambda annotation: element_type(annotation) is not None, "a list"),
    "add": (is_number_type, "a number"),
    "union": (is_mapping_type, "a mapping"),
}


def _require_shape(path: str, operation: str, value: Any) -> None:
    """Refuse what the supervisor could not merge: it sees bytes only."""
    if operation == "extend" and not isinstance(value, list):
        raise _invalid(path, f"extend needs a list, not {type(value).__name__}")
    if operation == "add" and type(value) not in (int, float):
        raise _invalid(path, f"add needs a number, not {type(value).__name__}")
    if operation == "union":
        if not isinstance(value, dict):
            raise _invalid(path, f"union needs a mapping, not {type(value).__name__}")
        if any(isinstance(key, bytes) for key in value):
            raise _invalid(path, "union needs keys that are not bytes")


def _require_key(key: Any) -> None:
    problem = _key_problem(key)
    if problem is not None:
        raise error_for(
            "invalid_node_result",
            f"the update's key {key!r} can't be: {problem}",
            details={"path": f"state.{key}" if isinstance(key, str) else "state"},
            hint="return only the keys of the state that change" if key == RESERVED_KEY else "",
        )


def _key_problem(key: Any) -> str | None:
    if not isinstance(key, str):
        return f"it is a {type(key).__name__}, not a str"
    if key == RESERVED_KEY:
        return f"{RESERVED_KEY!r} is the node's input"
    try:
        key.encode()
    except UnicodeEncodeError:
        return "it holds a lone surrogate"
    return reserved(key)


def _invalid(path: str, why: str) -> HayataError:
    return error_for("invalid_state", f"{path}: {why}", details={"path": path, "message": why})
