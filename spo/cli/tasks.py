"""`spo tasks`: problems before a job is spent on them: what the model sees, who judges, what can be learnt."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from spo.cli.jobs import OutputOption, TimeoutOption, api
from spo.cli.preview import Decision, Preview, chosen_problems, previews, rendering, tasks_and_model
from spo.cli.progress import wait_with_bar
from spo.client.models import PromptSuccess
from spo.console import ExitCode, Output, console, error_console, print_document
from spo.local.judge_client import AUTO
from spo.spec.spec_file import read_spec
from spo.tasks.learnability import (
    MOST_PROBED,
    PROBE_SAMPLES,
    Learnability,
    histogram_lines,
    kind_of,
    learnability,
    probe_document,
)

tasks = typer.Typer(no_args_is_help=True, help="Look at problems, and at what a model makes of them, before a job.")

SHOWN_CHARACTERS = 2000


@tasks.command()
def preview(
    source: Annotated[Path, typer.Argument(help="A job's spec, a `tasks` section, or a file or folder of problems.")],
    kind: Annotated[str, typer.Option("--kind", help="Of a file of problems.")] = "jsonl",
    model: Annotated[
        Path | None, typer.Option("--model", help="Folder of the model whose chat template is applied.")
    ] = None,
    problems: Annotated[int, typer.Option("--problems", min=1, max=1000, help="How many.")] = 10,
    where: Annotated[
        str, typer.Option("--judge", help="auto (one that runs here, else embedded), embedded, or host:port.")
    ] = os.environ.get("SPO_SANDBOX_JUDGE_ADDRESS", AUTO),
    output: OutputOption = Output.TABLE,
) -> None:
    """Show problems as the model sees them, and what a real judge says of a right and a wrong response to each.

    Exit status 1 when it says otherwise than expected.
    """
    found, spec = tasks_and_model(source, kind, read_spec)
    chosen = chosen_problems(found, problems)
    for note in chosen.notes:
        error_console.print(note, highlight=False)
    render = rendering(model, spec.chat_format)
    runs = Path(os.environ.get("SPO_LAUNCHER_RUNS_PATH", "runs"))
    shown: list[Preview] = []
    for place, one in enumerate(previews(chosen.train, render, where, runs), start=1):
        shown.append(one)
        if output is Output.TABLE:
            _print_preview(place, one)
    if output is not Output.TABLE:
        print_document([asdict(one) for one in shown], output)
    decisions = [decision for one in shown for decision in (one.right, one.wrong) if decision is not None]
    unexpected = sum(decision.as_expected is False for decision in decisions)
    if unexpected:
        error_console.print(f"{unexpected} of {len(decisions)} responses were judged otherwise than expected")
        raise typer.Exit(ExitCode.FAILURE)


@tasks.command()
def probe(
    spec_file: Annotated[Path, typer.Argument(help="The job's spec: its model and its tasks are probed.")],
    samples: Annotated[
        int, typer.Option("--samples", min=1, max=1000, help="Of the model, per problem.")
    ] = PROBE_SAMPLES,
    problems: Annotated[
        int, typer.Option("--problems", min=1, help="At most so many training problems.")
    ] = MOST_PROBED,
    model: Annotated[Path | None, typer.Option("--model", help="Folder in place of the spec's model.path.")] = None,
    timeout: TimeoutOption = 86_400,
    output: OutputOption = Output.TABLE,
) -> None:
    """Say which training problems the model never solves, always solves, or can learn from, before a job trains.

    Runs on the platform as a job of no steps: its samples are values and experience that later jobs may take. In JSON
    and YAML every problem is told with its counts.
    """
    document = probe_document(read_spec(spec_file), samples, problems, str(model.absolute()) if model else None)
    job_id, prompts = _run_probe(document, problems, timeout)
    found = learnability(prompts)
    if output is not Output.TABLE:
        each = [{"kind": kind_of(prompt), **prompt.model_dump()} for prompt in prompts]
        print_document({"job_id": job_id, **asdict(found), "prompts": each}, output)
        return
    _print_probe(found)


def probed_prompts(document: Mapping[str, object], problems: int, timeout: float) -> list[PromptSuccess]:
    """Run a probe on the platform to its end; how the model did on at most so many problems."""
    return _run_probe(document, problems, timeout)[1]


def _run_probe(document: Mapping[str, object], problems: int, timeout: float) -> tuple[str, list[PromptSuccess]]:
    with api() as client:
        job = client.submit(document)
        error_console.print(f"probing as {job.id}", highlight=False)
        job = wait_with_bar(client, job.id, timeout)
        if job.failure is not None or job.state != "succeeded":
            why = f": {job.failure.message}" if job.failure else ""
            error_console.print(f"{job.id} {job.state}{why}", markup=False, highlight=False)
            raise typer.Exit(ExitCode.FAILURE)
        return job.id, client.prompts(job.id, problems)


@tasks.command()
def generators(output: OutputOption = Output.TABLE) -> None:
    """The data sets of reasoning-gym that tasks of kind reasoning_gym name."""
    from spo.tasks.sources.generate import names
    from spo.tasks.sources.reasoning_gym import require_package

    require_package("reasoning_gym", "/tasks/kind")
    found = names()
    if output is Output.TABLE:
        console.print(", ".join(found), highlight=False)
    else:
        print_document(found, output)


def _print_preview(place: int, one: Preview) -> None:
    difficulty = f" ({one.difficulty})" if one.difficulty else ""
    console.rule(f"{place}{difficulty} {one.problem_id[:12]}", align="left")
    console.print(_short(one.prompt), markup=False, highlight=False, soft_wrap=True)
    for name, decision in (("right", one.right), ("wrong", one.wrong)):
        if decision is None:
            console.print(f"[dim]{name} response: the task set has none[/]")
        else:
            _print_decision(name, decision)


def _print_decision(name: str, decision: Decision) -> None:
    made_up = " (made up here: the task set has none)" if decision.invented else ""
    console.print(f"[bold]{name} response[/]{made_up}", highlight=False)
    console.print(_short(decision.response), markup=False, highlight=False, soft_wrap=True)
    colour = {True: "green", False: "red", None: "dim"}[decision.as_expected]
    detail = f": {' '.join(decision.detail.split())}" if decision.detail else ""
    console.print(f"[{colour}]{decision.outcome}[/]{escape(detail)}", highlight=False, soft_wrap=True)


def _print_probe(found: Learnability) -> None:
    counts = ("learnable", "unsolved", "solved", "unknown")
    for name in counts:
        count = getattr(found, name)
        if count or name != "unknown":
            console.print(f"{name:<10}{count:6d}  {count / max(1, found.problems):6.1%}", highlight=False)
    if found.mean_success is not None:
        console.print(f"mean success {found.mean_success:.3f} of {found.samples} samples each", highlight=False)
    console.print("success rate, problems:", highlight=False)
    for line in histogram_lines(found):
        console.print(line, markup=False, highlight=False)
    for suggestion in found.suggestions:
        console.print(f"- {suggestion}", markup=False, highlight=False, soft_wrap=True)


def _short(text: str) -> str:
    """What a terminal takes of a text that somebody else wrote."""
    safe = "".join(letter if letter.isprintable() or letter in "\n\t" else "?" for letter in text)
    return safe if len(safe) <= SHOWN_CHARACTERS else f"{safe[:SHOWN_CHARACTERS]}... ({len(safe)} characters)"
