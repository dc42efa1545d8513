"""How a node's update of a key joins the shared state: names for ``merge=`` and markers for a state's type.

class State(TypedDict):
    messages: Annotated[list[Message], Extend]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

MergeName: TypeAlias = Literal["replace", "append", "extend", "add", "union"]


@dataclass(frozen=True, slots=True)
class MergeOperation:
    """Marks a key of a state's type, inside `typing.Annotated`."""

    name: MergeName


Replace = MergeOperation("replace")
"""The new value instead of the old one; the default."""
Append = MergeOperation("append")
"""The value is one more element of the list."""
Extend = MergeOperation("extend")
"""The value's elements are added to the list."""
Add = MergeOperation("add")
"""The number is added."""
Union = MergeOperation("union")
"""The mapping's keys are merged, one level deep."""

MERGE_NAMES: tuple[MergeName, ...] = ("replace", "append", "extend", "add", "union")
