"""Conversations from elsewhere: turns by segments or by another library's mask, and what cannot be turns."""

from __future__ import annotations

from typing import Any

import pytest

from spo.experience.columns import StoredTrajectory, fields_of
from spo.experience.imports import ImportTerms, ProblemIndex, RowRefusal, UploadedRow, stored_row
from spo.model.chat import trained_mask, turns
from spo.tasks.problem import Problem
from spo.testing.runs import conversation
from spo.v1 import verdict_pb2
from spo.v1.prompt_pb2 import Prompt

PROBLEM = Problem("the statement", verdict_pb2.TestSet())
TERMS = ImportTerms(run="theirs", task_set="toy")
ROW = {
    "statement": PROBLEM.statement,
    "response_text": "tryno: wrongagain",
    "reward": -1.0,
    "prompt_token_ids": [1, 2],
    "response_token_ids": [3, 4, 5, 6, 7],
    "sampling_logprobs": [-0.1, -0.2, -0.7, -0.7, -0.3],
    "reference_hash": "b" * 64,
}
SEGMENTS = {
    "segment_kinds": ["action", "observation", "action"],
    "segment_tokens": [2, 2, 1],
    "segment_characters": [3, 9, 5],
}


def imported(**fields: Any) -> StoredTrajectory:
    row = {name: value for name, value in (ROW | fields).items() if value is not None}
    return stored_row(UploadedRow(1, row), ProblemIndex([PROBLEM]), TERMS)


@pytest.mark.parametrize("name", ["loss_mask", "response_mask", "completion_mask"])
@pytest.mark.parametrize("mask", [[1, 1, 0, 0, 1], [True, True, False, False, True], [1.0, 1.0, 0.0, 0.0, 1.0]])
def test_a_mask_of_any_librarys_name_says_what_is_learned_from(name: str, mask: list[Any]) -> None:
    found = imported(**{name: mask}).trajectory
    assert trained_mask(found).tolist() == [True, True, False, False, True]
    assert list(found.sampling_logprobs) == pytest.approx([-0.1, -0.2, 0, 0, -0.3]), "of observations nothing is said"


def test_a_mask_of_ones_is_a_single_turn() -> None:
    assert not imported(loss_mask=[1] * 5).trajectory.segments


def test_segments_say_also_where_the_turns_stand_in_the_text() -> None:
    found = imported(**SEGMENTS, segment_labels=["", "python", ""], segment_scores=[0.25, None, 1], reward=None)
    assert [turn.text for turn in turns(found.trajectory)] == ["try", "no: wrong", "again"]
    assert [segment.label for segment in found.trajectory.segments] == ["", "python", ""]
    assert [segment.HasField("score") for segment in found.trajectory.segments] == [True, False, True]


def test_what_the_store_exports_is_imported_with_its_turns() -> None:
    spoken = conversation(3)
    spoken.reference_hash = "b" * 64
    prompt = Prompt(
        prompt_id=PROBLEM.problem_id, text=PROBLEM.statement, environment="retry", environment_json='{"max_turns": 3}'
    )
    columns = fields_of(StoredTrajectory(spoken, prompt))
    found = stored_row(
        UploadedRow(1, {k: v for k, v in columns.items() if v is not None}), ProblemIndex([PROBLEM]), TERMS
    )
    assert found.trajectory.segments == spoken.segments
    assert (found.prompt.environment, found.prompt.environment_json) == (prompt.environment, prompt.environment_json)
    assert found.trajectory.response_token_ids == spoken.response_token_ids
    assert found.trajectory.sampling_logprobs == spoken.sampling_logprobs


@pytest.mark.parametrize(
    ("fields", "refusal"),
    [
        ({"loss_mask": [1, 0]}, ("malformed_row", "/loss_mask")),
        ({"loss_mask": [2, 1, 1, 1, 1]}, ("malformed_row", "/loss_mask/0")),
        ({"loss_mask": [0] * 5}, ("malformed_row", "/segments")),
        ({"loss_mask": [1, 1, 0, 0, 1], "reward": None}, ("missing_field", "/segment_characters")),
        ({**SEGMENTS, "loss_mask": [1, 0, 1, 1, 1]}, ("malformed_row", "/loss_mask")),
        ({**SEGMENTS, "segment_tokens": [2, 2]}, ("malformed_row", "/segment_tokens")),
        ({**SEGMENTS, "segment_tokens": [2, 2, 2]}, ("malformed_row", "/segments")),
        ({**SEGMENTS, "segment_characters": [3, 9, 6]}, ("malformed_row", "/segments")),
        ({**SEGMENTS, "segment_scores": [2, 0, 0]}, ("malformed_row", "/segment_scores/0")),
        ({**SEGMENTS, "segment_kinds": ["action", "dream", "action"]}, ("malformed_row", "/segment_kinds/1")),
        (
            {
                "loss_mask": [1, 1],
                "response_token_ids": None,
                "prompt_token_ids": None,
                "sampling_logprobs": None,
                "reference_hash": None,
            },
            ("missing_field", "/response_token_ids"),
        ),
    ],
)
def test_turns_that_do_not_fit_are_refused_by_their_field(fields: dict[str, Any], refusal: tuple[str, str]) -> None:
    with pytest.raises(RowRefusal) as refused:
        imported(**fields)
    assert (refused.value.code, refused.value.pointer) == refusal


@pytest.mark.parametrize("by", [1e-9, 1e-7, 5e-324])
def test_what_rounding_adds_to_a_row_is_taken_off(by: float) -> None:
    found = imported(reward=by, sampling_logprobs=[by, 0.0, -0.1, -by, -0.3]).trajectory
    assert found.reward == 0
    assert list(found.sampling_logprobs) == pytest.approx([0, 0, -0.1, -by, -0.3])
    assert max(found.sampling_logprobs) == 0
    scored = imported(**SEGMENTS, segment_scores=[1 + by, None, -by]).trajectory
    assert [segment.score for segment in scored.segments] == [1, 0, 0]


@pytest.mark.parametrize(
    ("fields", "pointer"),
    [({"reward": 1e-3}, "/reward"), ({"sampling_logprobs": [1e-3, 0, 0, 0, 0]}, "/sampling_logprobs/0")],
)
def test_what_is_more_than_rounding_is_refused(fields: dict[str, Any], pointer: str) -> None:
    with pytest.raises(RowRefusal) as refused:
        imported(**fields)
    assert refused.value.pointer == pointer


def test_a_statement_of_several_problems_names_none_of_them() -> None:
    other = Problem(PROBLEM.statement, verdict_pb2.TestSet(pass_score=0.5))
    problems = ProblemIndex([PROBLEM, other, PROBLEM])
    with pytest.raises(RowRefusal, match="name one by its prompt_id"):
        stored_row(UploadedRow(1, ROW), problems, TERMS)
    named = stored_row(UploadedRow(1, {**ROW, "prompt_id": other.problem_id}), problems, TERMS)
    assert named.trajectory.prompt_id == other.problem_id
