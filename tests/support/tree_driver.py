"""A supervisor that is only a worker tree: orders come as JSON lines on stdin, events go to stdout."""

import importlib
import json
import os
import signal
import sys
import threading
import time

import msgspec

from hayata import messages
from hayata.memfd import read_memfd
from hayata_supervisor.process import prctl
from hayata_supervisor.process.reactor import Reactor
from hayata_supervisor.process.signals import SignalInbox
from hayata_supervisor.process.spawn import keep_descriptors_to_ourselves
from hayata_supervisor.tree import WorkerTree


def raw(value):
    return msgspec.Raw(msgspec.msgpack.encode(value))


def plain(thing):
    """Messages as JSON can hold them."""
    if isinstance(thing, msgspec.Struct):
        fields = {name: plain(value) for name, value in msgspec.structs.asdict(thing).items()}
        return {"type": type(thing).__name__, **fields}
    if isinstance(thing, msgspec.Raw):
        return msgspec.msgpack.decode(thing)
    if isinstance(thing, dict):
        return {key: plain(value) for key, value in thing.items()}
    if isinstance(thing, list | tuple):
        return [plain(value) for value in thing]
    return thing


def say(event, **fields):
    line = json.dumps({"event": event, **{key: plain(value) for key, value in fields.items()}})
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


class Recorder:
    """The listener and the log."""

    def __init__(self):
        self.tree = None
        self.acknowledge = True

    def app_loaded(self, index, reference, manifests):
        say("app_loaded", index=index, reference=reference, agents=[manifest.id for manifest in manifests])

    def app_failed(self, index, reference, error):
        say("app_failed", index=index, reference=reference, error=error)

    def agent_answered(self, agent_id, answer):
        say("answered", agent=agent_id, answer=answer)

    def task_reported(self, agent_id, node, report):
        say("reported", agent=agent_id, node=node, report=report)
        if isinstance(report, messages.Partial) and self.acknowledge:
            self.tree.ack_partial(agent_id, node, messages.PartialAck(report.execution_id, report.number, None))

    def node_given_up(self, agent_id, node, error):
        say("node_given_up", agent=agent_id, node=node, error=error)

    def node_stopped(self, agent_id, node, error):
        say("node_stopped", agent=agent_id, node=node, error=error)

    def node_back(self, agent_id, node):
        say("node_back", agent=agent_id, node=node)

    def agent_given_up(self, agent_id, error):
        say("agent_given_up", agent=agent_id, error=error)

    def agent_back(self, agent_id):
        say("agent_back", agent=agent_id)

    def output(self, output, *, agent, node):
        say(
            "output",
            agent=agent,
            node=node,
            stream=output.stream,
            lines=output.lines,
            execution=output.execution_id,
        )

    def info(self, event, **fields):
        say("log", text=event, level="info", **fields)

    def warning(self, event, **fields):
        say("log", text=event, level="warning", **fields)

    def error(self, event, **fields):
        say("log", text=event, level="error", **fields)


class Driver:
    def __init__(self, launch, launch_fd):
        self.reactor = Reactor()
        self.recorder = Recorder()
        self.tree = WorkerTree(self.reactor, launch, launch_fd, self.recorder, self.recorder, dict(os.environ))
        self.recorder.tree = self.tree
        self.rest = b""

    def run(self):
        inbox = SignalInbox([signal.SIGCHLD])
        self.reactor.watch_read(inbox.fd, lambda: self.children_changed(inbox))
        self.reactor.watch_read(0, self.readable)
        self.tree.start()
        self.reactor.run()

    def children_changed(self, inbox):
        inbox.take()
        self.tree.children_changed()

    def block(self, gate):
        """Let the loop stand still until there is a file."""
        say("blocked")
        while not os.path.exists(gate):
            time.sleep(0.001)

    def readable(self):
        data = os.read(0, 1 << 20)
        if not data:
            os._exit(1)  # the test is gone
        *lines, self.rest = (self.rest + data).split(b"\n")
        for line in lines:
            order = json.loads(line)
            getattr(self, order.pop("do"))(**order)

    def evaluate(self, agent, number, input=None):
        request = messages.Evaluate(number, "i", {}, raw(input), 0, None, None, None, None, 0.0)
        self.tree.evaluate(agent, request)

    def check(self, agent, number, node, update):
        self.tree.check_update(agent, messages.CheckUpdate(number, node, raw(update)))

    def dispatch(self, agent, node, execution, input=None, timeout_s=None, filler=0):
        state = {"filler": raw("x" * filler)} if filler else {}
        task = messages.RunTask(execution, timeout_s, "i", 1, execution, None, True, state, raw(input))
        self.tree.dispatch(agent, node, task)

    def many(self, orders):
        """Several orders in one turn."""
        for order in orders:
            getattr(self, order.pop("do"))(**order)

    def kill(self, agent, node, execution, reason="wanted"):
        self.tree.kill(agent, node, execution, reason)

    def acknowledge(self, yes):
        self.recorder.acknowledge = yes

    def load(self, reference):
        say("loading", index=self.tree.load_app(reference))

    def stop_agent(self, agent):
        self.tree.stop_agent(agent, lambda: say("agent_stopped", agent=agent))

    def describe(self):
        say("tree", processes=self.tree.tree())

    def descriptors(self):
        """Numbers of the open descriptors and of the threads."""
        say("descriptors", count=len(os.listdir("/proc/self/fd")), threads=threading.active_count())

    def stop(self, drain):
        self.tree.stop(drain, self.stopped)

    def stopped(self):
        say("stopped", descriptors=len(os.listdir("/proc/self/fd")))
        self.reactor.stop()


def set_limits(limits):
    """Make what takes seconds for people take less: ``{"module.NAME": value}``."""
    for name, value in limits.items():
        module, constant = name.split(".")
        setattr(importlib.import_module(f"hayata_supervisor.tree.{module}"), constant, value)


if __name__ == "__main__":
    set_limits(json.loads(os.environ["TREE_RIG_LIMITS"]))
    prctl.become_subreaper()
    keep_descriptors_to_ourselves()
    launch_fd = int(sys.argv[1])
    Driver(msgspec.msgpack.decode(read_memfd(launch_fd), type=messages.Launch), launch_fd).run()
