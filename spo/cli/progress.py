"""`--wait`: a live progress bar on standard error, in a terminal; elsewhere silence until the end."""

from __future__ import annotations

from spo.client import Client
from spo.client.models import Job
from spo.client.waiting_view import ProgressBar
from spo.console import error_console


def wait_with_bar(client: Client, job_id: str, timeout_seconds: float) -> Job:
    """Wait for a job's end, showing how far it is: values first, then steps. Raises NotReady (code "wait_timeout")."""
    with ProgressBar(error_console) as bar:
        try:
            return client.wait(job_id, timeout_seconds, bar)
        except KeyboardInterrupt:
            error_console.print(f"the job goes on: `spo job watch {job_id}`, `spo job cancel {job_id}`")
            raise
