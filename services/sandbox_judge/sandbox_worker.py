"""A worker runs one program at a time, in zygotes of its own, within the cores and the memory of this machine.

What of this machine the judge may use, and which kernel it is on: cores and memory of its cgroup, gVisor, Landlock.
In a container the node's cores and memory are another's: what counts is the cgroup's quota (`cpu.max`, in version 1
`cpu.cfs_quota_us`) and limit (`memory.max`, `memory.limit_in_bytes`), of the judge's own cgroup and of all above it.

A limit on the memory of everything below a zygote, files in its scratch included, where a cgroup is writable.
Without one the limits are per process: address space as the hard bound, peak memory as the verdict. Both versions of
cgroups have what is needed under other names; in version 2 the judge's own cgroup must be delegated to it (a systemd
unit with Delegate=memory, a container whose cgroup folder is mounted writable).
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import os
import re
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from services.sandbox_judge.executor import (
    JudgeFault,
    ProgramRun,
    RunEnding,
    RunLimits,
    StartedTest,
    StartFault,
)
from services.sandbox_judge.isolation import Executable, OpenProgram, Preload, Zygote, launch, program_uid
from services.sandbox_judge.settings import IsolationTier, Settings
from spo.observability import get_logger

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
# Version 1 says "no limit" by a number near 2^63.
_NO_LIMIT = 1 << 60
# gVisor's Sentry gives this build time with every release it calls itself (4.4.0, 4.19.0-gvisor).
_GVISOR = re.compile(r"gvisor|#1 SMP Sun Jan 10 15:06:54 PST 2016", re.IGNORECASE)
_RELEASE = re.compile(r"Linux version (\S+)")
_LANDLOCK_SINCE = (5, 13)

log = get_logger("cgroup")

MOUNT = Path("/sys/fs/cgroup")
# What a zygote, its jail and a full scratch need beyond the program.
OVERHEAD_BYTES = 96 << 20
# The limit's file and the one that counts kills, by version.
_FILES = (("memory.max", "memory.events"), ("memory.limit_in_bytes", "memory.oom_control"))
_PREFIX = "spo-judge-"
REMOVE_SECONDS = 1.0

# What the judge itself and its idle zygotes take.
RESERVED_BYTES = 384 << 20
LANE_BYTES = RunLimits().memory_bytes + OVERHEAD_BYTES
# Longer than any program may run; lanes are freed by limits of time.
WAIT_SECONDS = 600.0


@dataclass(frozen=True)
class Machine:
    """Whole cores that may be used at once, bytes of memory (None: unlimited), the kernel in words."""

    cores: int
    memory_bytes: int | None
    kernel: str
    gvisor: bool

    def why_no_landlock(self) -> str:
        """Why this kernel has no Landlock, in words."""
        if self.gvisor:
            return f"{self.kernel} has no Landlock"
        release = tuple(map(int, re.findall(r"\d+", self.kernel)[:2]))
        if release and release < _LANDLOCK_SINCE:
            return f"{self.kernel} has no Landlock: it came with 5.13"
        return f"{self.kernel} offers no Landlock: it was built or started without (lsm=), or the container forbids it"


def this_machine(proc: Path = PROC, cgroups: Path = CGROUPS) -> Machine:
    """The facts, read anew."""
    version = _text(proc / "version")
    release = found.group(1) if (found := _RELEASE.search(version)) else "unknown"
    gvisor = bool(_GVISOR.search(version))
    own = _text(proc / "self" / "cgroup")
    quotas = [quota for folder in _folders(own, cgroups, "cpu") if (quota := _quota(folder))]
    limits = [limit for folder in _folders(own, cgroups, "memory") if (limit := _limit(folder))]
    # Rounded down: a lane that is throttled half of the time makes honest programs late.
    cores = max(1, int(min([float(len(os.sched_getaffinity(0))), *quotas]) + 0.01))
    kernel = f"gVisor (Linux {release})" if gvisor else f"Linux {release}"
    return Machine(cores, min(limits, default=None), kernel, gvisor)


def _folders(own: str, cgroups: Path, controller: str) -> list[Path]:
    """The process' cgroups that may limit what the controller counts, from its own one up to the mount."""
    found = []
    for line in own.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root = cgroups
        elif controller in controllers.split(","):
            root = next((each for each in (cgroups / controllers, cgroups / controller) if each.is_dir()), cgroups)
        else:
            continue
        inside = root / path.lstrip("/")
        # With a namespace of its own the container sees its cgroup as the root, whatever the path says.
        found += [each for each in (inside, *inside.parents) if each.is_relative_to(root)]
    return found


def _quota(folder: Path) -> float | None:
    """Cores' worth of CPU time; None where there is no quota."""
    quota, _, period = _text(folder / "cpu.max").partition(" ")
    if not quota:
        quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
    if not quota.strip().isdigit() or not period.strip().isdigit():
        return None
    return int(quota) / int(period)


def _limit(folder: Path) -> int | None:
    """Bytes; None where memory is not limited."""
    text = (_text(folder / "memory.max") or _text(folder / "memory.limit_in_bytes")).strip()
    return int(text) if text.isdigit() and int(text) < _NO_LIMIT else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


@dataclass
class MemoryCgroup:
    """One zygote's cgroup: what is started through `enter` and all its descendants share the limit."""

    folder: Path
    _limit_bytes: int = field(default=0, init=False)
    _kills: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.folder.mkdir(exist_ok=True)
        self._limit, self._events = next(
            (self.folder / limit, self.folder / events) for limit, events in _FILES if (self.folder / limit).exists()
        )
        # Swapped memory would not count.
        for name, value in (("memory.swap.max", "0"), ("memory.swappiness", "0")):
            with contextlib.suppress(OSError):
                _write(self.folder / name, value)

    def enter(self, command: tuple[str, ...]) -> tuple[str, ...]:
        """The command, made to start inside the cgroup."""
        return ("/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.folder / "cgroup.procs"), *command)

    def limit(self, memory_bytes: int) -> None:
        """Let a program of so much memory run. Raises OSError when the kernel refuses."""
        if memory_bytes != self._limit_bytes:
            _write(self._limit, str(memory_bytes + OVERHEAD_BYTES))
            self._limit_bytes = memory_bytes

    def has_killed(self) -> bool:
        """Whether the kernel has killed something in it, for want of memory, since this was last asked."""
        before, self._kills = self._kills, self._count()
        return self._kills > before

    def remove(self) -> None:
        """Remove it once what was in it has ended; an empty folder that stays goes at the next start of a judge."""
        deadline = time.monotonic() + REMOVE_SECONDS
        while time.monotonic() < deadline:
            try:
                self.folder.rmdir()
                return
            except FileNotFoundError:
                return
            except OSError:
                time.sleep(0.01)

    def _count(self) -> int:
        for line in self._events.read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
        return 0


def memory_parent(configured: str) -> Path | None:
    """The folder below which memory cgroups can be made, None where there is none; leftovers of dead judges go.

    configured: a delegated folder, "auto" for the judge's own cgroup, "off".
    """
    if configured == "off":
        return None
    for folder in [Path(configured)] if configured != "auto" else _own_folders():
        reason = _why_not(folder)
        if reason is None:
            _remove_leftovers(folder)
            log.info("memory of whole process trees is limited", cgroup=str(folder))
            return folder
        log.info("no memory cgroup", cgroup=str(folder), reason=reason)
    return None


def child_name(worker: int, role: str) -> str:
    return f"{_PREFIX}{os.getpid()}-{worker}-{role}"


def _own_folders() -> list[Path]:
    """Where this process lies in the hierarchies that may have the memory controller."""
    folders = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            folders.append(MOUNT / path.lstrip("/"))
        elif "memory" in controllers.split(","):
            folders.append(MOUNT / "memory" / path.lstrip("/"))
    return folders


def _why_not(folder: Path) -> str | None:
    """Try it out: make a cgroup and limit it."""
    trial = folder / f"{_PREFIX}{os.getpid()}-trial"
    try:
        _delegate_memory(folder)
        cgroup = MemoryCgroup(trial)
        cgroup.limit(1 << 30)
        cgroup.has_killed()
    except (OSError, StopIteration) as error:
        return str(error) or "no memory controller"
    finally:
        with contextlib.suppress(OSError):
            trial.rmdir()
    return None


def _delegate_memory(folder: Path) -> None:
    """In version 2 a cgroup hands controllers down only when no process lies in it: this one moves into a child."""
    control = folder / "cgroup.subtree_control"
    if not control.exists() or "memory" in control.read_text().split():
        return
    try:
        _write(control, "+memory")
    except OSError:
        own = folder / f"{_PREFIX}service"
        own.mkdir(exist_ok=True)
        _write(own / "cgroup.procs", str(os.getpid()))
        try:
            _write(control, "+memory")
        except OSError:
            _write(folder / "cgroup.procs", str(os.getpid()))
            own.rmdir()
            raise


def _remove_leftovers(folder: Path) -> None:
    for left in folder.glob(f"{_PREFIX}*-*-*"):
        pid = left.name.removeprefix(_PREFIX).partition("-")[0]
        if pid.isdigit() and not Path("/proc", pid).exists():
            with contextlib.suppress(OSError):
                left.rmdir()


def _write(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def lanes(configured: int, machine: Machine) -> int:
    """Programs run at once: as configured, or one per usable core as far as the memory of all of them fits."""
    budget = program_memory(machine)
    by_memory = machine.cores if budget is None else max(1, budget // LANE_BYTES)
    found = configured or min(machine.cores, by_memory)
    if found > by_memory:
        log.warning("lanes wait for memory: the pod's limit does not hold so many", lanes=found, fitting=by_memory)
    elif not configured and found < machine.cores:
        log.warning("fewer lanes than cores: memory is short", lanes=found, cores=machine.cores)
    return found


def program_memory(machine: Machine) -> int | None:
    """Bytes that programs may use together, None where nothing limits them."""
    return None if machine.memory_bytes is None else max(0, machine.memory_bytes - RESERVED_BYTES)


class MemoryBudget:
    """Lets programs begin as long as their limits together fit; one that alone does not fit runs alone."""

    def __init__(self, total_bytes: int | None) -> None:
        self._total = total_bytes
        self._taken = 0
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def hold(self, memory_bytes: int, *, waits: bool) -> Iterator[None]:
        """Take so much until the end of the block; `waits` false: at once, for whoever holds some already.

        Raises JudgeFault when nobody gives any back.
        """
        wanted = memory_bytes + OVERHEAD_BYTES
        with self._changed:
            if waits and not self._changed.wait_for(lambda: self._fits(wanted), WAIT_SECONDS):
                raise JudgeFault("no memory became free for the program; the judge's pod is too small")
            self._taken += wanted
        try:
            yield
        finally:
            with self._changed:
                self._taken -= wanted
                self._changed.notify_all()

    def _fits(self, wanted: int) -> bool:
        return self._total is None or not self._taken or self._taken + wanted <= self._total


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

    def start(self, stdin: bytes | None, files: Sequence[bytes], link: socket.socket) -> StartedTest:
        """Begin a run with an end of a socket; `ended` waits for it; stdin: None for no standard streams.

        Raises JudgeFault.
        """
        return self.program.start(stdin, (*self.files, *files), link)

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
    _scratches: dict[Role, str] = field(default_factory=dict, init=False)

    def zygote(self, role: Role) -> Zygote:
        """The worker's zygote for a role. Raises StartFault when it cannot be started."""
        if role not in self._zygotes:
            with self.starts.trying(role):
                self._zygotes[role] = self._started(role)
        return self._zygotes[role]

    def _started(self, role: Role) -> Zygote:
        if self.cgroups and self.tier != "docker":
            self._cgroups[role] = _cgroup(self.cgroups / child_name(self.index, role.value))
        scratch = self._private_folder(role) if role in _NEEDS_SCRATCH else None
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
        while self._scratches:
            shutil.rmtree(self._scratches.popitem()[1], ignore_errors=True)

    def _end(self, role: Role) -> None:
        with contextlib.suppress(JudgeFault):  # its zygote ends in any case
            self._leave(role)
        if zygote := self._zygotes.pop(role, None):
            zygote.close()
        if cgroup := self._cgroups.pop(role, None):
            cgroup.remove()

    def _private_folder(self, role: Role) -> str | None:
        """Where a role writes in tiers without a file system of its own: tests and response, say, have one each."""
        if self.tier != "seccomp+landlock":
            return None
        if role not in self._scratches:
            self._scratches[role] = folder = tempfile.mkdtemp(prefix="spo-judge-")
            if (uid := program_uid(self.index)) is not None:
                os.chown(folder, uid, uid)
        return self._scratches[role]


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
        from services.sandbox_judge.docker import ContainerZygote

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
