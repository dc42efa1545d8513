"""The first steps of a forked worker, in the order that they must have.

A child inherits everything: handlers, masks, descriptors, the state of the random generators. Each step gives
one of these back, and the order matters: the promise to die with the parent comes before anything that takes
time.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any, NoReturn

from hayata_supervisor import failpoints
from hayata_supervisor.process import clock, prctl
from hayata_supervisor.process.descriptors import close_own, close_owned

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_BROKEN = 70  # EX_SOFTWARE: something that can't be told to anybody
EXIT_ORPHANED = 75  # EX_TEMPFAIL: the parent was gone before we began

_EXPENDABLE = 300
"""What is added to ``oom_score_adj``, of -1000 to 1000. It weighs as much as three tenths of all memory: more
than guard, supervisor and node have together. Not all of it: a tiny edge must not go before whoever really
has taken the machine's memory."""

_ADOPTION_DEADLINE_S = 5.0
_ADOPTION_STEP_S = 20e-6


# What the functions of `signal` wrap. Those make an enum of each answer: ten times the time, and they touch a
# hundred kilobytes of pages that would else be shared by all workers.
_plain = sys.modules.get("_signal", signal)
get_handler: Callable[[int], Any] = _plain.getsignal
set_handler: Callable[[int, Any], Any] = _plain.signal


def _fresh_handler(number: int) -> Any:
    """What Python installs at its start: a broken pipe is an error, Ctrl-C an exception."""
    if number == signal.SIGINT:
        return signal.default_int_handler
    if number in (signal.SIGPIPE, signal.SIGXFSZ):
        return int(signal.SIG_IGN)
    return int(signal.SIG_DFL)


_FRESH_HANDLERS = [(int(number), _fresh_handler(number)) for number in sorted(signal.valid_signals())]


def fork() -> int:
    """Fork. What the standard streams hold is written first, or parent and child would both write it.

    Python's warning about threads is not for us: the forkserver refuses them, and mentions native ones.

    Raises:
        OSError: The system refused.
    """
    flush_standard_streams()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        failpoints.hit(".before_fork")
        pid = os.fork()
    if pid:
        failpoints.hit(".after_fork")
    return pid


def run_worker(begin: Callable[[], None], work: Callable[[], None]) -> NoReturn:
    """Run a worker in a fresh fork, and never return into what its parent was doing."""
    code = EXIT_BROKEN
    try:
        begin()
        work()
        code = EXIT_OK
    except SystemExit as request:
        code = request.code if isinstance(request.code, int) else EXIT_BROKEN
    except BaseException:  # noqa: BLE001 - the last place that can say what happened
        traceback.print_exc()
    finally:
        flush_standard_streams()
        os._exit(code)


def begin(
    *,
    name: str,
    parent: int,
    stdout: int,
    stderr: int,
    keep: Collection[int],
    middle: int | None = None,
    new_session: bool = False,
    expendable: bool = False,
) -> None:
    """Turn a fresh fork into a worker. It exits at once if its parent is gone.

    Args:
        name: What ``ps`` shows.
        parent: Pid of the process whose death is ours.
        stdout: Where user code's output goes; closed here, after it has become descriptor 1.
        stderr: The same, for descriptor 2.
        keep: The runtime's descriptors that stay open.
        middle: Pid of the process that forked us, when that is not ``parent``: it exits, and ``parent``
            adopts us.
        new_session: Edges lead a session of their own, so that their process group can be killed as one.
        expendable: When memory runs out, the kernel shall take this process, or what it has started, before
            those above it.
    """
    failpoints.hit(".before_begin")
    reset_signals()
    signal.set_wakeup_fd(-1)
    _bind_to(parent, middle)
    if new_session:
        os.setsid()
    if expendable:
        _be_expendable()
    prctl.become_subreaper()
    close_owned({*keep, stdout, stderr})
    _redirect(stdout, stderr)
    _reseed()
    gc.enable()
    prctl.set_name(name)
    failpoints.hit(".after_begin")


def reset_signals() -> None:
    """Give every signal the handler that a fresh Python has, unblock all, and stop the timers."""
    for number, handler in _FRESH_HANDLERS:
        if get_handler(number) is not handler:
            try:
                set_handler(number, handler)
            except (OSError, ValueError):
                continue  # SIGKILL, SIGSTOP and what the C library keeps for itself
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _bind_to(parent: int, middle: int | None) -> None:
    """Die with ``parent`` from now on.

    PDEATHSIG names the parent of the moment it is set. Set while the middle process still lives it would be
    the middle's exit that kills us (8 of 200 times, measured); hence the wait. Nothing signals an adoption,
    so this polls.
    """
    deadline = clock.monotonic() + _ADOPTION_DEADLINE_S
    while middle is not None and os.getppid() == middle:
        if clock.monotonic() > deadline:
            os._exit(EXIT_ORPHANED)
        select.select((), (), (), _ADOPTION_STEP_S)
    prctl.die_with_parent()
    if os.getppid() != parent:
        os._exit(EXIT_ORPHANED)


def _be_expendable() -> None:
    """A process may always raise its own score. Children inherit it."""
    # Some sandboxes have no such file, or a read-only /proc: then the kernel chooses as it likes.
    with suppress(OSError, ValueError):
        fd = os.open("/proc/self/oom_score_adj", os.O_RDWR | os.O_CLOEXEC)
        try:
            now = int(os.pread(fd, 32, 0))
            os.pwrite(fd, str(min(1000, now + _EXPENDABLE)).encode(), 0)
        finally:
            os.close(fd)


def _redirect(stdout: int, stderr: int) -> None:
    null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    for source, target in ((null, 0), (stdout, 1), (stderr, 2)):
        os.dup2(source, target)
        if source != target:
            close_own(source)


def buffer_lines() -> None:
    """Make the standard streams write whole lines of UTF-8, whatever the environment says.

    The forkserver does this for all that it forks: what is done before the fork costs no worker a page.
    """
    for text in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        reconfigure = getattr(text, "reconfigure", None)  # absent on what an app may have put in its place
        if reconfigure is not None:
            reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)


def flush_standard_streams() -> None:
    """Write what user code has printed so far. Its streams may be closed or broken."""
    for text in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            text.flush()


def _reseed() -> None:
    """Without this all forks would draw the same numbers. Python's own generator sees to itself."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
