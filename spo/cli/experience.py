"""`spo experience`: the store that outlives runs, on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from spo.cli.jobs import LimitOption, OutputOption, api
from spo.client.models import FileFormat, ImportOptions, JsonObject, Prune
from spo.console import Output, print_document, print_rows
from spo.errors import InvalidInput
from spo.experience.known_logs import KnownLog
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
        rows = client.experience.runs(run=run, task_set=task_set)
    print_rows(
        rows, ("run", "kind", "task_sets", "trajectories", "size_bytes", "complete", "licence", "parents"), output
    )


@experience.command()
def stats(run: RunOption = None, task_set: TaskSetOption = None, output: OutputOption = Output.TABLE) -> None:
    """Counts by run, source, outcome, judge and licence."""
    with api() as client:
        print_document(client.experience.statistics(run=run, task_set=task_set), output)


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
        rows = client.experience.rows(limit, run=name, prompt_id=prompt)
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
    reward_best: Annotated[
        float | None, typer.Option("--reward-best", help="The best reward in the files; it becomes 0. No shift then.")
    ] = None,
    fields: Annotated[
        list[str] | None,
        typer.Option("--field", help="COLUMN=PATH into rows of another log, such as prompt=messages.0.content."),
    ] = None,
    log: Annotated[
        KnownLog | None, typer.Option("--from", help="Whose log the files are, where --field is not to say it all.")
    ] = None,
    judging: Annotated[
        Literal["missing", "all", "never"], typer.Option("--judge", help="Which rows are judged here.")
    ] = "missing",
    *,
    keep_good: Annotated[
        bool, typer.Option("--keep-good", help="Store the good rows although others are bad.")
    ] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Store rows from elsewhere; each file whole or not at all unless --keep-good."""
    section = _tasks_section(job, tasks)
    options = ImportOptions(
        job=job,
        tasks=None if section is None else json.dumps(section),
        licence=licence,
        reward_scale=reward_scale,
        reward_shift=reward_shift,
        reward_best=reward_best,
        fields=json.dumps(dict(_column_and_path(each) for each in fields)) if fields else "",
        log=log,
        judging=judging,
        keep_good=keep_good,
    )
    with api() as client:
        found = [(str(file), client.experience.import_file(file, name, **options)) for file in files]
    reports = [{"file": file, **report.model_dump(exclude_unset=True)} for file, report in found]
    print_rows(reports, ("file", "rows", "stored", "refused", "judged", "duplicates", "faults_by_code"), output)


def _column_and_path(option: str) -> tuple[str, str]:
    column, equals, path = option.partition("=")
    if not (column and equals and path):
        raise InvalidInput(f"--field {option} is not COLUMN=PATH", code="bad_mapping")
    return column, path


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
    export_format: FileFormat = "jsonl" if suffix == "jsonl" else "parquet"
    with api() as client:
        size = client.experience.export(target, export_format, run=run, task_set=task_set, right=right)
    print_rows([{"file": str(target), "bytes": size}], ("file", "bytes"), output)


@experience.command()
def rejudge(
    job: JobOption = None,
    tasks: TasksOption = None,
    run: RunOption = None,
    task_set: TaskSetOption = None,
    name: Annotated[str | None, typer.Option("--name", help="Of the new lineage; default: a new one.")] = None,
    *,
    dry_run: DryRunOption = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Judge stored trajectories by the tests a task set has now; what changes is told and stored as a new lineage."""
    section = _tasks_section(job, tasks)
    with api() as client:
        report = client.experience.rejudge(
            job=job, tasks=section, run=run, task_set=task_set, name=name, dry_run=dry_run
        )
    print_document(report, output)


@experience.command()
def compact(
    run: RunOption = None,
    task_set: TaskSetOption = None,
    *,
    dry_run: DryRunOption = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Merge many small files of ended runs and imports into few."""
    with api() as client:
        print_document(client.experience.compact(run=run, task_set=task_set, dry_run=dry_run), output)


@experience.command()
def prune(
    run: RunOption = None,
    task_set: TaskSetOption = None,
    older_than_days: Annotated[float | None, typer.Option("--older-than-days", min=0)] = None,
    *,
    dry_run: DryRunOption = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Remove stored experience for good."""
    requested = Prune(run=run, task_set=task_set, older_than_days=older_than_days, dry_run=True)
    with api() as client:
        report = client.experience.prune(**requested)
        if not dry_run:
            found = f"{report.trajectories} trajectories of {', '.join(report.runs) or 'no run'}"
            yes or typer.confirm(f"Remove {found} for good?", abort=True)
            requested["dry_run"] = False
            report = client.experience.prune(**requested)
    print_document(report, output)


def _tasks_section(job: str | None, tasks: Path | None) -> JsonObject | None:
    """The `tasks` section of a file; None when a job was named instead. Raises InvalidInput (code "which_problems")."""
    if (job is None) == (tasks is None):
        raise InvalidInput("say which problems are meant: --job or --tasks", code="which_problems")
    if tasks is None:
        return None
    document = read_spec(tasks)
    section: JsonObject = document.get("tasks", document)
    return section
