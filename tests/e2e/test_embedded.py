"""`hayata.start`: from scripts, prompts, threads, event loops; and what is left, however it ends."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import hayata
from hayata import Agent, Client, Finish, Next, PolicyContext, loading
from hayata.client import Process
from hayata.embedded import Runtime
from hayata.errors import HayataError, InvocationFailed, RecoveryNeeded
from hayata.guard_child import GuardChild
from hayata.messages import StopRuntime
from tests.support import client_app
from tests.support.daemon import APP, DEADLINE_S, ROOT, assert_all_gone, environment, marked

MODES = [pytest.param(False, id="processes"), pytest.param(True, id="inline")]


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Whatever is started in this test is marked, and gone at its end."""
    mark = uuid.uuid4().hex
    for name, value in environment(mark).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(ROOT)
    yield mark
    assert_all_gone(mark)


@pytest.fixture
def data_dir(tmp_path: Path) -> str:
    return str(tmp_path / "data")


def await_file(path: Path) -> str:
    deadline = time.monotonic() + DEADLINE_S
    while not path.exists() or not path.read_text():
        assert time.monotonic() < deadline, f"{path} does not appear"
        time.sleep(0.005)
    return path.read_text()


def held(tmp_path: Path) -> tuple[dict[str, str], Path, Path]:
    started, go = tmp_path / f"started-{uuid.uuid4().hex}", tmp_path / f"go-{uuid.uuid4().hex}"
    return {"started": str(started), "go": str(go)}, started, go


def by_role(process: Process, role: str) -> list[Process]:
    found = [process] if process.role == role else []
    for child in process.children:
        found += by_role(child, role)
    return found


def script(tmp_path: Path, text: str, name: str = "script.py") -> Path:
    path = tmp_path / name
    path.write_text(textwrap.dedent(text))
    return path


def run_python(mark: str, tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", *arguments],
        env=environment(mark, DATA_DIR=str(tmp_path / "data")),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S * 2,
    )


@contextlib.contextmanager
def owning(mark: str, tmp_path: Path, path: Path) -> Iterator[subprocess.Popen[str]]:
    """Run a script that embeds a runtime, and that a test ends."""
    with subprocess.Popen(
        [sys.executable, str(path)],
        env=environment(mark, DATA_DIR=str(tmp_path / "data")),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as owner:
        try:
            yield owner
        finally:
            owner.kill()


HELLO = """
import os
import sys
import hayata

def greet(state):
    print("a word from the node", flush=True)
    return {"greeting": "Hello, " + state["input"]}

def policy(context):
    return hayata.Next(greet, context.input) if context.last is None else hayata.Finish(context.state)

agent = hayata.Agent("hello", nodes=[greet], decision_policy=policy)
"""
USE = """
with hayata.start(agent, data_dir=os.environ["DATA_DIR"]) as runtime:
    print(runtime.call("hello", "world", timeout=20))
"""


# ----------------------------------------------------------------------------------------------------------
# Where it is used from
# ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("guarded", [True, False])
def test_script_runs_its_agent_and_shows_what_it_prints(tmp_path: Path, mark: str, guarded: bool) -> None:
    """Also without ``if __name__ == "__main__"``: the forkserver's import stops where start is reached."""
    use = USE
    if guarded:
        use = 'if __name__ == "__main__":\n' + textwrap.indent(USE, "    ")
    path = script(tmp_path, HELLO + use)
    done = run_python(mark, tmp_path, str(path))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["a word from the node", "{'greeting': 'Hello, world'}"]


def test_prompt_sends_its_agent_by_value(tmp_path: Path, mark: str) -> None:
    done = run_python(mark, tmp_path, "-c", HELLO + USE)
    assert (done.returncode, done.stderr) == (0, "")
    assert "{'greeting': 'Hello, world'}" in done.stdout


def test_agent_of_a_function_goes_by_value_with_what_it_closes_over(data_dir: str, mark: str) -> None:
    word = "enclosed"

    def say(state: Mapping[str, Any]) -> dict[str, Any]:
        return {"word": word}

    def policy(context: PolicyContext[Any]) -> Any:
        return Next("say", None) if context.last is None else Finish(context.state)

    agent = Agent("local", nodes=[say], decision_policy=policy)
    with hayata.start(agent, data_dir=data_dir) as runtime:
        assert runtime.call("local", timeout=DEADLINE_S) == {"word": "enclosed"}
        # A restarted forkserver reads the same pickled agent again.
        os.kill(by_role(runtime.tree(), "supervisor")[0].pid, signal.SIGKILL)
        assert runtime.call("local", timeout=DEADLINE_S) == {"word": "enclosed"}


@pytest.mark.parametrize("inline", MODES)
def test_reference_and_objects_both_start(data_dir: str, mark: str, inline: bool) -> None:
    with hayata.start(APP, data_dir=data_dir, inline=inline) as runtime:
        assert runtime.call("echo", 1, timeout=DEADLINE_S) == {"echo": 1}
    with hayata.start(client_app.agents, data_dir=data_dir, inline=inline) as runtime:
        assert runtime.call("echo", 2, timeout=DEADLINE_S) == {"echo": 2}
        assert len(runtime.invocations()) == 2, "what an earlier runtime did is still there"


@pytest.mark.parametrize("inline", MODES)
def test_runtime_has_the_methods_of_a_client(data_dir: str, mark: str, inline: bool) -> None:
    with hayata.start(APP, data_dir=data_dir, inline=inline) as runtime:
        assert isinstance(runtime, Client)
        assert runtime.data_dir == data_dir
        invocation = runtime.run("stream", stream=True)
        numbers = [e.data["result"]["number"] for e in invocation.events() if e.type == "node_partial_result"]
        assert numbers == [0, 1, 2]
        assert invocation.result(timeout=DEADLINE_S) == {"streamed": 3}
        with pytest.raises(InvocationFailed, match="no such luck"):
            runtime.call("fail", timeout=DEADLINE_S)
        assert runtime.call("gather", 5, timeout=DEADLINE_S) == {"gathered": 5}
        if not inline:
            assert runtime.pid == runtime.tree().pid
            assert os.getsid(runtime.pid) == runtime.pid, "out of reach of the terminal's Ctrl-C"
            with Client(runtime.socket) as client:
                assert client.invocation(invocation.id).status() == "completed"


def test_module_that_only_this_process_finds_is_found_by_the_workers(
    tmp_path: Path, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    name = f"module_{uuid.uuid4().hex}"
    script(folder, HELLO, f"{name}.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["folder", *sys.path])
    agent = importlib.import_module(name).agent
    with hayata.start(agent, data_dir="data") as runtime:
        assert runtime.call("hello", "you", timeout=DEADLINE_S) == {"greeting": "Hello, you"}
        assert runtime.agents()[0].app == f"{name}:agent"


def test_start_in_a_thread_outlives_the_thread(data_dir: str, mark: str) -> None:
    started: list[Runtime] = []
    thread = threading.Thread(target=lambda: started.append(hayata.start(APP, data_dir=data_dir)))
    thread.start()
    thread.join(DEADLINE_S)
    with started[0] as runtime:
        assert runtime.call("echo", 1, timeout=DEADLINE_S) == {"echo": 1}


@pytest.mark.parametrize("inline", MODES)
def test_many_threads_use_one_runtime(data_dir: str, mark: str, inline: bool) -> None:
    results: list[Any] = []
    with hayata.start(APP, data_dir=data_dir, inline=inline) as runtime:
        threads = [
            threading.Thread(target=lambda n=n: results.append(runtime.call("echo", n, timeout=DEADLINE_S)))
            for n in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
    assert sorted(result["echo"] for result in results) == list(range(6))


@pytest.mark.parametrize("inline", MODES)
def test_async_with_gives_the_async_face(data_dir: str, mark: str, inline: bool) -> None:
    async def main() -> None:
        async with hayata.start(APP, data_dir=data_dir, inline=inline) as runtime:
            results = await asyncio.gather(*(runtime.call("echo", n, timeout=DEADLINE_S) for n in range(5)))
            assert results == [{"echo": n} for n in range(5)]
            invocation = await runtime.run("stream", stream=True)
            assert [event.type async for event in invocation.events()][-1] == "invocation_completed"
            assert await invocation.result() == {"streamed": 3}
        with pytest.raises(HayataError, match="this runtime is closed"):
            await runtime.agents()

    asyncio.run(main())


@pytest.mark.parametrize("inline", MODES)
def test_blocking_face_works_beside_a_running_loop(data_dir: str, mark: str, inline: bool) -> None:
    """As in a notebook: the cell runs inside the kernel's loop."""

    async def cell() -> Any:
        with hayata.start(APP, data_dir=data_dir, inline=inline) as runtime:
            return runtime.call("gather", 1, timeout=DEADLINE_S)

    assert asyncio.run(cell()) == {"gathered": 1}


def test_start_while_an_app_is_imported_ends_the_import(data_dir: str, tmp_path: Path, mark: str) -> None:
    path = script(tmp_path, HELLO + f"runtime = hayata.start(agent, data_dir={data_dir!r})\nraise SystemExit(9)\n")
    (agent,) = loading.load_app(str(path))
    assert agent.id == "hello"
    assert not os.path.exists(data_dir)


# ----------------------------------------------------------------------------------------------------------
# What can't be started
# ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inline", MODES)
def test_options_that_cannot_be_are_refused(data_dir: str, mark: str, inline: bool) -> None:
    def attempt(given: Any = APP, **options: Any) -> None:
        with pytest.raises(HayataError) as refused:
            hayata.start(given, data_dir=options.pop("data_dir", data_dir), inline=inline, **options)
        assert refused.value.code == "invalid_options"

    attempt([])
    attempt([3])
    attempt(data_dir="")
    attempt(log_level="loud")
    if not inline:
        attempt(drain_timeout_s=-1)
        attempt(start_timeout_s=0)
        attempt(policy_timeout_s=float("inf"))
        attempt(frame_cap_bytes=5)
    with pytest.raises(TypeError):
        hayata.start(APP, data_dir=data_dir, colour="red")  # type: ignore[call-arg]
    assert not os.path.exists(data_dir)


@pytest.mark.parametrize("inline", MODES)
def test_app_that_cannot_be_imported_gives_its_traceback(
    tmp_path: Path, data_dir: str, mark: str, inline: bool
) -> None:
    path = script(tmp_path, "import hayata\nraise RuntimeError('broken at import')\n")
    with pytest.raises(HayataError) as failed:
        hayata.start(str(path), data_dir=data_dir, inline=inline)
    assert failed.value.code == "agent_start_failed"
    assert "broken at import" in failed.value.details["traceback"]


def test_two_runtimes_on_one_directory_are_refused_and_the_first_goes_on(data_dir: str, mark: str) -> None:
    with hayata.start(APP, data_dir=data_dir) as runtime:
        with pytest.raises(HayataError) as refused:
            hayata.start(APP, data_dir=data_dir)
        assert refused.value.code == "data_dir_in_use"
        assert "this process has a runtime there already" in refused.value.hint
        assert runtime.call("echo", 1, timeout=DEADLINE_S) == {"echo": 1}


def test_directory_that_is_a_file_is_refused(tmp_path: Path, mark: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HayataError) as refused:
        hayata.start(APP, data_dir=tmp_path / "file")
    assert refused.value.code == "invalid_options"


def test_directory_with_a_very_long_path_works(tmp_path: Path, mark: str) -> None:
    with hayata.start(APP, data_dir=tmp_path / ("d" * 120) / "data") as runtime:
        assert runtime.call("echo", 1, timeout=DEADLINE_S) == {"echo": 1}
        with Client(runtime.socket) as client:
            assert client.call("echo", 2, timeout=DEADLINE_S) == {"echo": 2}


# ----------------------------------------------------------------------------------------------------------
# How it ends
# ----------------------------------------------------------------------------------------------------------


def test_leaving_drains_what_runs(tmp_path: Path, data_dir: str, mark: str) -> None:
    given, started, go = held(tmp_path)
    with hayata.start(APP, data_dir=data_dir) as runtime:
        invocation = runtime.run("wait", given)
        await_file(started)
        threading.Timer(0.2, lambda: go.write_text("go")).start()
    with hayata.start(APP, data_dir=data_dir) as runtime:
        assert runtime.invocation(invocation.id).result(timeout=DEADLINE_S) == {"waited": True}


def test_leaving_after_an_exception_does_not_wait(tmp_path: Path, data_dir: str, mark: str) -> None:
    given, started, _ = held(tmp_path)
    invocation_id = ""

    def leave() -> float:
        nonlocal invocation_id
        with hayata.start(APP, data_dir=data_dir) as runtime:
            invocation_id = runtime.run("wait", given).id
            await_file(started)
            began = time.monotonic()
            with contextlib.suppress(KeyError), runtime:
                raise KeyError
            return time.monotonic() - began

    assert leave() < 3
    with (
        hayata.start(APP, data_dir=data_dir) as runtime,
        pytest.raises(RecoveryNeeded, match="task_execution_uncertain"),
    ):
        runtime.invocation(invocation_id).result(timeout=DEADLINE_S)


def test_close_reaps_the_guard_and_a_second_close_does_nothing(data_dir: str, mark: str) -> None:
    runtime = hayata.start(APP, data_dir=data_dir)
    pid = runtime.pid
    descriptors = len(os.listdir("/proc/self/fd"))
    runtime.close()
    runtime.close()
    assert not os.path.exists(f"/proc/{pid}"), "no zombie"
    assert len(os.listdir("/proc/self/fd")) < descriptors
    with pytest.raises(HayataError, match="this runtime is closed"):
        runtime.agents()


def test_starting_and_closing_leaves_no_descriptor(tmp_path: Path, mark: str) -> None:
    def once(n: int) -> int:
        with hayata.start(APP, data_dir=tmp_path / str(n)) as runtime:
            runtime.call("echo", 1, timeout=DEADLINE_S)
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    first = once(0)
    assert [once(n) for n in range(1, 4)] == [first] * 3


def test_forgotten_runtime_is_closed_at_exit(tmp_path: Path, mark: str) -> None:
    use = """
runtime = hayata.start(agent, data_dir=os.environ["DATA_DIR"])
print(runtime.call("hello", "x", timeout=20))
"""
    done = run_python(mark, tmp_path, "-c", HELLO + use)
    assert (done.returncode, done.stderr) == (0, "")
    assert_all_gone(mark, timeout_s=0)


def test_collected_runtime_is_closed_with_a_warning(data_dir: str, mark: str) -> None:
    with pytest.warns(ResourceWarning, match="was never closed"):
        hayata.start(APP, data_dir=data_dir)
    assert_all_gone(mark, timeout_s=0)


def test_stop_through_the_client_ends_the_runtime(data_dir: str, mark: str) -> None:
    with hayata.start(APP, data_dir=data_dir) as runtime:
        runtime.stop(drain=0)
        assert_all_gone(mark)
        with pytest.raises(HayataError, match="the runtime has ended") as gone:
            runtime.agents()
        assert gone.value.code == "daemon_unavailable"


def test_killed_guard_is_named_by_the_next_call(tmp_path: Path, data_dir: str, mark: str) -> None:
    given, started, _ = held(tmp_path)
    with hayata.start(APP, data_dir=data_dir) as runtime:
        invocation = runtime.run("wait", given)
        await_file(started)
        os.kill(runtime.pid, signal.SIGKILL)
        with pytest.raises(HayataError, match="killed by SIGKILL") as gone:
            invocation.result(timeout=DEADLINE_S)
        assert gone.value.code == "daemon_unavailable"
        assert not os.path.exists(f"/proc/{runtime.pid}"), "no zombie"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killed_owner_takes_the_runtime_along(tmp_path: Path, mark: str, number: int) -> None:
    """PDEATHSIG would follow the thread that started it, which has ended here; and the end of the control
    connection is hidden by a child that was forked without Python's knowledge."""
    path = script(
        tmp_path,
        HELLO
        + """
import threading, time
if __name__ == "__main__":
    kept = []
    start = lambda: kept.append(hayata.start(agent, data_dir=os.environ["DATA_DIR"]))
    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    import ctypes
    child = ctypes.CDLL(None).fork()
    if child == 0:
        while True:
            time.sleep(60)
    print(child, flush=True)
    time.sleep(60)
""",
    )
    with owning(mark, tmp_path, path) as owner:
        assert owner.stdout is not None
        assert select.select([owner.stdout], [], [], DEADLINE_S)[0]
        child = int(owner.stdout.readline())
        assert len(marked(mark)) >= 5
        owner.send_signal(number)
        owner.wait(DEADLINE_S)
        try:
            assert_all_gone(mark, but=child)
        finally:
            os.kill(child, signal.SIGKILL)


def test_interrupt_during_the_drain_ends_it(tmp_path: Path, mark: str) -> None:
    """Ctrl-C twice, as people do: once out of the wait, once out of the drain that `with` begins."""
    given, started, _ = held(tmp_path)
    path = script(
        tmp_path,
        f"""
        import hayata, os
        runtime = hayata.start({APP!r}, data_dir=os.environ["DATA_DIR"], log_level="info")
        invocation = runtime.run("wait", {given!r})
        print("running", flush=True)
        try:
            invocation.result()
        except KeyboardInterrupt:
            runtime.close(30)
        """,
    )
    with owning(mark, tmp_path, path) as owner:
        assert owner.stdout is not None
        assert owner.stderr is not None
        assert owner.stdout.readline() == "running\n"
        await_file(started)
        owner.send_signal(signal.SIGINT)
        assert any("draining drain_s=30" in line for line in owner.stderr), "it drains, as the log says"
        began = time.monotonic()
        owner.send_signal(signal.SIGINT)
        _, errors = owner.communicate(timeout=DEADLINE_S)
        assert time.monotonic() - began < 10
        assert "KeyboardInterrupt" in errors
        assert_all_gone(mark)


def test_interrupt_right_after_the_drain_was_asked_for_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard may be faster than we are: its log is read, and Ctrl-C is here, before the send has returned."""
    given, started, _ = held(tmp_path)
    runtime = hayata.start(APP, data_dir=tmp_path / "data")
    runtime.run("wait", given)
    await_file(started)
    tell, told = GuardChild._tell, []

    def tell_and_be_interrupted(guard: GuardChild, message: StopRuntime) -> None:
        tell(guard, message)
        told.append(message.drain_s)
        if len(told) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(GuardChild, "_tell", tell_and_be_interrupted)
    with pytest.raises(KeyboardInterrupt):
        runtime.close(30)
    assert told == [30, 0.0]
    assert runtime._server.why_gone() is not None, "and it has ended"


# ----------------------------------------------------------------------------------------------------------
# Forks
# ----------------------------------------------------------------------------------------------------------


def in_fork(check: Callable[[], bool]) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks beside threads
        pid = os.fork()
    if pid == 0:
        status = 1
        with contextlib.suppress(BaseException):
            status = 0 if check() else 2
        os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("inline", MODES)
def test_forked_copy_is_inert(data_dir: str, mark: str, inline: bool) -> None:
    with hayata.start(APP, data_dir=data_dir, inline=inline) as runtime:
        runtime.call("echo", 1, timeout=DEADLINE_S)

        def check() -> bool:
            try:
                runtime.call("echo", 2)
            except HayataError as error:
                if "forked copy" not in error.message:
                    return False
            else:
                return False
            runtime.close()
            if inline:
                return True
            with Client(runtime.socket) as client:
                return bool(client.call("echo", 3, timeout=DEADLINE_S) == {"echo": 3})

        assert in_fork(check) == 0
        assert runtime.call("echo", 4, timeout=DEADLINE_S) == {"echo": 4}


def test_forked_child_that_exits_normally_closes_nothing(tmp_path: Path, mark: str) -> None:
    use = """
with hayata.start(agent, data_dir=os.environ["DATA_DIR"]) as runtime:
    runtime.call("hello", "x", timeout=20)
    pid = os.fork()
    if pid == 0:
        sys.exit(0)
    os.waitpid(pid, 0)
    print(runtime.call("hello", "again", timeout=20))
"""
    done = run_python(mark, tmp_path, "-c", HELLO + use)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Hello, again" in done.stdout


def test_leaving_waits_for_the_shutdown_of_a_node_beyond_all_other_patience(
    tmp_path: Path, mark: str, data_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guard passes on what the supervisor has announced; else it would be killed here, in mid-shutdown."""
    monkeypatch.setattr("hayata.guard_child.STOP_GRACE_S", 1.0)
    closed = tmp_path / "closed"

    @contextlib.contextmanager
    def slow_to_close() -> Iterator[None]:
        yield
        time.sleep(7.0)  # not to wait for something: this is the time that it takes
        closed.touch()

    def work(state: Any, ctx: Any) -> dict[str, Any]:
        return {}

    agent = Agent(id="slow", nodes=[hayata.Node(work, lifespan=slow_to_close, shutdown="infinity")])
    with hayata.start(agent, data_dir=data_dir) as runtime:
        runtime.call("slow", timeout=DEADLINE_S)
    assert closed.exists()
