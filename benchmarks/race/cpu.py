"""CPU of a process with its children, of anything over time, and how loaded the machine was meanwhile.

CPU seconds are those of all processes: the platform's services and Redis, or the peer and its judge, with the children
that ran the programs.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import psutil

SAMPLING_SECONDS = 0.25


def tree_cpu_seconds(pid: int) -> float:
    """CPU of a process, its descendants, and those of them that have ended."""
    total = 0.0
    root = psutil.Process(pid)
    for process in [root, *root.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


@dataclass
class CpuTrace:
    """A process's or platform's CPU over time, sampled in a thread while the block runs."""

    read: Callable[[], float]
    _times: list[float] = field(default_factory=list)
    _seconds: list[float] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> CpuTrace:
        self._thread = threading.Thread(target=self._sample, name="cpu-trace", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def at(self, unix_seconds: float) -> float:
        """CPU seconds at a moment within the block, by interpolation."""
        return float(np.interp(unix_seconds, self._times, self._seconds))

    def _sample(self) -> None:
        while True:
            last = self._over.is_set()
            self._times.append(time.time())
            self._seconds.append(self.read())
            if last:
                return
            self._over.wait(SAMPLING_SECONDS)


class LoadTrace:
    """The machine's load average while the block runs: what waits for a core costs the others' caches."""

    def __enter__(self) -> LoadTrace:
        self._found: list[float] = []
        self._trace = CpuTrace(self._load)
        self._trace.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._trace.__exit__(*error)

    def mean(self) -> float:
        """Of the averages over a minute, which hold the contestant's own processes."""
        return statistics.fmean(self._found)

    def _load(self) -> float:
        self._found.append(os.getloadavg()[0])
        return self._found[-1]
