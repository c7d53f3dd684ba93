"""One program in its inner jail: compile once, then fork a child from the pristine compiled state for every test.

The jail process is pid 1 of its namespace; the children are what runs the program, watched for their CPU and wall
limits. Tests reach the children as pipes held by the judge; expected outputs never come here.

Every page that is written between two forks costs a copy, a few microseconds, and that is most of what a test costs.
Hence the style: what can be done once is done before the first test, received pipes land where the child needs them,
and what is done for every test is short and keeps to local names.
"""

from __future__ import annotations

import _socket as socket
import contextlib
import functools
import gc
import os
import resource
import select
import signal
import stat
import struct
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from services.sandbox_judge.jail import kernel, python_child

# Address space counts what is reserved, not what is used; the verdict goes by what was used.
ADDRESS_SPACE_FACTOR = 2
ADDRESS_SPACE_ALLOWANCE = 128 << 20
# How it ended, wait status, CPU seconds, wall seconds, peak memory in bytes.
RESULT = struct.Struct("=iiddq")
# The jail keeps to the highest descriptors that programs may have, so what it receives is put on 0, 1, 2 and so on.
CHANNEL, BINARY = 62, 63
_ORDER_BYTES = 16
# What the scratch says of its last change: always the same.
_LONG_AGO = (0, 0)
_ANCILLARY_BYTES = socket.CMSG_SPACE(4 * 8)
# How a child ended.
ENDED, CPU_LIMIT, WALL_LIMIT, STOPPED = range(4)
# A program that gets at least this share of a core is waiting for the machine, not for time to pass; it may need up to
# STARVATION times its CPU limit.
BUSY_SHARE = 0.01
STARVATION = 60
LOOK_SECONDS = 0.25
_PIDFD = 0  # the lowest descriptor: none is open below the jail's own


class Setting(NamedTuple):
    """What is the same for all programs of a zygote."""

    namespaces: bool
    capabilities: int
    scratch: str | None
    filters: dict[str, bytes]
    own_pid_marker: bytes
    # In its own pid namespace a program's pid does not matter, so one prepared filter does for all; otherwise empty.
    prepared: dict[str, Callable[[], None]]
    main: dict[str, Any]
    # What runs in place of programs that are a source, in zygotes that serve something else; otherwise None.
    harness: Callable[[], NoReturn] | None


def live(setting: Setting, request: dict[str, Any], descriptors: list[int]) -> NoReturn:
    """The jail's whole life; never returns into the zygote."""
    _keep_only(descriptors)
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, CHANNEL)
    try:
        _lock_up(setting, request)
        guard = setting.prepared.get(request["freedom"]) or functools.partial(_guard_alone, setting, request)
        program = _program(setting, request, channel, binary=len(descriptors) > 1)
        gc.freeze()
        gc.enable()
        channel.send(b"+")
        _run_tests(setting, request, channel, guard, program)
    except BaseException as error:
        channel.send(b"!" + repr(error).encode(errors="replace")[:2000])
    finally:
        os._exit(1)


def _keep_only(descriptors: list[int]) -> None:
    """Move the channel, and the binary when there is one, to where they stay; close everything else."""
    for target, descriptor in zip((CHANNEL, BINARY), descriptors, strict=False):
        os.dup2(descriptor, target, inheritable=False)
    os.closerange(0, CHANNEL)


def _lock_up(setting: Setting, request: dict[str, Any]) -> None:
    if setting.namespaces:
        kernel.set_capabilities(0)  # a new user namespace came with all of them
        # Counted per user namespace, so exactly this program's threads; outside it would count the user's others.
        threads = request["threads"] + 1
        resource.setrlimit(resource.RLIMIT_NPROC, (threads, threads))
        _limit_cpu(request)  # pid 1 itself is not subject to it
    else:
        kernel.adopt_orphans()
    address_space = request["memory_bytes"] * ADDRESS_SPACE_FACTOR + ADDRESS_SPACE_ALLOWANCE
    resource.setrlimit(resource.RLIMIT_AS, (address_space, address_space))


def _limit_cpu(request: dict[str, Any]) -> None:
    """A backstop in whole seconds; the limit itself is watched from outside."""
    seconds = int(request["cpu_seconds"]) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))


def _guard_alone(setting: Setting, request: dict[str, Any]) -> None:
    """Without namespaces the child dies with its jail, and may signal nobody but itself."""
    kernel.die_with_parent()
    _limit_cpu(request)
    own_pid = struct.pack("=I", os.getpid())
    narrowing = setting.filters[request["freedom"]].replace(setting.own_pid_marker, own_pid)
    kernel.prepared_filter(narrowing)()


def _program(
    setting: Setting, request: dict[str, Any], channel: socket.socket, *, binary: bool
) -> Callable[[], NoReturn]:
    """What turns a child into the program."""
    command = request["command"]
    if command:
        sys.argv[:] = command
    if setting.harness:
        return setting.harness
    if not request["python"]:
        return functools.partial(os.execve, BINARY if binary else command[0], command, request["environment"])
    try:
        code = python_child.compile_program(request["source"])
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError) as error:
        text = f"{type(error).__name__}: {error}"
        channel.send(b"-" + text.encode(errors="replace")[:2000])
        os._exit(0)
    return functools.partial(python_child.run, code, setting.main)


def _run_tests(
    setting: Setting,
    request: dict[str, Any],
    channel: socket.socket,
    guard: Callable[[], None],
    program: Callable[[], NoReturn],
) -> NoReturn:
    """Obey the judge until it closes the channel: run a test for every message that brings its pipes and files."""
    receive, send, pack, now = channel.recvmsg, channel.send, RESULT.pack, time.monotonic
    fork, wait_for, setpgid, closerange = kernel.fork_bare, kernel.wait_for, os.setpgid, os.closerange
    supervise = supervisor(request, CHANNEL)
    clean_up = cleaner(setting, processes=request["processes"])
    while True:
        order, pipes, _, _ = receive(_ORDER_BYTES, _ANCILLARY_BYTES)
        if not order:
            os._exit(0)
        if not pipes:
            continue  # the judge's "stop", for a test that has ended meanwhile
        above = len(pipes[0][2]) >> 2
        started = now()
        pid = fork()
        if not pid:
            try:
                setpgid(0, 0)
                guard()
            except BaseException as error:
                # On the jail's channel, which no program has: what is on its streams, and its status, are its own.
                send(b"!" + repr(error).encode(errors="replace")[:2000])
                os._exit(1)
            closerange(above, BINARY)
            program()
        closerange(0, above)
        ending = supervise(pid, started)
        status, cpu_seconds, memory_bytes = wait_for(pid)
        clean_up(pid)
        send(b"=" + pack(ending, status, cpu_seconds, now() - started, memory_bytes))


def cleaner(setting: Setting, *, processes: bool) -> Callable[[int], None]:
    """What removes the traces of a child, given its pid: files and, where it may have made some, processes."""
    scratch, statvfs, chmod, utime = setting.scratch, os.statvfs, os.chmod, os.utime
    # In a file system of its own every file takes an inode; counting them costs less than looking.
    inodes = statvfs(scratch).f_ffree if scratch and setting.namespaces else None
    owned = scratch is not None and os.stat(scratch).st_uid == os.getuid()  # a container's is its engine's

    def clean_up(pid: int) -> None:
        if processes:
            _kill_group(pid)
            reap_descendants()
        if scratch is None:
            return
        if owned:
            chmod(scratch, 0o700)  # the program owns it too and may have closed it
        if inodes is None or statvfs(scratch).f_ffree != inodes:
            empty_folder(scratch)
        if owned:
            utime(scratch, _LONG_AGO)

    return clean_up


def reap_descendants() -> None:
    """Kill and reap whatever is left below this process, which adopts orphans.

    Every child leads a process group that no program can leave, so killing the groups is killing the tree; pid 1 of a
    namespace reaches everything in it anyway.
    """
    while True:
        if os.getpid() == 1:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
        try:
            pid = os.waitpid(-1, 0)[0]
        except ChildProcessError:
            return
        _kill_group(pid)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def empty_folder(folder: str) -> None:
    """Remove everything below a folder, however deep and whatever its names are; it becomes the working folder.

    Nobody may be left who could move what is in it.
    """
    os.chdir(folder)
    # For each folder on the way down, those in it that are still to be removed.
    left, way = [_folders_left()], list[str]()
    while True:
        if left[-1]:
            way.append(left[-1].pop())
            os.chmod(way[-1], 0o700)
            os.chdir(way[-1])
            left.append(_folders_left())
        elif way:
            os.chdir("..")
            os.rmdir(way.pop())
            left.pop()
        else:
            return


def _folders_left() -> list[str]:
    """The folders in the working folder, once everything else in it is removed."""
    folders = []
    for name in os.listdir():
        if stat.S_ISDIR(os.lstat(name).st_mode):
            folders.append(name)
        else:
            os.unlink(name)
    return folders


def supervisor(request: dict[str, Any], channel: int) -> Callable[[int, float], int]:
    """What watches a child, given its pid and start, to its end, killing it at its CPU or wall limit or when the judge
    says stop; it returns which of these it was. Descriptor 0 must be free for the child's pidfd."""
    poller = select.poll()
    poller.register(_PIDFD, select.POLLIN)
    poller.register(channel, select.POLLIN)
    poll, pidfd_open, close = poller.poll, os.pidfd_open, os.close
    first_look = _Watch(request, 0, 0.0).pause_seconds * 1000

    def supervise(pid: int, started: float) -> int:
        pidfd_open(pid)
        ready = poll(first_look)
        ending = (
            ENDED if ready and ready[0][0] == _PIDFD else _look_after(request, channel, pid, started, stop=bool(ready))
        )
        close(_PIDFD)
        return ending

    return supervise


def _look_after(request: dict[str, Any], channel: int, pid: int, started: float, *, stop: bool) -> int:
    """Wait for a child that has not ended at once; how it ended."""
    watch = _Watch(request, pid, started)
    ending = STOPPED if stop else watch.verdict()
    poller = select.poll()
    poller.register(_PIDFD, select.POLLIN)
    poller.register(channel, select.POLLIN)
    while not ending:
        ready = [descriptor for descriptor, _ in poller.poll(watch.pause_seconds * 1000)]
        if _PIDFD in ready:
            return ENDED
        ending = STOPPED if ready else watch.verdict()
    os.kill(pid, signal.SIGKILL)
    return ending


class _Watch:
    """A child's use of time. Time counts against the wall limit while the child sleeps, not while it has to wait for a
    loaded machine; only a multiple of its CPU limit bounds that."""

    def __init__(self, request: dict[str, float], pid: int, started: float) -> None:
        self.clock = (~pid << 3) | 2  # the kernel's clock id for another process's CPU time
        self.cpu_limit, self.wall_limit = request["cpu_seconds"], request["wall_seconds"]
        self.cores = request["cores"]
        self.started = self.seen_at = started
        self.cpu_seconds = self.idle_seconds = 0.0

    @property
    def pause_seconds(self) -> float:
        """When to look again; threads can use CPU faster than the wall clock runs."""
        cpu_left = self.cpu_limit - self.cpu_seconds
        return max(0.005, min(cpu_left / self.cores, self.wall_limit - self.idle_seconds, LOOK_SECONDS))

    def verdict(self) -> int:
        """ENDED while the child is within its limits, otherwise which one it has passed."""
        now = time.monotonic()
        try:
            cpu_seconds = time.clock_gettime(self.clock)
        except OSError:
            return ENDED  # it has just ended
        if cpu_seconds - self.cpu_seconds < BUSY_SHARE * (now - self.seen_at):
            self.idle_seconds += now - self.seen_at
        self.cpu_seconds, self.seen_at = cpu_seconds, now
        if cpu_seconds >= self.cpu_limit:
            return CPU_LIMIT
        longest = self.wall_limit + STARVATION * self.cpu_limit
        return WALL_LIMIT if self.idle_seconds >= self.wall_limit or now - self.started >= longest else ENDED
