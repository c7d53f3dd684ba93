"""`spo eval`: how good is a weight version, on any task set?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spo.cli.jobs import JobId, OutputOption, TimeoutOption, api
from spo.client.models import EvaluationRequest
from spo.console import ExitCode, Output, console, print_document, print_rows
from spo.spec.spec_file import read_spec

COLUMNS = ("prompt_id", "samples", "correct", "distinct", "public_only", "hard_coded", "entropy", "response_tokens")


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
    wanted = EvaluationRequest(
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


def cancel(
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
