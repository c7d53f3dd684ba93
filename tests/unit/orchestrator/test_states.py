"""The one table of transitions."""

from __future__ import annotations

import pytest

from services.orchestrator.job_records import ACTIONS, CANCEL, TRANSITIONS, fold, may_become, refuse
from spo.errors import IntegrityError
from spo.spec.section import ACTIVE, TERMINAL, JobState


def moves(*states: str) -> list[dict[str, str | None]]:
    before = (None, *states)[: len(states)]
    return [{"from": left, "to": right} for left, right in zip(before, states, strict=True)]


def test_every_state_can_be_reached_and_every_unfinished_one_can_end() -> None:
    reached = {JobState.QUEUED}
    while True:
        further = reached | {after for before in reached for after in TRANSITIONS[before]}
        if further == reached:
            break
        reached = further

    assert reached == set(JobState)
    assert all(JobState.FAILED in TRANSITIONS[state] for state in set(JobState) - TERMINAL)


def test_the_states_that_a_job_never_leaves_are_the_terminal_ones() -> None:
    assert {state for state, following in TRANSITIONS.items() if not following} == TERMINAL


def test_what_people_may_ask_never_leaves_the_table() -> None:
    asked = [(before, after) for action in ACTIONS for before, after in action.moves.items()]

    assert asked
    assert [move for move in asked if move[1] not in TRANSITIONS[move[0]]] == []


def test_every_unfinished_job_can_be_cancelled_or_already_is() -> None:
    assert set(CANCEL.moves) | CANCEL.already >= ACTIVE | {JobState.QUEUED}


def test_the_fold_of_a_life_is_its_last_state() -> None:
    assert fold(moves("queued", "validating", "estimating", "running", "succeeded")) is JobState.SUCCEEDED


@pytest.mark.parametrize(
    "states", [(), ("running",), ("queued", "running"), ("queued", "validating", "estimating", "paused")]
)
def test_a_history_that_leaves_the_table_is_refused(states: tuple[str, ...]) -> None:
    with pytest.raises(IntegrityError):
        fold(moves(*states))


def test_a_history_with_a_gap_is_refused() -> None:
    with pytest.raises(IntegrityError):
        fold([*moves("queued", "validating"), {"from": "running", "to": "succeeded"}])


def test_the_states_before_one_are_those_the_table_says() -> None:
    assert may_become(JobState.PAUSED) == {JobState.PAUSING}


def test_a_refusal_names_what_is_legal() -> None:
    error = refuse("resume", JobState.ESTIMATING)

    assert error.code == "illegal_transition"
    assert "cancelling, failed, running" in error.message
    assert "legal actions: cancel" in error.message
