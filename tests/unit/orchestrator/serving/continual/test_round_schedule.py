"""When a round of a continual job is due."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest
from pydantic import ValidationError

from services.orchestrator.continual import ContinualSpec, RoundSchedule

NOON = datetime(2026, 3, 4, 12, 0, tzinfo=UTC)


def test_a_daily_round_comes_at_the_next_such_time() -> None:
    assert RoundSchedule(daily_at="02:30").next_at(NOON) == datetime(2026, 3, 5, 2, 30, tzinfo=UTC)
    assert RoundSchedule(daily_at="18:00").next_at(NOON) == datetime(2026, 3, 4, 18, 0, tzinfo=UTC)
    # Exactly then it has begun already.
    assert RoundSchedule(daily_at="12:00").next_at(NOON) == NOON + timedelta(days=1)


def test_the_time_of_day_is_utc_wherever_the_last_round_was_noted() -> None:
    elsewhere = NOON.astimezone(timezone(timedelta(hours=9)))

    assert RoundSchedule(daily_at="18:00").next_at(elsewhere) == datetime(2026, 3, 4, 18, 0, tzinfo=UTC)


def test_hours_count_from_the_last_round_and_without_a_clock_only_experience_counts() -> None:
    assert RoundSchedule(every_hours=1.5).next_at(NOON) == NOON + timedelta(minutes=90)
    assert RoundSchedule().next_at(NOON) == NOON


def test_two_clocks_are_refused() -> None:
    with pytest.raises(ValidationError, match="not both"):
        RoundSchedule(daily_at="02:30", every_hours=2)


@pytest.mark.parametrize("time", ["24:00", "2:30", "12:60", "noon"])
def test_a_time_that_is_none_is_refused(time: str) -> None:
    with pytest.raises(ValidationError):
        RoundSchedule(daily_at=time)


def test_a_round_learns_from_the_named_experience_unless_its_overrides_say_otherwise() -> None:
    spec = ContinualSpec(serves="helper", experience=("traffic",), overrides={"trainer": {"steps": 9}})
    assert spec.round_overrides("nightly", 3) == {
        "name": "nightly round 3",
        "trainer": {"steps": 9},
        "offline": {"experience": [{"run": "traffic"}]},
    }

    said = {"offline": {"experience": [{"run": "traffic", "per_prompt": 4}], "decontaminate": True}}
    spec = ContinualSpec(serves="helper", experience=("traffic",), overrides=said)
    assert spec.round_overrides("nightly", 1)["offline"] == said["offline"]

    assert ContinualSpec(serves="helper").round_overrides("nightly", 1)["offline"] == {"experience": [{}]}
