"""Which tokens of a conversation are learned from, and which segments are refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from spo.model.chat import reasoning_characters, segment_faults, segments_of_mask, trained_mask, trained_tokens, turns
from spo.testing.runs import conversation, trajectory
from spo.v1.trajectory_pb2 import SEGMENT_KIND_ACTION, SEGMENT_KIND_OBSERVATION, Segment, Trajectory


def action(tokens: int = 1, **given: float) -> Segment:
    return Segment(kind=SEGMENT_KIND_ACTION, tokens=tokens, **given)  # type: ignore[arg-type]


def test_a_response_without_segments_is_one_action() -> None:
    single = trajectory(1)
    assert trained_mask(single).tolist() == [True] * 3
    assert (trained_tokens(single), turns(single)) == (3, [])
    assert reasoning_characters(single, lambda text, after: len(text) + after) == len(single.response_text)
    assert segment_faults(single.segments, 3, len(single.response_text)) == []


def test_a_conversation_is_learned_from_at_its_actions() -> None:
    spoken = conversation(1)
    assert trained_mask(spoken).tolist() == [True, True, False, False, True, True]
    assert trained_tokens(spoken) == 4
    said = [(turn.is_action, turn.text, turn.first, turn.end) for turn in turns(spoken)]
    assert said == [(True, "try(1)", 0, 2), (False, "no: wrong", 2, 4), (True, "print(1)", 4, 6)]
    asked = reasoning_characters(spoken, lambda text, after: 10 * after if text == "print(1)" else -1)
    assert asked == len("try(1)no: wrong") + 40, "of the last action, which begins after four tokens"
    assert reasoning_characters(spoken, lambda text, after: 0) == 0
    assert segment_faults(spoken.segments, 6, len(spoken.response_text)) == []


@given(st.lists(st.booleans(), min_size=1, max_size=40))
def test_a_mask_and_its_segments_say_the_same(mask: list[bool]) -> None:
    made = Trajectory(response_token_ids=range(len(mask)), segments=segments_of_mask(mask))
    assert np.array_equal(trained_mask(made), mask)
    assert trained_tokens(made) == sum(mask)
    assert bool(segment_faults(made.segments, len(mask), None)) == (not any(mask))


@pytest.mark.parametrize(
    ("segments", "pointer"),
    [
        ([Segment(tokens=2, characters=2)], "/segments/0/kind"),
        ([Segment(kind=7, tokens=2, characters=2)], "/segments/0/kind"),  # type: ignore[arg-type]
        ([action(3, characters=2), action(-1)], "/segments/1/tokens"),
        ([action(2, characters=3), action(0, characters=-1)], "/segments/1/characters"),
        ([action(2, characters=2, score=1.5)], "/segments/0/score"),
        ([action(2, characters=2, score=math.nan)], "/segments/0/score"),
        ([action(1, characters=2)], "/segments"),
        ([action(2, characters=1)], "/segments"),
        ([Segment(kind=SEGMENT_KIND_OBSERVATION, tokens=2, characters=2)], "/segments"),
        ([action(0), Segment(kind=SEGMENT_KIND_OBSERVATION, tokens=2, characters=2)], "/segments"),
    ],
)
def test_segments_that_cannot_be_a_responses_are_told_by_their_place(segments: list[Segment], pointer: str) -> None:
    assert pointer in dict(segment_faults(segments, 2, 2))
