"""One program in its inner jail: compile once, then fork a child from the pristine compiled state for every test.

The jail process is pid 1 of its namespace; the children are what runs the program. Tests reach the children as pipes
held by the judge; expected outputs never come here.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import socket
import struct
import time
from dataclasses import dataclass
from typing import Any, NoReturn

from services.sandbox_judge.jail import kernel, python_child

SCRATCH = "/tmp"
SCRATCH_INODES = 4096
FILE_BYTES = 64 << 20
OPEN_FILES = 64
STACK_BYTES = 64 << 20
# Address space counts what is reserved, not what is used; the verdict goes by what was used.
ADDRESS_SPACE_FACTOR = 2
ADDRESS_SPACE_ALLOWANCE = 128 << 20

ENDED, CPU_LIMIT, WALL_LIMIT, STOPPED = range(4)
# How it ended, wait status, CPU seconds, wall seconds, peak memory in bytes.
RESULT = struct.Struct("=iiddq")


@dataclass
class Setting:
    """What the zygote prepared for all jails: descriptors with their Landlock rights, capabilities of last resort."""

    namespaces: bool
    uid: int
    gid: int
    landlock_abi: int
    readable: list[tuple[int, int | None]]
    capabilities: int
    filters: dict[str, bytes]
    own_pid_marker: bytes


@dataclass
class Jail:
    setting: Setting
    request: dict[str, Any]
    source: bytes
    channel: socket.socket
    program_file: int | None
    code: Any = None
    ruleset: int | None = None


def live(setting: Setting, message: bytes, descriptors: list[int]) -> NoReturn:
    """The jail's whole life; never returns into the zygote."""
    status = 1
    channel = socket.socket(fileno=descriptors[0])
    try:
        head, _, source = message.partition(b"\n")
        file = descriptors[1] if len(descriptors) > 1 else None
        jail = Jail(setting, json.loads(head), source, channel, file)
        _lock_up(jail)
        if jail.request["python"]:
            _compile(jail)
        channel.send(b"+")
        while True:
            order, pipes = _next_order(channel)
            if not order:
                break
            channel.send(b"=" + _run_test(jail, pipes))
        status = 0
    except BaseException as error:
        channel.send(b"!" + repr(error).encode(errors="replace")[:2000])
    finally:
        os._exit(status)


def _next_order(channel: socket.socket) -> tuple[bytes, list[int]]:
    from services.sandbox_judge.jail.zygote import receive

    while True:
        order, pipes = receive(channel, 16)
        if order != b"stop":  # a stop for a test that has ended meanwhile
            return order, pipes


def _lock_up(jail: Jail) -> None:
    if jail.setting.namespaces:
        kernel.map_identity(jail.setting.uid, jail.setting.gid)
        _fresh_scratch(jail)
    else:
        kernel.adopt_orphans()
        jail.ruleset = kernel.landlock_ruleset(jail.setting.landlock_abi, jail.setting.readable)
    kernel.set_dumpable(False)
    memory = jail.request["memory_bytes"]
    address_space = memory * ADDRESS_SPACE_FACTOR + ADDRESS_SPACE_ALLOWANCE
    limits = {
        resource.RLIMIT_AS: (address_space, address_space),
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_FSIZE: (FILE_BYTES, FILE_BYTES),
        resource.RLIMIT_MEMLOCK: (0, 0),
        resource.RLIMIT_NOFILE: (OPEN_FILES, OPEN_FILES),
        resource.RLIMIT_STACK: (STACK_BYTES, resource.RLIM_INFINITY),
    }
    if jail.setting.namespaces:
        # Counted per user namespace, so exactly this program's threads; outside it would count the user's others.
        limits[resource.RLIMIT_NPROC] = (jail.request["threads"] + 1,) * 2
    for kind, pair in limits.items():
        resource.setrlimit(kind, pair)


def _fresh_scratch(jail: Jail) -> None:
    kernel.mount_tmpfs(SCRATCH, jail.request["scratch_bytes"], SCRATCH_INODES)
    if jail.setting.landlock_abi:
        if jail.ruleset is not None:
            os.close(jail.ruleset)
        scratch = os.open(SCRATCH, os.O_PATH)
        jail.ruleset = kernel.landlock_ruleset(jail.setting.landlock_abi, [*jail.setting.readable, (scratch, None)])
        os.close(scratch)


def _compile(jail: Jail) -> None:
    try:
        jail.code = python_child.compile_program(jail.source)
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError) as error:
        text = f"{type(error).__name__}: {error}"
        jail.channel.send(b"-" + text.encode(errors="replace")[:2000])
        os._exit(0)


def _run_test(jail: Jail, pipes: list[int]) -> bytes:
    started = time.monotonic()
    pid = os.fork()
    if pid == 0:
        _become_child(jail, pipes)
    for descriptor in pipes:
        os.close(descriptor)
    ending, status, usage = _supervise(jail, pid, started)
    kill_descendants()
    if jail.setting.namespaces and os.listdir(SCRATCH):
        kernel.unmount(SCRATCH)
        _fresh_scratch(jail)
    cpu_seconds = usage.ru_utime + usage.ru_stime
    return RESULT.pack(ending, status, cpu_seconds, time.monotonic() - started, usage.ru_maxrss * 1024)


def _supervise(jail: Jail, pid: int, started: float) -> tuple[int, int, Any]:
    """Wait for the child; kill it at its CPU or wall limit or when the judge says stop."""
    ended = os.pidfd_open(pid)
    poller = select.poll()
    poller.register(ended, select.POLLIN)
    poller.register(jail.channel, select.POLLIN)
    ending = ENDED
    while True:
        cpu_left, wall_left = _time_left(jail, pid, started)
        if ending == ENDED and min(cpu_left, wall_left) <= 0:
            ending = CPU_LIMIT if cpu_left <= 0 else WALL_LIMIT
            os.kill(pid, signal.SIGKILL)
        # Threads can use CPU faster than the wall clock runs.
        pause = max(0.005, min(cpu_left / jail.request["cores"], wall_left))
        ready = [descriptor for descriptor, _ in poller.poll(None if ending else pause * 1000)]
        if ended in ready:
            break
        if ready:
            poller.unregister(jail.channel)
            ending = STOPPED
            os.kill(pid, signal.SIGKILL)
    os.close(ended)
    _, status, usage = os.wait4(pid, 0)
    return ending, status, usage


def _time_left(jail: Jail, pid: int, started: float) -> tuple[float, float]:
    """CPU and wall seconds left; the clock id is the kernel's for the CPU time of another process."""
    wall_left = jail.request["wall_seconds"] - (time.monotonic() - started)
    try:
        cpu_left = jail.request["cpu_seconds"] - time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return 1.0, wall_left  # it has just ended
    return cpu_left, wall_left


def kill_descendants() -> None:
    """Kill and reap whatever is left below this process, which adopts orphans."""
    try:
        while True:
            if os.waitpid(-1, os.WNOHANG)[0]:
                continue
            if os.getpid() == 1:
                _kill(-1)
            else:
                with open(f"/proc/self/task/{os.getpid()}/children") as listing:
                    for child in listing.read().split():
                        _kill(int(child))
            os.waitpid(-1, 0)
    except ChildProcessError:
        return


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _become_child(jail: Jail, pipes: list[int]) -> NoReturn:
    try:
        for target, descriptor in enumerate(pipes):
            os.dup2(descriptor, target)
        cpu_backstop = int(jail.request["cpu_seconds"]) + 2
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_backstop, cpu_backstop + 1))
        if jail.ruleset is not None:
            kernel.landlock_restrict(jail.ruleset)
        kernel.set_capabilities(jail.setting.capabilities)
        filter_program = jail.setting.filters[jail.request["freedom"]]
        own_filter = filter_program.replace(jail.setting.own_pid_marker, struct.pack("=I", os.getpid()))
        os.closerange(3, 1024)
        kernel.install_filter(own_filter)
    except BaseException as error:
        os.write(2, f"jail failed: {error!r}".encode())
        os._exit(111)
    if jail.request["python"]:
        python_child.run(jail.code)
    os.execve(jail.request["command"][0], jail.request["command"], jail.request["environment"])
