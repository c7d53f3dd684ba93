"""`spo job mirror`: a job's curves in TensorBoard, MLflow or Weights & Biases."""

from __future__ import annotations

import signal
import threading
from typing import Annotated

import typer

from spo.cli.jobs import api
from spo.console import error_console
from spo.errors import InvalidInput
from spo.metrics_export.mirror import mirror


def mirror_job(
    job_id: Annotated[str | None, typer.Argument(help="Id of the job (job_...); leave it out with --all.")] = None,
    target: Annotated[
        str, typer.Option("--to", help="tensorboard:FOLDER, mlflow:TRACKING_URI or wandb:PROJECT.")
    ] = "tensorboard:runs/tensorboard",
    *,
    every: Annotated[bool, typer.Option("--all", help="All jobs, present and to come, until stopped.")] = False,
) -> None:
    """Write a job's curves to a sink until it has ended; started again it goes on where it was, without repeats."""
    if every == bool(job_id):
        raise InvalidInput("say which job, or --all", code="which_job")
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    said: dict[str, int] = {}

    def say(job: str, written: int) -> None:
        if written != said.get(job, 0):
            said[job] = written
            error_console.print(f"{job}: {written} points written to {target}", highlight=False, markup=False)

    # A platform that restarts is waited for.
    with api(retry_seconds=600) as client:
        mirror(client, target, stop, job_id, say)
