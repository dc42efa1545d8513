"""The places in the source that must have failpoints, and the points that it names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import hayata_supervisor

SOURCE = Path(hayata_supervisor.__file__).parent

_SEND = frozenset({"send", "sendall", "sendmsg", "sendto", "send_fds"})
_RECEIVE = frozenset({"recv", "recv_into", "recvfrom", "recvmsg", "recv_fds"})
_START = frozenset({"os.fork", "os.forkpty", "os.posix_spawn", "os.posix_spawnp", "subprocess.Popen", "subprocess.run"})
_RENAME = frozenset({"os.rename", "os.replace", "os.link", "shutil.move"})
_CHANNELS = frozenset({"channel", "_channel", "stream", "_stream", "packets", "_packets", "_guard", "_supervisor"})
"""Names of what has failpoints for each message itself: `process.channel` and its like."""


class Site(NamedTuple):
    """One place that makes something happen outside the process.

    Attributes:
        function: ``file.py:qualified.name`` of where it is.
        line: Number of the line.
        kind: ``send``, ``receive``, ``commit`` or ``start``.
        text: The call.
    """

    function: str
    line: int
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.function}, line {self.line}: {self.text}"


class Module:
    """One file of the runtime."""

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self._tree = ast.parse(text)
        self._parents = {child: node for node in ast.walk(self._tree) for child in ast.iter_child_nodes(node)}

    def sites(self) -> Iterator[Site]:
        """All of its sites."""
        for node, kind in self._found():
            yield Site(self._function(node), node.lineno, kind, ast.unparse(node).partition("\n")[0])

    def unguarded(self) -> Iterator[Site]:
        """Sites without their failpoints: before and after it, what is received only after it."""
        for node, kind in self._found():
            lines = [call.lineno for call in ast.walk(self._scope(node)) if _is_failpoint(call)]
            first, last = node.lineno, node.end_lineno or node.lineno
            if isinstance(node, ast.With):  # commits at its end
                before = any(first < line <= last for line in lines)
            else:
                before = kind == "receive" or any(line < first for line in lines)
            if not before or not any(line > last for line in lines):
                yield Site(self._function(node), first, kind, ast.unparse(node).partition("\n")[0])

    def names(self) -> Iterator[str]:
        """Names of the points that are written out; without those of whatever role the process has."""
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "failpoints.hit":
                name = node.args[0]
                assert isinstance(name, ast.Constant), f"{self.name}: {ast.unparse(node)}"
                if not name.value.startswith("."):
                    yield name.value

    def _found(self) -> Iterator[tuple[ast.stmt | ast.expr, str]]:
        for node in ast.walk(self._tree):
            if isinstance(node, ast.With):
                if any(_is_transaction(item.context_expr) for item in node.items):
                    yield node, "commit"
            elif isinstance(node, ast.Call):
                kind = _kind(node)
                if kind is not None:
                    yield node, kind

    def _scope(self, node: ast.AST) -> ast.AST:
        while not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Module):
            node = self._parents[node]
        return node

    def _function(self, node: ast.AST) -> str:
        names = []
        while not isinstance(node, ast.Module):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.insert(0, node.name)
            node = self._parents[node]
        return f"{self.name}:{'.'.join(names)}"


def modules() -> list[Module]:
    """All files of the runtime."""
    paths = sorted(SOURCE.rglob("*.py"))
    return [Module(str(path.relative_to(SOURCE)), path.read_text()) for path in paths if path.name != "failpoints.py"]


def named_points() -> list[str]:
    """Names of all points that the source writes out; see `Module.names`."""
    return sorted({name for module in modules() for name in module.names()})


def _is_failpoint(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) in ("failpoints.hit", "failpoints.message")


def _is_transaction(node: ast.expr) -> bool:
    """``env.begin(write=True)``: its with block commits."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr != "begin":
        return False
    return any(keyword.arg == "write" for keyword in node.keywords)


def _kind(call: ast.Call) -> str | None:
    name = ast.unparse(call.func)
    if name in _START:
        return "start"
    if name in _RENAME:
        return "commit"
    if name == "os.write":
        return "send"
    if not isinstance(call.func, ast.Attribute):
        return None
    owner, method = ast.unparse(call.func.value).rpartition(".")[2], call.func.attr
    if method in _SEND:
        return None if owner in _CHANNELS else "send"
    if method in _RECEIVE:
        return "receive"
    if method == "accept" and not call.args:
        return "receive"
    if method == "rename" or (method == "commit" and not call.args):
        return "commit"
    return None
