"""When a fault is over, and how long its recovery took.

Recovery is stated from process readiness: from the moment at which the fault is taken back (and every fault that has
begun since) and every process answers its health check again, to the next sign of progress that the API shows: a
trained step, before training a prompt's value, after it an evaluation, or the next state. What comes before it, starts
and imports most of all, is counted apart as `restart_seconds`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from spo.client.models import Job
from tests.chaos.faults.fault import Fault, Inflicted

Progress = tuple[str, str, int, int, int]


def progress_of(job: Job) -> Progress:
    """What grows while a platform works."""
    done = job.progress
    return (job.id, job.state, done.values_done, done.step, done.evaluations)


@dataclass
class Recovery:
    """One fault from its beginning to the platform's next progress; times are monotonic seconds."""

    fault: Fault
    inflicted: Inflicted
    began: float
    job_number: int
    own_deaths: int = 0
    ended: float | None = None
    ready: float | None = None
    progress_when_ready: Progress | None = None
    recovered: float | None = None
    job_ended: bool = False

    @property
    def is_due(self) -> bool:
        """Whether it is time to take the fault back."""
        return self.ended is None and time.monotonic() >= self.began + self.inflicted.seconds

    def end(self) -> None:
        self.inflicted.end()
        self.ended = time.monotonic()

    def overlap(self) -> None:
        """Another fault begins before this one is recovered from: both are, once both are over and all is ready."""
        self.ready = self.progress_when_ready = None

    def observe(self, all_ready: bool, progress: Progress | None, *, job_has_ended: bool) -> None:
        """Take note of a look at the platform; progress is None while the API does not answer."""
        if self.ended is None or self.recovered is not None:
            return
        if self.ready is None:
            if all_ready:
                self.ready = time.monotonic()
                self.progress_when_ready = progress
        elif job_has_ended:
            # No progress is to be seen any more: the fault is over, and counts for no recovery time.
            self.recovered, self.job_ended = time.monotonic(), True
        elif self.progress_when_ready is None:
            self.progress_when_ready = progress
        elif progress is not None and progress != self.progress_when_ready:
            self.recovered = time.monotonic()

    @property
    def restart_seconds(self) -> float | None:
        return None if self.ready is None or self.ended is None else self.ready - self.ended

    @property
    def recovery_seconds(self) -> float | None:
        if self.recovered is None or self.ready is None or self.job_ended:
            return None
        return self.recovered - self.ready
