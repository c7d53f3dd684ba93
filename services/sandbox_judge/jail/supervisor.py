"""Watching a running child: its CPU and wall limits, and the judge's order to stop it."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable
from typing import Any

ENDED, CPU_LIMIT, WALL_LIMIT, STOPPED = range(4)

# A program that gets at least this share of a core is waiting for the machine, not for time to pass; it may need up to
# STARVATION times its CPU limit.
BUSY_SHARE = 0.01
STARVATION = 60
LOOK_SECONDS = 0.25
_PIDFD = 0  # the lowest descriptor: none is open below the jail's own


def supervisor(request: dict[str, Any], channel: int) -> Callable[[int, float], int]:
    """What watches a child, given its pid and start, to its end, killing it at its CPU or wall limit or when the judge
    says stop; it returns which of these it was. Descriptor 0 must be free for the child's pidfd."""
    poller = select.poll()
    poller.register(_PIDFD, select.POLLIN)
    poller.register(channel, select.POLLIN)
    poll, pidfd_open, close = poller.poll, os.pidfd_open, os.close
    first_look = _Watch(request, 0, 0.0).pause_seconds * 1000

    def supervise(pid: int, started: float) -> int:
        pidfd_open(pid)
        ready = poll(first_look)
        ending = (
            ENDED if ready and ready[0][0] == _PIDFD else _look_after(request, channel, pid, started, stop=bool(ready))
        )
        close(_PIDFD)
        return ending

    return supervise


def _look_after(request: dict[str, Any], channel: int, pid: int, started: float, *, stop: bool) -> int:
    """Wait for a child that has not ended at once; how it ended."""
    watch = _Watch(request, pid, started)
    ending = STOPPED if stop else watch.verdict()
    poller = select.poll()
    poller.register(_PIDFD, select.POLLIN)
    poller.register(channel, select.POLLIN)
    while not ending:
        ready = [descriptor for descriptor, _ in poller.poll(watch.pause_seconds * 1000)]
        if _PIDFD in ready:
            return ENDED
        ending = STOPPED if ready else watch.verdict()
    os.kill(pid, signal.SIGKILL)
    return ending


class _Watch:
    """A child's use of time. Time counts against the wall limit while the child sleeps, not while it has to wait for a
    loaded machine; only a multiple of its CPU limit bounds that."""

    def __init__(self, request: dict[str, float], pid: int, started: float) -> None:
        self.clock = (~pid << 3) | 2  # the kernel's clock id for another process's CPU time
        self.cpu_limit, self.wall_limit = request["cpu_seconds"], request["wall_seconds"]
        self.cores = request["cores"]
        self.started = self.seen_at = started
        self.cpu_seconds = self.idle_seconds = 0.0

    @property
    def pause_seconds(self) -> float:
        """When to look again; threads can use CPU faster than the wall clock runs."""
        cpu_left = self.cpu_limit - self.cpu_seconds
        return max(0.005, min(cpu_left / self.cores, self.wall_limit - self.idle_seconds, LOOK_SECONDS))

    def verdict(self) -> int:
        """ENDED while the child is within its limits, otherwise which one it has passed."""
        now = time.monotonic()
        try:
            cpu_seconds = time.clock_gettime(self.clock)
        except OSError:
            return ENDED  # it has just ended
        if cpu_seconds - self.cpu_seconds < BUSY_SHARE * (now - self.seen_at):
            self.idle_seconds += now - self.seen_at
        self.cpu_seconds, self.seen_at = cpu_seconds, now
        if cpu_seconds >= self.cpu_limit:
            return CPU_LIMIT
        longest = self.wall_limit + STARVATION * self.cpu_limit
        return WALL_LIMIT if self.idle_seconds >= self.wall_limit or now - self.started >= longest else ENDED
