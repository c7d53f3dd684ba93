"""The record of a job: what is stored of it besides its spec, its state and its events, with types."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal, TypedDict, Unpack

from pydantic import BaseModel, ConfigDict, Field, Json

from services.orchestrator.jobs.commit import Precondition, Word, Write
from spo import redis_keys
from spo.spec.job_state import JobState

# Fields that are conditions of a commit, or that are removed again.
RecordMark = Literal[
    "checkpoint_asked",
    "resume_asked",
    "estimates_published",
    "estimates_pending",
    "pivotal_published",
    "prompts_too_long",
    "reference_asked",
    "reference_total",
    "reference_version",
    "events_in_files",
]


@dataclass(frozen=True)
class ForkLineage:
    """Where a job comes from; null: not from there."""

    parent: str
    version: int | None
    checkpoint_step: int | None
    as_reference: bool
    forked_at: str


class JobRecord(BaseModel):
    """The fields of a job's record; times are RFC 3339 UTC.

    trained_steps is set once the trainer has finished, start_version where training begins at a published version.
    reference_asked is "version:position" of the refresh under way: prompts before the position have been asked about,
    reference_total is how many there are once all have been, reference_version the version in force.
    scores: pass@k of the newest evaluation, "pass@10" by name; a copy, so that lists need not read whole evaluations.
    estimates_pending is set while a job trains beside its estimates, and gone once they are over.
    events_in_files is the last event that is in a file and no more in Redis, state_in_files the state after it.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    name: str
    labels: Json[dict[str, str]]
    created_at: str
    created_unix_ms: int
    updated_at: str = ""
    tenant: str = ""
    priority: int = 1
    prompts_total: int | None = None
    evaluation_total: int | None = None
    prompts_too_long: int = 0
    start_version: int = 0
    trained_steps: int | None = None
    checkpoint_asked: bool = False
    resume_asked: bool = False
    estimates_published: int = 0
    estimates_pending: bool = False
    pivotal_published: int = 0
    reference_asked: str = Field(default="", pattern=r"^(\d+:\d+)?$")
    reference_total: int | None = None
    reference_version: int = 0
    failure_code: str = ""
    failure_message: str = ""
    scores: Json[dict[str, float]] = Field(default_factory=dict)
    lineage: Json[ForkLineage] | None = None
    events_in_files: int = 0
    state_in_files: JobState | None = None

    @classmethod
    def from_redis(cls, fields: Mapping[bytes, bytes]) -> JobRecord:
        """The record of a hash as Redis holds it; fields of other names are left out."""
        return cls.model_validate({name.decode(): value.decode() for name, value in fields.items()})

    @property
    def is_trained(self) -> bool:
        """Whether the trainer has done all its steps."""
        return self.trained_steps is not None


class RecordFields(TypedDict, total=False):
    """What may be written into a record; `updated_at` moves with every event."""

    name: str
    labels: dict[str, str]
    created_at: str
    created_unix_ms: int
    tenant: str
    priority: int
    prompts_total: int
    evaluation_total: int
    prompts_too_long: int
    start_version: int
    trained_steps: int
    checkpoint_asked: bool
    resume_asked: bool
    estimates_published: int
    estimates_pending: bool
    pivotal_published: int
    reference_asked: str
    reference_total: int
    reference_version: int
    failure_code: str
    failure_message: str
    scores: dict[str, float]
    lineage: ForkLineage
    events_in_files: int
    state_in_files: JobState


def write_fields(job_id: str, **fields: Unpack[RecordFields]) -> Write:
    """The write that sets fields of a job's record."""
    words: list[Word] = []
    for name, value in fields.items():
        words += [name, _word(value)]
    return ("HSET", redis_keys.job_record(job_id), *words)


def clear_fields(job_id: str, *names: RecordMark) -> Write:
    """The write that removes fields of a job's record."""
    return ("HDEL", redis_keys.job_record(job_id), *names)


def while_field_is(job_id: str, name: RecordMark, value: str | int = "") -> Precondition:
    """The condition that a field of a job's record holds a value; "" and 0: that it is absent."""
    return Precondition(redis_keys.job_record(job_id), name, str(value) if value else "")


def _word(value: object) -> Word:
    if isinstance(value, ForkLineage):
        return json.dumps(asdict(value))
    if isinstance(value, dict):
        return json.dumps(value)
    if isinstance(value, bool):
        return int(value)
    assert isinstance(value, str | int)
    return value
