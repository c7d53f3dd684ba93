"""One program in its inner jail: compile once, then fork a child from the pristine compiled state for every test.

The jail process is pid 1 of its namespace; the children are what runs the program. Tests reach the children as pipes
held by the judge; expected outputs never come here.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import socket
import struct
import time
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from services.sandbox_judge.jail import kernel, python_child

# Address space counts what is reserved, not what is used; the verdict goes by what was used.
ADDRESS_SPACE_FACTOR = 2
ADDRESS_SPACE_ALLOWANCE = 128 << 20
# A program that gets at least this share of a core is waiting for the machine, not for time to pass; it may need up to
# STARVATION times its CPU limit.
BUSY_SHARE = 0.01
STARVATION = 60
LOOK_SECONDS = 0.25

ENDED, CPU_LIMIT, WALL_LIMIT, STOPPED = range(4)
# How it ended, wait status, CPU seconds, wall seconds, peak memory in bytes.
RESULT = struct.Struct("=iiddq")
SETUP_FAILED = 111
BINARY = 63  # the highest descriptor that programs may have

Receive = Callable[..., "tuple[bytes, list[int]]"]


class Setting(NamedTuple):
    """What is the same for all programs of a zygote."""

    namespaces: bool
    capabilities: int
    scratch: str | None
    filters: dict[str, bytes]
    own_pid_marker: bytes


class Jail(NamedTuple):
    """One program's jail: what was asked for, and what the children inherit."""

    setting: Setting
    request: dict[str, Any]
    channel: socket.socket
    code: Any
    namespace: dict[str, Any]
    binary: int | None


def live(setting: Setting, request: dict[str, Any], descriptors: list[int], receive: Receive) -> NoReturn:
    """The jail's whole life; never returns into the zygote."""
    status = 1
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, descriptors[0])
    try:
        _lock_up(setting, request)
        namespace = python_child.prepare(request["command"])
        code = _compile(request["source"], channel) if request["python"] else None
        binary = descriptors[1] if len(descriptors) > 1 else None
        jail = Jail(setting, request, channel, code, namespace, binary)
        channel.send(b"+")
        while True:
            order, pipes = receive(channel, 16)
            if order == b"stop":
                continue  # it was meant for a test that has ended meanwhile
            if not order:
                break
            channel.send(b"=" + _run_test(jail, pipes))
        status = 0
    except BaseException as error:
        channel.send(b"!" + repr(error).encode(errors="replace")[:2000])
    finally:
        os._exit(status)


def _lock_up(setting: Setting, request: dict[str, Any]) -> None:
    if setting.namespaces:
        kernel.set_capabilities(0)  # a new user namespace came with all of them
        # Counted per user namespace, so exactly this program's threads; outside it would count the user's others.
        threads = request["threads"] + 1
        resource.setrlimit(resource.RLIMIT_NPROC, (threads, threads))
    else:
        kernel.adopt_orphans()
    address_space = request["memory_bytes"] * ADDRESS_SPACE_FACTOR + ADDRESS_SPACE_ALLOWANCE
    resource.setrlimit(resource.RLIMIT_AS, (address_space, address_space))


def _compile(source: bytes, channel: socket.socket) -> Any:
    try:
        return python_child.compile_program(source)
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError) as error:
        text = f"{type(error).__name__}: {error}"
        channel.send(b"-" + text.encode(errors="replace")[:2000])
        os._exit(0)


def _run_test(jail: Jail, pipes: list[int]) -> bytes:
    started = time.monotonic()
    pid = kernel.fork_bare()
    if pid == 0:
        _become_child(jail, pipes)
    for descriptor in pipes:
        os.close(descriptor)
    ending, status, usage = _supervise(jail, pid, started)
    _kill_group(pid)
    reap_descendants()
    if jail.setting.scratch:
        empty_folder(jail.setting.scratch)
    cpu_seconds = usage.ru_utime + usage.ru_stime
    return RESULT.pack(ending, status, cpu_seconds, time.monotonic() - started, usage.ru_maxrss * 1024)


def _supervise(jail: Jail, pid: int, started: float) -> tuple[int, int, Any]:
    """Wait for the child; kill it at its CPU or wall limit or when the judge says stop."""
    ended = os.pidfd_open(pid)
    poller = select.poll()
    poller.register(ended, select.POLLIN)
    poller.register(jail.channel, select.POLLIN)
    watch = _Watch(jail.request, pid, started)
    ending = ENDED
    while True:
        ready = [descriptor for descriptor, _ in poller.poll(None if ending else watch.pause_seconds * 1000)]
        if ended in ready:
            break
        if ready:
            poller.unregister(jail.channel)
            ending = STOPPED
        elif not ending:
            ending = watch.verdict()
        if ending:
            os.kill(pid, signal.SIGKILL)
    os.close(ended)
    _, status, usage = os.wait4(pid, 0)
    return ending, status, usage


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
    """Remove everything below a folder, however deep: what lies deeper is moved up first."""
    moved = 0
    while names := os.listdir(folder):
        for name in names:
            path = os.path.join(folder, name)
            if not _open_folder(path):
                os.unlink(path)
                continue
            for inner in os.listdir(path):
                moved += 1
                _open_folder(os.path.join(path, inner))
                os.rename(os.path.join(path, inner), os.path.join(folder, f"moved {moved}"))
            os.rmdir(path)


def _open_folder(path: str) -> bool:
    """Whether path is a folder; if so it can be emptied and moved afterwards."""
    if os.path.islink(path) or not os.path.isdir(path):
        return False
    os.chmod(path, 0o700)
    return True


def _become_child(jail: Jail, pipes: list[int]) -> NoReturn:
    try:
        os.setpgid(0, 0)
        if not jail.setting.namespaces:
            kernel.die_with_parent()
        _take_descriptors(jail.binary, pipes)
        cpu_backstop = int(jail.request["cpu_seconds"]) + 2
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_backstop, cpu_backstop + 1))
        narrowing = jail.setting.filters[jail.request["freedom"]]
        kernel.install_filter(narrowing.replace(jail.setting.own_pid_marker, struct.pack("=I", os.getpid())))
    except BaseException as error:
        os.write(2, f"jail failed: {error!r}".encode())
        os._exit(SETUP_FAILED)
    if jail.code is not None:
        python_child.run(jail.code, jail.namespace)
    command = jail.request["command"]
    os.execve(command[0] if jail.binary is None else BINARY, command, jail.request["environment"])


def _take_descriptors(binary: int | None, pipes: list[int]) -> None:
    """Standard streams, then the test's files from 3 on; a binary to execute lies at BINARY."""
    if binary is not None:
        os.dup2(binary, BINARY, inheritable=False)
    # All targets lie below what was received, so no step overwrites what a later one needs.
    for target, descriptor in enumerate(pipes):
        os.dup2(descriptor, target)
    os.closerange(len(pipes), BINARY if binary is not None else 1024)
