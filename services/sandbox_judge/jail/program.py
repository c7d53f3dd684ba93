"""One program in its inner jail: compile once, then fork a child from the pristine compiled state for every test.

The jail process is pid 1 of its namespace; the children are what runs the program. Tests reach the children as pipes
held by the judge; expected outputs never come here. Every object touched between two forks costs both sides a page
fault, so what can be done once is done before the first one.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from services.sandbox_judge.jail import kernel, python_child, watch

# Address space counts what is reserved, not what is used; the verdict goes by what was used.
ADDRESS_SPACE_FACTOR = 2
ADDRESS_SPACE_ALLOWANCE = 128 << 20
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
    # In its own pid namespace a program's pid does not matter, so one prepared filter does for all; otherwise empty.
    prepared: dict[str, Callable[[], None]]
    main: dict[str, Any]


class Jail(NamedTuple):
    """One program's jail: what was asked for, and what the children inherit."""

    setting: Setting
    request: dict[str, Any]
    channel: socket.socket
    code: Any
    binary: int | None


def live(setting: Setting, request: dict[str, Any], descriptors: list[int], receive: Receive) -> NoReturn:
    """The jail's whole life; never returns into the zygote."""
    status = 1
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, descriptors[0])
    try:
        _lock_up(setting, request)
        if request["command"]:
            sys.argv[:] = request["command"]
        code = _compile(request["source"], channel) if request["python"] else None
        jail = Jail(setting, request, channel, code, descriptors[1] if len(descriptors) > 1 else None)
        nothing = os.open(os.devnull, os.O_RDWR)
        channel.send(b"+")
        while True:
            order, pipes = receive(channel, 16)
            if order == b"stop":
                continue  # it was meant for a test that has ended meanwhile
            if not order:
                break
            channel.send(b"=" + _run_test(jail, pipes, nothing))
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
        _limit_cpu(request)  # pid 1 itself is not subject to it
    else:
        kernel.adopt_orphans()
    address_space = request["memory_bytes"] * ADDRESS_SPACE_FACTOR + ADDRESS_SPACE_ALLOWANCE
    resource.setrlimit(resource.RLIMIT_AS, (address_space, address_space))


def _limit_cpu(request: dict[str, Any]) -> None:
    """A backstop in whole seconds; the limit itself is watched from outside."""
    seconds = int(request["cpu_seconds"]) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))


def _compile(source: bytes, channel: socket.socket) -> Any:
    try:
        return python_child.compile_program(source)
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError) as error:
        text = f"{type(error).__name__}: {error}"
        channel.send(b"-" + text.encode(errors="replace")[:2000])
        os._exit(0)


def _run_test(jail: Jail, pipes: list[int], nothing: int) -> bytes:
    started = time.monotonic()
    for target in (0, 1, 2):
        os.dup2(pipes[target], target)
    pid = kernel.fork_bare()
    if pid == 0:
        _become_child(jail, pipes[3:])
    for target in (0, 1, 2):
        os.dup2(nothing, target)
    for descriptor in pipes:
        os.close(descriptor)
    ending, status, usage = watch.supervise(jail.request, jail.channel, pid, started)
    if jail.request["processes"]:
        _kill_group(pid)
        reap_descendants()
    if jail.setting.scratch:
        empty_folder(jail.setting.scratch)
    cpu_seconds = usage.ru_utime + usage.ru_stime
    return RESULT.pack(ending, status, cpu_seconds, time.monotonic() - started, usage.ru_maxrss * 1024)


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


def _become_child(jail: Jail, files: list[int]) -> NoReturn:
    try:
        os.setpgid(0, 0)
        if files or jail.binary is not None:
            _take_files(jail.binary, files)
        else:
            os.closerange(3, BINARY + 1)
        install = jail.setting.prepared.get(jail.request["freedom"])
        if install is not None:
            install()
        else:
            _guard_alone(jail)
    except BaseException as error:
        os.write(2, f"jail failed: {error!r}".encode())
        os._exit(SETUP_FAILED)
    if jail.code is not None:
        python_child.run(jail.code, jail.setting.main)
    command = jail.request["command"]
    os.execve(command[0] if jail.binary is None else BINARY, command, jail.request["environment"])


def _guard_alone(jail: Jail) -> None:
    """Without namespaces the child dies with its jail, and may signal nobody but itself."""
    kernel.die_with_parent()
    _limit_cpu(jail.request)
    own_pid = struct.pack("=I", os.getpid())
    narrowing = jail.setting.filters[jail.request["freedom"]].replace(jail.setting.own_pid_marker, own_pid)
    kernel.prepared_filter(narrowing)()


def _take_files(binary: int | None, files: list[int]) -> None:
    """The test's files lie from descriptor 3 on, a binary to execute at BINARY; nothing else is open."""
    if binary is not None:
        os.dup2(binary, BINARY, inheritable=False)
    # What was received lies above its target and in the same order, so no step overwrites what a later one needs.
    for target, descriptor in enumerate(files, start=3):
        os.dup2(descriptor, target)
    os.closerange(3 + len(files), BINARY if binary is not None else BINARY + 1)
