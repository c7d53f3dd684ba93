"""The record of a job: what is written is what is read, under names that both know."""

from __future__ import annotations

from typing import get_args

import pytest

from services.orchestrator.job_records import (
    ForkLineage,
    JobRecord,
    RecordFields,
    RecordMark,
    clear_fields,
    while_field_is,
    write_fields,
)
from spo.errors import IntegrityError
from spo.spec.section import JobState

FIRST: RecordFields = {
    "name": "a job",
    "labels": {"team": "red"},
    "created_at": "2026-01-31T12:00:00.000Z",
    "created_unix_ms": 1_769_860_800_000,
}


def stored(*fields: RecordFields) -> dict[bytes, bytes]:
    """The hash after these writes."""
    found: dict[bytes, bytes] = {}
    for written in fields:
        _, _, *words = write_fields("job_1", **written)
        encoded = [str(word).encode() for word in words]
        found |= dict(zip(encoded[::2], encoded[1::2], strict=True))
    return found


def test_every_field_is_read_as_it_was_written() -> None:
    further: RecordFields = {
        "tenant": "red",
        "priority": 7,
        "prompts_total": 160,
        "evaluation_total": 80,
        "start_version": 1,
        "trained_steps": 20,
        "checkpoint_asked": True,
        "resume_asked": True,
        "estimates_published": 128,
        "estimates_pending": True,
        "pivotal_published": 64,
        "reference_asked": "2:128",
        "reference_total": 160,
        "reference_version": 2,
        "failure_code": "internal",
        "failure_message": "it broke",
        "scores": {"pass@10": 0.5},
        "prompts_too_long": 3,
        "events_in_files": 1000,
        "state_in_files": JobState.RUNNING,
        "published_again": True,
        "lineage": ForkLineage("job_0", 3, None, as_reference=False, forked_at="2026-01-31T12:00:00.000Z"),
    }

    record = JobRecord.from_redis(stored(FIRST, further))

    assert record.model_dump(exclude={"updated_at", "lineage"}) == {
        name: value for name, value in (FIRST | further).items() if name != "lineage"
    }
    assert record.lineage == further["lineage"]
    assert set(RecordFields.__annotations__) == set(FIRST | further)


def test_what_may_be_written_is_what_is_read() -> None:
    assert set(RecordFields.__annotations__) | {"updated_at"} == set(JobRecord.model_fields)
    assert set(get_args(RecordMark)) < set(JobRecord.model_fields)


def test_a_new_record_says_that_nothing_has_happened_yet() -> None:
    record = JobRecord.from_redis(stored(FIRST))

    assert not record.is_trained
    assert (record.tenant, record.priority, record.reference_version, record.lineage) == ("", 1, 0, None)


def test_zero_steps_trained_are_trained() -> None:
    assert JobRecord.from_redis(stored(FIRST, {"trained_steps": 0})).is_trained


def test_a_field_of_the_wrong_type_is_refused() -> None:
    with pytest.raises(IntegrityError, match="trained_steps"):
        JobRecord.from_redis(stored(FIRST) | {b"trained_steps": b"many"})


def test_a_condition_on_an_absent_field_is_the_empty_value() -> None:
    assert [while_field_is("job_1", "estimates_published", value).value for value in (0, 128, "")] == ["", "128", ""]


def test_fields_are_removed_by_name() -> None:
    command, _, *names = clear_fields("job_1", "resume_asked", "checkpoint_asked")

    assert (command, names) == ("HDEL", ["resume_asked", "checkpoint_asked"])
