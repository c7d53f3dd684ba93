"""`spo job`: jobs from their submission to their end, on the command line."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from spo.cli.progress import wait_with_bar
from spo.client import DEFAULT_URL, Client
from spo.client.models import Event, ForkRequest, Job, JobSummary, JsonObject, LogLevel, LogLine
from spo.console import (
    ExitCode,
    Output,
    console,
    error_console,
    print_document,
    print_entry,
    print_failure,
    print_rows,
)
from spo.errors import SpoError
from spo.local.state import running_platforms
from spo.spec.job_state import JobState
from spo.spec.spec_file import read_spec
from spo.tasks.toy.built import newest_model, wanted_difficulty

# Of one request.
MOST_DELETED = 200

jobs = typer.Typer(no_args_is_help=True, help="Submit, watch and steer jobs.")


def api(*, retry_seconds: float = 5, timeout_seconds: float = 15) -> Client:
    """A client of SPO_API_URL, else of the platform started last on this machine, else of the default port."""
    url = os.environ.get("SPO_API_URL")
    if not url:
        running = running_platforms(_runs_path())
        url = running[0]["http_url"] if running else DEFAULT_URL
    return Client(url, os.environ.get("SPO_API_KEY"), retry_seconds=retry_seconds, timeout_seconds=timeout_seconds)


def _runs_path() -> Path:
    return Path(os.environ.get("SPO_LAUNCHER_RUNS_PATH", "runs"))


def known_jobs(incomplete: str) -> list[str]:
    """Ids for the shell to complete; none when no platform answers at once."""
    try:
        with api(retry_seconds=0, timeout_seconds=2) as client:
            return [job.id for job in client.jobs(limit=100) if job.id.startswith(incomplete)]
    except SpoError:
        return []


JobId = Annotated[str, typer.Argument(help="Id of the job (job_...).", autocompletion=known_jobs)]
OutputOption = Annotated[Output, typer.Option("--output", "-o", help="How to print.")]
WaitOption = Annotated[bool, typer.Option("--wait", help="Return when the job has ended.")]
TimeoutOption = Annotated[float, typer.Option("--timeout", help="Longest wait, seconds.")]
LimitOption = Annotated[int, typer.Option("--limit", min=1, help="At most so many.")]


@jobs.command()
def submit(
    spec_file: Annotated[Path, typer.Argument(help="JobSpec, YAML or JSON.")],
    model: Annotated[
        Path | None,
        typer.Option(
            "--model", help="In place of model.path. The toy contest of a platform here makes its own without one."
        ),
    ] = None,
    *,
    wait: WaitOption = False,
    timeout: TimeoutOption = 86_400,
    validate_only: Annotated[
        bool, typer.Option("--validate-only", help="Show the resolved spec, start nothing.")
    ] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Submit a job."""
    document = _with_model(read_spec(spec_file), model)
    with api() as client:
        if validate_only:
            resolved = client.validate(document)
            _warn(resolved.pop("warnings", []))
            print_document(resolved, output)
            return
        job = client.submit(document)
        _warn([warning.model_dump() for warning in job.warnings])
        if wait:
            job = wait_with_bar(client, job.id, timeout)
    _print_job(job, output)
    if wait:
        _exit_as(job)


def _warn(warnings: Sequence[Mapping[str, object]]) -> None:
    for warning in warnings:
        typer.echo(f"warning: {warning['pointer']}: {warning['message']}", err=True)


@jobs.command("list")
def list_jobs(
    status: Annotated[JobState | None, typer.Option("--status", help="Only jobs in this state.")] = None,
    label: Annotated[list[str] | None, typer.Option("--label", help="Only with this key or key:value.")] = None,
    since: Annotated[str | None, typer.Option("--since", help="Made at this time or later, RFC 3339.")] = None,
    metric: Annotated[
        list[str] | None, typer.Option("--metric", help="A column more: reward, loss, kl_to_reference, pass@10, ...")
    ] = None,
    limit: LimitOption = 50,
    output: OutputOption = Output.TABLE,
) -> None:
    """Jobs, newest first."""
    with api() as client:
        found = client.jobs(limit, status=status, label=label, created_from=since)
    if output is Output.TABLE and metric:
        rows = [{**job.model_dump(mode="json"), **job.metrics} for job in found]
        print_rows(rows, ("id", "name", "state", "step", *metric), output)
    else:
        _print_jobs(found, output)


@jobs.command()
def get(job_id: JobId, output: OutputOption = Output.TABLE) -> None:
    """One job in full."""
    with api() as client:
        print_document(client.get(job_id), output)


@jobs.command()
def watch(job_id: JobId, output: OutputOption = Output.TABLE) -> None:
    """Print what happens to a job until it ends; as JSON one object per line, as YAML one document each."""
    with api() as client:
        for event in client.events(job_id):
            if output is Output.TABLE:
                _print_event(event)
            else:
                print_entry(event, output)
        _exit_as(client.get(job_id))


@jobs.command()
def events(job_id: JobId, output: OutputOption = Output.TABLE) -> None:
    """What has happened to a job so far."""
    with api() as client:
        history = client.history(job_id)
    if output is Output.TABLE:
        for event in history:
            _print_event(event)
    else:
        print_rows(history, ("seq", "at", "kind"), output)


@jobs.command()
def pause(job_id: JobId, output: OutputOption = Output.TABLE) -> None:
    """Let a running job checkpoint and wait."""
    with api() as client:
        _print_job(client.pause(job_id), output)


@jobs.command()
def resume(job_id: JobId, output: OutputOption = Output.TABLE) -> None:
    """Let a paused job go on."""
    with api() as client:
        _print_job(client.resume(job_id), output)


@jobs.command()
def cancel(
    job_id: JobId, *, wait: WaitOption = False, timeout: TimeoutOption = 120, output: OutputOption = Output.TABLE
) -> None:
    """Stop a job for good."""
    with api() as client:
        job = client.cancel(job_id)
        _print_job(wait_with_bar(client, job_id, timeout) if wait else job, output)


@jobs.command()
def fork(
    job_id: JobId,
    version: Annotated[int | None, typer.Option("--version", help="Start from these weights; default: newest.")] = None,
    checkpoint: Annotated[
        int | None, typer.Option("--checkpoint", help="Go on from the checkpoint of this step.")
    ] = None,
    *,
    as_reference: Annotated[
        bool, typer.Option("--as-reference", help="The weights become the reference; otherwise it is the parent's.")
    ] = False,
    overrides: Annotated[
        Path | None, typer.Option("--overrides", help="YAML or JSON with the parts of the JobSpec that differ.")
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """A new job that starts from another's weights or goes on from its checkpoint."""
    requested = ForkRequest(version=version, checkpoint_step=checkpoint, as_reference=as_reference)
    if overrides:
        requested["overrides"] = read_spec(overrides)
    with api() as client:
        _print_job(client.fork(job_id, **requested), output)


@jobs.command()
def delete(
    job_ids: Annotated[list[str], typer.Argument(help="Ids of jobs (job_...).", autocompletion=known_jobs)],
    output: OutputOption = Output.TABLE,
) -> None:
    """Delete ended jobs with their weights and checkpoints; the experience store keeps what it has."""
    if len(job_ids) == 1:
        with api() as client:
            client.delete(job_ids[0])
        print_rows([{"deleted": job_ids[0]}], ("deleted",), output)
        return
    with api() as client:
        parts = [
            client.delete_jobs(job_ids[start : start + MOST_DELETED]) for start in range(0, len(job_ids), MOST_DELETED)
        ]
    print_rows([{"deleted": job_id} for part in parts for job_id in part.deleted], ("deleted",), output)
    refused = [each for part in parts for each in part.refused]
    for each in refused:
        error_console.print(f"{each.id}: {each.message} ({each.code})", markup=False, highlight=False, soft_wrap=True)
    if refused:
        raise typer.Exit(ExitCode.CONFLICT)


@jobs.command()
def rename(
    job_id: JobId,
    name: Annotated[str, typer.Argument(help="The new name, at most 200 characters.")],
    output: OutputOption = Output.TABLE,
) -> None:
    """Give a job another name, whatever its state; its spec keeps the one it came with."""
    with api() as client:
        _print_job(client.rename(job_id, name), output)


@jobs.command()
def checkpoint(job_id: JobId, output: OutputOption = Output.TABLE) -> None:
    """Let a running job save its state now."""
    with api() as client:
        _print_job(client.checkpoint(job_id), output)


@jobs.command()
def logs(
    job_id: JobId,
    service: Annotated[str, typer.Option("--service", help="Only of this service.")] = "",
    level: Annotated[LogLevel, typer.Option("--level", help="At least this.")] = "info",
    limit: LimitOption = 200,
    output: OutputOption = Output.TABLE,
) -> None:
    """Latest log lines of a job from every service, oldest first."""
    with api() as client:
        lines = client.logs(job_id, limit, service=service, level=level)[::-1]
    if output is not Output.TABLE:
        print_rows(lines, (), output)
        return
    for line in lines:
        _print_line(line)


def _with_model(document: JsonObject, model: Path | None) -> JsonObject:
    """The spec with this model; one of the toy contest without a model gets pi0, where the platform runs here."""
    difficulty = wanted_difficulty(document)
    asked = os.environ.get("SPO_API_URL", "").rstrip("/").replace("//localhost:", "//127.0.0.1:")
    here = (each for each in running_platforms(_runs_path()) if asked in ("", each["http_url"]))
    if model is None and difficulty and (platform := next(here, None)):
        from spo.demo.toy_model import toy_model

        state_path = Path(platform["state_path"])
        model = newest_model(state_path / "cache" / "models", difficulty) or toy_model(difficulty, state_path)
    if model is None or not isinstance(document.get("model", {}), dict):
        return document
    return {**document, "model": {**document.get("model", {}), "path": str(model.absolute())}}


def _exit_as(job: Job) -> None:
    if job.failure:
        print_failure(job.failure.code, job.failure.message)
    for missing in job.missing_evaluations:
        print_failure(missing.code, f"the evaluation of step {missing.step} never came: {missing.message}")
    if job.state != "succeeded" or job.missing_evaluations:
        raise typer.Exit(ExitCode.JOB_DID_NOT_SUCCEED)


def _print_jobs(found: Sequence[JobSummary], output: Output) -> None:
    print_rows(found, ("id", "name", "state", "created_at"), output)


def _print_job(job: JobSummary, output: Output) -> None:
    if output is Output.TABLE:
        _print_jobs([job], output)
    else:
        print_document(job, output)


def _print_line(line: LogLine) -> None:
    fields = dict(line.fields)
    at, event = fields.pop("timestamp", ""), fields.pop("event", "")
    facts = " ".join(f"{name}={value}" for name, value in fields.items() if name not in ("level", "service"))
    text = f"{at} {line.service:<16} {line.level:<8} {event} {facts}"
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _print_event(event: Event) -> None:
    facts = " ".join(f"{name}={value}" for name, value in event.body.items())
    line = f"{event.seq:>5} {event.at} {event.kind:<16} {facts}"
    console.print(line, markup=False, highlight=False, soft_wrap=True)
