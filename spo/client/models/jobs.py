"""Jobs, their events and their log lines."""

from __future__ import annotations

from pydantic import Field, RootModel

from spo.client.models.document import Document, JsonObject, Page
from spo.client.models.training import StepEvaluation
from spo.spec.job_state import TERMINAL, JobState


class SolvedPrompts(Document):
    """What rollouts found, of a job that remembers or chooses prompts by need: numbers of its training prompts.

    never of those tried have no right answer; once: exactly one; lately: the latest rollout but at most one group ago.
    """

    tried: int
    never: int
    once: int
    lately: int


class Progress(Document):
    """How far a job is; totals are None until its tasks are loaded.

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


class Failure(Document):
    """Why a job failed; the code is one of the catalogue of error codes."""

    code: str
    message: str


class Lineage(Document):
    """The job that this one was forked from, and where: a version of its weights or a checkpoint."""

    parent: str
    version: int | None
    checkpoint_step: int | None
    as_reference: bool
    forked_at: str


class SpecWarning(Document):
    """What may go wrong with a spec as it stands, on the replicas that live; pointer is a JSON pointer to a field."""

    pointer: str
    message: str


class JobSummary(Document):
    """A job as lists and actions show it; times are RFC 3339, UTC.

    metrics holds the newest of a few: reward, loss, kl_to_reference, entropy, and pass@k by name.
    """

    id: str
    name: str
    labels: dict[str, str]
    state: JobState
    step: int
    created_at: str
    updated_at: str
    metrics: dict[str, float] = Field(default_factory=dict)

    @property
    def is_final(self) -> bool:
        """Whether the job has ended, however."""
        return self.state in TERMINAL


class MissingEvaluation(Document):
    """A step whose evaluation was given up on, and why."""

    step: int
    version: int
    code: str
    message: str


class Job(JobSummary):
    """A job in full: its JobSpec with every default filled in, and where it stands; waits says what for.

    missing_evaluations: those of its schedule that never came, also of a job that has succeeded.
    """

    progress: Progress
    latest_evaluation: StepEvaluation | None
    failure: Failure | None
    waits: list[str]
    spec: JsonObject
    lineage: Lineage | None = None
    missing_evaluations: tuple[MissingEvaluation, ...] = ()
    warnings: tuple[SpecWarning, ...] = ()


class ResolvedSpec(RootModel[JsonObject]):
    """A JobSpec with every default filled in, and `warnings`: each with the pointer to a field and a message."""


class JobPage(Page[JobSummary]):
    """Jobs, newest first."""


class NotDeleted(Document):
    """A job that stayed, and why."""

    id: str
    code: str
    message: str


class DeletedJobs(Document):
    """What became of jobs that were to be deleted."""

    deleted: list[str]
    refused: list[NotDeleted]


class Event(Document):
    """One entry of a job's history; seq counts from 1 without gaps."""

    seq: int
    at: str
    actor: str
    kind: str
    body: JsonObject

    @property
    def ends_the_job(self) -> bool:
        """Whether no event follows this one."""
        return self.kind == "state" and self.body.get("to") in TERMINAL


class EventPage(Page[Event]):
    """Events in the order of seq."""


class LogLine(Document):
    """A line that a service logged about a job; `fields` is the structured line."""

    service: str
    replica_id: str
    level: str
    at_unix_ms: int
    fields: JsonObject


class LogPage(Page[LogLine]):
    """Log lines, newest first."""
