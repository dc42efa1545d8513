"""README, CONTRIBUTING and CHANGELOG agree with the code: what they name exists, what they show has types."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest

import hayata
from hayata.cli.root import Commands
from hayata_supervisor.main import command as supervisor_command

ROOT = Path(__file__).parents[2]
DOCUMENTS = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
_FILE = re.compile(r"^\.?[\w./-]*/[\w./-]*$|^[\w-]+\.(md|py|toml)$")
_ROLE_FILES = {"guard", "supervisor", "forkserver", "agent_worker", "node_worker", "edge_worker"}


def text(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


def blocks(name: str, language: str) -> list[str]:
    return [code for kind, code in BLOCK.findall(text(name)) if kind == language]


def spans(name: str) -> list[str]:
    """Inline code."""
    return INLINE.findall(BLOCK.sub("", text(name)))


def command_lines(name: str) -> list[list[str]]:
    """Lines of sh blocks, and inline code that calls one of our commands, as words."""
    lines = [line for block in blocks(name, "sh") for line in block.splitlines() if line.strip()]
    lines += [span for span in spans(name) if re.match(r"(hayata|hayata-supervisor|make|\.venv/bin/python) \S", span)]
    return [shlex.split(line, comments=True) for line in lines]


def example() -> str:
    """The README's example."""
    (code,) = blocks("README.md", "python")
    return code


def test_readme_example_has_at_most_twenty_lines():
    assert len([line for line in example().splitlines() if line.strip()]) <= 20


def test_readme_example_passes_mypy_strict(tmp_path):
    (tmp_path / "letters.py").write_text(example())
    config = tmp_path / "mypy.ini"
    config.write_text(f"[mypy]\nstrict = true\nmypy_path = {ROOT}\ncache_dir = {tmp_path / 'cache'}\n")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", str(config), "--follow-imports=silent", "letters.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.stdout.startswith("Success"), done.stdout + done.stderr


def test_readme_example_names_only_what_is_public():
    names = {
        alias.name
        for node in ast.walk(ast.parse(example()))
        if isinstance(node, ast.ImportFrom) and node.module == "hayata"
        for alias in node.names
    }
    assert names
    assert names <= set(hayata.__all__)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_commands_in_documents_exist(name):
    makefile = text("Makefile")
    group = Commands("hayata")
    context = click.Context(group)
    for words in command_lines(name):
        if words[0] == "make":
            targets = [word for word in words[1:] if "=" not in word]
            assert all(re.search(rf"^{re.escape(target)}:", makefile, re.M) for target in targets), words
        elif words[0] == "hayata":
            found = group.get_command(context, words[1])
            assert found is not None, words
            assert options(words) <= {name for each in found.params for name in each.opts}, words
        elif words[0] == "hayata-supervisor":
            assert options(words) <= {name for each in supervisor_command.params for name in each.opts}, words
        elif words[1:2] == ["-m"] and words[2] != "pip":
            assert importlib.util.find_spec(words[2]), words


def options(words: list[str]) -> set[str]:
    return {word for word in words if word.startswith("-")}


def test_both_commands_of_the_readme_are_there():
    made = {tuple(words[:2]) for words in command_lines("README.md") if words[0] == "make"}
    assert {("make", "demo"), ("make", "test")} <= made


@pytest.mark.parametrize("name", DOCUMENTS)
def test_commands_named_alone_in_documents_exist(name):
    """As in "`hayata run`, `ps`, `show`"."""
    group = Commands("hayata")
    for listed in re.findall(r"`hayata \w+`((?:,\s+`\w+`)+)", text(name)):
        for command in INLINE.findall(listed):
            assert group.get_command(click.Context(group), command) is not None, command


@pytest.mark.parametrize("name", DOCUMENTS)
def test_files_and_links_in_documents_exist(name):
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text(name)) if "://" not in link]
    files = [span for span in spans(name) if _FILE.match(span) and not span.startswith(".venv")]
    runtime = ROOT / "supervisor" / "hayata_supervisor"
    for path in links + files:
        is_role = path.endswith(".py") and path[:-3] in _ROLE_FILES and (runtime / path).is_file()
        assert is_role or (ROOT / path).exists(), f"{name} names {path}, which is not there"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_python_names_in_documents_exist(name):
    of_context = {name for kind in hayata.Context.__mro__ for name in (*vars(kind), *getattr(kind, "__slots__", ()))}
    for span in spans(name):
        if dotted := re.match(r"hayata(?:\.\w+)+", span):
            assert _resolves(dotted[0]), span
        elif public := re.match(r"([A-Z]\w+)(?:\(.*\))?$", span):
            assert public[1] in hayata.__all__, span
        elif span.startswith("ctx."):
            assert span.removeprefix("ctx.") in of_context, span


def _resolves(dotted: str) -> bool:
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        return all((found := getattr(found, part, None)) is not None for part in parts[length:])
    return False


def test_changelog_has_the_version_of_the_project():
    version = tomllib.loads(text("pyproject.toml"))["project"]["version"]
    assert re.search(rf"^## {re.escape(version)}\b", text("CHANGELOG.md"), re.M)
