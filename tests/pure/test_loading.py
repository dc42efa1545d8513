"""From references to agents and back; what can't be loaded is a typed error with users' traceback."""

from __future__ import annotations

import importlib
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hayata import Agent, Finish, HayataError, loading, values
from hayata.scripts import script_module_name

AGENT = """
    from hayata import Agent, Finish
    def node(state):
        return {}
    def policy(context):
        return Finish(__name__)
    agent = Agent("ID", [node], policy)
"""


def app(agent_id: str) -> str:
    """A script's text, to go on with four spaces of indentation."""
    return AGENT.replace("ID", agent_id)


Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Iterator[Write]:
    """Write a module or script into a folder of the test's own; what is imported from there is forgotten."""
    path_before, modules_before = list(sys.path), set(sys.modules)

    def put(name: str, text: str, **values: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        text = textwrap.dedent(text)
        for key, value in values.items():
            text = text.replace("{" + key + "}", value)
        path.write_text(text)
        importlib.invalidate_caches()
        return path

    yield put
    sys.path[:] = path_before
    for name in set(sys.modules) - modules_before:
        del sys.modules[name]


def refusal(reference: str, code: str = "agent_start_failed") -> HayataError:
    with pytest.raises(HayataError) as caught:
        loading.load_app(reference)
    assert caught.value.code == code
    return caught.value


def ids(agents: list[Agent]) -> list[str]:
    return [agent.id for agent in agents]


# ------------------------------------------------------------------------------------------------- loading


def test_a_script_gives_all_agents_that_are_globals_in_order(write):
    path = write("app.py", app("b") + "    second = Agent('a', [node])\n    again = agent\n")
    assert ids(loading.load_app(str(path))) == ["b", "a"]


@pytest.mark.parametrize(
    ("attr", "expected"),
    [
        ("agent", ["one"]),
        ("group", ["one", "two"]),
        ("make", ["three"]),
        ("make_all", ["one", "two"]),
        ("Space.inner", ["two"]),
    ],
)
def test_an_attribute_is_an_agent_a_list_or_a_function(write, attr, expected):
    text = (
        app("one")
        + """
    two = Agent("two", [node])
    group = [agent, two, agent]
    class Space:
        inner = two
    def make():
        return Agent("three", [node])
    def make_all():
        return (agent, two)
    """
    )
    path = write("app_with_more.py", text)
    assert ids(loading.load_app(f"{path}:{attr}")) == expected
    sys.path.insert(0, str(path.parent))
    assert ids(loading.load_app(f"app_with_more:{attr}")) == expected


def test_a_script_is_not_main_but_its_folder_is_on_the_path(write):
    write("beside_it.py", "ID = 'from_beside'")
    path = write(
        "script.py",
        app("x")
        + """
    import beside_it
    agent = Agent(beside_it.ID, [node], policy)
    if __name__ == "__main__":
        raise SystemExit("not as a script")
    """,
    )
    (agent,) = loading.load_app(str(path))
    assert agent.id == "from_beside"
    assert agent.decision_policy.__module__ == script_module_name(str(path))
    assert sys.modules[script_module_name(str(path))].agent is agent


def test_a_script_is_imported_once_whatever_its_path_is_spelled_like(write, monkeypatch):
    path = write("once.py", app("x"))
    (agent,) = loading.load_app(f"{path}:agent")
    monkeypatch.chdir(path.parent)
    assert loading.load_app("once.py")[0] is agent
    assert loading.load_app("./once.py:agent")[0] is agent


def test_a_script_behind_a_link_is_the_same_script(write):
    path = write("real.py", app("x"))
    link = path.with_name("link.py")
    link.symlink_to(path)
    assert script_module_name(str(link)) == script_module_name(str(path))
    assert loading.load_app(str(link)) == loading.load_app(str(path))


def test_two_scripts_of_one_name_in_two_folders_are_two_modules(write):
    first = write("a/app.py", app("first"))
    second = write("b/app.py", app("second"))
    assert ids(loading.load_app(str(first)) + loading.load_app(str(second))) == ["first", "second"]


def test_reaching_start_ends_the_import_quietly(write):
    text = (
        app("x")
        + """
    from hayata import loading
    try:
        loading.stop_if_loading()
    except Exception:
        raise SystemExit("an Exception can be swallowed")
    later = Agent("never", [node])
    """
    )
    path = write("starts.py", text)
    assert ids(loading.load_app(str(path))) == ["x"]
    loading.stop_if_loading()


def test_a_module_that_starts_while_it_is_imported_says_what_to_do(write):
    path = write(
        "starts_mod.py",
        app("x") + "    from hayata import loading\n    loading.stop_if_loading()\n",
    )
    sys.path.insert(0, str(path.parent))
    assert "__main__" in refusal("starts_mod:agent").hint


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import no_such_module_at_all", ["ModuleNotFoundError", "line 1"]),
        ("def f():\n    raise KeyError('deep')\nf()", ["KeyError", "line 2, in f"]),
        ("raise SystemExit(3)", ["SystemExit"]),
        ("x = (", ["SyntaxError", "x = ("]),
        ("class E(Exception):\n    def __str__(self):\n        raise OSError\nraise E", ["E"]),
    ],
)
def test_an_app_that_cannot_be_imported_gives_its_traceback(write, text, words):
    path = write("broken.py", text)
    error = refusal(str(path))
    for word in words:
        assert word in error.details["traceback"]
    assert "hayata/loading.py" not in error.details["traceback"]
    assert error.hint
    assert script_module_name(str(path)) not in sys.modules


def test_a_broken_module_gives_its_traceback(write):
    path = write("broken_mod.py", "1 / 0")
    sys.path.insert(0, str(path.parent))
    assert "ZeroDivisionError" in refusal("broken_mod:agent").details["traceback"]
    assert "no_such_module_at_all" in refusal("no_such_module_at_all:agent").message


def test_a_definition_that_is_refused_keeps_its_code_and_says_where(write):
    path = write("twice.py", app("x") + "    Agent('y', [node, node])\n")
    error = refusal(str(path), "duplicate_nodes")
    assert error.details["problems"]
    assert "twice.py" in error.details["traceback"]


@pytest.mark.parametrize("reference", ["", ":", "module", "module:", ":attr", "a.b.c"])
def test_what_is_no_reference_says_what_one_is(reference):
    assert "module:attr" in refusal(reference).hint


def test_what_is_not_there_is_said(write):
    path = write("app.py", app("x") + "    number = 3\n    def none():\n        return None\n")
    assert "no file" in refusal(f"{path.parent}/other.py").message
    assert "no file" in refusal(f"{path.parent}/other.py:agent").message
    missing = refusal(f"{path}:nothing")
    assert "nothing" in missing.message
    assert "agent" in missing.hint
    assert "int" in refusal(f"{path}:number").message
    assert "NoneType" in refusal(f"{path}:none").message
    empty = write("empty.py", "x = 1")
    assert "no global" in refusal(str(empty)).message


def test_a_function_that_raises_gives_its_traceback(write):
    path = write("app.py", "def make():\n    raise LookupError('no config')")
    assert "no config" in refusal(f"{path}:make").details["traceback"]


def test_a_module_whose_attributes_raise_is_a_typed_error(write):
    path = write("app.py", "def __getattr__(name):\n    raise RuntimeError('lazy')")
    assert "lazy" in refusal(f"{path}:agent").message


def test_two_agents_of_one_id_are_refused(write):
    path = write("app.py", app("same") + "    other = Agent('same', [node])\n")
    assert "same" in refusal(str(path)).message


# --------------------------------------------------------------------------------------------- references


def run_script(path: Path, *arguments: str) -> str:
    """Run a script as a person would; gives what it prints."""
    done = subprocess.run(
        [sys.executable, *arguments] if arguments else [sys.executable, str(path)],
        cwd=path.parent,
        env={
            "PYTHONPATH": ":".join(map(str, [Path(loading.__file__).parents[1], path.parent, path.parents[1]])),
            "PATH": "/usr/bin",
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


SAY = "    from hayata import loading\n    print(loading.reference_of([agent]))\n"


def test_a_global_of_a_script_goes_by_its_path(write):
    path = write("app.py", app("x") + SAY)
    assert run_script(path) == repr([f"{path}:agent"])


def test_a_global_of_a_module_goes_by_the_modules_name(write):
    write("pack/__init__.py", "")
    write("pack/mod.py", app("x"))
    path = write(
        "app.py",
        "from pack.mod import agent\nfrom hayata import loading\nprint(loading.reference_of([agent]))",
    )
    assert run_script(path) in (repr(["pack.mod:agent"]), repr([f"{path}:agent"]))
    path = write(
        "mod_only.py",
        "import pack.mod\nfrom hayata import loading\nprint(loading.reference_of([pack.mod.agent]))",
    )
    assert run_script(path) == repr(["pack.mod:agent"])


def test_a_module_run_with_dash_m_goes_by_its_name(write):
    write("pack/__init__.py", "")
    path = write("pack/tool.py", app("x") + SAY)
    assert run_script(path, "-m", "pack.tool") == repr(["pack.tool:agent"])


def test_what_is_only_there_when_the_script_runs_has_no_reference(write):
    guarded = app("x").replace("    agent = ", '    if __name__ == "__main__":\n        agent = ')
    assert run_script(write("guarded.py", guarded + SAY)) == "None"
    local = app("x").replace("    agent = ", "    def make():\n        return ")
    said = SAY.replace("[agent]", "[make()]")
    assert run_script(write("local.py", local + said)) == "None"


def test_an_interactive_command_has_no_reference(write):
    path = write("app.py", "")
    text = textwrap.dedent(app("x") + SAY)
    assert run_script(path, "-c", text) == "None"


def test_several_agents_go_by_reference_only_together(write):
    text = (
        app("x")
        + """
    other = Agent("y", [node])
    from hayata import loading
    print(loading.reference_of([agent, other]), loading.reference_of([agent, Agent("z", [node])]))
    """
    )
    path = write("app.py", text)
    assert run_script(path) == f"{[f'{path}:agent', f'{path}:other']!r} None"


def test_a_module_that_another_process_could_not_find_has_no_reference(write):
    path = write("hidden/app.py", app("x"))
    spec = importlib.util.spec_from_file_location("not_on_the_path", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["not_on_the_path"] = module
    spec.loader.exec_module(module)
    assert loading.reference_of([module.agent]) is None


def test_a_reference_leads_to_the_same_agent_again(write):
    path = write("app.py", app("x"))
    agents = loading.load_app(str(path))
    references = loading.reference_of(agents)
    assert references == [f"{path}:agent"]
    assert loading.load_app(references[0]) == agents


# ------------------------------------------------------------------------------------------------- values

ENUM_APP = """
    import enum
    from hayata.values import decode, encode
    class Color(enum.Enum):
        RED = "red"
    if __name__ == "__main__":
        import sys
        raw = encode(Color.RED) if len(sys.argv) < 2 else bytes.fromhex(sys.argv[1])
        print(raw.hex(), decode(raw) is Color.RED)
"""


def test_an_enum_of_a_script_is_the_same_member_in_main_and_in_a_worker(write):
    path = write("enums.py", ENUM_APP)
    raw, same_in_main = run_script(path).split()
    assert same_in_main == "True"
    with pytest.raises(HayataError):  # it has no agent, but it is imported
        loading.load_app(str(path))
    color = sys.modules[script_module_name(str(path))].Color
    assert values.decode(bytes.fromhex(raw)) is color.RED
    assert run_script(path, str(path), values.encode(color.RED).hex()).endswith("True")


BY_VALUE = '''
{future}
import dataclasses, enum, sys
from typing import Annotated, TypedDict
import msgspec, pydantic
from hayata import Agent, Extend, Finish, Next, loading

class Color(enum.Enum):
    RED = "red"

class Message(pydantic.BaseModel):
    text: str

class Inner(TypedDict):
    n: int

@dataclasses.dataclass
class Data:
    x: int = 0
    inner: Inner | None = None

class Point(msgspec.Struct, rename="camel", frozen=True):
    """With a method, defaults and an option."""
    left_side: int = 1
    names: list[str] = []

    def doubled(self) -> int:
        return 2 * self.left_side

class State(TypedDict, total=False):
    messages: Annotated[list[Message], Extend]
    color: Color
    data: Data
    point: Point

def main():
    factor = 3

    def work(state, ctx):
        assert state["point"].doubled() == 8, state
        return {"messages": [Message(text="a" * factor)], "color": Color.RED, "data": Data(3, {"n": 1}),
                "point": Point(left_side=5, names=["p"])}

    def policy(context):
        return Next(work) if context.last is None else Finish(context.state)

    agent = Agent("x", [work], policy, state_type=State, state={"point": Point(left_side=4)})
    assert loading.reference_of([agent]) is None
    sys.stdout.buffer.write(loading.dump_value([agent]).hex().encode())

if __name__ == "__main__":
    main()
'''

LOADER = """
import sys
from hayata import calls, loading, messages as m, values

(agent,) = loading.load_value(bytes.fromhex(sys.argv[1]))
run = m.RunTask("e", None, "i", 1, "k", None, False, agent.initial_state, m.NIL)
done = calls.TaskCall(agent, "work", run, "edge", None, None, None).run()
assert isinstance(done, m.TaskCompleted), done
print(sorted(values.decode_mapping(done.update).items()))
question = m.Evaluate(1, "i", agent.initial_state, m.NIL, 0, None, None, None, None, 0.0)
assert calls.evaluate(agent, question).nodes == ["work"]
"""


@pytest.mark.parametrize("future", ["", "from __future__ import annotations"], ids=["types", "text"])
def test_agents_by_value_take_their_functions_and_types_along(write, future):
    path = write("by_value.py", BY_VALUE, future=future)
    data = run_script(path)
    loader = write("elsewhere/loader.py", LOADER)
    said = run_script(loader, str(loader), data)
    assert said == repr(
        [
            ("color", "red"),
            ("data", {"x": 3, "inner": {"n": 1}}),
            ("messages", [{"text": "aaa"}]),
            ("point", {"leftSide": 5, "names": ["p"]}),
        ]
    )


def test_what_cannot_be_pickled_is_a_typed_error():
    lock = __import__("threading").Lock()

    def node(state):
        return {"locked": lock.locked()}

    with pytest.raises(HayataError) as caught:
        loading.dump_value([Agent("a", [node], lambda context: Finish())])
    assert caught.value.code == "agent_start_failed"
    assert "lifespan" in caught.value.hint


@pytest.mark.parametrize("data", [b"", b"not a pickle", b"\x80\x05N."])
def test_bytes_that_are_no_agents_are_a_typed_error(data):
    with pytest.raises(HayataError) as caught:
        loading.load_value(data)
    assert caught.value.code == "agent_start_failed"
