"""`--wait`: a live progress bar on standard error, in a terminal; elsewhere silence until the end."""

from __future__ import annotations

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from spo.client import Client
from spo.client.models import Job
from spo.console import error_console


def wait_with_bar(client: Client, job_id: str, timeout_seconds: float) -> Job:
    """Wait for a job's end, showing how far it is: values first, then steps. Raises NotReady (code "wait_timeout")."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=error_console, transient=True, disable=not error_console.is_terminal) as progress:
        bar = progress.add_task(job_id, total=None)

        def show(job: Job) -> None:
            far = job.progress
            estimating = job.state in ("queued", "validating", "estimating")
            done, total = (far.values_done, far.values_total) if estimating else (far.step, far.steps)
            waits = f", {job.waits[0]}" if job.waits else ""
            beside = f" beside values {far.values_done}/{far.values_total}" if far.values_pending else ""
            what = f"{job_id} {job.state}: {'values' if estimating else 'steps'}{beside}{waits}"
            progress.update(bar, description=what[:100], completed=done, total=total or None)

        try:
            return client.wait(job_id, timeout_seconds, show)
        except KeyboardInterrupt:
            error_console.print(f"the job goes on: `spo job watch {job_id}`, `spo job cancel {job_id}`")
            raise
