"""What of this machine the judge may use, and which kernel it is on: cores and memory of its cgroup, gVisor, Landlock.

In a container the node's cores and memory are another's: what counts is the cgroup's quota (`cpu.max`, in version 1
`cpu.cfs_quota_us`) and limit (`memory.max`, `memory.limit_in_bytes`), of the judge's own cgroup and of all above it.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
# Version 1 says "no limit" by a number near 2^63.
_NO_LIMIT = 1 << 60
# gVisor's Sentry gives this build time with every release it calls itself (4.4.0, 4.19.0-gvisor).
_GVISOR = re.compile(r"gvisor|#1 SMP Sun Jan 10 15:06:54 PST 2016", re.IGNORECASE)
_RELEASE = re.compile(r"Linux version (\S+)")
_LANDLOCK_SINCE = (5, 13)


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
