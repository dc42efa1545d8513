"""An app whose files a test rewrites under a running daemon; its bodies are those of `apps.crash`, ledger included."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hayata.client.records import Process
from tests.support.crash_site import Daemon, Site, flat
from tests.support.eventually import eventually

_APPS = str(Path(__file__).with_name("apps"))

_APP = """\
import sys
sys.path.insert(0, {apps!r})
from pathlib import Path
from crash import HOME, body, note, wait_for_gate, wanted
import code_of_the_day
from hayata import Agent, Finish, Next, Node

CODE = {code!r}
note("import", code=CODE)
{import_line}


def act(state, ctx):
    with body(ctx) as result:
        for number in range(wanted(ctx, "chunks") or 0):
            ctx.stream({{"number": number, "code": CODE}})
        if gate := wanted(ctx, "gate"):
            wait_for_gate(gate + str(ctx.input["step"]))
        result["log"] = [[CODE, code_of_the_day.CODE]]
    return result


def policy(context):
    steps = (context.input or {{}}).get("steps", 3)
    if context.step < steps:
        return Next({node!r}, {{**(context.input or {{}}), "step": context.step}})
    return Finish({{"log": context.state["log"], "policy": CODE}})


node = Node(act, name={node!r}, concurrency={concurrency})
agent = Agent({id!r}, [node], policy, state={{"log": []}}, merge={{"log": "extend"}}, version={version!r})
agents = [agent]
{more}
"""


class ReloadApp:
    """The app's files, and a daemon for it: not started."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.path = Path(site.home) / "app.py"
        self.write("1")
        self.daemon: Daemon = site.daemon(f"{self.path}:agents")

    def write(
        self,
        code: str,
        *,
        version: str = "1",
        id: str = "app",
        node: str = "act",
        concurrency: int = 2,
        import_line: str = "",
        more: str = "",
    ) -> None:
        """Put other code there: the same size, mostly within the same second."""
        fields = {"version": version, "id": id, "node": node, "concurrency": concurrency}
        text = _APP.format(apps=_APPS, code=code, import_line=import_line, more=more, **fields)
        self._put(self.path, text)
        self._put(self.path.with_name("code_of_the_day.py"), f"CODE = {code!r}\n")

    def _put(self, path: Path, text: str) -> None:
        fresh = path.with_suffix(".new")
        fresh.write_text(text)
        fresh.rename(path)

    def imports(self, code: str) -> int:
        """How often code was imported."""
        return len(self.site.ledger.lines("import", code=code))

    def wait_import(self, code: str, count: int = 1) -> None:
        """Wait until it was imported so often."""
        eventually(lambda: self.imports(code) >= count, f"import {count} of {code}")

    def wait_body(self, invocation: Any, count: int = 1) -> None:
        """Wait until so many bodies of an invocation have begun."""
        eventually(lambda: len(self.site.ledger.lines("start", invocation=invocation.id)) >= count, "a body")

    def processes(self, role: str) -> list[Process]:
        """Those of the role."""
        return [each for each in flat(self.daemon.client.tree()) if each.role == role]

    def serving(self, role: str) -> Process:
        """Wait for the one of the role that serves."""
        return eventually(
            lambda: next((each for each in self.processes(role) if each.status == "serving"), None), f"serving {role}"
        )

    def wait_drained(self) -> None:
        """Wait until nothing of an older generation is left."""
        eventually(lambda: len({each.generation for each in self._workers()}) == 1, "the end of the old generation")

    def _workers(self) -> list[Process]:
        return [each for each in flat(self.daemon.client.tree()) if each.role in ("agent", "node", "forkserver")]


class Later:
    """A call in a thread of its own."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._outcome: list[Any] = []
        self._thread = threading.Thread(target=self._run, args=(call,), daemon=True)
        self._thread.start()

    def _run(self, call: Callable[[], Any]) -> None:
        try:
            self._outcome.append(call())
        except Exception as error:
            self._outcome.append(error)

    @property
    def done(self) -> bool:
        return bool(self._outcome)

    def result(self) -> Any:
        """Wait for what it returned or raised."""
        self._thread.join(60.0)
        assert self._outcome, "it does not return"
        return self._outcome[0]
