"""Compositions: the score that follows from parts, and what composes none."""

from __future__ import annotations

import math
from typing import Any

import pytest

from spo.errors import InvalidInput
from spo.spec.tasks import Script
from spo.tasks.verifier import (
    SCRIPTS,
    composed,
    gate_has_failed,
    language_penalty,
    length_penalty,
    require_composable,
    text_for,
)
from spo.v1 import verdict_pb2
from spo.v1.verdict_pb2 import (
    AnswerRule,
    Composition,
    LanguagePenalty,
    LengthPenalty,
    Outcome,
    Part,
    PartScore,
    Verdict,
)

RIGHT = Verdict(outcome=Outcome.OUTCOME_ACCEPTED, tests_passed=1, tests_total=1)
WRONG = Verdict(outcome=Outcome.OUTCOME_WRONG_ANSWER, detail="expected 3", tests_total=1)
VERIFIER = verdict_pb2.TestSet(answer=AnswerRule(expected=["3"], comparison=1, extraction=1))


def part(name: str, weight: float = 1.0, *, gate: bool = False, **kind: Any) -> Part:
    return Part(name=name, weight=weight, gate=gate, **(kind or {"verifier": VERIFIER}))


BLOCKS = "First:\n```python\nprint(1)\n```\nBetter:\n```python\nprint(2)\n```\n"


@pytest.mark.parametrize(
    ("response_format", "verifier", "shown"),
    [
        ("", verdict_pb2.TestSet(tests=[{"stdin": b""}]), "print(1)\n"),
        ("fenced_last", verdict_pb2.TestSet(tests=[{"stdin": b""}]), "print(2)\n"),
        ("fenced_last", verdict_pb2.TestSet(code_tests={"code": "assert f"}), "print(2)\n"),
        ("fenced_last", VERIFIER, BLOCKS),
    ],
)
def test_a_part_with_tests_is_shown_the_block_that_the_rows_format_names(
    response_format: str, verifier: verdict_pb2.TestSet, shown: str
) -> None:
    built = Part(name="right", weight=1, verifier=verifier, response_format=response_format)
    assert text_for(built, BLOCKS, "python") == shown


def scored(score: float, *, right: bool = False, **fields: Any) -> Verdict:
    outcome = Outcome.OUTCOME_ACCEPTED if right else Outcome.OUTCOME_WRONG_ANSWER
    return Verdict(outcome=outcome, score=score, **fields)


def whole(parts: list[Part], verdicts: dict[str, Verdict], response: str = "three", pass_score: float = 0) -> Verdict:
    return composed(
        response, verdict_pb2.TestSet(composition=Composition(parts=parts), pass_score=pass_score), verdicts
    )


@pytest.mark.parametrize(
    ("parts", "verdicts", "score", "outcome"),
    [
        ([part("a")], {"a": RIGHT}, 1.0, "ACCEPTED"),
        ([part("a", 3), part("b")], {"a": RIGHT, "b": WRONG}, 0.75, "WRONG_ANSWER"),
        ([part("a", 0.1), part("b", 0.2)], {"a": RIGHT, "b": RIGHT}, 1.0, "ACCEPTED"),
        ([part("a"), part("b")], {"a": scored(0.5), "b": scored(0.25)}, 0.375, "WRONG_ANSWER"),
        ([part("a", gate=True), part("b")], {"a": WRONG, "b": RIGHT}, 0.0, "WRONG_ANSWER"),
        ([part("a", 0, gate=True), part("b")], {"a": RIGHT, "b": scored(0.5)}, 0.5, "WRONG_ANSWER"),
        ([part("a", 0, gate=True), part("b")], {"a": WRONG}, 0.0, "WRONG_ANSWER"),
        ([part("a"), part("c", 0.5, length=LengthPenalty(most_characters=10))], {"a": RIGHT}, 0.75, "WRONG_ANSWER"),
        ([part("a"), part("c", 1, length=LengthPenalty(most_characters=10))], {"a": WRONG}, 0.0, "WRONG_ANSWER"),
        ([part("a"), part("c", 1, language=LanguagePenalty(script="latin"))], {"a": RIGHT}, 1.0, "ACCEPTED"),
        (
            [part("a"), part("b", 99)],
            {"a": Verdict(outcome=Outcome.OUTCOME_SECURITY_VIOLATION), "b": RIGHT},
            0.0,
            "SECURITY_VIOLATION",
        ),
        (
            [part("a"), part("b")],
            {"a": RIGHT, "b": Verdict(outcome=Outcome.OUTCOME_RUNTIME_ERROR)},
            0.5,
            "RUNTIME_ERROR",
        ),
    ],
)
def test_scores_follow_from_weights_gates_and_penalties(
    parts: list[Part], verdicts: dict[str, Verdict], score: float, outcome: str
) -> None:
    verdict = whole(parts, verdicts)
    assert verdict.score == pytest.approx(score, abs=1e-12)
    assert Outcome.Name(verdict.outcome) == f"OUTCOME_{outcome}"


def test_a_response_is_right_from_the_pass_score_on() -> None:
    parts, verdicts = [part("a", 3), part("b")], {"a": RIGHT, "b": WRONG}
    assert whole(parts, verdicts, pass_score=0.75).outcome == Outcome.OUTCOME_ACCEPTED
    assert whole(parts, verdicts, pass_score=0.76).outcome == Outcome.OUTCOME_WRONG_ANSWER


def test_parts_and_their_own_parts_are_told_with_reasons() -> None:
    inner = scored(0.5, right=True, detail="half", parts=[PartScore(name="rhyme", score=0.25, detail="weak")])
    length = part("short", 0.5, length=LengthPenalty(free_characters=0, most_characters=10))
    verdict = whole([part("right", gate=True), part("style"), length], {"right": WRONG, "style": inner})
    told = [(one.name, one.score, one.detail) for one in verdict.parts]
    assert told == [
        ("right", 0.0, "expected 3"),
        ("style", 0.5, "half"),
        ("style.rhyme", 0.25, "weak"),
        ("short", 0.25, "5 characters"),
    ]
    assert verdict.detail == "gate right: expected 3"
    assert (verdict.tests_passed, verdict.tests_total) == (0, 1)


@pytest.mark.parametrize(
    "broken",
    [
        Verdict(outcome=Outcome.OUTCOME_INTERNAL_ERROR, detail="it threw"),
        Verdict(),
        scored(math.nan, right=True),
        scored(math.inf, right=True),
        scored(1.5, right=True),
        scored(-0.5),
    ],
)
def test_a_part_that_broke_breaks_the_whole_and_is_no_zero(broken: Verdict) -> None:
    verdict = whole([part("a"), part("b", 0)], {"a": RIGHT, "b": broken})
    assert verdict.outcome == Outcome.OUTCOME_INTERNAL_ERROR
    assert verdict.detail.startswith("part b: ")
    assert not verdict.HasField("score")
    assert not gate_has_failed(Composition(parts=[part("b", gate=True)]), {"b": broken})


def test_length_is_linear_between_its_ends() -> None:
    penalty = LengthPenalty(free_characters=10, most_characters=20)
    assert [length_penalty(penalty, "x" * n) for n in (0, 10, 15, 20, 10**6)] == [0, 0, 0.5, 1, 1]


@pytest.mark.parametrize(
    ("script", "response", "share"),
    [
        ("latin", "Hello, world: 12 + 3!", 0.0),
        ("latin", "Größe, naïve, Łódź", 0.0),
        ("latin", "", 0.0),
        ("latin", "123 + 456", 0.0),
        ("latin", "abcд", 0.25),
        ("cyrillic", "Привет", 0.0),
        ("cjk", "你好 ok", 0.5),
        ("kana", "こんにちは世界", 0.0),
        ("hangul", "안녕", 0.0),
        ("greek", "αβγδ", 0.0),
        ("latin", "\U0001d465 + \U0001d49a = \xb5", 0.0),
        ("arabic", "مرحبا", 0.0),
        ("latin", "\uff21\uff22", 0.0),
    ],
)
def test_the_share_of_letters_of_another_script(script: str, response: str, share: float) -> None:
    assert language_penalty(LanguagePenalty(script=script), response) == share


def test_the_spec_names_the_scripts_that_are_known() -> None:
    assert set(Script.__args__) == set(SCRIPTS)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("parts", "pointer"),
    [
        ([], "parts"),
        ([part("a", 0)], "parts"),
        ([part("c", 1, length=LengthPenalty(most_characters=1))], "parts"),
        ([part("a"), part("a")], "parts/1/name"),
        ([part("")], "parts/0/name"),
        ([part("a.b")], "parts/0/name"),
        ([part("a", math.nan)], "parts/0/weight"),
        ([part("a", math.inf)], "parts/0/weight"),
        ([part("a"), part("b", -1)], "parts/1/weight"),
        ([part("a"), Part(name="b", weight=1)], "parts/1"),
        ([part("a"), part("c", 2, length=LengthPenalty(most_characters=1))], "parts/1/weight"),
        ([part("a"), part("c", gate=True, length=LengthPenalty(most_characters=1))], "parts/1/gate"),
        (
            [part("a"), part("c", length=LengthPenalty(free_characters=2, most_characters=2))],
            "parts/1/length/most_characters",
        ),
        ([part("a"), part("c", language=LanguagePenalty(script="runes"))], "parts/1/language/script"),
        ([part("a", verifier=verdict_pb2.TestSet(composition=Composition()))], "parts/0/verifier/composition"),
        ([part(f"p{n}") for n in range(17)], "parts"),
    ],
)
def test_what_composes_no_score_is_refused_at_its_place(parts: list[Part], pointer: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        require_composable(verdict_pb2.TestSet(composition=Composition(parts=parts)), lambda test_set: None)
    assert f"/composition/{pointer}" in [fault.pointer for fault in refused.value.violations]
