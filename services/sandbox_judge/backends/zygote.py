"""The judge's end of a zygote: starts it, opens programs in it, makes sure that nothing of them is left."""

from __future__ import annotations

import contextlib
import marshal
import os
import select
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from services.sandbox_judge.executor import (
    CompileFailed,
    JudgeFault,
    ProgramRun,
    RunLimits,
    StartedTest,
    memory_file,
    run_test,
)
from services.sandbox_judge.isolation.seccomp_filter import Freedom
from services.sandbox_judge.isolation.tiers import Launch

START_SECONDS = 30.0
# With libraries to import, on a machine that is busy with other things.
LIBRARY_START_SECONDS = 240.0
COMPILE_SECONDS = 10.0
END_SECONDS = 10.0
FAREWELL_SECONDS = 1.0
_MESSAGE_BYTES = 1 << 18
_MARSHAL_VERSION = 2  # read by every Python 3


@dataclass(frozen=True)
class Executable:
    """What runs in a jail: a Python source, a binary, or a command of the system."""

    source: bytes = b""
    binary: bytes = b""
    command: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    freedom: Freedom = Freedom.INTERPRETED


@dataclass
class OpenProgram:
    """A program in its jail, ready to be run on one input after the other."""

    channel: socket.socket
    limits: RunLimits

    def run(self, stdin: bytes, files: Sequence[bytes] = ()) -> ProgramRun:
        """One run from the program's pristine state. Raises JudgeFault."""
        return run_test(self.channel, stdin, self.limits, files)

    def start(self, files: Sequence[bytes], link: socket.socket) -> StartedTest:
        """Begin a run with an end of a socket. Raises JudgeFault."""
        return StartedTest(self.channel, self.limits, b"", files, link)


class Zygote:
    """One zygote process; used by one thread, one program at a time."""

    def __init__(self, launch: Launch) -> None:
        self.programs = 0
        self._inside = launch.inside
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MESSAGE_BYTES)
        with theirs:
            try:
                # Standard streams are pipes because the programs' will be: Python decides about them when it starts.
                self._process = subprocess.Popen(
                    [*launch.command, str(theirs.fileno())],
                    env=launch.environment,
                    cwd="/",
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._log,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            except OSError as error:
                raise JudgeFault(f"zygote cannot be started: {error}") from error
        self.pid = self._process.pid
        self.landlock_abi = self._greet(launch.setting)

    def _greet(self, setting: dict[str, object]) -> int:
        try:
            self._control.send(marshal.dumps(setting, _MARSHAL_VERSION))
            patience = LIBRARY_START_SECONDS if setting["imports"] else START_SECONDS
            answer = _receive(self._control, patience)
            if answer.startswith(b"ready "):
                return int(answer[6:])
        except OSError as error:
            answer = str(error).encode()
        reason = self._last_words() or answer.decode(errors="replace")
        self.close()
        raise JudgeFault(f"zygote did not start: {reason}")

    @contextlib.contextmanager
    def open(self, executable: Executable, limits: RunLimits) -> Iterator[OpenProgram]:
        """A jail with the program in it. Raises CompileFailed or JudgeFault; afterwards nothing of it is alive."""
        self.programs += 1
        channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with channel:
            with theirs:
                self._request(executable, limits, theirs.fileno())
            try:
                _expect_ready(channel)
                yield OpenProgram(channel, limits)
            finally:
                # Closing the channel ends an idle jail by itself; one that is stuck is killed.
                channel.close()
                self._wait_until_gone()

    def _request(self, executable: Executable, limits: RunLimits, channel: int) -> None:
        request = {
            "python": executable.freedom is Freedom.INTERPRETED,
            "command": tuple(map(self._inside, executable.command)),
            "freedom": executable.freedom.value,
            "processes": executable.freedom is Freedom.TOOLCHAIN,
            "environment": executable.environment,
            "cpu_seconds": limits.cpu_seconds,
            "wall_seconds": limits.wall_seconds,
            "memory_bytes": limits.memory_bytes,
            "threads": limits.processes,
            "source": executable.source,
            "cores": os.cpu_count() or 1,
        }
        descriptors = [channel]
        try:
            if executable.binary:
                descriptors.append(memory_file("program", executable.binary))
            socket.send_fds(self._control, [marshal.dumps(request, _MARSHAL_VERSION)], descriptors)
        except OSError as error:
            raise JudgeFault(f"zygote gone: {error} {self._last_words()}") from error
        finally:
            for descriptor in descriptors[1:]:
                os.close(descriptor)

    def _wait_until_gone(self) -> None:
        try:
            answer = _receive(self._control, 0.5)
            if not answer:
                self._control.send(b"kill")
                answer = _receive(self._control, END_SECONDS)
        except OSError as error:
            raise JudgeFault(f"zygote gone: {error} {self._last_words()}") from error
        if not answer.startswith(b"ended "):
            raise JudgeFault(f"zygote lost its jail: {self._last_words()}")

    def _last_words(self) -> str:
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - 2000))
        return self._log.read().decode(errors="replace").strip()

    def close(self) -> None:
        """End the process and everything below it; it ends by itself when it is well."""
        self._control.close()
        try:
            self._process.wait(FAREWELL_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(END_SECONDS)
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


def _expect_ready(channel: socket.socket) -> None:
    answer = _receive(channel, COMPILE_SECONDS)
    if answer.startswith(b"-"):
        raise CompileFailed(answer[1:].decode(errors="replace"))
    if answer.startswith(b"!"):
        raise JudgeFault(f"the jail failed: {answer[1:].decode(errors='replace')}")
    if answer != b"+":
        # Only the compiler has seen the program so far: it crashed or never finished on it.
        raise CompileFailed("the compiler crashed or did not finish")


def _receive(channel: socket.socket, seconds: float) -> bytes:
    """The next message; empty when the other side is gone or silent for so long."""
    poller = select.poll()
    poller.register(channel, select.POLLIN)
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        if poller.poll(left * 1000):
            return channel.recv(_MESSAGE_BYTES)
    return b""
