"""How much memory a process may take, and whether it was a want of memory that ended something."""

from __future__ import annotations

import errno
import resource
from pathlib import Path

import psutil

CGROUPS, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# What libraries say where they raise no error of a type of its own: torch's allocators, C++.
_SAYINGS = ("can't allocate memory", "out of memory", "Cannot allocate memory", "std::bad_alloc")
# Above it a limit of version 1 means that there is none.
_UNLIMITED = 1 << 60


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the host or a device had no memory left, as far as the error or what it came from says."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, MemoryError) or getattr(seen, "errno", None) == errno.ENOMEM:
            return True
        if isinstance(seen, RuntimeError) and any(saying in str(seen) for saying in _SAYINGS):
            return True
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return False


def memory_limit_bytes() -> int:
    """What this process and its siblings may take: the least of the machine's, its cgroups' and its own limit."""
    limits = [psutil.virtual_memory().total]
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        limits.append(soft)
    limits += [
        found
        for folder in _own_cgroups()
        for name in ("memory.max", "memory.limit_in_bytes")
        if (found := _number(folder / name)) is not None and found < _UNLIMITED
    ]
    return min(limits)


def oom_kills() -> int | None:
    """Processes of this one's cgroup that the kernel has killed for want of memory; None where it cannot be read."""
    for folder in _own_cgroups():
        for name in ("memory.events", "memory.oom_control"):
            try:
                lines = (folder / name).read_text().splitlines()
            except OSError:
                continue
            for line in lines:
                word, _, count = line.partition(" ")
                if word == "oom_kill" and count.isdecimal():
                    return int(count)
    return None


def _own_cgroups() -> list[Path]:
    """The folders of this process's memory cgroup and of those around it, the innermost first."""
    try:
        lines = OWN_CGROUPS.read_text().splitlines()
    except OSError:
        return []
    found: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = CGROUPS / "memory" if controllers else CGROUPS
        inner = root / path.lstrip("/")
        # In a container the path may be the host's, and only the root is to be seen.
        found += [inner, *[parent for parent in inner.parents if parent == root or root in parent.parents]]
    return found


def _number(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
