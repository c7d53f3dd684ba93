"""A job, its history and what went wrong with it.

What training leaves behind: curves, evaluations, weight versions, checkpoints, and completions of any version.
"""

from __future__ import annotations

import operator
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, RootModel, StrictBool

from spo.api.platform import JOB_ID_PATTERN, Document, JsonObject, Listing, Page, RequestBody
from spo.spec.section import TERMINAL, JobState, Temperature, TopP
from spo.spec.tasks import TasksSpec


class MetricSeries(Document):
    """Columns of equal length; axis names what `steps` counts."""

    # A default is for answers of older servers; this one writes every field.
    model_config = ConfigDict(json_schema_serialization_defaults_required=True)

    axis: Literal["step", "unix_ms"] = "step"
    steps: list[int] = Field(default_factory=list)
    series: dict[str, list[float | None]] = Field(default_factory=dict)

    def latest(self, name: str) -> float | None:
        """The newest value of a column, None when there is none."""
        return next((value for value in reversed(self.series.get(name, [])) if value is not None), None)


class PassAtK(Document):
    """pass@k with its 95 % interval over problems."""

    value: float
    low: float
    high: float

    def against(self, before: PassAtK) -> Literal["better", "worse", "inside the interval"]:
        """What may be said of the difference: nothing where the intervals meet."""
        if self.low > before.high:
            return "better"
        return "worse" if self.high < before.low else "inside the interval"


class ProblemScore(Document):
    """What the samples of one problem came to; entropy in nats per token.

    public_only counts programs that pass the public tests and fail a hidden one, hard_coded those of them that seem to
    print remembered answers. scores: of a verifier that knows more than right and wrong the mean, `score`, and by name
    those of its parts.
    """

    prompt_id: str
    samples: int
    correct: int
    distinct: int
    public_only: int
    hard_coded: int
    entropy: float
    response_tokens: float
    scores: dict[str, float] = Field(default_factory=dict)


class UndecidedProblem(Document):
    """A held-out problem without a score, and why."""

    prompt_id: str
    code: str
    reason: str


class EvaluationResult(Document):
    """Scores of a weight version on held-out problems; `per_problem` is empty where the API leaves it out.

    They are of the `decided` problems of all `problems`; `undecided` names the others. decided null: all.
    """

    # A default is for records and answers of older releases; this one writes every field.
    model_config = ConfigDict(json_schema_serialization_defaults_required=True)

    version: int
    pass_at_k: dict[str, PassAtK]
    distinct_solutions: float = 0.0
    entropy: float = 0.0
    response_tokens: float = 0.0
    public_only_rate: float = 0.0
    hard_coded_rate: float = 0.0
    scores: dict[str, float] = Field(default_factory=dict)
    problems: int = 0
    decided: int | None = None
    undecided: list[UndecidedProblem] = Field(default_factory=list)
    samples: int = 0
    per_problem: list[ProblemScore] = Field(default_factory=list, exclude_if=operator.not_)


class StepEvaluation(EvaluationResult):
    """The evaluation that a job ran itself after a training step; step 0 is the reference policy.

    It took so many seconds and ended at that time, RFC 3339.
    """

    step: int
    seconds: float = 0.0
    at: str = ""


class Evaluations(Listing[StepEvaluation]):
    """Evaluations of a job in the order of steps."""


class EvaluationRequest(RequestBody):
    """What to evaluate and how. Without version and checkpoint_step: the newest version; 0 is the reference."""

    job_id: str = Field(pattern=JOB_ID_PATTERN)
    version: int | None = Field(default=None, ge=0, le=2**53)
    checkpoint_step: int | None = Field(default=None, ge=1, le=2**53, description="The weights of this checkpoint.")
    tasks: TasksSpec | None = Field(default=None, description="Whose held-out problems; default: the job's.")
    samples: int = Field(default=20, ge=1, le=10_000)
    temperature: Temperature = 0.4
    top_p: TopP = 0.95
    ks: tuple[Annotated[int, Field(ge=1, le=10_000)], ...] = Field(default=(1, 10), min_length=1, max_length=64)


class Evaluation(Document):
    """An evaluation that somebody asked for; `result` is null until the state is "succeeded"."""

    id: str
    job_id: str
    version: int
    tasks: JsonObject | None
    protocol: JsonObject
    state: str
    created_at: str
    result: EvaluationResult | None
    failure: dict[str, str]


class EvaluationList(Listing[Evaluation]):
    """Without the tables of problems."""


class WeightVersion(Document):
    """A published version of a job's weights, and which replicas serve it, do not yet, or could not."""

    version: int
    step: int
    uri: str
    manifest_digest: str
    size_bytes: int
    published_at: str
    announced: bool
    applied: list[str]
    pending: list[str]
    failed: list[str]


class WeightVersions(Listing[WeightVersion]):
    """Weight versions of a job."""


class AnnouncedVersion(Document):
    """The version that replicas are to serve from now on."""

    version: int


class Checkpoint(Document):
    """parent: the step of the checkpoint before it, null for the first; epoch: of the lease it was written under."""

    step: int
    parent: int | None = None
    path: str
    manifest_digest: str
    weight_version: int
    epoch: int = 0


class Checkpoints(Listing[Checkpoint]):
    """Checkpoints of a job by step."""


class CompletionRequest(RequestBody):
    """What to ask the policy; `version` 0 is the reference, null the newest announced."""

    prompt: str = Field(min_length=1, max_length=200_000)
    version: int | None = Field(default=None, ge=0, le=2**53)
    samples: int = Field(default=1, ge=1, le=64)
    temperature: Temperature = 0.4
    top_p: TopP = 0.95
    max_tokens: int | None = Field(default=None, ge=1, le=131_072, description="Default: the job's response length.")
    seed: int | None = Field(default=None, ge=0, le=2**63 - 1)


class Completion(Document):
    """What a policy wrote; mean_logprob in nats per token."""

    text: str
    tokens: int
    finish_reason: str
    version: int
    mean_logprob: float


class Completions(Listing[Completion]):
    """Answers to one prompt, and the seed that gives them again."""

    seed: int


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
    """A job in one line; metrics holds the newest of a few, by name.

    They are reward (of the step's rollouts, where it has some), loss, kl_to_reference, entropy and pass@k.
    """

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
