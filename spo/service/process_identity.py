"""Which process this is, in a form that another process of the same machine can prove dead."""

from __future__ import annotations

import os
from pathlib import Path

_PROC = Path("/proc")


def own_identity() -> str:
    """Boot of the machine, namespace of process ids, pid and the process's start in clock ticks since the boot."""
    pid = os.getpid()
    return f"{_place()}/{pid}/{_started(pid)}"


def is_dead(identity: str) -> bool:
    """Whether that process certainly runs no more; one of another machine or container is never known to be dead."""
    place, _, process = identity.partition("/")
    pid, _, started = process.partition("/")
    return place == _place() and pid.isdecimal() and _started(int(pid)) != started


def _place() -> str:
    boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{os.readlink(_PROC / 'self/ns/pid')}"


def _started(pid: int) -> str:
    """The start of a running process; "" when there is none, or it has ended and only waits to be noticed."""
    try:
        # The name in parentheses may hold anything; the state is the first field after it, the start the twentieth.
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
