"""`spo experience`: the store that outlives runs, on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from spo.cli.jobs import LimitOption, OutputOption, api
from spo.console import Output, print_document, print_rows
from spo.errors import InvalidInput
from spo.spec.spec_file import read_spec

experience = typer.Typer(no_args_is_help=True, help="Look at, import, export and judge anew what runs have stored.")

RunOption = Annotated[str | None, typer.Option("--run", help="Only this run or import.")]
TaskSetOption = Annotated[str | None, typer.Option("--task-set", help="Only of this task set.")]
JobOption = Annotated[str | None, typer.Option("--job", help="The problems are those of this job.")]
TasksOption = Annotated[
    Path | None, typer.Option("--tasks", help="The problems are those of this YAML or JSON `tasks` section.")
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Only say what would come of it.")]


@experience.command("ls")
def list_runs(run: RunOption = None, task_set: TaskSetOption = None, output: OutputOption = Output.TABLE) -> None:
    """Stored runs and imports, newest first."""
    with api() as client:
        rows = client.experience.runs(**_chosen(run, task_set))
    print_rows(
        rows, ("run", "kind", "task_sets", "trajectories", "size_bytes", "complete", "licence", "parents"), output
    )


@experience.command()
def stats(run: RunOption = None, task_set: TaskSetOption = None, output: OutputOption = Output.TABLE) -> None:
    """Counts by run, source, outcome, judge and licence."""
    with api() as client:
        print_document(client.experience.statistics(**_chosen(run, task_set)), output)


@experience.command()
def show(
    name: Annotated[str, typer.Argument(help="A stored trajectory (traj_...), or a run or import.")],
    prompt: Annotated[str | None, typer.Option("--prompt", help="Only trajectories of this prompt.")] = None,
    limit: LimitOption = 20,
    output: OutputOption = Output.TABLE,
) -> None:
    """One trajectory with every column, or a run's trajectories."""
    with api() as client:
        if name.startswith("traj_"):
            print_document(client.experience.row(name), output)
            return
        filters = {"run": name} | ({"prompt_id": prompt} if prompt else {})
        rows = client.experience.rows(limit, **filters)
    print_rows(rows, ("trajectory_id", "source", "outcome", "reward", "policy_version_first", "response_text"), output)


@experience.command("import")
def import_files(
    files: Annotated[list[Path], typer.Argument(help="JSONL or Parquet files of prompts, responses and rewards.")],
    name: Annotated[str, typer.Option("--name", help="What jobs call it in offline.experience.")],
    job: JobOption = None,
    tasks: TasksOption = None,
    licence: Annotated[str, typer.Option("--licence", help="Terms of use, kept with every row.")] = "",
    reward_scale: Annotated[float, typer.Option("--reward-scale", help="reward = scale * given + shift")] = 1.0,
    reward_shift: Annotated[float, typer.Option("--reward-shift", help="reward = scale * given + shift")] = 0.0,
    judging: Annotated[
        Literal["missing", "all", "never"], typer.Option("--judge", help="Which rows are judged here.")
    ] = "missing",
    keep_good: Annotated[
        bool, typer.Option("--keep-good", help="Store the good rows although others are bad.")
    ] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Store rows from elsewhere; each file whole or not at all unless --keep-good."""
    options: dict[str, Any] = {
        **_problems(job, tasks, as_text=True),
        "licence": licence,
        "reward_scale": reward_scale,
        "reward_shift": reward_shift,
        "judging": judging,
        "keep_good": keep_good,
    }
    with api() as client:
        reports = [{"file": str(file)} | client.experience.import_file(file, name, **options) for file in files]
    print_rows(reports, ("file", "rows", "stored", "refused", "judged", "duplicates", "faults_by_code"), output)


@experience.command("export")
def export_file(
    target: Annotated[Path, typer.Argument(help="File to write; .jsonl or .parquet says the format.")],
    run: RunOption = None,
    task_set: TaskSetOption = None,
    right: Annotated[bool | None, typer.Option("--right/--wrong", help="Only successes, or only failures.")] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Write stored trajectories to a file."""
    suffix = target.suffix.removeprefix(".")
    if suffix not in ("jsonl", "parquet"):
        raise InvalidInput(f"{target} ends neither in .jsonl nor in .parquet", code="unsupported_file")
    requested = {**_chosen(run, task_set), **({} if right is None else {"right": right})}
    with api() as client:
        size = client.experience.export(target, "jsonl" if suffix == "jsonl" else "parquet", **requested)
    print_rows([{"file": str(target), "bytes": size}], ("file", "bytes"), output)


@experience.command()
def rejudge(
    job: JobOption = None,
    tasks: TasksOption = None,
    run: RunOption = None,
    task_set: TaskSetOption = None,
    name: Annotated[str | None, typer.Option("--name", help="Of the new lineage; default: a new one.")] = None,
    dry_run: DryRunOption = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Judge stored trajectories by the tests a task set has now; what changes is told and stored as a new lineage."""
    requested = {**_problems(job, tasks), **_chosen(run, task_set), "dry_run": dry_run} | (
        {"name": name} if name else {}
    )
    with api() as client:
        print_document(client.experience.rejudge(**requested), output)


@experience.command()
def compact(
    run: RunOption = None,
    task_set: TaskSetOption = None,
    dry_run: DryRunOption = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Merge many small files of ended runs and imports into few."""
    with api() as client:
        print_document(client.experience.compact(**_chosen(run, task_set), dry_run=dry_run), output)


@experience.command()
def prune(
    run: RunOption = None,
    task_set: TaskSetOption = None,
    older_than_days: Annotated[float | None, typer.Option("--older-than-days", min=0)] = None,
    dry_run: DryRunOption = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Remove stored experience for good."""
    requested: dict[str, Any] = {**_chosen(run, task_set), "dry_run": True}
    if older_than_days is not None:
        requested["older_than_days"] = older_than_days
    with api() as client:
        report = client.experience.prune(**requested)
        if not dry_run:
            found = f"{report['trajectories']} trajectories of {', '.join(report['runs']) or 'no run'}"
            yes or typer.confirm(f"Remove {found} for good?", abort=True)
            report = client.experience.prune(**requested | {"dry_run": False})
    print_document(report, output)


def _chosen(run: str | None, task_set: str | None) -> dict[str, str]:
    return {name: value for name, value in (("run", run), ("task_set", task_set)) if value}


def _problems(job: str | None, tasks: Path | None, as_text: bool = False) -> dict[str, Any]:
    if (job is None) == (tasks is None):
        raise InvalidInput("say which problems are meant: --job or --tasks", code="which_problems")
    if tasks is None:
        return {"job": job}
    document = read_spec(tasks)
    section = document.get("tasks", document)
    return {"tasks": json.dumps(section) if as_text else section}
