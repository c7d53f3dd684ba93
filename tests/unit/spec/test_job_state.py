"""One enum of job states for all services, with the sets that they ask for."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from spo.spec.section import ACTIVE, ESTIMATED, HOLDS_SLOT, TERMINAL, WANTED, JobState, decode_state

ROOT = Path(__file__).parents[3]
STATES = {state.value.encode() for state in JobState}


def test_a_job_is_queued_active_or_ended() -> None:
    assert {JobState.QUEUED} | ACTIVE | TERMINAL == set(JobState)
    assert not ACTIVE & TERMINAL


def test_the_sets_of_states_contain_each_other() -> None:
    assert ESTIMATED < WANTED < ACTIVE
    assert HOLDS_SLOT < ACTIVE


@pytest.mark.parametrize("state", list(JobState))
def test_a_state_is_read_as_it_was_written(state: JobState) -> None:
    assert decode_state(state.encode()) is state


def test_an_absent_state_is_none() -> None:
    assert decode_state(None) is None


def test_no_service_spells_a_state_in_bytes() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for folder in ("spo", "services")
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, bytes) and node.value in STATES
    ]

    assert found == []
