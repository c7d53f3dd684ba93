"""`spo trajectory`, `spo weights`, `spo ask` and what else a job makes, on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from spo.cli.jobs import JobId, LimitOption, OutputOption, api
from spo.client.models import Source
from spo.console import Output, console, print_document, print_entry, print_rows
from spo.errors import InvalidInput

trajectories = typer.Typer(no_args_is_help=True, help="Look at trajectories.")
weights = typer.Typer(no_args_is_help=True, help="Look at weight versions, announce them again, go back.")

VersionArgument = Annotated[int, typer.Argument(min=0, help="Weight version; 0 is pi0.")]


@trajectories.command("ls")
def list_trajectories(
    job_id: JobId,
    prompt: Annotated[str | None, typer.Option("--prompt", help="Only of this prompt.")] = None,
    source: Annotated[Source | None, typer.Option("--source", help="Only from there.")] = None,
    verdict: Annotated[
        str | None, typer.Option("--verdict", help="Only judged so: accepted, wrong_answer, ...")
    ] = None,
    limit: LimitOption = 20,
    output: Annotated[
        Output | None, typer.Option("--output", "-o", help="How to print; into a pipe a line of JSON for each.")
    ] = None,
) -> None:
    """Trajectories of a job; a reward of 0 means solved, -1 that it is not."""
    with api() as client:
        rows = client.trajectories(job_id, limit, prompt_id=prompt, source=source, verdict=verdict)
    if output is None and not console.is_terminal:
        for row in rows:
            print_entry(row, Output.JSON)
        return
    output = output or Output.TABLE
    print_rows(rows, ("trajectory_id", "source", "reward", "policy_version_first", "response_text"), output)


@trajectories.command("show")
def show_trajectory(job_id: JobId, trajectory_id: str, output: OutputOption = Output.TABLE) -> None:
    """One trajectory with every hop it took."""
    with api() as client:
        print_document(client.trajectory(job_id, trajectory_id), output)


@weights.command("ls")
def list_weights(job_id: JobId, output: OutputOption = Output.TABLE) -> None:
    """Weight versions of a job and who serves them."""
    with api() as client:
        print_rows(client.weights(job_id), ("version", "step", "published_at", "size_bytes", "manifest_digest"), output)


@weights.command("export")
def download_weights(
    job_id: JobId,
    places: Annotated[list[str], typer.Argument(metavar="[VERSION] FOLDER", help="Default: the newest version.")],
    *,
    merge: Annotated[
        bool, typer.Option("--merge", help="An adapter: a whole model, the adapter in its weights.")
    ] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Download a weight version as a folder that transformers and vLLM load, or peft an adapter; from anywhere."""
    *named, folder = places
    if len(named) > 1 or not all(version.isdecimal() for version in named):
        raise typer.BadParameter("say JOB [VERSION] FOLDER; the version is a number")
    with api() as client:
        published = [found.version for found in client.weights(job_id)]
        if not named and not published:
            raise InvalidInput(f"{job_id} has published no version", code="unknown_version")
        version = int(named[0]) if named else published[-1]
        made = client.download_weights(job_id, version, Path(folder), merge=merge)
    print_rows([{"folder": str(made), "version": version}], ("folder", "version"), output)


@trajectories.command("values")
def token_values(
    job_id: JobId,
    trajectory_id: str,
    version: Annotated[int | None, typer.Option("--version", help="Weight version; default: the newest.")] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Q_t and advantage of each token of a trajectory."""
    with api() as client:
        print_document(client.token_values(job_id, trajectory_id, version), output)


@trajectories.command("prompt")
def show_prompt(job_id: JobId, prompt_id: str, output: OutputOption = Output.TABLE) -> None:
    """A prompt's value, its group side by side and its pivotal tokens."""
    with api() as client:
        print_document(client.prompt(job_id, prompt_id), output)


@weights.command("push")
def push_weights(job_id: JobId, version: VersionArgument, output: OutputOption = Output.TABLE) -> None:
    """Announce a stored version to the replicas again."""
    with api() as client:
        print_rows([client.push_weights(job_id, version)], ("version",), output)


@weights.command("rollback")
def rollback_weights(job_id: JobId, version: VersionArgument, output: OutputOption = Output.TABLE) -> None:
    """Let inference serve an older version."""
    with api() as client:
        print_rows([client.rollback_weights(job_id, version)], ("version",), output)


def list_checkpoints(job_id: JobId, output: OutputOption = Output.TABLE) -> None:
    """Saved states of a job's trainer."""
    with api() as client:
        print_rows(client.checkpoints(job_id), ("step", "weight_version", "parent", "path", "manifest_digest"), output)


def show_metrics(
    job_id: JobId,
    names: Annotated[list[str] | None, typer.Argument(help="Only these curves.")] = None,
    kind: Annotated[Literal["training", "platform"], typer.Option("--kind")] = "training",
    points: Annotated[int, typer.Option("--points", min=1, max=1000, help="At most so many.")] = 20,
    output: OutputOption = Output.TABLE,
) -> None:
    """A job's curves: training over steps, or queues and replicas over unix milliseconds."""
    with api() as client:
        found = client.metrics(job_id, kind=kind, max_points=points)
    wanted = [name for name in found.series if not names or name in names]
    rows = [
        {found.axis: step, **{name: found.series[name][index] for name in wanted}}
        for index, step in enumerate(found.steps)
    ]
    print_rows(rows, (found.axis, *wanted), output)


def list_replicas(output: OutputOption = Output.TABLE) -> None:
    """Every registered replica: what it serves, how loaded it is, when it was last heard of."""
    with api() as client:
        found = client.replicas()
    columns = ("replica_id", "pool", "run_id", "policy_version", "load", "draining", "last_seen_seconds_ago", "problem")
    print_rows(found, columns, output)


def ask_policy(
    job_id: JobId,
    prompt: Annotated[str, typer.Argument(help="What to complete.")],
    version: Annotated[int | None, typer.Option("--version", help="Weight version; 0 is pi0.")] = None,
    samples: Annotated[int, typer.Option("--samples", min=1, max=64)] = 1,
    temperature: Annotated[float, typer.Option("--temperature")] = 0.4,
    output: OutputOption = Output.TABLE,
) -> None:
    """Let a job's policy complete a prompt, while replicas serve the job."""
    with api() as client:
        found = client.complete(job_id, prompt, version=version, samples=samples, temperature=temperature)
    if output is Output.TABLE:
        print_rows(found.items, ("version", "tokens", "finish_reason", "text"), output)
    else:
        print_document(found, output)
