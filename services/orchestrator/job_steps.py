"""Steps of many jobs side by side: a step that blocks or raises delays no other job."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait

THREADS = 16


class JobSteps:
    """Runs one function for each of many jobs on a few threads, for each job at most once at a time."""

    def __init__(self, step: Callable[[str], None], name: str) -> None:
        self._step = step
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix=name)
        self._lock = threading.Lock()
        self._under_way: dict[str, tuple[Future[None], float]] = {}

    def round(self, job_ids: Iterable[str], patience_seconds: float) -> None:
        """Begin the step of every job that has none under way; return when all are done, or after patience_seconds.

        Raises what the first of the finished ones raised.
        """
        with self._lock:
            for job_id in job_ids:
                if job_id not in self._under_way:
                    self._under_way[job_id] = (self._pool.submit(self._step, job_id), time.monotonic())
            waiting = [future for future, _ in self._under_way.values()]
        wait(waiting, patience_seconds)
        with self._lock:
            done = [(job_id, future) for job_id, (future, _) in self._under_way.items() if future.done()]
            for job_id, _ in done:
                del self._under_way[job_id]
        for _, future in done:
            future.result()

    def seconds_under_way(self) -> dict[str, float]:
        """The jobs whose step has not ended, and how long it has taken so far."""
        now = time.monotonic()
        with self._lock:
            return {job_id: now - began for job_id, (_, began) in self._under_way.items()}

    def close(self) -> None:
        """Begin no further step."""
        self._pool.shutdown(wait=False, cancel_futures=True)
