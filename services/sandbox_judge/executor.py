"""One run of a program on one input, in any of the judge's languages: limits in, what happened out."""

from __future__ import annotations

import contextlib
import enum
import fcntl
import math
import os
import platform
import re
import select
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from services.sandbox_judge.jail.program import CPU_LIMIT, RESULT, STARVATION, WALL_LIMIT
from services.sandbox_judge.settings import Settings
from spo.errors import InvalidInput
from spo.redis_keys import digest
from spo.v1 import verdict_pb2

STDERR_KEPT_BYTES = 16 << 10
_CHUNK_BYTES = 1 << 16
# The jail enforces the limits; this much later the judge stops believing in the jail.
_PATIENCE_SECONDS = 5.0
# Most programs end within this time and print less than a pipe holds: one wake-up for the report is enough for them.
_SHORT_MILLISECONDS = 20
_SIGXCPU, _SIGSYS = 24, 31
_ALL_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE

VERSION_SECONDS = 30
_UTF8 = {"LC_ALL": "C.UTF-8", "HOME": "/tmp"}


class JudgeFault(Exception):
    """The judge, not the program, broke: retried; never a verdict unless it follows one program through new zygotes."""

    # Whose zygote it happened in, by the name of its role; empty: none's.
    role = ""


class StartFault(JudgeFault):
    """A zygote does not start, which is no program's doing; `role` names what it would be for."""


class CompileFailed(Exception):
    """The program is not one; the text says why."""


class RunEnding(enum.Enum):
    """How a run ended; limits are values, not errors."""

    EXITED = "exited"
    SIGNALLED = "signalled"
    CPU_TIME_LIMIT = "cpu time limit"
    WALL_TIME_LIMIT = "wall time limit"
    MEMORY_LIMIT = "memory limit"
    OUTPUT_LIMIT = "output limit"
    SECURITY_VIOLATION = "security violation"


@dataclass(frozen=True)
class RunLimits:
    """Limits of one run, all positive; processes counts threads too."""

    cpu_seconds: float = 2.0
    wall_seconds: float = 10.0
    memory_bytes: int = 256 << 20
    output_bytes: int = 1 << 20
    processes: int = 16


BUILD_LIMITS = RunLimits(cpu_seconds=15, wall_seconds=30, memory_bytes=512 << 20, output_bytes=32 << 20, processes=32)


def limits_of(test_set: verdict_pb2.TestSet) -> RunLimits:
    """The limits of a TestSet with defaults where a field is 0; a right output is never too long by default."""
    limits, defaults = test_set.limits, RunLimits()
    longest = 0 if limits.output_bytes else max((len(test.stdout) for test in test_set.tests), default=0)
    return RunLimits(
        cpu_seconds=limits.cpu_seconds or defaults.cpu_seconds,
        wall_seconds=limits.wall_seconds or max(defaults.wall_seconds, 2 * limits.cpu_seconds),
        memory_bytes=limits.memory_bytes or defaults.memory_bytes,
        output_bytes=limits.output_bytes or max(defaults.output_bytes, 2 * longest),
        processes=max(limits.processes, defaults.processes),
    )


@dataclass(frozen=True)
class ProgramRun:
    """What one run did; code is the exit status or the signal's number."""

    ending: RunEnding
    code: int
    cpu_seconds: float
    wall_seconds: float
    memory_bytes: int
    stdout: bytes
    stderr: bytes


@dataclass
class _Exchange:
    """The judge's ends of one run's pipes and what has come through them."""

    readers: dict[int, bytearray]
    poller: select.poll = field(default_factory=select.poll)
    overflow: bool = False
    result: bytes = b""
    # The channel of a run that this one needs, how long it may outlive it, and until when that is.
    needed: int = -1
    outlives_seconds: float = 0.0
    stop_at: float = math.inf


def run_test(channel: socket.socket, stdin: bytes, limits: RunLimits, files: Sequence[bytes] = ()) -> ProgramRun:
    """Run the program behind the channel once; it finds the files at descriptors 3, 4 and so on.

    Raises JudgeFault when its jail fails.
    """
    return StartedTest(channel, limits, stdin, files).ended()


class StartedTest:
    """A run that has begun; a link is an end of a socket that the program finds after its files.

    stdin: None for a program without standard streams, whose files then come first.
    """

    def __init__(
        self,
        channel: socket.socket,
        limits: RunLimits,
        stdin: bytes | None,
        files: Sequence[bytes] = (),
        link: socket.socket | None = None,
    ) -> None:
        self._channel, self._limits = channel, limits
        self._exchange, theirs = (_Exchange({}), []) if stdin is None else _open_pipes()
        try:
            try:
                if stdin is not None:
                    theirs.insert(0, _input_file(stdin))
                theirs += [memory_file("file", content) for content in files]
                socket.send_fds(channel, [b"test"], [*theirs, *([link.fileno()] if link else [])])
            finally:
                for descriptor in theirs:
                    os.close(descriptor)
        except OSError as error:
            self._close()
            raise JudgeFault(f"jail gone: {error}") from error

    def stop(self) -> None:
        """Have the jail end the program, if it has not ended."""
        with contextlib.suppress(OSError):
            self._channel.send(b"stop")

    def need(self, other: StartedTest, outlives_seconds: float) -> None:
        """Stop this run so long after another one has ended."""
        self._exchange.needed, self._exchange.outlives_seconds = other._channel.fileno(), outlives_seconds

    def ended(self) -> ProgramRun:
        """What it did, when it has ended. Raises JudgeFault when its jail fails."""
        exchange = self._exchange
        stdout, stderr = exchange.readers.values() or (b"", b"")
        try:
            _converse(exchange, self._channel, self._limits)
        except OSError as error:
            raise JudgeFault(f"jail gone: {error}") from error
        finally:
            self._close()
        return _classify(exchange, self._limits, bytes(stdout), bytes(stderr[-STDERR_KEPT_BYTES:]))

    def _close(self) -> None:
        for reader in self._exchange.readers:
            os.close(reader)


def _open_pipes() -> tuple[_Exchange, list[int]]:
    stdout, stdout_writer = os.pipe()
    stderr, stderr_writer = os.pipe()
    theirs = [stdout_writer, stderr_writer]
    for descriptor in theirs:
        os.fchmod(descriptor, 0o666)  # the program, another user, may open /dev/stdout
    return _Exchange({stdout: bytearray(), stderr: bytearray()}), theirs


def _input_file(content: bytes) -> int:
    """A descriptor of a file to read from, as `< file` gives it: of known size, mappable, with a place of its own."""
    writable = memory_file("stdin", content)
    try:
        os.fchmod(writable, 0o444)
        return os.open(f"/proc/self/fd/{writable}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(writable)


def _converse(exchange: _Exchange, channel: socket.socket, limits: RunLimits) -> None:
    """Collect outputs until the jail has reported; then nobody is left who could print more."""
    poller = exchange.poller
    poller.register(channel, select.POLLIN)
    if poller.poll(_SHORT_MILLISECONDS):
        _take_result(exchange, channel)
    for reader in (*exchange.readers, *([exchange.needed] if exchange.needed >= 0 else [])):
        poller.register(reader, select.POLLIN)
    deadline = time.monotonic() + limits.wall_seconds + limits.cpu_seconds * STARVATION + _PATIENCE_SECONDS
    while not exchange.result:
        _wait_on(exchange, channel, limits, deadline)
    if exchange.needed >= 0 and exchange.stop_at == math.inf:
        poller.unregister(exchange.needed)
    while ready := poller.poll(0):
        for descriptor, _ in ready:
            if _collect(exchange, descriptor, limits, channel) < _CHUNK_BYTES:
                poller.unregister(descriptor)


def _wait_on(exchange: _Exchange, channel: socket.socket, limits: RunLimits, deadline: float) -> None:
    """Do what can be done next on any of the pipes or the channel."""
    ready = exchange.poller.poll(max(0.0, min(deadline, exchange.stop_at) - time.monotonic()) * 1000)
    if not ready and exchange.stop_at < deadline:
        exchange.stop_at = deadline
        channel.send(b"stop")
    elif not ready:
        raise JudgeFault("the jail did not report in time")
    for descriptor, _ in ready:
        if descriptor == exchange.needed:
            exchange.poller.unregister(descriptor)
            exchange.stop_at = time.monotonic() + exchange.outlives_seconds
        elif descriptor == channel.fileno():
            _take_result(exchange, channel)
        elif not _collect(exchange, descriptor, limits, channel):
            exchange.poller.unregister(descriptor)


def _take_result(exchange: _Exchange, channel: socket.socket) -> None:
    exchange.result = channel.recv(256)
    if not exchange.result.startswith(b"="):
        raise JudgeFault(f"the jail failed: {exchange.result[1:].decode(errors='replace') or 'it died'}")
    exchange.poller.unregister(channel)


def _collect(exchange: _Exchange, reader: int, limits: RunLimits, channel: socket.socket) -> int:
    """Read what has come; how much it was, 0 when this output has ended or grown past its limit."""
    chunk = os.read(reader, _CHUNK_BYTES)
    collected = exchange.readers[reader]
    collected += chunk
    if len(collected) <= limits.output_bytes:
        return len(chunk)
    exchange.overflow = True
    with contextlib.suppress(OSError):
        channel.send(b"stop")
    return 0


def _classify(exchange: _Exchange, limits: RunLimits, stdout: bytes, stderr: bytes) -> ProgramRun:
    how, status, cpu_seconds, wall_seconds, memory_bytes = RESULT.unpack(exchange.result[1:])
    code = os.waitstatus_to_exitcode(status)
    if exchange.overflow:
        ending = RunEnding.OUTPUT_LIMIT
    elif how == CPU_LIMIT or cpu_seconds > limits.cpu_seconds or code == -_SIGXCPU:
        ending = RunEnding.CPU_TIME_LIMIT
    elif how == WALL_LIMIT:
        ending = RunEnding.WALL_TIME_LIMIT
    elif code == -_SIGSYS:
        ending = RunEnding.SECURITY_VIOLATION
    elif memory_bytes > limits.memory_bytes or (code and _out_of_memory(stderr)):
        ending = RunEnding.MEMORY_LIMIT
    else:
        ending = RunEnding.SIGNALLED if code < 0 else RunEnding.EXITED
    return ProgramRun(ending, abs(code), cpu_seconds, wall_seconds, memory_bytes, stdout, stderr)


def _out_of_memory(stderr: bytes) -> bool:
    """Whether a failed program says that an allocation was refused; lying gains nothing: it failed either way."""
    if b"java.lang.OutOfMemoryError" in stderr:
        return True
    last_line = stderr.rstrip().rsplit(b"\n", 1)[-1]
    return last_line.startswith(b"MemoryError") or b"bad_alloc" in last_line or b"Cannot allocate memory" in last_line


def memory_file(name: str, content: bytes) -> int:
    """A descriptor of an anonymous file that nobody can change; the caller closes it."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _ALL_SEALS)
    return descriptor


@dataclass(frozen=True)
class Language:
    """How programs of one language become something that runs.

    build: a command that reads the source on stdin and writes the file `program` where it stands. Empty: the program is
    run by the zygote itself.
    run: what runs that file, which it finds at descriptor 3; "{memory_mib}" stands for the limit. Empty: the file is a
    native binary.
    version: a command that prints what decides how programs behave.
    readable: folders outside /usr that the commands need.
    allowance_bytes, processes: what the runtime itself needs beyond the program's memory, and at least in threads.
    """

    name: str
    build: tuple[str, ...] = ()
    run: tuple[str, ...] = ()
    version: tuple[str, ...] = ()
    readable: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    allowance_bytes: int = 0
    processes: int = 0

    @property
    def command(self) -> tuple[str, ...]:
        """A shell line that builds and then hands the result over on stdout."""
        return ("/bin/sh", "-c", f"{shlex.join(self.build)} && cat program")


_CPP = ("g++", "-x", "c++", "-std=gnu++20", "-O2", "-pipe", "-o", "program", "-")
_C = ("gcc", "-x", "c", "-std=gnu17", "-O2", "-pipe", "-o", "program", "-", "-lm")
_NATIVE = (
    Language("cpp", _CPP, version=("g++", "-dumpfullversion")),
    Language("c", _C, version=("gcc", "-dumpfullversion")),
)

# A syntax error is a compile error: so the build compiles, and hands on the source itself.
_CHECK_PYTHON = (
    "import sys; source = sys.stdin.buffer.read(); compile(source, 'program.py', 'exec'); "
    "open('program', 'wb').write(source)"
)
_RUN_PYTHON = "exec(compile(open(3, 'rb').read(), 'program.py', 'exec', dont_inherit=True))"

# The public class gives the file its name; where there is none, the first class does.
_BUILD_JAVA = r"""
cat > source
name=$(grep -oE 'public +(final +|abstract +)*class +[A-Za-z_0-9]+' source | head -n 1 | grep -oE '[A-Za-z_0-9]+$')
[ -n "$name" ] || name=$(grep -oE '\bclass +[A-Za-z_0-9]+' source | head -n 1 | grep -oE '[A-Za-z_0-9]+$')
name=${name:-Main}
mkdir classes && mv source "$name.java" && "$1/javac" $2 -encoding UTF-8 -d classes "$name.java" &&
  "$1/jar" $2 --create --file program --main-class "$name" -C classes .
"""
# Reserved address space counts against the limit, so none of it is left to the machine's size.
_JVM = (
    "-XX:+UseSerialGC",
    "-XX:-UsePerfData",
    "-XX:ReservedCodeCacheSize=48m",
    "-XX:CompressedClassSpaceSize=32m",
    "-XX:VMThreadStackSize=1024",
)


@cache
def languages() -> dict[str, Language]:
    """The languages that are installed here, by name; python is the judge's own version, run by zygotes."""
    own = (Language("python"), Language(_python_name(sys.version_info[:2])))
    rows = (*own, *_other_pythons(), *_pypy(), *_NATIVE, *_java())
    found = {
        language.name: language for language in reversed(rows) if not language.build or shutil.which(language.build[0])
    }
    return dict(sorted(found.items(), key=lambda pair: [row.name for row in rows].index(pair[0])))


def language_of(name: str) -> Language:
    """Raises InvalidInput (code "unknown_language") for a name that is not in the table or cannot be built here."""
    found = languages().get(name)
    if found is None:
        raise InvalidInput(f"unknown language {name!r}; known: {', '.join(languages())}", code="unknown_language")
    return found


@cache
def version_of(name: str) -> str:
    """The version of what builds or runs programs of the language."""
    language = language_of(name)
    if not language.version:
        return platform.python_version()
    told = subprocess.run(language.version, capture_output=True, text=True, timeout=VERSION_SECONDS, check=True)
    return " ".join((told.stdout + told.stderr).split())


@cache
def behaviour_of(name: str) -> str:
    """What decides how a program of the language behaves: part of the key of a cached verdict."""
    language = language_of(name)
    return digest(*language.build, "", *language.run, "", version_of(name))


@cache
def readable_folders() -> tuple[str, ...]:
    """Folders outside /usr that languages need; they are bound read-only into the jail."""
    return tuple(dict.fromkeys(folder for language in languages().values() for folder in language.readable))


def _python_name(version: tuple[int, ...]) -> str:
    return "python" + ".".join(map(str, version))


def _other_pythons() -> Iterator[Language]:
    """Interpreters of other versions below /usr, and those whose prefix the settings name."""
    prefixes = [Path("/usr"), Path("/usr/local"), *map(Path, Settings().python_prefixes)]
    for prefix in prefixes:
        for path in sorted(prefix.glob("bin/python3.*")):
            if re.fullmatch(r"python3\.\d+", path.name) and path.name != _python_name(sys.version_info[:2]):
                yield _interpreter(path.name, path, () if prefix.is_relative_to("/usr") else (str(prefix.resolve()),))


def _pypy() -> Iterator[Language]:
    path = shutil.which("pypy3")
    if path:
        prefix = Path(path).resolve().parent.parent
        yield _interpreter("pypy", Path(path), () if prefix.is_relative_to("/usr") else (str(prefix),))


def _interpreter(name: str, path: Path, readable: tuple[str, ...]) -> Language:
    interpreter = (os.path.realpath(path), "-s", "-S", "-B")
    return Language(
        name,
        build=(*interpreter, "-c", _CHECK_PYTHON),
        run=(*interpreter, "-c", _RUN_PYTHON),
        version=(interpreter[0], "--version"),
        readable=readable,
        environment={**_UTF8, "PYTHONHASHSEED": "0", "PYTHONINTMAXSTRDIGITS": "0"},
        # PyPy's own start takes more than CPython's.
        allowance_bytes=64 << 20 if name == "pypy" else 0,
    )


def _java() -> Iterator[Language]:
    path = shutil.which("javac")
    if path is None:
        return
    tools = Path(path).resolve().parent
    # Distributions keep a runtime's configuration elsewhere and link to it.
    linked = {str(path.resolve().parent) for path in (tools.parent / "conf").rglob("*") if path.is_symlink()}
    outside = tuple(sorted(folder for folder in {str(tools.parent), *linked} if not folder.startswith("/usr/")))
    options = " ".join(f"-J{option}" for option in (*_JVM, "-Xmx256m", "-XX:TieredStopAtLevel=1"))
    yield Language(
        "java",
        build=("/bin/sh", "-c", _BUILD_JAVA, "build", str(tools), options),
        run=(str(tools / "java"), *_JVM, "-Xss16m", "-Xmx{memory_mib}m", "-jar", "/dev/fd/3"),
        version=(str(tools / "java"), "-version"),
        readable=outside,
        environment={**_UTF8, "MALLOC_ARENA_MAX": "1"},
        allowance_bytes=128 << 20,
        processes=64,
    )
