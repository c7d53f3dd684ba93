"""From `tasks.verifier` of a JobSpec to what decides about each response: which pool of judges, and how well it
agrees with people; and the verdict of a composition.

The parts of a composition are judged as what they are, and a weighted mean, gates and penalties follow. A part that
broke breaks the whole: nothing is made of the others.
"""

from __future__ import annotations

import ast
import json
import math
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import groupby
from pathlib import Path

from spo.errors import FieldViolation, InvalidInput, raise_if_storage_is_away
from spo.spec.reward import reaches, score_in_range
from spo.spec.tasks import (
    DEFAULT,
    MOST_PARTS,
    PART_NAME,
    SERVED,
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
from spo.tasks.problem import DEFAULT_LIMITS, Problem, extract_program, write_response
from spo.tasks.records import malformed
from spo.tasks.separate_tests import is_shared, reasons_to_share
from spo.v1 import verdict_pb2 as wire

SANDBOX_JUDGE = "sandbox-judge"
VERIFIER = "verifier"
# Before a run's id, where that run's pi0 judges: in the address of a model, and in the versions of what it said.
OF_RUN = "run:"
_KINDS = ("composition", "http", "model", "answer", "code_tests", "scoring_function")

MOST_SOURCE_BYTES = 64 << 10
# The faults of a file that one refusal names.
SHOWN_FAULTS = 20

BINS = 10
# A label from which people call a response right.
RIGHT = 0.5

# How the names of a script's letters begin; Japanese mixes kana with the letters of Chinese.
SCRIPTS: dict[str, tuple[str, ...]] = {
    "arabic": ("ARABIC",),
    "cjk": ("CJK",),
    "cyrillic": ("CYRILLIC",),
    "devanagari": ("DEVANAGARI",),
    "greek": ("GREEK",),
    "hangul": ("HANGUL",),
    "hebrew": ("HEBREW",),
    "kana": ("HIRAGANA", "KATAKANA", "CJK"),
    "latin": ("LATIN",),
    "thai": ("THAI",),
}
# Letters of no script, such as those of formulas.
_NEUTRAL = ("MATHEMATICAL", "DOUBLE-STRUCK", "SCRIPT", "MICRO", "MODIFIER", "FEMININE", "MASCULINE", "PLANCK", "ALEF")

MOST_WEIGHT = 1000.0

DETAIL_CHARACTERS = 500
PART_DETAIL_CHARACTERS = 200
# A scoring function may name scores of its own; more than so many are told of none.
MOST_PART_SCORES = 64
# Composed scores are equal when they differ in later digits: a sum of decimal weights is not exact.
_DIGITS = 9


def pool_of(test_set: wire.TestSet) -> str:
    """`Prompt.verifier_pool` of a problem: "verifier" where its test set asks a service or a model, else ""."""
    return VERIFIER if any(True for _ in asking(test_set)) else ""


def judges_named(pool: str) -> str:
    """The service that a `Prompt.verifier_pool` stands for."""
    return pool or SANDBOX_JUDGE


def asking(test_set: wire.TestSet) -> Iterator[wire.TestSet]:
    """What of a test set asks a service or a model: itself, or parts of its composition."""
    if test_set.HasField("http") or test_set.HasField("model"):
        yield test_set
    for part in test_set.composition.parts:
        yield from asking(part.verifier)


def own_judges(test_set: wire.TestSet) -> list[str]:
    """The policies of this platform that a test set asks, as `judge_version` names them, in the order of its parts."""
    models = [one.model for one in asking(test_set) if one.HasField("model")]
    named = [one.address if one.address.startswith(OF_RUN) else one.model for one in models if _is_own(one)]
    return list(dict.fromkeys(name for name in named if name.startswith((OF_RUN, SERVED))))


def _is_own(model: wire.ModelScore) -> bool:
    return not model.address or model.address.startswith(OF_RUN)


def kind_of(test_set: wire.TestSet) -> str:
    """What decides by a test set, by the name of its field; "program" where tests of a program do."""
    return next((name for name in _KINDS if test_set.HasField(name)), "program")  # type: ignore[arg-type]


def deciders(test_set: wire.TestSet) -> str:
    """Pool and kinds in words: "verifier: composition of http, answer"."""
    kind = kind_of(test_set).replace("_", " ")
    parts = (kind_of(part.verifier) for part in test_set.composition.parts if part.HasField("verifier"))
    inner = ", ".join(dict.fromkeys(name.replace("_", " ") for name in parts))
    return f"{judges_named(pool_of(test_set))}: {kind}{f' of {inner}' if inner else ''}"


def composed_version(*versions: str) -> str:
    """The version of a verdict that several pools have made, the composing one's first."""
    return " ".join(dict.fromkeys(version for version in versions if version))


def versions_of_today(test_set: wire.TestSet, versions: Mapping[str, str]) -> set[str]:
    """The versions that a verdict by this test set may have if today's judges made it; versions: by pool.

    Of a composition whose verifiers' gate failed the sandbox judge has seen nothing.
    """
    pool, judges = pool_of(test_set), own_judges(test_set)
    alone = composed_version(versions[pool], *judges)
    if pool == VERIFIER and test_set.HasField("composition") and "" in versions:
        return {alone, composed_version(versions[pool], versions[""], *judges)}
    return {alone}


def is_of_pool(version: str, pool_version: str) -> bool:
    """Whether a verdict's version is that of a pool, alone or with the judge of a composition's parts; what a run's
    pi0 has said is of that run, and what a served policy has said of the jobs that name it."""
    first, *others = version.split(" ")
    return first == pool_version and not any(other.startswith((OF_RUN, SERVED)) for other in others)


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


def apply_verifier(problem: Problem, verifier: ProblemVerifier | PartVerifier) -> wire.TestSet:
    """What decides about responses to a problem, under a spec's verifier.

    Raises InvalidInput: "malformed_task" names the problem that lacks what the verifier needs, "unusable_function" the
    file that holds no such function.
    """
    match verifier:
        case ProgramVerifier():
            if not problem.tests.ByteSize():
                raise malformed(problem.place or "a problem", "neither tests nor an answer, which a program needs")
            if verifier.isolation and problem.tests.HasField("code_tests") and is_shared(problem.tests.code_tests):
                reasons = reasons_to_share(problem.tests.code_tests) or ("the row says isolation: shared",)
                told = f"code_tests: they cannot be separate from a response: {'; '.join(reasons)}"
                raise malformed(problem.place or "a problem", told)
            return problem.tests
        case PythonVerifier():
            source = _source_of(verifier.path, verifier.function)
            function = wire.ScoringFunction(
                source=source, function=verifier.function, arguments_json=arguments_of(problem)
            )
            tests = wire.TestSet(scoring_function=function, limits=_limits_of(problem))
        case HttpVerifier():
            score = wire.HttpScore(
                url=verifier.url, arguments_json=arguments_of(problem), timeout_seconds=verifier.timeout_seconds
            )
            tests = wire.TestSet(http=score)
        case ModelVerifier():
            tests = wire.TestSet(model=_model_score(problem, verifier))
        case FormatVerifier():
            rule = wire.AnswerRule(
                expected=[verifier.expression],
                comparison=wire.AnswerComparison.ANSWER_COMPARISON_REGULAR_EXPRESSION,
                extraction=wire.AnswerExtraction.ANSWER_EXTRACTION_WHOLE,
            )
            return wire.TestSet(answer=rule)
        case CompositionVerifier():
            tests = wire.TestSet(composition=wire.Composition(parts=[_part(problem, part) for part in verifier.parts]))
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


def _part(problem: Problem, part: PartSpec) -> wire.Part:
    built = wire.Part(name=part.name, weight=part.weight, gate=part.gate)
    if part.verifier is not None:
        built.verifier.CopyFrom(apply_verifier(problem, part.verifier))
        if isinstance(part.verifier, ProgramVerifier) and problem.response_format == "fenced_last":
            built.response_format = problem.response_format
    elif part.length is not None:
        built.length.CopyFrom(wire.LengthPenalty(**part.length.model_dump()))
    elif part.language is not None:
        built.language.CopyFrom(wire.LanguagePenalty(script=part.language.script))
    return built


def _model_score(problem: Problem, verifier: ModelVerifier) -> wire.ModelScore:
    references = (*problem.tests.answer.expected, *problem.human_solutions)
    return wire.ModelScore(
        rubric=verifier.rubric,
        statement=problem.statement,
        address=verifier.address or "",
        model=verifier.model,
        votes=verifier.votes,
        reference=references[0] if references else "",
    )


def _limits_of(problem: Problem) -> wire.Limits:
    """Those of the problem's own tests, where it has any."""
    return problem.tests.limits if problem.tests.HasField("limits") else DEFAULT_LIMITS


def _source_of(path: str, function: str) -> str:
    try:
        facts = Path(path).stat()
        return _read(path, function, facts.st_mtime, facts.st_size)
    except (OSError, ValueError) as error:
        raise_if_storage_is_away(error, path)
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


@dataclass(frozen=True)
class ScoreBin:
    """The examples whose score lies from `low` up to the next bin, and the mean of their labels."""

    low: float
    examples: int
    mean_score: float
    mean_label: float


@dataclass(frozen=True)
class JudgeCalibration:
    """All shares are between 0 and 1; spearman and auc are None where all labels, or all scores, are alike."""

    examples: int
    agreement: float
    right_and_passed: int
    right_and_failed: int
    wrong_and_passed: int
    wrong_and_failed: int
    spearman: float | None
    auc: float | None
    mean_error: float
    bins: tuple[ScoreBin, ...]


def calibration_of(scores: Sequence[float], labels: Sequence[float], pass_score: float) -> JudgeCalibration:
    """Compare scores with labels, both between 0 and 1 and as many; at least one."""
    passed = [score >= pass_score for score in scores]
    right = [label >= RIGHT for label in labels]
    pairs = list(zip(right, passed, strict=True))
    return JudgeCalibration(
        examples=len(pairs),
        agreement=sum(one == other for one, other in pairs) / len(pairs),
        right_and_passed=pairs.count((True, True)),
        right_and_failed=pairs.count((True, False)),
        wrong_and_passed=pairs.count((False, True)),
        wrong_and_failed=pairs.count((False, False)),
        spearman=_correlation(_ranks(scores), _ranks(labels)),
        auc=_auc(scores, right),
        mean_error=sum(abs(score - label) for score, label in zip(scores, labels, strict=True)) / len(pairs),
        bins=tuple(_bins(scores, labels)),
    )


def _ranks(values: Sequence[float]) -> list[float]:
    """From 1; equal values share the mean of their ranks."""
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    before = 0
    for _, places in groupby(order, key=values.__getitem__):
        same = list(places)
        for place in same:
            ranks[place] = before + (len(same) + 1) / 2
        before += len(same)
    return ranks


def _correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    middle_first, middle_second = sum(first) / len(first), sum(second) / len(second)
    moments = [(one - middle_first, other - middle_second) for one, other in zip(first, second, strict=True)]
    spread = math.sqrt(sum(one**2 for one, _ in moments) * sum(other**2 for _, other in moments))
    return sum(one * other for one, other in moments) / spread if spread else None


def _auc(scores: Sequence[float], right: Sequence[bool]) -> float | None:
    """How often a right response scores above a wrong one, ties by half."""
    positives = sum(right)
    negatives = len(right) - positives
    if not positives or not negatives:
        return None
    above = sum(rank for rank, one in zip(_ranks(scores), right, strict=True) if one) - positives * (positives + 1) / 2
    return above / (positives * negatives)


def _bins(scores: Sequence[float], labels: Sequence[float]) -> list[ScoreBin]:
    found = []
    for number in range(BINS):
        inside = [
            pair for pair in zip(scores, labels, strict=True) if min(BINS - 1, int(pair[0] * BINS + 1e-9)) == number
        ]
        if inside:
            count = len(inside)
            means = sum(score for score, _ in inside) / count, sum(label for _, label in inside) / count
            found.append(ScoreBin(number / BINS, count, *means))
    return found


def length_penalty(penalty: wire.LengthPenalty, response: str) -> float:
    """0 up to the free characters, 1 from the most on, linear between."""
    beyond = len(response) - penalty.free_characters
    return min(1.0, max(0.0, beyond / (penalty.most_characters - penalty.free_characters)))


def language_penalty(penalty: wire.LanguagePenalty, response: str) -> float:
    """The share of the letters that are of another script; 0 without letters."""
    beginnings = SCRIPTS[penalty.script]
    names = (_name(character) for character in response if character.isalpha())
    letters = [name for name in names if not name.startswith(_NEUTRAL)]
    return sum(not name.startswith(beginnings) for name in letters) / len(letters) if letters else 0.0


@lru_cache(maxsize=4096)
def _name(character: str) -> str:
    return unicodedata.name(character, "UNNAMED").removeprefix("FULLWIDTH ").removeprefix("HALFWIDTH ")


def require_composable(test_set: wire.TestSet, require_part: Callable[[wire.TestSet], None]) -> None:
    """Raises InvalidInput naming each field by which no score follows, those of parts at their own place.

    require_part: raises InvalidInput on a part's test set that cannot be judged by.
    """
    faults = list(_faults_of_whole(test_set))
    for number, part in enumerate(test_set.composition.parts):
        at = f"/composition/parts/{number}"
        faults += [FieldViolation(f"{at}{pointer}", message) for pointer, message in _faults_of_part(part)]
        if part.HasField("verifier"):
            faults += _faults_of_verifier(f"{at}/verifier", part.verifier, require_part)
    if faults:
        raise InvalidInput("this composition makes no score", violations=tuple(faults))


def _faults_of_whole(test_set: wire.TestSet) -> Iterator[FieldViolation]:
    parts = test_set.composition.parts
    if not 0 < len(parts) <= MOST_PARTS:
        yield FieldViolation("/composition/parts", f"must be between 1 and {MOST_PARTS} parts")
    elif not any(part.weight > 0 for part in parts if part.HasField("verifier")):
        yield FieldViolation("/composition/parts", "must hold a verifier with a weight above 0")
    names = [part.name for part in parts]
    for number, name in enumerate(names):
        if name in names[:number]:
            yield FieldViolation(f"/composition/parts/{number}/name", "must not be the name of another part")


def _faults_of_part(part: wire.Part) -> Iterator[tuple[str, str]]:
    is_penalty = not part.HasField("verifier")
    most = 1.0 if is_penalty else MOST_WEIGHT
    if not re.fullmatch(PART_NAME, part.name):
        yield "/name", "must be letters, digits, _ and -, at most 64, a letter first"
    if not (math.isfinite(part.weight) and 0 <= part.weight <= most):
        yield "/weight", f"must be finite, not negative and at most {most:g}"
    if is_penalty and part.gate:
        yield "/gate", "must not be set for a penalty"
    match part.WhichOneof("kind"):
        case None:
            yield "", "must be a verifier or a penalty"
        case "length":
            if not 0 <= part.length.free_characters < part.length.most_characters:
                yield "/length/most_characters", "must be more than free_characters, which is not negative"
        case "language":
            if part.language.script not in SCRIPTS:
                yield "/language/script", f"must be one of {', '.join(SCRIPTS)}"


def _faults_of_verifier(
    at: str, verifier: wire.TestSet, require_part: Callable[[wire.TestSet], None]
) -> Iterator[FieldViolation]:
    if verifier.HasField("composition"):
        yield FieldViolation(f"{at}/composition", "must not be within another composition")
        return
    try:
        require_part(verifier)
    except InvalidInput as error:
        yield from (FieldViolation(f"{at}{fault.pointer}", fault.message) for fault in error.violations)


def composed(response: str, test_set: wire.TestSet, verdicts: Mapping[str, wire.Verdict]) -> wire.Verdict:
    """One verdict from those of the parts by name; a part that was not judged is missing."""
    sum_ = _Sum(response)
    for part in test_set.composition.parts:
        if part.HasField("verifier"):
            if part.name in verdicts:
                sum_.add_verdict(part, verdicts[part.name])
        else:
            sum_.add_penalty(part)
    return sum_.verdict(test_set.pass_score)


@dataclass
class _Sum:
    """What the parts come to, one after the other."""

    response: str
    earned: float = 0.0
    weights: float = 0.0
    taken_off: float = 0.0
    stopped: str = ""
    broken: str = ""
    failed: list[tuple[wire.Outcome.ValueType, str]] = field(default_factory=list)
    whole: wire.Verdict = field(default_factory=lambda: wire.Verdict(runs=1, cached=True))

    def add_verdict(self, part: wire.Part, verdict: wire.Verdict) -> None:
        """A verifier's part."""
        score = score_of(verdict)
        if score is None:
            reason = verdict.detail or "it has no score between 0 and 1"
            self.broken = self.broken or f"part {part.name}: {reason}"
            return
        right = verdict.outcome == wire.Outcome.OUTCOME_ACCEPTED
        if not right:
            self.failed.append((verdict.outcome, f"{part.name}: {verdict.detail}"))
        if part.gate and not right:
            self.stopped = self.stopped or f"gate {part.name}: {verdict.detail}"
        if verdict.outcome == wire.Outcome.OUTCOME_SECURITY_VIOLATION:
            self.stopped = f"{part.name}: {verdict.detail}"
        self.earned += part.weight * score
        self.weights += part.weight
        self._note(part.name, score, verdict.detail)
        for inner in verdict.parts:
            self._note(f"{part.name}.{inner.name}", inner.score, inner.detail)
        self._count(verdict)

    def add_penalty(self, part: wire.Part) -> None:
        """A penalty's part."""
        if part.HasField("length"):
            share, detail = length_penalty(part.length, self.response), f"{len(self.response)} characters"
        else:
            share, detail = (
                language_penalty(part.language, self.response),
                f"letters that are not {part.language.script}",
            )
        self.taken_off += part.weight * share
        self._note(part.name, part.weight * share, detail)

    def verdict(self, pass_score: float) -> wire.Verdict:
        """The verdict on all of them."""
        if self.broken:
            return wire.Verdict(
                outcome=wire.Outcome.OUTCOME_INTERNAL_ERROR, detail=self.broken[:DETAIL_CHARACTERS], runs=1
            )
        whole = self.whole
        mean = self.earned / self.weights if self.weights else 0.0
        whole.score = 0.0 if self.stopped else round(min(1.0, max(0.0, mean - self.taken_off)), _DIGITS)
        if reaches(whole.score, pass_score):
            whole.outcome = wire.Outcome.OUTCOME_ACCEPTED
            return whole
        whole.outcome, detail = self._first_failure()
        whole.detail = (self.stopped or detail)[:DETAIL_CHARACTERS]
        return whole

    def _first_failure(self) -> tuple[wire.Outcome.ValueType, str]:
        """A violation goes before all else; then the order of the parts decides."""
        if not self.failed:
            return wire.Outcome.OUTCOME_WRONG_ANSWER, "the score is too low: see its parts"
        violations = [one for one in self.failed if one[0] == wire.Outcome.OUTCOME_SECURITY_VIOLATION]
        return (violations or self.failed)[0]

    def _note(self, name: str, score: float, detail: str) -> None:
        if len(self.whole.parts) < MOST_PART_SCORES:
            self.whole.parts.append(wire.PartScore(name=name, score=score, detail=detail[:PART_DETAIL_CHARACTERS]))

    def _count(self, verdict: wire.Verdict) -> None:
        whole = self.whole
        for counted in ("tests_passed", "tests_total", "public_tests_passed", "public_tests_total"):
            setattr(whole, counted, getattr(whole, counted) + getattr(verdict, counted))
        whole.cpu_seconds += verdict.cpu_seconds
        whole.wall_seconds += verdict.wall_seconds
        whole.memory_bytes = max(whole.memory_bytes, verdict.memory_bytes)
        whole.runs = max(whole.runs, verdict.runs)
        whole.differing_runs = max(whole.differing_runs, verdict.differing_runs)
        whole.suspected_hard_coded |= verdict.suspected_hard_coded
        whole.cached &= verdict.cached
        whole.judge_version = whole.judge_version or verdict.judge_version
        whole.isolation = whole.isolation or verdict.isolation
        # The least apart of all parts.
        whole.test_isolation = max(whole.test_isolation, verdict.test_isolation)
        whole.tests.extend(verdict.tests)


def score_of(verdict: wire.Verdict) -> float | None:
    """A part's score, 1 or 0 where it only knows right and wrong; None where it decides nothing."""
    if verdict.outcome in (wire.Outcome.OUTCOME_UNSPECIFIED, wire.Outcome.OUTCOME_INTERNAL_ERROR):
        return None
    if not verdict.HasField("score"):
        return float(verdict.outcome == wire.Outcome.OUTCOME_ACCEPTED)
    return score_in_range(verdict.score)


def text_for(part: wire.Part, response: str, language: str) -> str:
    """What a part is shown: programs in `language` are cut out of the response, all else sees the whole of it."""
    is_program = bool(part.verifier.tests) or part.verifier.HasField("code_tests")
    return extract_program(response, part.response_format or "fenced", language) if is_program else response


def gate_has_failed(composition: wire.Composition, verdicts: Mapping[str, wire.Verdict]) -> bool:
    """Whether one of these verdicts, by name of part, is of a gate that failed, so that no other part matters."""
    known = (verdicts[part.name] for part in composition.parts if part.gate and part.name in verdicts)
    return any(score_of(verdict) is not None and verdict.outcome != wire.Outcome.OUTCOME_ACCEPTED for verdict in known)
