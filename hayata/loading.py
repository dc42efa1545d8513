"""From a reference to agents, and back: ``module:attr``, ``path.py``, ``path.py:attr``, or cloudpickled
bytes.

Loading runs users' code. The forkserver does it, once; the supervisor never.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from hayata.agent import Agent
from hayata.error_info import traceback_text
from hayata.errors import HayataError, error_for
from hayata.scripts import script_module_name

_FORM = "an app is module:attr, path.py:attr or path.py"


class StartReached(BaseException):
    """``hayata.start`` was reached while an app is imported: everything above it has been defined, that is
    enough.
    """


_loading = 0


def stop_if_loading() -> None:
    """For ``hayata.start``: end the import of the script that calls it, if it is imported as an app.

    Raises:
        StartReached: It is.
    """
    if _loading:
        raise StartReached


@contextmanager
def _importing() -> Iterator[None]:
    global _loading
    _loading += 1
    try:
        yield
    except StartReached:
        pass
    finally:
        _loading -= 1


# ------------------------------------------------------------------------------------------------- references


def load_app(reference: str) -> list[Agent]:
    """Import an app and find its agents.

    Args:
        reference: ``module:attr``, ``path.py:attr``, or ``path.py``: all agents that are globals of the
            script. ``attr`` is an `Agent`, a list of them, or a function without parameters that returns
            either.

    Raises:
        HayataError: ``agent_start_failed``, or the code of the definition that is refused;
            ``details.traceback`` is the text of what went wrong in users' code.
    """
    target, attr = _split(reference)
    if target.endswith(".py"):
        module = _import_script(target, reference)
    else:
        module = _import_module(target, reference)
    if attr is None:
        agents = [value for value in vars(module).values() if isinstance(value, Agent)]
        if not agents:
            raise _failure(reference, "no global of it is an Agent", hint=f"{_FORM}; name a list or a function as attr")
        return _distinct(agents, reference)
    return _distinct(_agents_of(_attribute(module, attr, reference), reference), reference)


def _split(reference: str) -> tuple[str, str | None]:
    if reference.endswith(".py"):
        return reference, None
    target, colon, attr = reference.rpartition(":")
    if not colon or not target or not attr:
        raise _failure(reference, "it is not of a form that can be loaded", hint=_FORM)
    return target, attr


def _import_script(path: str, reference: str) -> ModuleType:
    """Import a script once, under a name of its own; its folder goes on ``sys.path``, as Python does it."""
    real = os.path.realpath(path)
    if not os.path.isfile(real):
        raise _failure(reference, f"there is no file {path}")
    name = script_module_name(real)
    known = sys.modules.get(name)
    if known is not None:
        return known
    folder = os.path.dirname(real)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(name, real)
    if spec is None or spec.loader is None:
        raise _failure(reference, "it is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with _users_code(reference, "it can't be imported"), _importing():
            spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def _import_module(name: str, reference: str) -> ModuleType:
    with _users_code(reference, "it can't be imported"):
        found: list[ModuleType] = []
        with _importing():
            found.append(importlib.import_module(name))
        if found:
            return found[0]
    raise _failure(
        reference,
        "it calls hayata.start while it is imported",
        hint="put the call under `if __name__ == '__main__':`",
    )


def _attribute(module: ModuleType, attr: str, reference: str) -> Any:
    found: Any = module
    for name in attr.split("."):
        try:
            with _users_code(reference, f"{attr} can't be read", but=AttributeError):
                found = getattr(found, name)
        except AttributeError:
            agents = [key for key, value in vars(module).items() if isinstance(value, Agent)]
            hint = f"its agents: {', '.join(agents)}" if agents else "is it a global, outside of `if __name__ == …`?"
            raise _failure(reference, f"there is no {attr!r} in it", hint=hint) from None
    return found


def _agents_of(value: Any, reference: str) -> list[Agent]:
    if callable(value) and not isinstance(value, Agent | type):
        with _users_code(reference, "the function raised"), _importing():
            value = value()
    agents = [value] if isinstance(value, Agent) else list(value) if isinstance(value, list | tuple) else []
    strangers = [item for item in agents if not isinstance(item, Agent)]
    if not agents or strangers:
        wrong = strangers[0] if strangers else value
        raise _failure(reference, f"it gives a {type(wrong).__name__}, not an Agent or a list of agents")
    return agents


def _distinct(agents: Iterable[Agent], reference: str) -> list[Agent]:
    """Drop repetitions of the same agent; refuse two with one id."""
    by_id: dict[str, Agent] = {}
    for agent in agents:
        if by_id.setdefault(agent.id, agent) is not agent:
            raise _failure(reference, f"two agents have the id {agent.id!r}", hint="ids are unique within a daemon")
    return list(by_id.values())


@contextmanager
def _users_code(reference: str, what: str, *, but: type[Exception] | None = None) -> Iterator[None]:
    """Make typed errors of what users' code raises.

    Raises:
        HayataError: See `load_app`.
    """
    try:
        yield
    except (KeyboardInterrupt, StartReached):
        raise
    except HayataError as error:  # a definition that was refused keeps its code
        error.details.setdefault("traceback", traceback_text(error))
        error.details.setdefault("app", reference)
        raise
    except BaseException as error:
        if but is not None and isinstance(error, but):
            raise
        raise _failure(reference, f"{what}: {_described(error)}", traceback=traceback_text(error)) from error


def _described(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - a user's __str__
        return type(error).__name__


def _failure(reference: str, why: str, *, hint: str = "", traceback: str = "") -> HayataError:
    details = {"app": reference, **({"traceback": traceback} if traceback else {})}
    if traceback and not hint:
        hint = "python itself shows the same error: modules are looked for where it would look"
    return error_for("agent_start_failed", f"{reference}: {why}", details=details, hint=hint)


# ----------------------------------------------------------------------------------------------------- values


def dump_value(agents: Sequence[Agent]) -> bytes:
    """Pickle agents by value, for `load_value` in another process.

    Raises:
        HayataError: ``agent_start_failed``: something that they refer to can't be pickled.
    """
    from hayata.by_value import pickle_agents

    try:
        return pickle_agents(agents)
    except Exception as error:
        raise _failure(
            ", ".join(agent.id for agent in agents),
            f"it can't be sent to the workers: {_described(error)}",
            hint="define the agent as a global of a module or script, or make what it holds in its lifespan",
        ) from error


def load_value(data: bytes) -> list[Agent]:
    """Unpickle what `dump_value` made. Only ever bytes of this user's own process, never from the socket.

    Raises:
        HayataError: ``agent_start_failed``.
    """
    import cloudpickle  # type: ignore[import-untyped]

    with _users_code("agents by value", "they can't be unpickled"), _importing():
        value = cloudpickle.loads(data)
    return _distinct(_agents_of(value, "agents by value"), "agents by value")


# ------------------------------------------------------------------------------------------------------- back


def reference_of(agents: Sequence[Agent]) -> list[str] | None:
    """Find references by which another process, with the same ``sys.path``, can load these agents.

    Returns:
        One for each agent; None when one of them is no global of an importable module or script: a REPL, a
        notebook, a local variable, something defined only under ``if __name__ == "__main__"``.
    """
    references = []
    for agent in agents:
        reference = next(_references(agent), None)
        if reference is None:
            return None
        references.append(reference)
    return references


def _references(agent: Agent) -> Iterator[str]:
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType):
            for attr, value in list(vars(module).items()):
                if value is agent:
                    target = _main_target(module, attr) if name == "__main__" else _module_target(name, module)
                    if target is not None:
                        yield f"{target}:{attr}"


def _main_target(module: ModuleType, attr: str) -> str | None:
    spec = getattr(module, "__spec__", None)
    path = getattr(module, "__file__", None)
    if not isinstance(path, str) or not path.endswith(".py") or not os.path.isfile(path):
        return None
    if attr not in _globals_on_import(path):
        return None
    if spec is not None and spec.name:  # python -m package.module
        return str(spec.name)
    return os.path.realpath(path)


def _module_target(name: str, module: ModuleType) -> str | None:
    from hayata.by_value import is_importable

    path = getattr(module, "__file__", None)
    if isinstance(path, str) and name == script_module_name(path):
        return os.path.realpath(path)
    return name if is_importable(module) else None


def _globals_on_import(path: str) -> set[str]:
    """Names that importing a script binds: not those under ``if __name__ == "__main__"``."""
    try:
        with open(path, "rb") as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError):
        return set()
    names: set[str] = set()
    waiting: list[ast.AST] = [statement for statement in tree.body if not _is_main_guard(statement)]
    while waiting:
        item = waiting.pop()
        if isinstance(item, ast.Name) and isinstance(item.ctx, ast.Store):
            names.add(item.id)
        elif isinstance(item, ast.alias):
            names.add((item.asname or item.name).partition(".")[0])
        if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            names.add(getattr(item, "name", ""))
        else:
            waiting += [child for child in ast.iter_child_nodes(item) if not _is_main_guard(child)]
    return names


def _is_main_guard(item: ast.AST) -> bool:
    return isinstance(item, ast.If) and "__name__" in {
        name.id for name in ast.walk(item.test) if isinstance(name, ast.Name)
    }
