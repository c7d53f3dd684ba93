"""What the API says of jobs and their events."""

from __future__ import annotations

from pydantic import BaseModel

from spo.spec.job_state import JobState


class SolvedPrompts(BaseModel):
    """What rollouts found, of a job that remembers or chooses prompts by need: numbers of its training prompts.

    never of those tried have no right answer; once: exactly one; lately: the latest rollout but at most one group ago.
    """

    tried: int
    never: int
    once: int
    lately: int


class Progress(BaseModel):
    """How far the job is; totals are null until the tasks are loaded.

    value_samples made the values so far; value_interval_width is the mean width of their intervals, reward units.
    values_provisional prompts have a value that further samples refine; values_pending: the job trains beside its
    estimates.
    """

    values_done: int
    values_total: int | None
    value_samples: int = 0
    value_interval_width: float | None = None
    values_provisional: int = 0
    values_pending: bool = False
    solved: SolvedPrompts | None = None
    step: int
    steps: int
    weight_version: int
    evaluations: int


class Failure(BaseModel):
    code: str
    message: str


class Lineage(BaseModel):
    """The job that this one was forked from, and where: a version of its weights or a checkpoint."""

    parent: str
    version: int | None
    checkpoint_step: int | None
    as_reference: bool
    forked_at: str


class JobSummary(BaseModel):
    """A job in one line; metrics holds the newest of a few: reward, loss, kl_to_reference, entropy, pass@k by name."""

    id: str
    name: str
    labels: dict[str, str]
    state: JobState
    step: int
    created_at: str
    updated_at: str
    metrics: dict[str, float] = {}


class SpecWarning(BaseModel):
    """What may go wrong with a spec as it stands, on the replicas that live; no reason to refuse it."""

    pointer: str
    message: str


class MissingEvaluation(BaseModel):
    """A step of the schedule whose evaluation was given up on, and why."""

    step: int
    version: int
    code: str
    message: str


class Job(JobSummary):
    """missing_evaluations: those of its schedule that never came, also of a job that has succeeded."""

    progress: Progress
    latest_evaluation: dict[str, object] | None
    failure: Failure | None
    waits: list[str]
    spec: dict[str, object]
    lineage: Lineage | None = None
    missing_evaluations: list[MissingEvaluation] = []
    warnings: list[SpecWarning] = []


class JobPage(BaseModel):
    items: list[JobSummary]
    next_cursor: str | None


class NotDeleted(BaseModel):
    """A job that stayed, and why."""

    id: str
    code: str
    message: str


class DeletedJobs(BaseModel):
    """What became of jobs that were to be deleted."""

    deleted: list[str]
    refused: list[NotDeleted]


class Event(BaseModel):
    seq: int
    at: str
    actor: str
    kind: str
    body: dict[str, object]


class EventPage(BaseModel):
    items: list[Event]
    next_cursor: str | None
