"""A limit on the memory of everything below a zygote, files in its scratch included, where a cgroup is writable.

Without one the limits are per process: address space as the hard bound, peak memory as the verdict. Both versions of
cgroups have what is needed under other names; in version 2 the judge's own cgroup must be delegated to it (a systemd
unit with Delegate=memory, a container whose cgroup folder is mounted writable).
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from spo.observability.logs import get_logger

log = get_logger("cgroup")

MOUNT = Path("/sys/fs/cgroup")
# What a zygote, its jail and a full scratch need beyond the program.
OVERHEAD_BYTES = 96 << 20
# The limit's file and the one that counts kills, by version.
_FILES = (("memory.max", "memory.events"), ("memory.limit_in_bytes", "memory.oom_control"))
_PREFIX = "spo-judge-"
REMOVE_SECONDS = 1.0


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
