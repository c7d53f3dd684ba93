"""Watching a running child: its CPU and wall limits, and the judge's wish to stop it."""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from typing import Any

ENDED, CPU_LIMIT, WALL_LIMIT, STOPPED = range(4)

# A program that gets at least this share of a core is waiting for the machine, not for time to pass; it may need up to
# STARVATION times its CPU limit.
BUSY_SHARE = 0.01
STARVATION = 60
LOOK_SECONDS = 0.25


def supervise(request: dict[str, Any], channel: socket.socket, pid: int, started: float) -> tuple[int, int, Any]:
    """Wait for the child, killing it at its CPU or wall limit or when the judge says stop; how, wait status, usage."""
    ended = os.pidfd_open(pid)
    poller = select.poll()
    poller.register(ended, select.POLLIN)
    poller.register(channel, select.POLLIN)
    watch = _Watch(request, pid, started)
    ending = ENDED
    while True:
        ready = [descriptor for descriptor, _ in poller.poll(None if ending else watch.pause_seconds * 1000)]
        if ended in ready:
            break
        if ready:
            poller.unregister(channel)
            ending = STOPPED
        elif not ending:
            ending = watch.verdict()
        if ending:
            os.kill(pid, signal.SIGKILL)
    os.close(ended)
    _, status, usage = os.wait4(pid, 0)
    return ending, status, usage


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
