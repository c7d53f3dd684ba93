"""Problems as a model sees them, and what a real judge says of a right and of a wrong response to each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from spo.cli.known_responses import Known, known_responses
from spo.errors import InvalidInput, SpoError
from spo.local.judge_client import JudgeClient
from spo.model.chat import ChatFormat
from spo.spec.tasks import ModelSpec, TasksSpec
from spo.spec.violations import violations_of
from spo.spec.wire_enums import wire_name
from spo.tasks.load import load_tasks
from spo.tasks.problem import Problem, TaskSets, extract_program
from spo.tasks.verifier_pool import pool_of
from spo.v1.verdict_pb2 import (
    OUTCOME_ACCEPTED,
    OUTCOME_INTERNAL_ERROR,
    OUTCOME_WRONG_ANSWER,
    AnswerComparison,
    AnswerExtraction,
    AnswerRule,
    Outcome,
    TestSet,
)

JUDGING_SECONDS = 120.0
# To begin with, before the first problem's own tests.
_ANY = TestSet(
    answer=AnswerRule(
        expected=["1"],
        comparison=AnswerComparison.ANSWER_COMPARISON_EXACT,
        extraction=AnswerExtraction.ANSWER_EXTRACTION_WHOLE,
    )
)
# Of English and code, where no tokenizer can be had.
CHARACTERS_PER_TOKEN = 3
SUFFIXES_OF_SPECS = (".yaml", ".yml", ".json")


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
    return load_tasks(fewer)


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
    """Each problem with the verdicts on its known responses; one judge serves them all."""
    with JudgeClient(_ANY, where, runs) as judge:
        for problem in problems:
            known = known_responses(problem)
            if pool_of(problem.tests):
                yield _shown(problem, render, _unasked(known, "right"), _unasked(known, "wrong"))
                continue
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


def _unasked(known: Known, which: str) -> Decision | None:
    response: str | None = getattr(known, which)
    if response is None:
        return None
    detail = "a service or model decides, which jobs ask through the verifiers"
    return Decision(response, "not asked", detail, None, which in known.invented)


def _decided(judge: JudgeClient, problem: Problem, known: Known, fault: str, *, is_right: bool) -> Decision | None:
    response = known.right if is_right else known.wrong
    invented = ("right" if is_right else "wrong") in known.invented
    if response is None:
        return None
    if fault:
        return Decision(response, "refused", fault, as_expected=False, invented=invented)
    program = extract_program(response, problem.response_format, problem.language)
    try:
        verdict = judge.judge(program.encode(), problem.language, stop_early=True, deadline_seconds=JUDGING_SECONDS)
    except SpoError as error:
        return Decision(response, "internal_error", error.message, as_expected=False, invented=invented)
    failed = next((test.detail for test in verdict.tests if test.outcome != OUTCOME_ACCEPTED and test.detail), "")
    score = f"score {verdict.score:g}" if verdict.HasField("score") else ""
    return Decision(
        response,
        wire_name(Outcome, verdict.outcome),
        verdict.detail or failed or score,
        _is_as_expected(problem, verdict.outcome, is_right=is_right, invented=invented),
        invented,
    )


def _is_as_expected(problem: Problem, outcome: Outcome.ValueType, *, is_right: bool, invented: bool) -> bool | None:
    """Whether a verdict is the one that the response should get; None where nobody can know.

    A verifier that fails decides about nothing, so that is never expected. What people's own function should make of a
    response that is made up here, only they know.
    """
    if outcome == OUTCOME_INTERNAL_ERROR:
        return False
    if problem.tests.HasField("scoring_function"):
        if outcome not in (OUTCOME_ACCEPTED, OUTCOME_WRONG_ANSWER):
            return False
        if invented:
            return None
    return (outcome == OUTCOME_ACCEPTED) == is_right
