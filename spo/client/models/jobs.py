"""Jobs and what they make, as documents: events, dead letters, curves, versions, trajectories, stored experience,
task sets.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, RootModel

from spo.client.models.documents import Document, JsonObject, Listing, Page
from spo.spec.section import TERMINAL, JobState

TaskFormat = Literal["jsonl", "code_contests", "taco"]
FileFormat = Literal["jsonl", "parquet"]
DatasetState = Literal["uploading", "validating", "ready", "invalid"]


class MetricSeries(Document):
    """Named columns of equal length; axis names what `steps` counts, a missing value is None."""

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

    They are of the `decided` problems of all `problems`; `undecided` names the others. decided None: all.
    """

    version: int
    pass_at_k: dict[str, PassAtK]
    distinct_solutions: float
    entropy: float
    response_tokens: float
    public_only_rate: float
    hard_coded_rate: float
    scores: dict[str, float] = Field(default_factory=dict)
    problems: int
    decided: int | None = None
    undecided: list[UndecidedProblem] = Field(default_factory=list)
    samples: int
    per_problem: list[ProblemScore] = Field(default_factory=list)


class StepEvaluation(EvaluationResult):
    """The evaluation that a job ran itself after a training step; step 0 is the reference policy.

    It took so many seconds and ended at that time, RFC 3339.
    """

    step: int
    seconds: float
    at: str


class Evaluations(Listing[StepEvaluation]):
    """Evaluations of a job in the order of steps."""


class Evaluation(Document):
    """An evaluation that somebody asked for; `result` is None until the state is "succeeded"."""

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
    """Evaluations that were asked for, newest first, without their tables of problems."""


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
    """The version that replicas were told to serve."""

    version: int


class Checkpoint(Document):
    """A saved state of the trainer; parent is the step of the checkpoint before it, None for the first.

    epoch: of the lease that it was written under.
    """

    step: int
    parent: int | None = None
    path: str
    manifest_digest: str
    weight_version: int
    epoch: int = 0


class Checkpoints(Listing[Checkpoint]):
    """Checkpoints of a job by step."""


class Completion(Document):
    """What a policy wrote; mean_logprob in nats per token."""

    text: str
    tokens: int
    finish_reason: str
    mean_logprob: float
    version: int


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


class DeadLetterSummary(Document):
    """One entry that was given up on; job_id is None where it names no job."""

    id: str
    stream: str
    job_id: str | None
    reason: str
    deliveries: int
    at_unix_ms: int
    size_bytes: int


class DeadLetterDetail(DeadLetterSummary):
    """With what the entry says; message is None where it cannot be decoded."""

    message: JsonObject | None
    payload_base64: str


class DeadLetterTotals(Document):
    """given_up: entries of the job given up on and not redriven; gone: letters of the stream that gave way."""

    given_up: int
    gone: int


class DeadLetterPage(Page[DeadLetterSummary]):
    """Dead letters, the newest of each stream first."""

    totals: dict[str, DeadLetterTotals]


class Redriven(Document):
    """Whether the letter was there to be put back."""

    redriven: bool


class Verdict(Document):
    """What the judge found of one program."""

    outcome: str
    tests_passed: int
    tests_total: int
    cpu_seconds: float
    detail: str
    cached: bool
    isolation: str
    judge_version: str


class Hop(Document):
    """When a service passed a trajectory on."""

    service: str
    at_unix_ms: int


class Trajectory(Document):
    """One response to a prompt; reward and verdict are None until it is judged."""

    trajectory_id: str
    group_id: str
    prompt_id: str
    source: str
    response_text: str
    response_tokens: int
    policy_version_first: int
    policy_version_last: int
    temperature: float
    top_p: float
    finish_reason: str
    created_unix_ms: int
    reward: float | None
    verdict: Verdict | None
    hops: list[Hop]


class TrajectoryPage(Page[Trajectory]):
    """Trajectories of a job."""


class ResponseSegment(Document):
    """A turn of a conversation: an `action` of the policy's, or an `observation` that its environment wrote.

    score: of a turn that the environment scored, between 0 and 1. label: which tool it is about.
    """

    kind: str
    label: str
    text: str
    tokens: int
    score: float | None


class TrajectoryDetail(Trajectory):
    """With tokens and their log-probs, nats; `segments` are the turns of a conversation, none of a single turn.

    anchor_version: the weight version that stands for pi0, where the job's anchor moves with its rollouts.
    `steps` is one page of the training steps whose batches held it, times_sampled the number of all of them. `copies`
    counts further trajectories with the same normalised content.
    """

    prompt_token_ids: list[int]
    response_token_ids: list[int]
    segments: list[ResponseSegment] = Field(default_factory=list)
    sampling_logprobs: list[float]
    reference_logprobs: list[float]
    reference_hash: str
    anchor_version: int | None = None
    steps: list[int]
    times_sampled: int
    copies: int


class BatchView(Document):
    """What the replay buffer drew for a training step."""

    step: int
    trajectory_ids: list[str]


class PromptSuccess(Document):
    """How pi0 did on a training prompt; None until it is known. Rewards are of its samples, text is its beginning."""

    prompt_id: str
    text: str
    difficulty: str = ""
    samples: int | None = None
    successes: int | None = None
    lowest_reward: float | None = None
    highest_reward: float | None = None
    with_solutions: bool = False


class PromptPage(Page[PromptSuccess]):
    """Training prompts in their order."""


class PromptView(Document):
    """A prompt, its value if one is estimated (qhat_0 with its interval), and its latest trajectories."""

    prompt_id: str
    text: str
    samples: int | None
    successes: int | None
    qhat_0: float | None
    qhat_0_low: float | None = None
    qhat_0_high: float | None = None
    trajectories: list[Trajectory]


class TokenValues(Document):
    """Q_t after each response token and its advantage A_t, reward units (Eq. 11, 12)."""

    trajectory_id: str
    policy_version: int
    qhat_0: float
    tokens: list[str]
    q: list[float]
    advantages: list[float]


class CalibrationBin(Document):
    """Predicted against observed success, with the interval of what was observed."""

    predicted: float
    observed: float
    outcomes: int
    low: float
    high: float


class Calibration(Document):
    """How well Q_t predicts the success of fresh continuations; bins hold about equally many."""

    policy_version: int
    bins: list[CalibrationBin]
    expected_calibration_error: float
    brier_score: float
    brier_score_of_qhat_0: float
    prefixes: int


class StoredRun(Document):
    """Everything stored under one name; `complete` is false while a job may still add to it."""

    run: str
    kind: str
    task_sets: list[str]
    reference_hashes: list[str]
    trajectories: int
    files: int
    size_bytes: int
    licence: str
    parents: list[str]
    stored_at: str
    complete: bool


class StoredRuns(Listing[StoredRun]):
    """Stored runs and imports, newest first."""


class ExperienceStatistics(Document):
    """Counts over the chosen part of the store; equal responses to a prompt count once as distinct."""

    trajectories: int
    right: int
    prompts: int
    prompts_with_success: int
    distinct_responses: int
    response_tokens: int
    runs: dict[str, int]
    sources: dict[str, int]
    outcomes: dict[str, int]
    judge_versions: dict[str, int]
    licences: dict[str, int]


class StoredRow(Document):
    """One stored trajectory without its tokens."""

    trajectory_id: str
    run_id: str
    run: str
    source: str
    prompt_id: str
    statement: str
    response_text: str
    reward: float | None
    outcome: str | None
    judge_version: str | None
    policy_version_first: int
    licence: str
    parents: list[str]


class StoredRowPage(Page[StoredRow]):
    """Stored trajectories."""


class StoredRowDetail(Document):
    """One stored trajectory with every column, by the names of the file format."""

    run: str
    file: str
    columns: JsonObject


class RowFault(Document):
    """Why a row was refused; rows count from 1."""

    row: int
    code: str
    pointer: str
    message: str


class ImportReport(Document):
    """What became of the rows of a file."""

    run: str
    rows: int
    stored: int
    refused: int
    judged: int
    duplicates: int
    faults: list[RowFault]
    faults_by_code: dict[str, int]


class ChangedVerdict(Document):
    """A trajectory whose outcome differs under the tests of today."""

    trajectory_id: str
    prompt_id: str
    before: str
    after: str


class RejudgeReport(Document):
    """What a second judgement of stored trajectories found; `run` names the new lineage, if one was written."""

    run: str | None
    looked_at: int
    judged: int
    unknown_problems: int
    newly_accepted: int
    newly_rejected: int
    changed: list[ChangedVerdict]


class CompactReport(Document):
    """Files before and after a merge, or what they would be."""

    runs: list[str]
    trajectories: int
    files_before: int
    files_after: int
    left_over: int
    compacted: bool


class PruneReport(Document):
    """What was removed, or would be."""

    runs: list[str]
    files: int
    trajectories: int
    size_bytes: int
    removed: bool


class DatasetRowFault(Document):
    """What is wrong with a row, and where."""

    place: str
    message: str


class DatasetReport(Document):
    """What became of the rows of a dataset; `faults` holds the first of faults_total."""

    rows: int
    problems: int
    left_out: int = 0
    duplicates: int = 0
    tests: int = 0
    answers: int = 0
    with_solutions: int = 0
    difficulties: dict[str, int] = Field(default_factory=dict)
    faults: list[DatasetRowFault]
    faults_total: int


class DatasetView(Document):
    """A dataset; `report` is None until its rows are looked at."""

    id: str
    name: str
    task_format: TaskFormat
    file_format: FileFormat
    state: DatasetState
    size_bytes: int
    uploaded_bytes: int
    digest: str
    created_at: str
    report: DatasetReport | None


class DatasetPage(Page[DatasetView]):
    """Datasets, newest first."""
