"""`spo trajectory`, `weights`, `ask`, `export`, `experience`, `continual`: what jobs make, and jobs that go on from
it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from spo.api.experience import KnownLog
from spo.cli.jobs import JobId, LimitOption, OutputOption, api
from spo.client.models import FileFormat, ImportOptions, JsonObject, PruneKeywords, Source
from spo.console import Output, console, print_document, print_entry, print_rows
from spo.errors import InvalidInput
from spo.spec.section import read_spec

trajectories = typer.Typer(no_args_is_help=True, help="Look at trajectories.")
weights = typer.Typer(no_args_is_help=True, help="Look at weight versions, announce them again, go back.")

VersionArgument = Annotated[int, typer.Argument(min=0, help="Weight version; 0 is pi0.")]

experience = typer.Typer(no_args_is_help=True, help="Look at, import, export and judge anew what runs have stored.")

RunOption = Annotated[str | None, typer.Option("--run", help="Only this run or import.")]
TaskSetOption = Annotated[str | None, typer.Option("--task-set", help="Only of this task set.")]
JobOption = Annotated[str | None, typer.Option("--job", help="The problems are those of this job.")]
TasksOption = Annotated[
    Path | None, typer.Option("--tasks", help="The problems are those of this YAML or JSON `tasks` section.")
]
MergeOption = Annotated[bool, typer.Option("--merge", help="An adapter: a whole model, the adapter in its weights.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Only say what would come of it.")]

continual = typer.Typer(no_args_is_help=True, help="Train from stored experience by a schedule, serve what is better.")

NameArgument = Annotated[str, typer.Argument(help="Name of the continual job.")]


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
    merge: MergeOption = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Download a weight version as a folder that transformers and vLLM load, or peft an adapter; from anywhere."""
    *named, folder = places
    if len(named) > 1 or not all(version.isdecimal() for version in named):
        raise typer.BadParameter("say JOB [VERSION] FOLDER; the version is a number")
    version = _downloaded(job_id, int(named[0]) if named else None, Path(folder), merge=merge)
    print_rows([{"folder": folder, "version": version}], ("folder", "version"), output)


def _downloaded(job_id: str, version: int | None, folder: Path, *, merge: bool) -> int:
    """Make the folder of a version, None: the newest; returns which."""
    with api() as client:
        published = [found.version for found in client.weights(job_id)]
        if version is None and not published:
            raise InvalidInput(f"{job_id} has published no version", code="unknown_version")
        chosen = published[-1] if version is None else version
        client.download_weights(job_id, chosen, folder, merge=merge)
    return chosen


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
    if unknown := [name for name in names or () if name not in found.series]:
        message = f"the job has no curve {', '.join(unknown)}; it has {', '.join(found.series) or 'none yet'}"
        raise InvalidInput(
            f"{message}. pass@k is in `spo job list --metric pass@1` and on its page", code="no_such_curve"
        )
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
    """Let a job's policy complete a prompt; an ended job's too, once a replica that no job needs has loaded it."""
    with api() as client:
        found = client.complete(job_id, prompt, version=version, samples=samples, temperature=temperature)
    if output is Output.TABLE:
        print_rows(found.items, ("version", "tokens", "finish_reason", "text"), output)
    else:
        print_document(found, output)


def export_weights(
    job_id: JobId,
    out: Annotated[Path, typer.Argument(help="Folder to make; must not be there yet.")],
    *,
    version: Annotated[int | None, typer.Option("--version", min=1, help="Default: the newest.")] = None,
    merge: MergeOption = False,
) -> None:
    """`spo weights export`, under the name that it had where the weight store is."""
    console.print(f"version {_downloaded(job_id, version, out, merge=merge)} of {job_id}: {out}")


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
    requested = PruneKeywords(run=run, task_set=task_set, older_than_days=older_than_days, dry_run=True)
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


@continual.command("put")
def put_continual(
    name: NameArgument,
    file: Annotated[Path, typer.Argument(help="YAML or JSON: serves, experience, schedule, gate, overrides.")],
    output: OutputOption = Output.TABLE,
) -> None:
    """Make a continual job, or change it."""
    with api() as client:
        print_document(client.continual.put(name, read_spec(file)), output)


@continual.command("ls")
def list_continual(output: OutputOption = Output.TABLE) -> None:
    """All continual jobs, by name."""
    with api() as client:
        found = [each.model_dump(mode="json") for each in client.continual.all()]
    rows = [row if output is not Output.TABLE else row | {"serves": row["spec"]["serves"]} for row in found]
    print_rows(rows, ("name", "serves", "created_at", "waits"), output)


@continual.command("show")
def show_continual(name: NameArgument, output: OutputOption = Output.TABLE) -> None:
    """One with its rounds: what each learned from, what the gate said, what was put in service."""
    with api() as client:
        found = client.continual.get(name)
    if output is not Output.TABLE:
        print_document(found, output)
        return
    console.print(f"{found.name} improves {found.spec['serves']}; {found.new_trajectories} new trajectories")
    if found.waits:
        console.print(f"waits since {found.waits_since}: {found.waits}", markup=False, highlight=False, soft_wrap=True)
    print_rows(found.history, ("number", "state", "job_id", "began_at", "reason"), output)


@continual.command("run")
def begin_round(name: NameArgument, output: OutputOption = Output.TABLE) -> None:
    """Begin a round as soon as none is under way and anything is new, whatever the schedule says."""
    with api() as client:
        print_document(client.continual.begin_round(name), output)


@continual.command("rm")
def delete_continual(name: NameArgument) -> None:
    """Forget it and its rounds; jobs, weights and what is served stay."""
    with api() as client:
        client.continual.delete(name)
