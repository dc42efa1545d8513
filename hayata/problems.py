"""All problems of a definition at once, each with its path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from hayata.errors import DefinitionError, HayataError
from hayata.ids import check_name

RESERVED_KEY = "input"
RESERVED_PREFIX = "hayata"

Seconds = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
Pause = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(strict=True, ge=1)]
MemoryBytes = Annotated[int, Field(strict=True, ge=16 * 2**20)]
"""The worker itself needs almost that much; and who writes 512 means MiB."""
OpenFiles = Annotated[int, Field(strict=True, ge=32)]
"""The worker itself needs a dozen."""
Amount = Annotated[int, Field(strict=True, ge=0)]
Flag = Annotated[bool, Field(strict=True)]


def _shutdown(value: Any) -> Any:
    if value in ("brutal_kill", "infinity"):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ValueError("Input should be seconds, 0 or more, 'brutal_kill' or 'infinity'")
    return value


ShutdownTime = Annotated[Any, AfterValidator(_shutdown)]


def _name(value: Any) -> str:
    try:
        return check_name("name", value)
    except HayataError as error:
        raise ValueError(error.hint) from None


Name = Annotated[str, Field(strict=True), AfterValidator(_name)]


class Fields(BaseModel):
    """Base of the checks of simple fields: nothing is converted, nothing unknown is accepted."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)


class Problems:
    """Collects what is wrong with one definition."""

    def __init__(self) -> None:
        self._found: list[dict[str, str]] = []
        self._codes: set[str] = set()

    def add(self, path: str, message: str, code: str = "invalid_definition") -> None:
        """Note one problem."""
        self._found.append({"path": path, "message": message})
        self._codes.add(code)

    def check(self, model: type[Fields], values: Mapping[str, Any]) -> None:
        """Note what pydantic finds wrong with simple fields."""
        try:
            model.model_validate(dict(values))
        except ValidationError as error:
            for problem in error.errors(include_url=False, include_input=False, include_context=False):
                message = problem["msg"].removeprefix("Value error, ")
                if problem["type"] == "extra_forbidden":
                    message = "there is no such field"
                self.add(".".join(map(str, problem["loc"])), message)

    def raise_any(self, what: str) -> None:
        """Raise if there is a problem.

        Raises:
            DefinitionError: ``invalid_definition``, or ``duplicate_nodes`` when that is the only kind of
                problem; details ``problems``: a list of ``path`` and ``message``.
        """
        if not self._found:
            return
        code = next(iter(self._codes)) if len(self._codes) == 1 else "invalid_definition"
        count = "1 problem" if len(self._found) == 1 else f"{len(self._found)} problems"
        lines = "".join(f"\n  {problem['path']}: {problem['message']}" for problem in self._found)
        raise DefinitionError(code, f"{what}: {count}{lines}", details={"problems": self._found})


def reserved(name: str) -> str | None:
    """Why ``name`` can't be a state key or a node's name; None if it can."""
    if name.startswith(RESERVED_PREFIX):
        return f"names that start with {RESERVED_PREFIX!r} are reserved"
    return None
