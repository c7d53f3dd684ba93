"""A job, its history and what went wrong with it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, RootModel, StrictBool

from spo.api.document import JOB_ID_PATTERN, Document, JsonObject, Page, RequestBody
from spo.api.training import StepEvaluation
from spo.spec.section import TERMINAL, JobState


class SolvedPrompts(Document):
    """What rollouts found, of a job that remembers or chooses prompts by need: numbers of its training prompts.

    never of those tried have no right answer; once: exactly one; lately: the latest rollout but at most one group ago.
    """

    tried: int
    never: int
    once: int
    lately: int


class Progress(Document):
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
    """What may go wrong with a spec as it stands, on the replicas that live; no reason to refuse it."""

    pointer: str
    message: str


class JobSummary(Document):
    """A job in one line; metrics holds the newest of a few: reward, loss, kl_to_reference, entropy, pass@k by name."""

    id: str
    name: str
    labels: dict[str, str]
    state: JobState
    step: int
    created_at: str
    updated_at: str
    metrics: dict[str, float] = Field(default={})

    @property
    def is_final(self) -> bool:
        """Whether the job has ended, however."""
        return self.state in TERMINAL


class MissingEvaluation(Document):
    """A step of the schedule whose evaluation was given up on, and why."""

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
    # Generated clients would call its class JobSpec, as that of what is submitted.
    spec: JsonObject = Field(title="Resolved spec")
    lineage: Lineage | None = None
    missing_evaluations: list[MissingEvaluation] = Field(default=[])
    warnings: list[SpecWarning] = Field(default=[])


class ResolvedSpec(RootModel[JsonObject]):
    """A JobSpec with every default filled in, and `warnings`: each with the pointer to a field and a message."""


class JobPage(Page[JobSummary]):
    """Jobs, newest first."""


class ForkRequest(RequestBody):
    """Where to start: a weight version, by default the newest, or a checkpoint with its optimiser state."""

    version: int | None = Field(default=None, ge=1, le=2**53, description="Start at step 0 with these weights.")
    checkpoint_step: int | None = Field(default=None, ge=1, le=2**53, description="Go on from this checkpoint.")
    as_reference: StrictBool = Field(
        default=False, description="The weights become pi0, with new values; otherwise pi0 is the parent's."
    )
    overrides: JsonObject = Field(
        default_factory=dict, max_length=64, description="Changes to the parent's JobSpec (JSON merge patch)."
    )


class JobChange(RequestBody):
    """What may be changed of a job at any time."""

    name: str = Field(min_length=1, max_length=200)


class JobsToDelete(RequestBody):
    """Jobs by id."""

    job_ids: list[Annotated[str, Field(pattern=JOB_ID_PATTERN)]] = Field(min_length=1, max_length=200)


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
    """`fields` is the structured line, redacted when it was written."""

    service: str
    replica_id: str
    level: str
    at_unix_ms: int
    fields: JsonObject


class LogPage(Page[LogLine]):
    """Log lines, newest first."""


class DeadLetterSummary(Document):
    """One entry that was given up on, without its payload."""

    id: str
    stream: str = Field(description="prompts, rollouts, verdicts, estimates or pivotal.")
    job_id: str | None = Field(description="Null where the entry names no job.")
    reason: str
    deliveries: int
    at_unix_ms: int
    size_bytes: int


class DeadLetterDetail(DeadLetterSummary):
    """With what the entry says: `message`, null where it cannot be decoded, and the beginning of its bytes."""

    message: JsonObject | None
    payload_base64: str


class DeadLetterTotals(Document):
    """given_up: entries of the job that were given up on and not redriven, also those whose letters are gone.

    gone: letters of all jobs on this stream that gave way to newer ones.
    """

    given_up: int
    gone: int


class DeadLetterPage(Page[DeadLetterSummary]):
    """Dead letters, the newest of each stream first."""

    totals: dict[str, DeadLetterTotals] = Field(description="By stream.")


class Redriven(Document):
    """redriven is false where the letter had been redriven before, was dropped, or gave way to newer ones."""

    redriven: bool
