"""`spo job`, `spo eval`, `spo dead-letters`: jobs from their submission to their end, on the command line."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from spo.client import DEFAULT_URL, Client
from spo.client.models import (
    EvaluationKeywords,
    Event,
    ForkKeywords,
    Job,
    JobSummary,
    JsonObject,
    LogLevel,
    LogLine,
    StepEvaluation,
)
from spo.client.waiting_view import LinesNowAndThen, ProgressBar
from spo.console import (
    ExitCode,
    Output,
    console,
    error_console,
    print_document,
    print_entry,
    print_failure,
    print_rows,
    while_checked,
)
from spo.errors import InvalidInput, SpoError
from spo.local.judge_client import running_platforms
from spo.metrics_export import mirror
from spo.spec.section import JobState, read_spec
from spo.tasks.toy import newest_model, wanted_difficulty

# Of one request.
MOST_DELETED = 200
# So many of a file's first problems tell whether a model knows their words.
UNREAD_ROWS = 100

jobs = typer.Typer(no_args_is_help=True, help="Submit, watch and steer jobs.")

COLUMNS = ("prompt_id", "samples", "correct", "distinct", "public_only", "hard_coded", "entropy", "response_tokens")

# More than the platform keeps.
MAX_LETTERS = 100_000

dead_letters = typer.Typer(no_args_is_help=True, help="Entries that were given up on: list, show, redrive, drop.")

StreamOption = Annotated[
    str, typer.Option("--stream", help="prompts, rollouts, verdicts, estimates or pivotal; default: all.")
]
Letters = Annotated[list[str] | None, typer.Argument(help="Ids, as `list` shows them.")]
AllOption = Annotated[bool, typer.Option("--all", help="All of them.")]


def wait_with_bar(client: Client, job_id: str, timeout_seconds: float) -> Job:
    """Wait for a job's end, showing how far it is: values first, then steps. Raises NotReady (code "wait_timeout")."""
    shown: ProgressBar | LinesNowAndThen
    shown = ProgressBar(error_console) if error_console.is_terminal else LinesNowAndThen(error_console)
    with shown as bar:
        try:
            return client.wait(job_id, timeout_seconds, bar)
        except KeyboardInterrupt:
            error_console.print(f"the job goes on: `spo job watch {job_id}`, `spo job cancel {job_id}`")
            raise


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


JobOption = Annotated[
    str | None,
    typer.Option(
        "--job",
        help="Whose; default: those that name no job, for admins.",
        autocompletion=known_jobs,
        show_default=False,
    ),
]

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
    if unread := unread_problems(document):
        _warn([{"pointer": "/model/path", "message": unread}])
    with api() as client:
        if validate_only:
            with while_checked():
                resolved = client.validate(document)
            _warn(resolved.pop("warnings", []))
            print_document(resolved, output)
            return
        with while_checked():
            job = client.submit(document)
        _warn([warning.model_dump() for warning in job.warnings])
        results: list[StepEvaluation] = []
        if wait:
            job = wait_with_bar(client, job.id, timeout)
            results = client.evaluations(job.id)
            _warn([warning.model_dump() for warning in job.warnings])
    _print_job(job, output)
    if output is Output.TABLE:
        for line in before_and_after(results):
            console.print(line, markup=False, highlight=False)
    if wait:
        _exit_as(job)


def what_is_not_read(statements: Sequence[str], count_tokens: Callable[[str], int]) -> str:
    """A warning where a tokenizer drops most of the words that are asked, "" where it does not."""
    words = sum(len(statement.split()) for statement in statements)
    around = count_tokens("")
    tokens = sum(max(0, count_tokens(statement) - around) for statement in statements)
    if 2 * tokens >= words:
        return ""
    return (
        f"this model's tokenizer makes {tokens} tokens of {words} words: it drops most of what is asked, so that "
        "nothing can be learned; take a model that knows these words"
    )


def unread_problems(document: Mapping[str, object]) -> str:
    """The same warning of a spec whose model and file of problems are here; "" where they are not, or all is read."""
    model, tasks = document.get("model"), document.get("tasks")
    if not isinstance(model, Mapping) or not isinstance(tasks, Mapping) or tasks.get("kind") != "jsonl":
        return ""
    problems, words = Path(str(tasks.get("path"))), Path(str(model.get("path"))) / "tokenizer.json"
    try:
        # Without transformers, which takes seconds to load.
        from tokenizers import Tokenizer

        with problems.open(encoding="utf-8") as file:
            rows = [json.loads(line) for line in itertools.islice(file, UNREAD_ROWS) if line.strip()]
        statements = [row["statement"] for row in rows]
        tokenizer = Tokenizer.from_str(words.read_text(encoding="utf-8"))
        return what_is_not_read(statements, lambda text: len(tokenizer.encode(text).ids))
    except Exception:
        # A tokenizer fails in whatever way its library does; what is wrong with the files the platform says.
        return ""


def before_and_after(results: Sequence[StepEvaluation]) -> Iterator[str]:
    """What was learnt, in the words of the job's page; nothing before there are two evaluations."""
    by_step = sorted(results, key=lambda result: result.step)
    if len(by_step) < 2:
        return
    first, last = by_step[0].pass_at_k, by_step[-1].pass_at_k
    for k in sorted(first.keys() & last.keys(), key=int):
        before, after = first[k], last[k]
        interval = f"[{after.low:.2f}, {after.high:.2f}], {after.against(before)}"
        yield f"pass@{k} {before.value:.2f} -> {after.value:.2f} {interval}"


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
        if output is Output.TABLE:
            _watch(client, job_id)
        else:
            for event in client.events(job_id):
                print_entry(event, output)
        _exit_as(client.get(job_id))


def _watch(client: Client, job_id: str) -> None:
    """Events above a bar, which a terminal alone has."""
    drawn = 0.0
    with ProgressBar(console) as bar:
        for event in client.events(job_id):
            _print_event(event)
            if console.is_terminal and time.monotonic() - drawn >= 1:
                bar(client.get(job_id))
                drawn = time.monotonic()


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
    requested = ForkKeywords(version=version, checkpoint_step=checkpoint, as_reference=as_reference)
    if overrides:
        requested["overrides"] = read_spec(overrides)
    with api() as client:
        _print_job(client.fork(job_id, **requested), output)


def is_at_terminal() -> bool:
    """Whether somebody can be asked."""
    return sys.stdin.isatty()


@jobs.command()
def delete(
    job_ids: Annotated[list[str], typer.Argument(help="Ids of jobs (job_...).", autocompletion=known_jobs)],
    *,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask, as where nobody is at a terminal.")] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Delete ended jobs with their weights and checkpoints; the experience store keeps what it has."""
    if not yes and is_at_terminal():
        typer.confirm(f"Delete {', '.join(job_ids)} with weights and checkpoints for good?", abort=True)
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
        from spo.demo.demo import toy_model

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


def evaluate(
    job_id: JobId,
    version: Annotated[
        int | None, typer.Option("--version", help="Weight version; default: the newest. 0 is pi0.")
    ] = None,
    checkpoint: Annotated[
        int | None, typer.Option("--checkpoint", help="The weights of this checkpoint's step.")
    ] = None,
    tasks: Annotated[
        Path | None, typer.Option("--tasks", help="YAML or JSON of a `tasks` section; default: the job's.")
    ] = None,
    samples: Annotated[int, typer.Option("--samples", help="Samples per problem.")] = 20,
    temperature: Annotated[float, typer.Option("--temperature")] = 0.4,
    top_p: Annotated[float, typer.Option("--top-p")] = 0.95,
    k: Annotated[
        list[int] | None, typer.Option("-k", help="pass@k; may be given several times. Default: 1 and 10.")
    ] = None,
    *,
    problems: Annotated[bool, typer.Option("--problems", help="Show every problem.")] = False,
    timeout: TimeoutOption = 3600,
    output: OutputOption = Output.TABLE,
) -> None:
    """Evaluate a weight version or checkpoint and wait for the result."""
    wanted = EvaluationKeywords(
        version=version,
        checkpoint_step=checkpoint,
        tasks=read_spec(tasks) if tasks else None,
        samples=samples,
        temperature=temperature,
        top_p=top_p,
        ks=k or [1, 10],
    )
    with api() as client:
        found = client.wait_evaluation(client.request_evaluation(job_id, **wanted).id, timeout)
    result = found.result
    if result is None:
        console.print(f"{found.id} {found.state}: {found.failure.get('message', '')}", markup=False)
        raise typer.Exit(ExitCode.FAILURE)
    if output is not Output.TABLE:
        print_document(found, output)
        return
    for name, score in result.pass_at_k.items():
        console.print(f"pass@{name} {score.value:.3f} [{score.low:.3f}, {score.high:.3f}]", highlight=False)
    counts = f"problems {result.problems}, samples {result.samples}, "
    rates = f"distinct_solutions {result.distinct_solutions:.4g}, entropy {result.entropy:.4g}, "
    rates += f"response_tokens {result.response_tokens:.4g}, public_only_rate {result.public_only_rate:.4g}"
    console.print(counts + rates, highlight=False)
    if result.scores:
        console.print("mean " + ", ".join(f"{name} {value:.3f}" for name, value in result.scores.items()), markup=False)
    if result.undecided:
        console.print(f"decided {result.decided} of {result.problems} problems", highlight=False)
    for each in result.undecided:
        console.print(f"undecided {each.prompt_id}: {each.reason} ({each.code})", markup=False, soft_wrap=True)
    if problems:
        print_rows(result.per_problem, COLUMNS, output)


def cancel_evaluation(
    evaluation_id: Annotated[str, typer.Argument(help="eval_..., as the web page and the API name it.")],
    output: OutputOption = Output.TABLE,
) -> None:
    """End an evaluation that has not ended yet, without a result."""
    with api() as client:
        found = client.cancel_evaluation(evaluation_id)
    if output is not Output.TABLE:
        print_document(found, output)
        return
    console.print(f"{found.id} {found.state}", markup=False)


@dead_letters.command("list")
def list_letters(
    job: JobOption = None, stream: StreamOption = "", limit: LimitOption = 50, output: OutputOption = Output.TABLE
) -> None:
    """Letters, the newest of each stream first, and how many entries of the job were given up on."""
    with api() as client:
        found = client.dead_letters.newest(job, stream, limit)
        totals = client.dead_letters.totals(job) if job and output is Output.TABLE else {}
    print_rows(found, ("id", "job_id", "deliveries", "size_bytes", "reason"), output)
    for name, counts in totals.items():
        if counts.given_up:
            console.print(f"{name}: {counts.given_up} given up on", highlight=False)


@dead_letters.command("show")
def show_letter(
    letter: Annotated[str, typer.Argument(help="Id, as `list` shows it.")],
    job: JobOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """One letter with what it says."""
    with api() as client:
        print_document(client.dead_letters.get(letter, job), output)


@dead_letters.command()
def redrive(
    letters: Letters = None,
    job: JobOption = None,
    stream: StreamOption = "",
    *,
    everything: AllOption = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Put entries back on their streams, to be handled again."""
    with api() as client:
        ids = _all(client, job, stream) if everything else letters or []
        rows = [{"id": letter, "redriven": client.dead_letters.redrive(letter, job)} for letter in ids]
    print_rows(rows, ("id", "redriven"), output)


@dead_letters.command()
def drop(
    letters: Letters = None,
    job: JobOption = None,
    stream: StreamOption = "",
    *,
    everything: AllOption = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Forget letters; their job goes on counting them as given up."""
    with api() as client:
        ids = _all(client, job, stream) if everything else letters or []
        for letter in ids:
            client.dead_letters.drop(letter, job)
    print_rows([{"id": letter, "dropped": True} for letter in ids], ("id", "dropped"), output)


def _all(client: Client, job: str | None, stream: str) -> list[str]:
    return [letter.id for letter in client.dead_letters.newest(job, stream, MAX_LETTERS)]


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
