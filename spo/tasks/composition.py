"""Compositions: what one must be, and the verdict that follows from its parts, their weights, gates and penalties.

The verdict of a composition: its parts are judged as what they are, and a weighted mean, gates and penalties follow.
A part that broke breaks the whole: nothing is made of the others.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from spo.errors import FieldViolation, InvalidInput
from spo.spec.reward import reaches, score_in_range
from spo.spec.tasks import MOST_PARTS, PART_NAME
from spo.tasks.problem import extract_program
from spo.v1.verdict_pb2 import Composition, LanguagePenalty, LengthPenalty, Outcome, Part, PartScore, TestSet, Verdict

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


def length_penalty(penalty: LengthPenalty, response: str) -> float:
    """0 up to the free characters, 1 from the most on, linear between."""
    beyond = len(response) - penalty.free_characters
    return min(1.0, max(0.0, beyond / (penalty.most_characters - penalty.free_characters)))


def language_penalty(penalty: LanguagePenalty, response: str) -> float:
    """The share of the letters that are of another script; 0 without letters."""
    beginnings = SCRIPTS[penalty.script]
    names = (_name(character) for character in response if character.isalpha())
    letters = [name for name in names if not name.startswith(_NEUTRAL)]
    return sum(not name.startswith(beginnings) for name in letters) / len(letters) if letters else 0.0


@lru_cache(maxsize=4096)
def _name(character: str) -> str:
    return unicodedata.name(character, "UNNAMED").removeprefix("FULLWIDTH ").removeprefix("HALFWIDTH ")


def require_composable(test_set: TestSet, require_part: Callable[[TestSet], None]) -> None:
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


def _faults_of_whole(test_set: TestSet) -> Iterator[FieldViolation]:
    parts = test_set.composition.parts
    if not 0 < len(parts) <= MOST_PARTS:
        yield FieldViolation("/composition/parts", f"must be between 1 and {MOST_PARTS} parts")
    elif not any(part.weight > 0 for part in parts if part.HasField("verifier")):
        yield FieldViolation("/composition/parts", "must hold a verifier with a weight above 0")
    names = [part.name for part in parts]
    for number, name in enumerate(names):
        if name in names[:number]:
            yield FieldViolation(f"/composition/parts/{number}/name", "must not be the name of another part")


def _faults_of_part(part: Part) -> Iterator[tuple[str, str]]:
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
    at: str, verifier: TestSet, require_part: Callable[[TestSet], None]
) -> Iterator[FieldViolation]:
    if verifier.HasField("composition"):
        yield FieldViolation(f"{at}/composition", "must not be within another composition")
        return
    try:
        require_part(verifier)
    except InvalidInput as error:
        yield from (FieldViolation(f"{at}{fault.pointer}", fault.message) for fault in error.violations)


def composed(response: str, test_set: TestSet, verdicts: Mapping[str, Verdict]) -> Verdict:
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
    failed: list[tuple[Outcome.ValueType, str]] = field(default_factory=list)
    whole: Verdict = field(default_factory=lambda: Verdict(runs=1, cached=True))

    def add_verdict(self, part: Part, verdict: Verdict) -> None:
        """A verifier's part."""
        score = score_of(verdict)
        if score is None:
            reason = verdict.detail or "it has no score between 0 and 1"
            self.broken = self.broken or f"part {part.name}: {reason}"
            return
        right = verdict.outcome == Outcome.OUTCOME_ACCEPTED
        if not right:
            self.failed.append((verdict.outcome, f"{part.name}: {verdict.detail}"))
        if part.gate and not right:
            self.stopped = self.stopped or f"gate {part.name}: {verdict.detail}"
        if verdict.outcome == Outcome.OUTCOME_SECURITY_VIOLATION:
            self.stopped = f"{part.name}: {verdict.detail}"
        self.earned += part.weight * score
        self.weights += part.weight
        self._note(part.name, score, verdict.detail)
        for inner in verdict.parts:
            self._note(f"{part.name}.{inner.name}", inner.score, inner.detail)
        self._count(verdict)

    def add_penalty(self, part: Part) -> None:
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

    def verdict(self, pass_score: float) -> Verdict:
        """The verdict on all of them."""
        if self.broken:
            return Verdict(outcome=Outcome.OUTCOME_INTERNAL_ERROR, detail=self.broken[:DETAIL_CHARACTERS], runs=1)
        whole = self.whole
        mean = self.earned / self.weights if self.weights else 0.0
        whole.score = 0.0 if self.stopped else round(min(1.0, max(0.0, mean - self.taken_off)), _DIGITS)
        if reaches(whole.score, pass_score):
            whole.outcome = Outcome.OUTCOME_ACCEPTED
            return whole
        whole.outcome, detail = self._first_failure()
        whole.detail = (self.stopped or detail)[:DETAIL_CHARACTERS]
        return whole

    def _first_failure(self) -> tuple[Outcome.ValueType, str]:
        """A violation goes before all else; then the order of the parts decides."""
        if not self.failed:
            return Outcome.OUTCOME_WRONG_ANSWER, "the score is too low: see its parts"
        violations = [one for one in self.failed if one[0] == Outcome.OUTCOME_SECURITY_VIOLATION]
        return (violations or self.failed)[0]

    def _note(self, name: str, score: float, detail: str) -> None:
        if len(self.whole.parts) < MOST_PART_SCORES:
            self.whole.parts.append(PartScore(name=name, score=score, detail=detail[:PART_DETAIL_CHARACTERS]))

    def _count(self, verdict: Verdict) -> None:
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


def score_of(verdict: Verdict) -> float | None:
    """A part's score, 1 or 0 where it only knows right and wrong; None where it decides nothing."""
    if verdict.outcome in (Outcome.OUTCOME_UNSPECIFIED, Outcome.OUTCOME_INTERNAL_ERROR):
        return None
    if not verdict.HasField("score"):
        return float(verdict.outcome == Outcome.OUTCOME_ACCEPTED)
    return score_in_range(verdict.score)


def text_for(part: Part, response: str, language: str) -> str:
    """What a part is shown: programs in `language` are cut out of the response, all else sees the whole of it."""
    is_program = bool(part.verifier.tests) or part.verifier.HasField("code_tests")
    return extract_program(response, part.response_format or "fenced", language) if is_program else response


def gate_has_failed(composition: Composition, verdicts: Mapping[str, Verdict]) -> bool:
    """Whether one of these verdicts, by name of part, is of a gate that failed, so that no other part matters."""
    known = (verdicts[part.name] for part in composition.parts if part.gate and part.name in verdicts)
    return any(score_of(verdict) is not None and verdict.outcome != Outcome.OUTCOME_ACCEPTED for verdict in known)
