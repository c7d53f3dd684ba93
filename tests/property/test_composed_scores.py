"""Scores that are means and weighted sums: rounding takes none of them out of the range, and nothing else is let in."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given, settings, strategies as st

from services.sandbox_judge.jail import scores_child
from services.verifier.http_scorer import BadAnswer, number_in, scored
from spo.errors import InvalidInput
from spo.spec.reward import reward_of, score_in_range
from spo.spec.tasks import RewardSpec
from spo.tasks.verifier import composed
from spo.v1 import verdict_pb2
from spo.v1.verdict_pb2 import Composition, LengthPenalty, Outcome, Part, Verdict

thorough = settings(max_examples=400, deadline=None)
units = st.floats(0, 1)
# Above 0, as one of a composition's weights must be.
weights = st.floats(0.001, 1000)
weighed = st.lists(st.tuples(weights, units), min_size=1, max_size=12)
NORMALISED = [(0.7, 1.0), (0.2, 1.0), (0.1, 1.0), (0.3, 1.0), (0.6, 1.0)]


def mean_as_people_write_it(parts: list[tuple[float, float]]) -> float:
    """A weighted mean whose weights are normalised first: it may lie above 1 by rounding."""
    total = sum(weight for weight, _ in parts)
    found = 0.0
    for weight, score in parts:
        found += weight / total * score
    return found


def verdict_of(score: float) -> Verdict:
    outcome = Outcome.OUTCOME_ACCEPTED if score >= 1 else Outcome.OUTCOME_WRONG_ANSWER
    return Verdict(outcome=outcome, score=score, runs=1)


@thorough
@given(parts=weighed)
@example(parts=NORMALISED)
def test_a_weighted_mean_of_scores_is_a_score_to_everybody_who_checks_one(parts: list[tuple[float, float]]) -> None:
    mean = mean_as_people_write_it(parts)
    clamped = score_in_range(mean)

    assert clamped is not None
    assert 0 <= clamped <= 1
    assert math.isclose(clamped, mean, abs_tol=1e-9)
    assert number_in(mean, "the service's score") == clamped
    assert scored({"mean": mean, "best": 1.0}, "the service", 1.0).outcome != Outcome.OUTCOME_INTERNAL_ERROR
    assert scores_child._checked(mean) == (clamped, {})
    assert -1 <= reward_of(verdict_of(mean), RewardSpec()) <= 0


@thorough
@given(parts=weighed, penalty=st.none() | units, response=st.text(max_size=20), pass_score=units)
def test_a_composition_of_parts_in_range_never_faults(
    parts: list[tuple[float, float]], penalty: float | None, response: str, pass_score: float
) -> None:
    made = [
        Part(name=f"p{number}", weight=weight, verifier=verdict_pb2.TestSet())
        for number, (weight, _) in enumerate(parts)
    ]
    if penalty is not None:
        made.append(Part(name="length", weight=penalty, length=LengthPenalty(free_characters=3, most_characters=9)))
    # The last part is itself such a mean, as a person's function may compute it.
    scores = [score for _, score in parts[:-1]] + [mean_as_people_write_it(parts)]
    verdicts = {f"p{number}": verdict_of(score) for number, score in enumerate(scores)}
    test_set = verdict_pb2.TestSet(composition=Composition(parts=made), pass_score=pass_score)

    whole = composed(response, test_set, verdicts)

    assert whole.outcome in (Outcome.OUTCOME_ACCEPTED, Outcome.OUTCOME_WRONG_ANSWER), whole.detail
    assert 0 <= whole.score <= 1
    assert all(0 <= part.score <= 1 for part in whole.parts)
    assert -1 <= reward_of(whole, RewardSpec()) <= 0


@thorough
@given(score=st.floats(max_value=-1e-8) | st.floats(min_value=1 + 1e-8) | st.just(math.nan))
def test_what_lies_beyond_rounding_stays_an_error_with_its_name(score: float) -> None:
    assert score_in_range(score) is None
    with pytest.raises(BadAnswer, match=r"scores\[0\] is .* not between 0 and 1"):
        number_in(score, "scores[0]")
    with pytest.raises(ValueError, match="not a number between 0 and 1"):
        scores_child._checked(score)
    with pytest.raises(InvalidInput, match="not between 0 and 1"):
        reward_of(verdict_of(score), RewardSpec())
    broken = composed(
        "x",
        verdict_pb2.TestSet(composition=Composition(parts=[Part(name="p", weight=1, verifier=verdict_pb2.TestSet())])),
        {"p": verdict_of(score)},
    )
    assert broken.outcome == Outcome.OUTCOME_INTERNAL_ERROR
