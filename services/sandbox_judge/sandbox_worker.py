"""A worker runs one program at a time, in zygotes of its own that are replaced when they fail or have aged."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from services.sandbox_judge.backends.zygote import Executable, OpenProgram, Zygote
from services.sandbox_judge.executor import (
    JudgeFault,
    ProgramRun,
    RunEnding,
    RunLimits,
    StartedTest,
    StartFault,
)
from services.sandbox_judge.isolation.memory_budget import MemoryBudget
from services.sandbox_judge.isolation.memory_cgroup import MemoryCgroup, child_name
from services.sandbox_judge.isolation.tiers import Preload, launch, program_uid
from services.sandbox_judge.settings import IsolationTier, Settings


class Role(enum.Enum):
    """Zygotes never serve two roles: a checker sees answers, a compiler may write and start processes."""

    PROGRAM = "program"
    COMPILER = "compiler"
    CHECKER = "checker"
    # Responses with the tests that people wrote for them, the second with pytest.
    TESTS = "tests"
    PYTEST = "pytest"
    # Those responses themselves, apart from their tests.
    RESPONSE = "response"
    # Functions that score responses: people's own, and those of libraries.
    FUNCTION = "function"
    MATHEMATICS = "mathematics"
    REASONING_GYM = "reasoning-gym"


PRELOADS = {
    Role.TESTS: Preload("tests_child"),
    Role.RESPONSE: Preload("response_child"),
    Role.PYTEST: Preload("tests_child", ("pytest", "_pytest.assertion.rewrite")),
    Role.FUNCTION: Preload("scores_child", ("numpy", "difflib", "statistics")),
    Role.MATHEMATICS: Preload("scores_child", ("math_verify",)),
    Role.REASONING_GYM: Preload("scores_child", ("reasoning_gym",)),
}
# What interpreter and libraries take themselves, beyond a response's memory.
ALLOWANCE_BYTES = {
    Role.PYTEST: 64 << 20,
    Role.FUNCTION: 96 << 20,
    Role.MATHEMATICS: 128 << 20,
    Role.REASONING_GYM: 256 << 20,
}
_NEEDS_SCRATCH = (Role.COMPILER, Role.TESTS, Role.RESPONSE, Role.PYTEST, Role.FUNCTION, Role.REASONING_GYM)


@dataclass
class PreparedProgram:
    """A program in its jail, with the files that every run finds; a kill by its cgroup counts as its memory limit."""

    program: OpenProgram
    files: tuple[bytes, ...]
    cgroup: MemoryCgroup | None

    def run(self, stdin: bytes, files: Sequence[bytes] = ()) -> ProgramRun:
        """One run from the program's pristine state. Raises JudgeFault."""
        return self._classed(self.program.run(stdin, (*self.files, *files)))

    def start(self, files: Sequence[bytes], link: socket.socket) -> StartedTest:
        """Begin a run with an end of a socket; `ended` waits for it. Raises JudgeFault."""
        return self.program.start((*self.files, *files), link)

    def ended(self, started: StartedTest) -> ProgramRun:
        """What a run did that was begun here. Raises JudgeFault."""
        return self._classed(started.ended())

    def _classed(self, run: ProgramRun) -> ProgramRun:
        killed = run.code != 0 and self.cgroup is not None and self.cgroup.has_killed()
        return dataclasses.replace(run, ending=RunEnding.MEMORY_LIMIT) if killed else run


@dataclass
class KeptJail:
    """A jail that serves one response after the other; `closing` ends it."""

    program: OpenProgram
    closing: contextlib.ExitStack


# So many starts that fail one after the other show that a role cannot be served here; it is then tried again ever less
# often, by one worker at a time, and whoever needs it meanwhile learns why at once.
STARTS = 3
LONGEST_BACKOFF_SECONDS = 60.0


class ZygoteStarts:
    """Which roles' zygotes did not start lately, for all workers of a judge. Safe from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # By role: starts that failed one after the other, when the next may be tried, why the last failed.
        self._failed: dict[Role, tuple[int, float, str]] = {}

    @contextlib.contextmanager
    def trying(self, role: Role) -> Iterator[None]:
        """Around a start. Raises StartFault in its place while the role is given a rest, and for what goes wrong."""
        with self._lock:
            failures, rests_until, reason = self._failed.get(role, (0, 0.0, ""))
            if failures >= STARTS:
                if time.monotonic() < rests_until:
                    raise self._fault(role, reason)
                # Whoever else comes while this one is tried waits for the next.
                self._failed[role] = failures, time.monotonic() + LONGEST_BACKOFF_SECONDS, reason
        try:
            yield
        except JudgeFault as error:
            with self._lock:
                failures = self._failed.get(role, (0, 0.0, ""))[0] + 1
                rest = min(LONGEST_BACKOFF_SECONDS, 2.0 ** min(10, failures - STARTS))
                self._failed[role] = failures, time.monotonic() + rest, str(error)
            raise self._fault(role, str(error)) from error
        with self._lock:
            self._failed.pop(role, None)

    def _fault(self, role: Role, reason: str) -> StartFault:
        fault = StartFault(reason)
        fault.role = role.value
        return fault


@dataclass
class SandboxWorker:
    """The zygotes of one worker thread, started when first needed; cgroups: where theirs can be made.

    memory: what programs of all workers take together; starts: what they know of roles that cannot be started.
    rehearsed: whether libraries do before the first fork what every fork would do anew.
    """

    tier: IsolationTier
    index: int
    settings: Settings = field(default_factory=Settings)
    cgroups: Path | None = None
    memory: MemoryBudget = field(default_factory=lambda: MemoryBudget(None))
    starts: ZygoteStarts = field(default_factory=ZygoteStarts)
    rehearsed: bool = True
    _open: int = field(default=0, init=False)
    _zygotes: dict[Role, Zygote] = field(default_factory=dict, init=False)
    _cgroups: dict[Role, MemoryCgroup] = field(default_factory=dict, init=False)
    _jails: dict[Role, KeptJail] = field(default_factory=dict, init=False)
    _scratch: str | None = field(default=None, init=False)

    def zygote(self, role: Role) -> Zygote:
        """The worker's zygote for a role. Raises StartFault when it cannot be started."""
        if role not in self._zygotes:
            with self.starts.trying(role):
                self._zygotes[role] = self._started(role)
        return self._zygotes[role]

    def _started(self, role: Role) -> Zygote:
        if self.cgroups and self.tier != "docker":
            self._cgroups[role] = _cgroup(self.cgroups / child_name(self.index, role.value))
        scratch = self._private_folder() if role in _NEEDS_SCRATCH else None
        preload = PRELOADS.get(role)
        if preload and not self.rehearsed:
            preload = dataclasses.replace(preload, rehearsed=False)
        try:
            return start_zygote(self.tier, self.index, self.settings, scratch, self._cgroups.get(role), preload)
        except JudgeFault:
            self._end(role)
            raise

    @contextlib.contextmanager
    def open(
        self, role: Role, executable: Executable, limits: RunLimits, files: tuple[bytes, ...] = ()
    ) -> Iterator[PreparedProgram]:
        """A jail with the program in it, its tree held to the memory limit; every run finds the files.

        Raises CompileFailed, or JudgeFault: then the role has a new zygote the next time, and only it.
        """
        try:
            with self._held_open(role, executable, limits) as (program, cgroup):
                yield PreparedProgram(program, files, cgroup)
        except JudgeFault as fault:
            fault.role = fault.role or role.value
            self._end(role)
            raise

    @contextlib.contextmanager
    def _held_open(
        self, role: Role, executable: Executable, limits: RunLimits
    ) -> Iterator[tuple[OpenProgram, MemoryCgroup | None]]:
        """A jail with the program in it, and the cgroup that it is held to."""
        limits = dataclasses.replace(limits, memory_bytes=limits.memory_bytes + ALLOWANCE_BYTES.get(role, 0))
        # A checker beside its program must not wait for what the program holds.
        with self.memory.hold(limits.memory_bytes, waits=not self._open):
            zygote = self.zygote(role)
            cgroup = self._cgroups.get(role)
            if cgroup:
                with _faults():
                    cgroup.limit(limits.memory_bytes)
            self._open += 1
            try:
                with self._opened(role, zygote, executable, limits) as program:
                    yield program, cgroup
            finally:
                self._open -= 1

    @contextlib.contextmanager
    def _opened(self, role: Role, zygote: Zygote, executable: Executable, limits: RunLimits) -> Iterator[OpenProgram]:
        """A jail of the program's own; the one that is kept for the role where what runs in it is the platform's.

        To make a jail costs as much as several responses. Nothing passes from one to the next in one that is kept: each
        is a fork of the same pristine process, and what it leaves is removed, as between the tests of a program.
        """
        if role not in PRELOADS:
            with zygote.open(executable, limits) as program:
                yield program
            return
        kept = self._jails.get(role)
        if kept is None or kept.program.limits != limits:
            self._leave(role)
            closing = contextlib.ExitStack()
            kept = self._jails[role] = KeptJail(closing.enter_context(zygote.open(executable, limits)), closing)
        else:
            zygote.programs += 1
        try:
            yield kept.program
        except BaseException:
            self._leave(role)
            raise

    def _leave(self, role: Role) -> None:
        """End the jail that is kept for a role. Raises JudgeFault."""
        if kept := self._jails.pop(role, None):
            kept.closing.close()

    def retire_old(self) -> None:
        """End zygotes that have served long enough."""
        for role, zygote in list(self._zygotes.items()):
            if zygote.programs >= self.settings.programs_per_zygote:
                self._end(role)

    def kill(self) -> None:
        """End what runs, from another thread, as a judge fault."""
        for zygote in list(self._zygotes.values()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(zygote.pid, signal.SIGKILL)

    def close(self) -> None:
        """End everything the worker has started; it can be used again."""
        for role in {*self._zygotes, *self._cgroups}:
            self._end(role)
        if self._scratch:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = None

    def _end(self, role: Role) -> None:
        with contextlib.suppress(JudgeFault):  # its zygote ends in any case
            self._leave(role)
        if zygote := self._zygotes.pop(role, None):
            zygote.close()
        if cgroup := self._cgroups.pop(role, None):
            cgroup.remove()

    def _private_folder(self) -> str | None:
        """Where compilers write in tiers without a file system of their own."""
        if self.tier != "seccomp+landlock":
            return None
        if self._scratch is None:
            self._scratch = tempfile.mkdtemp(prefix="spo-judge-")
            if (uid := program_uid(self.index)) is not None:
                os.chown(self._scratch, uid, uid)
        return self._scratch


def start_zygote(
    tier: IsolationTier,
    worker: int,
    settings: Settings,
    scratch: str | None = None,
    cgroup: MemoryCgroup | None = None,
    preload: Preload | None = None,
) -> Zygote:
    """A zygote of a tier. Raises JudgeFault, or NotReady when seccomp filters cannot be built."""
    if tier == "docker":
        # Only this tier pays for importing the engine's SDK.
        from services.sandbox_judge.backends.docker import ContainerZygote

        return ContainerZygote(worker, settings, preload)
    started = launch(tier, worker, scratch, preload)
    if cgroup:
        started = dataclasses.replace(started, command=cgroup.enter(started.command))
    return Zygote(started)


def _cgroup(folder: Path) -> MemoryCgroup:
    with _faults():
        return MemoryCgroup(folder)


@contextlib.contextmanager
def _faults() -> Iterator[None]:
    try:
        yield
    except (OSError, StopIteration) as error:
        raise JudgeFault(f"memory cgroup: {error}") from error
