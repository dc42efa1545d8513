"""Failpoints: named places at which a test lets this very process die, lose a connection, err or wait.

They are armed by the environment, which every process of a runtime inherits::

    HAYATA_FAILPOINTS="store.after_commit=kill@3;node.before_send_completed=delay(0.2)@1@once:/tmp/claimed"

    NAME=ACTION[@N][@once:PATH], several of them with ``;`` between

``@N``: at the Nth time that this process comes by, and not again; without it each time. A process that is
started anew counts from one, so it would die at the same place again, for ever: ``@once:PATH`` is for the one
process that creates the file, which then names it.

| action | what happens |
|---|---|
| ``kill`` | SIGKILL to this process |
| ``orphan`` | SIGKILL to its parent; it goes on until that catches up with it |
| ``error``, ``error(ENOSPC)`` | what goes wrong at such a place: the connection breaks, the commit fails |
| ``raise`` | a RuntimeError, as if there were a bug |
| ``delay(SECONDS)`` | the thread sleeps |
| ``trace(PATH)`` | the name is appended to a file; ``*`` names all points |

Names are ``<where>.<before|after>_<what>``. Where is the process's role, or a part of the supervisor's:
``store``, ``committer``, ``engine``, ``server``. Each message has its own: ``send_<tag>`` and
``receive_<tag>`` with the tag of `hayata.messages`, a client's with that of its request or answer
(``supervisor.after_send_tell_invocation``). The channels make those, so a new message has failpoints from
the start. ``before_send`` is when it is queued, ``after_send`` when all of it has been given to the kernel.
Commits and forks name theirs; ``tests/pure/test_failpoint_sites.py`` fails for one that does not.

When nothing is armed, `hit` and `message` are functions that do nothing, and a call costs 25 ns.

Source: fail(9) of FreeBSD; gofail of etcd.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeAlias

import msgspec

VARIABLE = "HAYATA_FAILPOINTS"

Fault: TypeAlias = socket.socket | Callable[[int], BaseException]
"""What ``error`` does: a connection breaks, or an exception is made of the errno and raised."""

_SPEC = re.compile(
    r"(?P<name>[\w.]+|\*)=(?P<action>[a-z]+)(\((?P<argument>[^)]*)\))?(@(?P<nth>[1-9]\d*))?(@once:(?P<once>.+))?"
)
_decode = msgspec.msgpack.Decoder(ext_hook=lambda code, data: None).decode


class Armed(NamedTuple):
    """One failpoint that shall strike.

    Attributes:
        action: As in the module's table.
        argument: Seconds, the name of an errno, or a path; empty for none.
        nth: At which hit; 0: at each.
        once: Path of the marker; empty for none.
    """

    action: str
    argument: str
    nth: int
    once: str


class Hit(Protocol):
    """Come by a failpoint."""

    def __call__(self, name: str, fault: Fault | None = None, /) -> None:
        """Do what is armed there.

        Args:
            name: Of the point; one that begins with a dot gets the process's role before it.
            fault: How to err; None is an OSError.
        """


class Message(Protocol):
    """Come by the failpoint of one message."""

    def __call__(self, when: str, body: bytes | None, fault: Fault | None = None, skip: int = 0, /) -> None:
        """Do what is armed for it.

        Args:
            when: ``before_send``, ``after_send``, ``before_receive`` or ``after_receive``.
            body: The message; None is none.
            fault: As for `Hit`.
            skip: Bytes before the message.
        """


def parse(text: str) -> dict[str, list[Armed]]:
    """Read the variable.

    Raises:
        ValueError: It can't be read. A test whose failpoint does nothing would prove nothing.
    """
    armed: dict[str, list[Armed]] = {}
    for spec in filter(None, (part.strip() for part in text.split(";"))):
        found = _SPEC.fullmatch(spec)
        if found is None:
            raise ValueError(f"{VARIABLE}: can't read {spec!r}")
        one = Armed(found["action"], found["argument"] or "", int(found["nth"] or 0), found["once"] or "")
        _check(spec, found["name"], one)
        armed.setdefault(found["name"], []).append(one)
    return armed


def _check(spec: str, name: str, one: Armed) -> None:
    match one.action:
        case "kill" | "orphan" | "raise":
            fits = not one.argument
        case "error":
            fits = not one.argument or hasattr(errno, one.argument)
        case "delay":
            fits = re.fullmatch(r"\d+(\.\d+)?", one.argument) is not None
        case "trace":
            fits = bool(one.argument)
        case _:
            fits = False
    if not fits or (name == "*" and one.action != "trace"):
        raise ValueError(f"{VARIABLE}: can't read {spec!r}")


class Failpoints:
    """The armed points of this process, and how often it has come by them."""

    def __init__(self, armed: dict[str, list[Armed]]) -> None:
        self._armed = armed
        self._everywhere = armed.pop("*", [])
        self._hits: dict[str, int] = {}
        os.register_at_fork(after_in_child=self._hits.clear)

    def hit(self, name: str, fault: Fault | None = None, /) -> None:
        """See `Hit`."""
        if name.startswith("."):
            name = role + name
        for one in self._everywhere:
            _append(one.argument, name)
        here = self._armed.get(name)
        if here is None:
            return
        self._hits[name] = count = self._hits.get(name, 0) + 1
        for one in here:
            if one.nth in (0, count) and (not one.once or _claim(one.once, name)):
                _strike(name, one, fault)

    def message(self, when: str, body: bytes | None, fault: Fault | None = None, skip: int = 0, /) -> None:
        """See `Message`."""
        if body is not None:
            self.hit(f"{role}.{when}_{_tag(body[skip:])}", fault)


def _tag(body: bytes) -> str:
    """Of an array, its first item; of a map, its type and the type of what is in it."""
    try:
        message: Any = _decode(body)
    except (msgspec.DecodeError, RecursionError):
        return "unreadable"
    if isinstance(message, list) and message:
        return str(message[0])
    if not isinstance(message, dict):
        return "unreadable"
    kinds = [message.get("type")]
    inner = message.get("request", message.get("answer"))
    if isinstance(inner, dict):
        kinds.append(inner.get("type"))
    return "_".join(map(str, kinds))


def _claim(path: str, name: str) -> bool:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return False
    os.write(fd, f"{name} in {role} {os.getpid()}\n".encode())
    os.close(fd)
    return True


def _append(path: str, name: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    os.write(fd, f"{os.getpid()} {name}\n".encode())
    os.close(fd)


def _strike(name: str, one: Armed, fault: Fault | None) -> None:
    match one.action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "orphan":
            os.kill(os.getppid(), signal.SIGKILL)
        case "raise":
            raise RuntimeError(f"failpoint {name}")
        case "delay":
            time.sleep(float(one.argument))
        case "trace":
            _append(one.argument, name)
        case "error":
            _err(fault or _os_error, getattr(errno, one.argument or _usual(name)))


def _err(fault: Fault, number: int) -> None:
    if not isinstance(fault, socket.socket):
        raise fault(number)
    try:
        fault.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # the peer was faster


def _usual(name: str) -> str:
    """The errno that is likely there."""
    if "fork" in name or "spawn" in name:
        return "EAGAIN"
    return "EMFILE" if "accept" in name else "EIO"


def _os_error(number: int) -> OSError:
    return OSError(number, f"{os.strerror(number)} (failpoint)")


def enter(name: str) -> None:
    """Say which role this process has from now on."""
    global role
    role = name


def _hit_nothing(name: str, fault: Fault | None = None, /) -> None:
    """Nothing is armed."""


def _message_nothing(when: str, body: bytes | None, fault: Fault | None = None, skip: int = 0, /) -> None:
    """Nothing is armed."""


role = "inline"
"""The process's role; ``inline`` where the runtime is in the user's own process."""

hit: Hit = _hit_nothing
message: Message = _message_nothing

if text := os.environ.get(VARIABLE):
    _points = Failpoints(parse(text))
    hit, message = _points.hit, _points.message
