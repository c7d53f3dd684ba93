"""The JSON of the REST API: snake_case, RFC 3339 UTC; fields are only ever added."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from spo.spec.section import JobState


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


class MetricSeries(BaseModel):
    """Columns of equal length; axis names what `steps` counts."""

    axis: Literal["step", "unix_ms"]
    steps: list[int]
    series: dict[str, list[float | None]]


class WeightVersion(BaseModel):
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


class WeightVersions(BaseModel):
    items: list[WeightVersion]


class Checkpoint(BaseModel):
    """parent: the step of the checkpoint before it, null for the first; epoch: of the lease it was written under."""

    step: int
    parent: int | None = None
    path: str
    manifest_digest: str
    weight_version: int
    epoch: int = 0


class Checkpoints(BaseModel):
    items: list[Checkpoint]


class Evaluations(BaseModel):
    items: list[dict[str, object]]


class Verdict(BaseModel):
    outcome: str
    tests_passed: int
    tests_total: int
    cpu_seconds: float
    detail: str
    cached: bool
    isolation: str
    judge_version: str


class Hop(BaseModel):
    service: str
    at_unix_ms: int


class Trajectory(BaseModel):
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


class ResponseSegment(BaseModel):
    """A turn of a conversation: an `action` was sampled from the policy, an `observation` written by the environment.

    score: of a turn that the environment scored, between 0 and 1. label: which tool it is about.
    """

    kind: str
    label: str
    text: str
    tokens: int
    score: float | None


class TrajectoryDetail(Trajectory):
    """With the tokens and their log-probs, nats; those of a conversation's observations are 0."""

    prompt_token_ids: list[int]
    response_token_ids: list[int]
    # Empty: all of the response was sampled, in one turn.
    segments: list[ResponseSegment] = []
    sampling_logprobs: list[float]
    reference_logprobs: list[float]
    reference_hash: str
    # The weight version whose log-probs the reference's are, where the job's anchor moves with its rollouts.
    anchor_version: int | None = None
    # Training steps whose batches held it, in the order of draws; one page, of times_sampled in all.
    steps: list[int]
    times_sampled: int
    # Further trajectories with the same normalised content, which it stands for.
    copies: int


class BatchView(BaseModel):
    """What the replay buffer drew for a training step."""

    step: int
    trajectory_ids: list[str]


class TrajectoryPage(BaseModel):
    items: list[Trajectory]
    next_cursor: str | None


class PromptView(BaseModel):
    """A prompt with what is known of it: its value, if estimated, and its latest trajectories."""

    prompt_id: str
    text: str
    samples: int | None
    successes: int | None
    qhat_0: float | None
    qhat_0_low: float | None = None
    qhat_0_high: float | None = None
    trajectories: list[Trajectory]


class PromptSuccess(BaseModel):
    """How pi0 did on a training prompt; null until it is known. Rewards are of its samples, text is its beginning."""

    prompt_id: str
    text: str
    difficulty: str = ""
    samples: int | None = None
    successes: int | None = None
    lowest_reward: float | None = None
    highest_reward: float | None = None
    with_solutions: bool = False


class PromptPage(BaseModel):
    items: list[PromptSuccess]
    next_cursor: str | None


class TokenValues(BaseModel):
    """The policy as value: Q_t after each response token and its advantage A_t, reward units (Eq. 11, 12)."""

    trajectory_id: str
    policy_version: int
    qhat_0: float
    tokens: list[str]
    q: list[float]
    advantages: list[float]


class CalibrationBin(BaseModel):
    predicted: float
    observed: float
    outcomes: int
    low: float
    high: float


class Calibration(BaseModel):
    """Success of pi0 going on from prefixes, as Q_t predicts it and as it came; bins of about equal count."""

    policy_version: int
    bins: list[CalibrationBin]
    expected_calibration_error: float
    brier_score: float
    brier_score_of_qhat_0: float
    prefixes: int


class Replica(BaseModel):
    replica_id: str
    pool: str
    address: str
    pid: int
    run_id: str
    policy_version: int
    load: float
    draining: bool
    problem: str
    last_seen_seconds_ago: float


class Replicas(BaseModel):
    items: list[Replica]


class PoolView(BaseModel):
    """desired is null where nobody scales; live counts registered replicas that do not drain."""

    desired: int | None
    live: int
    draining: int
    minimum: int
    maximum: int


class ScaleView(BaseModel):
    scaler: str
    pools: dict[str, PoolView]


class LogLine(BaseModel):
    """`fields` is the structured line, redacted when it was written."""

    service: str
    replica_id: str
    level: str
    at_unix_ms: int
    fields: dict[str, object]


class LogPage(BaseModel):
    items: list[LogLine]
    next_cursor: str | None


class AttentionEntry(BaseModel):
    """Something that is wrong now, and what to do about it; page is where one sees more, "" where nowhere."""

    severity: Literal["error", "warning"]
    subject: str
    message: str
    remedy: str
    job_id: str | None
    page: str


class AttentionList(BaseModel):
    """What is wrong now, errors first."""

    items: list[AttentionEntry]


class PlatformLoss(BaseModel):
    """Data that the platform found missing, and when; `epoch` is the one that ended with it."""

    at: str
    kind: str
    message: str
    epoch: str
    acknowledged: bool


class LostJob(BaseModel):
    """A job whose records are gone: its state at `saved_at`, and what of it is on disk."""

    id: str
    name: str
    tenant: str
    state: str
    saved_at: str
    checkpoints: list[int]
    weight_versions: list[int]


class PlatformView(BaseModel):
    """The platform's identity; `notice` says what people must know now, and is empty when all is well."""

    epoch: str
    schema_version: str
    notice: str
    losses: list[PlatformLoss]
    lost_jobs: list[LostJob]


class RebuiltJob(BaseModel):
    """A job that has records again; note says what it lacks."""

    id: str
    state: str
    note: str


class RebuiltJobs(BaseModel):
    items: list[RebuiltJob]


class Version(BaseModel):
    version: str


class DeadLetterSummary(BaseModel):
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

    message: dict[str, object] | None
    payload_base64: str


class DeadLetterTotals(BaseModel):
    """given_up: entries of the job that were given up on and not redriven, also those whose letters are gone.

    gone: letters of all jobs on this stream that gave way to newer ones.
    """

    given_up: int
    gone: int


class DeadLetterPage(BaseModel):
    items: list[DeadLetterSummary]
    totals: dict[str, DeadLetterTotals] = Field(description="By stream.")
    next_cursor: str | None


class Redriven(BaseModel):
    """redriven is false where the letter had been redriven before, was dropped, or gave way to newer ones."""

    redriven: bool


class StoredRun(BaseModel):
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


class StoredRuns(BaseModel):
    items: list[StoredRun]


class ExperienceStatistics(BaseModel):
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


class StoredRow(BaseModel):
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


class StoredRowPage(BaseModel):
    items: list[StoredRow]
    next_cursor: str | None


class StoredRowDetail(BaseModel):
    """One stored trajectory with every column, by the names of the file format."""

    run: str
    file: str
    columns: dict[str, object]


class RowFault(BaseModel):
    """Why a row was refused; rows count from 1."""

    row: int
    code: str
    pointer: str
    message: str


class ImportReport(BaseModel):
    """What became of the rows of a file."""

    run: str
    rows: int
    stored: int
    refused: int
    judged: int
    duplicates: int
    faults: list[RowFault]
    faults_by_code: dict[str, int]


class ChangedVerdict(BaseModel):
    trajectory_id: str
    prompt_id: str
    before: str
    after: str


class RejudgeReport(BaseModel):
    """What other tests, or another judge, say about stored trajectories; `run` names the new lineage, if written."""

    run: str | None
    looked_at: int
    judged: int
    unknown_problems: int
    newly_accepted: int
    newly_rejected: int
    changed: list[ChangedVerdict]


class CompactReport(BaseModel):
    """Files as they were and as they are, or would be."""

    runs: list[str]
    trajectories: int
    files_before: int
    files_after: int
    left_over: int
    compacted: bool


class PruneReport(BaseModel):
    runs: list[str]
    files: int
    trajectories: int
    size_bytes: int
    removed: bool
