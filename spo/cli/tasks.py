"""`spo tasks` and `spo dataset`: problems before a job is spent on them, and task sets that are uploaded once."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError
from rich.markup import escape

from spo.cli.jobs import LimitOption, OutputOption, TimeoutOption, api, wait_with_bar
from spo.client.models import DatasetView, PromptSuccess, TaskFormat
from spo.console import ExitCode, Output, console, error_console, print_document, print_rows, while_checked
from spo.errors import InvalidInput, SpoError
from spo.local.judge_client import AUTO, JudgeClient, running_verifier
from spo.model.chat import ChatFormat
from spo.spec.section import read_spec, violations_of, wire_name
from spo.spec.tasks import ModelSpec, TasksSpec
from spo.tasks.foreign import OWN_PROBLEMS, read_foreign
from spo.tasks.load import (
    MOST_PROBED,
    PROBE_SAMPLES,
    Learnability,
    histogram_lines,
    kind_of,
    learnability,
    load_tasks,
    probe_document,
)
from spo.tasks.problem import Problem, TaskSets, extract_program, write_response
from spo.tasks.records import SUFFIXES
from spo.tasks.verifier import own_judges, pool_of
from spo.v1 import verdict_pb2 as wire

# A whole response or answer of these is no expected text but a description of it.
_DESCRIBED = (
    wire.AnswerComparison.ANSWER_COMPARISON_REGULAR_EXPRESSION,
    wire.AnswerComparison.ANSWER_COMPARISON_JSON_SCHEMA,
)
_NO_PROGRAM = "print('this is not the answer')\n"

JUDGING_SECONDS = 120.0
# To begin with, before the first problem's own tests.
_ANY = wire.TestSet(
    answer=wire.AnswerRule(
        expected=["1"],
        comparison=wire.AnswerComparison.ANSWER_COMPARISON_EXACT,
        extraction=wire.AnswerExtraction.ANSWER_EXTRACTION_WHOLE,
    )
)
# Of English and code, where no tokenizer can be had.
CHARACTERS_PER_TOKEN = 3
SUFFIXES_OF_SPECS = (".yaml", ".yml", ".json")

tasks = typer.Typer(no_args_is_help=True, help="Look at problems, and at what a model makes of them, before a job.")

SHOWN_CHARACTERS = 2000

datasets = typer.Typer(no_args_is_help=True, help="Upload task sets and see what is wrong with their rows.")

COLUMNS = ("id", "name", "task_format", "state", "uploaded_bytes", "size_bytes", "created_at")


@dataclass(frozen=True)
class Known:
    """None: the task set does not say. invented: what is made up here, of `right` and `wrong`."""

    right: str | None
    wrong: str | None
    invented: frozenset[str] = frozenset()


def known_responses(problem: Problem) -> Known:
    """A solution that people wrote, or the expected answer where the rule looks for it; and one that is wrong."""
    right = next(iter(problem.human_solutions), None)
    wrong = next(iter(problem.wrong_solutions), None)
    invented = frozenset(name for name, known in (("right", right), ("wrong", wrong)) if known is None)
    kind = problem.tests
    if kind.HasField("answer"):
        if right is None and kind.answer.comparison not in _DESCRIBED:
            right = written_answer(kind.answer, kind.answer.expected[0])
        return Known(right, wrong or written_answer(kind.answer, _other(kind.answer.expected[0])), invented)
    if kind.HasField("scoring_function"):
        arguments = json.loads(kind.scoring_function.arguments_json or "{}")
        tag = arguments.get("tag", "")
        return Known(right, wrong or (f"<{tag}>not it</{tag}>" if tag else "not it"), invented)
    if kind.HasField("http") or kind.HasField("model"):
        return Known(right, wrong or "not it", invented)
    if kind.HasField("code_tests"):
        wrong = wrong or _other_function(kind.code_tests.entry_point)
    wrong = wrong or _NO_PROGRAM
    return Known(
        None if right is None else write_response(right, problem.response_format, problem.language),
        write_response(wrong, problem.response_format, problem.language),
        invented,
    )


def written_answer(rule: wire.AnswerRule, answer: str) -> str:
    """The response in which the rule finds this answer."""
    match rule.extraction:
        case wire.AnswerExtraction.ANSWER_EXTRACTION_BOXED:
            return f"\\boxed{{{answer}}}"
        case wire.AnswerExtraction.ANSWER_EXTRACTION_AFTER_MARKER:
            return f"{rule.marker} {answer}"
        case wire.AnswerExtraction.ANSWER_EXTRACTION_XML_TAG:
            return f"<{rule.marker}>{answer}</{rule.marker}>"
    return answer


def _other(expected: str) -> str:
    """An answer that is another number, or no such text."""
    try:
        return str(float(expected.replace(",", "")) * 2 + 1)
    except (ValueError, OverflowError):
        return f"not {expected[:80]}"


def _other_function(entry_point: str) -> str:
    return f"def {entry_point or 'f'}(*_, **__):\n    return 'this is not the answer'\n"


@dataclass(frozen=True)
class Decision:
    """What the judge said of a response; `as_expected` None: it was not asked, or nothing was expected of it.

    invented: the response is made up here, since the task set has none.
    """

    response: str
    outcome: str
    detail: str
    as_expected: bool | None
    invented: bool = False


@dataclass(frozen=True)
class Preview:
    """One problem; prompt is the text with the chat template around it."""

    problem_id: str
    prompt: str
    difficulty: str
    right: Decision | None
    wrong: Decision | None


def tasks_and_model(file: Path, kind: str, read: Callable[[Path], dict[str, object]]) -> tuple[TasksSpec, ModelSpec]:
    """The tasks that a job's spec, a `tasks` section or a file of problems names, and the spec's model."""
    document: dict[str, object] = {"kind": kind, "path": str(file), "evaluation_problems": 0}
    model: object = None
    if file.suffix in SUFFIXES_OF_SPECS:
        document = read(file)
        if "tasks" in document or "model" in document:
            model, found = document.get("model"), document.get("tasks", {})
            document = found if isinstance(found, dict) else {"kind": found}
    try:
        named = {"path": "/models/pi0", **(model if isinstance(model, dict) else {})}
        return TasksSpec.model_validate(document), ModelSpec.model_validate(named)
    except ValidationError as error:
        message = f"{file} names no tasks that can be shown"
        raise InvalidInput(message, code="invalid_job_spec", violations=violations_of(error)) from None


def chosen_problems(tasks: TasksSpec, count: int) -> TaskSets:
    """The first `count` training problems, and what was left out on the way. Raises InvalidInput as loading does."""
    fewer = tasks.model_copy(update={"train_problems": min(count, tasks.most_train_problems)})
    try:
        return load_tasks(fewer)
    except InvalidInput as error:
        if error.code != "too_few_problems" or "evaluation_problems" in tasks.model_fields_set:
            raise
    # Nobody asked to hold so many out.
    return load_tasks(fewer.model_copy(update={"evaluation_problems": 0}))


def rendering(folder: Path | None, chat: ChatFormat) -> Callable[[str], str]:
    """What makes the model's prompt of a statement: its chat template, or nothing without a model."""
    if folder is None:
        return lambda statement: statement
    from spo.model.tokenizer import encode_prompt, load_tokenizer

    tokenizer = load_tokenizer(folder)
    return lambda statement: str(tokenizer.decode(encode_prompt(tokenizer, statement, chat)))


def prompt_counter(folder: Path) -> tuple[Callable[[str], int], str, bool]:
    """How many tokens a statement has in the model's prompt, how that is known, and whether a template stands there."""
    try:
        from spo.model.tokenizer import encode_prompt, load_tokenizer
    except ImportError:
        return lambda text: len(text) // CHARACTERS_PER_TOKEN + 1, "guessed: no tokenizer is installed here", False
    tokenizer = load_tokenizer(folder)
    template = bool(getattr(tokenizer, "chat_template", None))
    return lambda text: len(encode_prompt(tokenizer, text)), "by its tokenizer", template


def previews(problems: Sequence[Problem], render: Callable[[str], str], where: str, runs: Path) -> Iterator[Preview]:
    """Each problem with the verdicts on its known responses; one judge serves them all.

    What a service or a model decides is asked of the verifier of a platform that runs here, by whose rules jobs ask it.
    """
    with contextlib.ExitStack() as open_judges:
        judges: dict[str, JudgeClient] = {}
        for problem in problems:
            known, pool = known_responses(problem), pool_of(problem.tests)
            verifier = running_verifier(runs) if pool and not own_judges(problem.tests) else ""
            if pool and not verifier:
                yield _shown(problem, render, _unasked(problem, known, "right"), _unasked(problem, known, "wrong"))
                continue
            if pool not in judges:
                # It holds the first problem's tests from the beginning, since each pool takes its own kinds alone.
                first = problem.tests if pool else _ANY
                judges[pool] = open_judges.enter_context(JudgeClient(first, verifier or where, runs))
            judge = judges[pool]
            fault = _use(judge, problem)
            yield _shown(
                problem,
                render,
                _decided(judge, problem, known, fault, is_right=True),
                _decided(judge, problem, known, fault, is_right=False),
            )


def _shown(problem: Problem, render: Callable[[str], str], right: Decision | None, wrong: Decision | None) -> Preview:
    return Preview(problem.problem_id, render(problem.statement), problem.difficulty, right, wrong)


def _use(judge: JudgeClient, problem: Problem) -> str:
    """Give the judge what decides about a problem; why it refuses, "" where it does not."""
    try:
        judge.judge_by(problem.tests)
    except SpoError as error:
        return str(error).replace("\n", " ")
    return ""


def _unasked(problem: Problem, known: Known, which: str) -> Decision | None:
    response: str | None = getattr(known, which)
    if response is None:
        return None
    detail = "a service or model decides: `spo up` starts a verifier that this asks"
    if own_judges(problem.tests):
        detail = "a policy of the platform decides, which jobs ask through the verifiers"
    return Decision(response, "not asked", detail, None, which in known.invented)


def _decided(judge: JudgeClient, problem: Problem, known: Known, fault: str, *, is_right: bool) -> Decision | None:
    response = known.right if is_right else known.wrong
    invented = ("right" if is_right else "wrong") in known.invented
    if response is None:
        return None
    if fault:
        return Decision(response, "refused", fault, as_expected=False, invented=invented)
    # A service sees the whole response.
    whole = bool(pool_of(problem.tests))
    program = response if whole else extract_program(response, problem.response_format, problem.language)
    try:
        verdict = judge.judge(program.encode(), problem.language, stop_early=True, deadline_seconds=JUDGING_SECONDS)
    except SpoError as error:
        return Decision(response, "internal_error", error.message, as_expected=False, invented=invented)
    failed = next((test.detail for test in verdict.tests if test.outcome != wire.OUTCOME_ACCEPTED and test.detail), "")
    score = f"score {verdict.score:g}" if verdict.HasField("score") else ""
    return Decision(
        response,
        wire_name(wire.Outcome, verdict.outcome),
        verdict.detail or failed or score,
        _is_as_expected(problem, verdict.outcome, is_right=is_right, invented=invented),
        invented,
    )


def _is_as_expected(
    problem: Problem, outcome: wire.Outcome.ValueType, *, is_right: bool, invented: bool
) -> bool | None:
    """Whether a verdict is the one that the response should get; None where nobody can know.

    A verifier that fails decides about nothing, so that is never expected. What people's own function should make of a
    response that is made up here, only they know, as with a service of theirs.
    """
    if outcome == wire.OUTCOME_INTERNAL_ERROR:
        return False
    if problem.tests.HasField("scoring_function") or pool_of(problem.tests):
        if outcome not in (wire.OUTCOME_ACCEPTED, wire.OUTCOME_WRONG_ANSWER):
            return False
        if invented:
            return None
    return (outcome == wire.OUTCOME_ACCEPTED) == is_right


def naming_their_project(file: Path, error: InvalidInput) -> InvalidInput:
    """The error for a file that is none of problems here; where it is of another project, with what says more of it."""
    if error.code != "malformed_task" or not file.name.endswith((*SUFFIXES, ".json")):
        return error
    shapes = [name for name in read_foreign(file, most=1).shapes if name != OWN_PROBLEMS]
    if not shapes:
        return error
    message = f"{file} holds rows of {shapes[0]}: `spo data look {file}` says how they are taken. {error.message}"
    return InvalidInput(message, code=error.code, violations=error.violations)


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
    try:
        chosen = chosen_problems(found, problems)
    except InvalidInput as error:
        raise naming_their_project(source, error) from None
    for note in chosen.notes:
        error_console.print(note, highlight=False)
    render = rendering(model, spec.chat_format)
    runs = Path(os.environ.get("SPO_LAUNCHER_RUNS_PATH", "runs"))
    shown: list[Preview] = []
    for place, one in enumerate(previews(chosen.train, render, where, runs), start=1):
        shown.append(one)
        if output is Output.TABLE:
            print_preview(place, one)
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
        with while_checked():
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
    from spo.tasks.generate import names
    from spo.tasks.sources import require_package

    require_package("reasoning_gym", "/tasks/kind")
    found = names()
    if output is Output.TABLE:
        console.print(", ".join(found), highlight=False)
    else:
        print_document(found, output)


def print_preview(place: int, one: Preview) -> None:
    """A problem as a person sees it, with the verdicts on its known responses."""
    difficulty = f" ({one.difficulty})" if one.difficulty else ""
    console.rule(f"{place}{difficulty} {one.problem_id[:12]}", align="left")
    console.print(_short(one.prompt), markup=False, highlight=False, soft_wrap=True)
    for name, decision in (("right", one.right), ("wrong", one.wrong)):
        if decision is None:
            console.print(f"[dim]{name} response: the task set has none[/]")
        else:
            _print_decision(name, decision)


def print_response(row: Mapping[str, object]) -> None:
    """A row of experience as a person sees it."""
    console.rule(align="left")
    console.print(_short(str(row.get("statement", ""))), markup=False, highlight=False, soft_wrap=True)
    reward = "to be judged" if "reward" not in row else f"reward {row['reward']}"
    console.print(f"[bold]response[/], {reward}", highlight=False)
    console.print(_short(str(row["response_text"])), markup=False, highlight=False, soft_wrap=True)


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


@datasets.command()
def upload(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="JSONL or Parquet.")],
    name: Annotated[str, typer.Option("--name", help="Default: the file's.")] = "",
    task_format: Annotated[TaskFormat, typer.Option("--format", help="Schema; jsonl is the platform's own.")] = "jsonl",
    resume: Annotated[str | None, typer.Option("--resume", help="Id of an upload that was cut off.")] = None,
    timeout: TimeoutOption = 3600,
    output: OutputOption = Output.TABLE,
) -> None:
    """Upload a file in parts and wait for the report on its rows."""
    with api() as client:
        found = client.datasets.upload(file, name, task_format, resume)
        found = client.datasets.wait(found.id, timeout)
    _print(found, output)
    if found.state != "ready":
        raise typer.Exit(ExitCode.INVALID_INPUT)


@datasets.command("ls")
def list_datasets(limit: LimitOption = 50, output: OutputOption = Output.TABLE) -> None:
    """Datasets, newest first."""
    with api() as client:
        print_rows(client.datasets.all(limit), COLUMNS, output)


@datasets.command()
def show(dataset_id: str, output: OutputOption = Output.TABLE) -> None:
    """One dataset with what is wrong with its rows."""
    with api() as client:
        _print(client.datasets.get(dataset_id), output)


@datasets.command()
def delete(dataset_id: str, output: OutputOption = Output.TABLE) -> None:
    """Remove a dataset, or an upload that will not be finished; refused while a job uses it."""
    with api() as client:
        client.datasets.delete(dataset_id)
    print_rows([{"deleted": dataset_id}], ("deleted",), output)


def _print(found: DatasetView, output: Output) -> None:
    if output is not Output.TABLE:
        print_document(found, output)
        return
    print_rows([found], COLUMNS, output)
    report = found.report
    if report is None:
        return
    for note in report.notes:
        console.print(note, markup=False, highlight=False, soft_wrap=True)
    for fault in report.faults:
        console.print(f"{fault.place}: {fault.message}", markup=False, highlight=False, soft_wrap=True)
    counts = f"{report.rows} rows, {report.problems} problems, {report.left_out} left_out"
    console.print(f"{counts}, {report.faults_total} faults_total", markup=False, highlight=False)
