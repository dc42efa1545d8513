"""Nothing of a dead incarnation may live: finding its processes, killing them, waiting until they are dead.

Two ways, each for what the other misses. Descendants: what our children leave behind becomes our child, since
we are a subreaper. The cookie: after the death of guard and supervisor together their processes belong to
somebody else, but carry `COOKIE` in the environment they were started with. A process that overwrote its
environment is missed by the second; PDEATHSIG has killed it long ago unless it was a task's own subprocess.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Collection

from hayata.errors import error_for
from hayata_supervisor.process import clock, locks
from hayata_supervisor.process.pidfd import children_of, is_dead, open_pidfd, reap, send_signal, wait_dead

COOKIE = "HAYATA_INSTANCE"


def cookie_prefix(identity: tuple[int, int]) -> str:
    """What the cookies of all runtimes on one data directory begin with.

    Args:
        identity: Device and inode of its ``guard.lock``: a copied directory is another one, and a directory
            that was replaced while its daemon ran is another one, too.
    """
    return f"{identity[0]}-{identity[1]}-"


def bears_cookie(pid: int, prefix: str) -> bool:
    """Whether the process was started with a cookie that begins so. Open its pidfd first if it matters."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            environ = file.read()
    except OSError:
        return False  # gone, or another user's
    wanted = f"{COOKIE}={prefix}".encode()
    return environ.startswith(wanted) or b"\0" + wanted in environ


def kill_children(keep: Collection[int], *, timeout_s: float) -> list[int]:
    """Kill and reap all children and, as each death makes its children ours, all descendants.

    Args:
        keep: Pids of unreaped children that are none of ours to kill.
        timeout_s: Seconds to wait for a process that the kernel doesn't let die.

    Returns:
        Those that did not die, normally none.
    """
    deadline = clock.monotonic() + timeout_s
    while children := [pid for pid in children_of(os.getpid()) if pid not in keep]:
        for pid in children:
            os.kill(pid, signal.SIGKILL)  # unreaped children: the numbers are theirs
        for pid in children:
            pidfd = open_pidfd(pid)  # one at a time: there may be few descriptors left
            try:
                if not wait_dead([pidfd], max(0.0, deadline - clock.monotonic())):
                    return children
                reap(pidfd)
            finally:
                os.close(pidfd)
    return []


def sweep(prefix: str, *, timeout_s: float) -> list[int]:
    """Kill every process that bears such a cookie, but not us and our ancestors; wait until all are dead.

    Returns:
        Pids of those that were killed.

    Raises:
        HayataError: ``data_dir_in_use``: one of them does not die.
    """
    deadline = clock.monotonic() + timeout_s
    spared = _ourselves_and_ancestors()
    killed: list[int] = []
    while found := _kill_bearers(prefix, spared):
        try:
            for pid, pidfd in found:
                if not wait_dead([pidfd], max(0.0, deadline - clock.monotonic())):
                    raise _undying(pid)
                killed.append(pid)
        finally:
            for _, pidfd in found:
                os.close(pidfd)
    return killed


def _kill_bearers(prefix: str, spared: Collection[int]) -> list[tuple[int, int]]:
    """One pass over the process table; returns pid and pidfd of each that was alive and is now dying."""
    found: list[tuple[int, int]] = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) in spared or not bears_cookie(int(name), prefix):
            continue
        pid = int(name)
        try:
            pidfd = open_pidfd(pid)
        except ProcessLookupError:
            continue
        # Again, now that the pidfd says whom we mean: the number may have gone to another process in between.
        if bears_cookie(pid, prefix) and send_signal(pidfd):
            found.append((pid, pidfd))
        else:
            os.close(pidfd)
    return found


def end_orphan(lock_path: str, prefix: str, *, patience_s: float, timeout_s: float) -> int | None:
    """See that nobody holds the store's lock, given that we hold the guard's.

    A supervisor that lost its guard notices and ends by itself, which is the better way; one that has not
    after ``patience_s`` seconds hangs and is killed.

    Returns:
        Pid of the orphan that was there, if one was.

    Raises:
        HayataError: ``data_dir_in_use``: the holder is no supervisor of this directory, or does not die.
    """
    orphan = None
    while (pid := locks.holder(lock_path)) is not None:
        try:
            pidfd = open_pidfd(pid) if pid else -1
        except ProcessLookupError:
            continue
        try:
            if pid and locks.holder(lock_path) != pid:
                continue
            if not pid or (not bears_cookie(pid, prefix) and not is_dead(pidfd)):
                raise error_for(
                    "data_dir_in_use",
                    f"process {pid or 'in another container'} has {lock_path} locked and is not ours",
                    details={"pid": pid},
                    hint="wait for it to end, or end it",
                )
            orphan = pid
            if wait_dead([pidfd], patience_s):
                continue
            send_signal(pidfd)
            if not wait_dead([pidfd], timeout_s):
                raise _undying(pid)
        finally:
            if pidfd >= 0:
                os.close(pidfd)
    return orphan


def _undying(pid: int) -> Exception:
    return error_for(
        "data_dir_in_use",
        f"process {pid} of an earlier runtime was killed and does not die",
        details={"pid": pid},
        hint=f"see /proc/{pid}/stack; a dead network mount or a frozen cgroup does that",
    )


def _ourselves_and_ancestors() -> set[int]:
    spared = {os.getpid()}
    pid = os.getppid()
    while pid > 0 and pid not in spared:
        spared.add(pid)
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                # The name in parentheses may hold anything, parentheses included.
                pid = int(file.read().rpartition(b")")[2].split()[1])
        except OSError:
            break
    return spared
