"""From `tasks.verifier` of a JobSpec to what decides about the responses to each problem."""

from __future__ import annotations

import ast
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from spo.errors import FieldViolation, InvalidInput
from spo.spec.verifier import (
    DEFAULT,
    CompositionVerifier,
    FormatVerifier,
    HttpVerifier,
    ModelVerifier,
    PartSpec,
    PartVerifier,
    PerProblemVerifier,
    ProblemVerifier,
    ProgramVerifier,
    PythonVerifier,
    VerifierSpec,
    verifiers_in,
)
from spo.tasks.answer import ANSWER_LANGUAGE
from spo.tasks.faults import malformed
from spo.tasks.problem import DEFAULT_LIMITS, Problem, write_response
from spo.v1.verdict_pb2 import (
    AnswerComparison,
    AnswerExtraction,
    AnswerRule,
    Composition,
    HttpScore,
    LanguagePenalty,
    LengthPenalty,
    Limits,
    ModelScore,
    Part,
    ScoringFunction,
    TestSet,
)

MOST_SOURCE_BYTES = 64 << 10
# The faults of a file that one refusal names.
SHOWN_FAULTS = 20


def decided_by(problems: Sequence[Problem], verifier: VerifierSpec) -> tuple[Problem, ...]:
    """The problems with what the verifier makes of their tests. Raises InvalidInput naming each that lacks it."""
    decided: list[Problem] = []
    faults: list[FieldViolation] = []
    for problem in problems:
        try:
            decided.append(_decided_by(problem, verifier))
        except InvalidInput as error:
            if error.code != "malformed_task":
                raise
            faults += error.violations
    if faults:
        message = f"{len(faults)} problems lack what the verifier needs; the first: {faults[0].message}"
        raise InvalidInput(message, code="malformed_task", violations=tuple(faults[:SHOWN_FAULTS]))
    return tuple(decided)


def apply_verifier(problem: Problem, verifier: ProblemVerifier | PartVerifier) -> TestSet:
    """What decides about responses to a problem, under a spec's verifier.

    Raises InvalidInput: "malformed_task" names the problem that lacks what the verifier needs, "unusable_function" the
    file that holds no such function.
    """
    match verifier:
        case ProgramVerifier():
            if not problem.tests.ByteSize():
                raise malformed(problem.place or "a problem", "neither tests nor an answer, which a program needs")
            return problem.tests
        case PythonVerifier():
            source = _source_of(verifier.path, verifier.function)
            function = ScoringFunction(source=source, function=verifier.function, arguments_json=arguments_of(problem))
            tests = TestSet(scoring_function=function, limits=_limits_of(problem))
        case HttpVerifier():
            score = HttpScore(
                url=verifier.url, arguments_json=arguments_of(problem), timeout_seconds=verifier.timeout_seconds
            )
            tests = TestSet(http=score)
        case ModelVerifier():
            tests = TestSet(model=_model_score(problem, verifier))
        case FormatVerifier():
            rule = AnswerRule(
                expected=[verifier.expression],
                comparison=AnswerComparison.ANSWER_COMPARISON_REGULAR_EXPRESSION,
                extraction=AnswerExtraction.ANSWER_EXTRACTION_WHOLE,
            )
            return TestSet(answer=rule)
        case CompositionVerifier():
            tests = TestSet(composition=Composition(parts=[_part(problem, part) for part in verifier.parts]))
    tests.pass_score = verifier.pass_score
    return tests


def arguments_of(problem: Problem) -> str:
    """What of the problem a function or a service is told, as a JSON object: the row's own arguments, `statement` and
    `expected` (the right answers, none for programs)."""
    arguments = json.loads(problem.arguments_json or "{}")
    arguments |= {"statement": problem.statement, "expected": list(problem.tests.answer.expected)}
    return json.dumps(arguments, sort_keys=True, separators=(",", ":"))


def _named_by(problem: Problem, verifier: VerifierSpec) -> ProblemVerifier:
    """What the problem's row names. Raises InvalidInput naming a row that names what there is not."""
    named = problem.verifier
    if isinstance(verifier, PerProblemVerifier):
        if found := verifier.verifiers.get(named or DEFAULT):
            return found
        told = f"verifier: {named!r}" if named else "no verifier"
        raise malformed(problem.place or "a problem", f"{told}; the job has {', '.join(sorted(verifier.verifiers))}")
    if named:
        raise malformed(problem.place or "a problem", f"verifier: {named!r}, and the job's is not of kind per_problem")
    return verifier


def _decided_by(problem: Problem, of_job: VerifierSpec) -> Problem:
    verifier = _named_by(problem, of_job)
    tests = apply_verifier(problem, verifier)
    if isinstance(verifier, ProgramVerifier):
        return problem
    # The verifier sees whole responses; a composition's program is cut out of them for its own part.
    with_program = any(isinstance(one, ProgramVerifier) for _, one in verifiers_in(verifier))
    return replace(
        problem,
        tests=tests,
        language=problem.language if with_program else ANSWER_LANGUAGE,
        response_format="raw",
        human_solutions=tuple(
            write_response(text, problem.response_format, problem.language) for text in problem.human_solutions
        ),
        wrong_solutions=tuple(
            write_response(text, problem.response_format, problem.language) for text in problem.wrong_solutions
        ),
    )


def _part(problem: Problem, part: PartSpec) -> Part:
    built = Part(name=part.name, weight=part.weight, gate=part.gate)
    if part.verifier is not None:
        built.verifier.CopyFrom(apply_verifier(problem, part.verifier))
    elif part.length is not None:
        built.length.CopyFrom(LengthPenalty(**part.length.model_dump()))
    elif part.language is not None:
        built.language.CopyFrom(LanguagePenalty(script=part.language.script))
    return built


def _model_score(problem: Problem, verifier: ModelVerifier) -> ModelScore:
    references = (*problem.tests.answer.expected, *problem.human_solutions)
    return ModelScore(
        rubric=verifier.rubric,
        statement=problem.statement,
        address=verifier.address or "",
        model=verifier.model,
        votes=verifier.votes,
        reference=references[0] if references else "",
    )


def _limits_of(problem: Problem) -> Limits:
    """Those of the problem's own tests, where it has any."""
    return problem.tests.limits if problem.tests.HasField("limits") else DEFAULT_LIMITS


def _source_of(path: str, function: str) -> str:
    try:
        facts = Path(path).stat()
        return _read(path, function, facts.st_mtime, facts.st_size)
    except (OSError, ValueError) as error:
        raise _unusable(path, f"it cannot be read: {error}"[:300]) from None


@lru_cache(maxsize=16)
def _read(path: str, function: str, _changed: float, _size: int) -> str:
    if not Path(path).is_file():
        raise _unusable(path, "it is no regular file")
    with Path(path).open("rb") as file:
        read = file.read(MOST_SOURCE_BYTES + 1)
    if len(read) > MOST_SOURCE_BYTES:
        raise _unusable(path, f"it is longer than {MOST_SOURCE_BYTES} bytes")
    try:
        source = read.decode()
        statements = ast.parse(source).body
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise _unusable(path, f"it is no Python: {error}"[:300]) from None
    if not any(isinstance(one, ast.FunctionDef) and one.name == function for one in statements):
        raise _unusable(path, f"it defines no function {function}")
    return source


def _unusable(path: str, reason: str) -> InvalidInput:
    message = f"{path}: {reason}"
    return InvalidInput(message, code="unusable_function", violations=(FieldViolation("/tasks/verifier", message),))
