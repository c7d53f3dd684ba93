"""A bar for waits: how far a job is, in a terminal or a notebook. `client.wait(job_id, 600, ProgressBar())`."""

from __future__ import annotations

from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from spo.client.models import Job

ESTIMATING = ("queued", "validating", "estimating")


class ProgressBar:
    """Called with a job every second, as `wait` does; values first, then steps. It closes itself when the job ends."""

    def __init__(self, console: Console | None = None) -> None:
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        shown = console or Console(stderr=True)
        # A notebook is no terminal and shows the bar all the same.
        quiet = not (shown.is_terminal or shown.is_jupyter)
        self._progress = Progress(*columns, console=shown, transient=True, disable=quiet)
        self._bar = self._progress.add_task("", total=None)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def __call__(self, job: Job) -> None:
        """Show how far the job is."""
        if not self._progress.live.is_started:
            self._progress.start()
        far = job.progress
        estimating = job.state in ESTIMATING
        done, total = (far.values_done, far.values_total) if estimating else (far.step, far.steps)
        waits = f", {job.waits[0]}" if job.waits else ""
        beside = f" beside values {far.values_done}/{far.values_total}" if far.values_pending else ""
        what = f"{job.id} {job.state}: {'values' if estimating else 'steps'}{beside}{waits}"
        self._progress.update(self._bar, description=what[:100], completed=done, total=total or None)
        if job.is_final:
            self._progress.stop()
