"""The machine: its kernel, what of the kernel can be used here, limits of the user, the clock."""

from __future__ import annotations

import os
import platform
import resource
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from hayata.errors import HayataError
from hayata.memfd import read_memfd, sealed_memfd
from hayata.messages import Finding
from hayata_supervisor.doctor.findings import fail, of_error, ok, warn
from hayata_supervisor.main import check_platform, has_pidfds
from hayata_supervisor.process import cgroup, prctl, prologue, usage
from hayata_supervisor.process.pidfd import open_pidfd, reap, send_signal, wait_dead

_ENOUGH_FILES = 4096
_LEAST_FILES = 256
_ENOUGH_PROCESSES = 256
_STORE_MAP_BYTES = 64 << 30
_DEATH_S = 5.0
_EPOCH_S = 1_704_067_200.0  # 2024: a clock before it was never set


def check_system() -> Iterator[Finding]:
    """Linux, its version, Python's."""
    release, python = platform.release(), sys.version_info[:3]
    try:
        check_platform(sys.platform, release, python, pidfds=has_pidfds())
    except HayataError as error:
        yield of_error("platform", error)
        return
    yield ok("platform", f"{platform.system()} {release}, Python {platform.python_version()}")


def check_kernel() -> Iterator[Finding]:
    """Each promise of the kernel that supervision rests on, tried out on a child of this process."""
    try:
        prctl.become_subreaper()
        prctl.die_with_parent()
    except OSError as error:
        yield fail("kernel", f"prctl is refused: {error.strerror}", "allow prctl in the container's seccomp profile")
        return
    ours = os.getpid()
    child = prologue.fork()
    if child == 0:
        _wait_to_be_killed(ours)
    pidfd = -1
    try:
        pidfd = open_pidfd(child)
        yield from _look_at(child)
        send_signal(pidfd)
        if not wait_dead([pidfd], _DEATH_S) or reap(pidfd) is None:
            yield fail("kernel", "a killed child does not die", "see its /proc/PID/stack")
            return
    except OSError as error:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        yield fail("kernel", f"pidfds can't be used: {error.strerror}", "allow them in the container's seccomp profile")
        return
    finally:
        if pidfd >= 0:
            os.close(pidfd)
    yield ok("kernel", "pidfds, PDEATHSIG and subreapers work")


def _wait_to_be_killed(parent: int) -> NoReturn:
    prctl.die_with_parent()
    while os.getppid() == parent:
        signal.pause()
    os._exit(prologue.EXIT_ORPHANED)


def _look_at(child: int) -> Iterator[Finding]:
    """What of a child can be read, as the same user."""
    if not Path("/proc/self/task").is_dir():
        yield fail("proc", "/proc is not mounted", "mount it: the runtime finds its processes there")
        return
    found = True
    if not Path(f"/proc/self/task/{os.getpid()}/children").exists():
        found = False
        yield warn("proc", "the kernel lists no children (CONFIG_PROC_CHILDREN): the process table is scanned instead")
    try:
        Path(f"/proc/{child}/environ").read_bytes()
    except OSError as error:
        found = False
        yield warn(
            "proc",
            f"the environment of other processes can't be read: {error.strerror}",
            "what tasks left running when guard and supervisor died together won't be found at the next start: "
            "have a service manager or a PID namespace end it",
        )
    if usage.share_of(child) is None:
        found = False
        yield warn(
            "proc",
            "shares of memory can't be read (smaps_rollup)",
            "memory_limit counts pages that processes share in full",
        )
    if found:
        yield ok("proc", "what is needed can be read")


def check_memfd() -> Iterator[Finding]:
    """Memory files: how a start hands on its settings."""
    data = b"doctor"
    try:
        fd = sealed_memfd("hayata-doctor", data)
    except OSError as error:
        yield fail("memfd", f"memory files are refused: {error.strerror}", "see vm.memfd_noexec, and seccomp profiles")
        return
    try:
        readable = read_memfd(fd) == data
    finally:
        os.close(fd)
    if readable:
        yield ok("memfd", "sealed memory files work")
    else:
        yield fail("memfd", "a memory file does not hold what was written")


def check_ulimits() -> Iterator[Finding]:
    """Open files, processes, address space, sizes of files."""
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    hint = "raise it: ulimit -n, LimitNOFILE="
    if files != resource.RLIM_INFINITY and files < _LEAST_FILES:
        yield fail("ulimit nofile", f"at most {files} open files: a worker needs six, a client one", hint)
    elif files != resource.RLIM_INFINITY and files < _ENOUGH_FILES:
        yield warn("ulimit nofile", f"at most {files} open files: a worker needs six, a client one", hint)
    else:
        yield ok("ulimit nofile", f"{_number(files)} open files")
    yield from _processes()
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if space != resource.RLIM_INFINITY and space < _STORE_MAP_BYTES:
        yield warn(
            "ulimit as",
            f"{space / 2**30:.1f} GiB of address space: the store wants 64 GiB of it (not of memory)",
            "ulimit -v unlimited; limit tasks with memory_limit=",
        )
    size, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if size != resource.RLIM_INFINITY:
        yield warn("ulimit fsize", f"files may have {size:,} bytes, the store's, too", "ulimit -f unlimited")


def _processes() -> Iterator[Finding]:
    limits = [limit for limit in (cgroup.process_limit(),) if limit is not None]
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if os.geteuid() != 0 and soft != resource.RLIM_INFINITY:  # root is not held to it
        limits.append(soft)
    if limits and min(limits) < _ENOUGH_PROCESSES:
        yield warn(
            "processes",
            f"at most {min(limits)} processes and threads",
            "raise it: ulimit -u, TasksMax=, --pids-limit; each task that runs is a process",
        )
    else:
        yield ok("processes", f"{_number(min(limits, default=resource.RLIM_INFINITY))} processes and threads")


def _number(limit: int) -> str:
    return "any number of" if limit == resource.RLIM_INFINITY else str(limit)


def check_clock() -> Iterator[Finding]:
    """Deadlines that outlive a restart need the boot's id, and a clock that was set."""
    try:
        Path("/proc/sys/kernel/random/boot_id").read_text()
        time.clock_gettime(time.CLOCK_BOOTTIME)
    except OSError as error:
        yield warn("clock", f"the boot can't be told from the last one: {error}", "deadlines follow the wall clock")
        return
    now = time.time()
    if now < _EPOCH_S:
        yield warn("clock", f"it says {time.strftime('%Y-%m-%d', time.gmtime(now))}", "set it, for example by NTP")
    else:
        yield ok("clock", time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now)))
