"""The JSON of the REST API: snake_case, RFC 3339 UTC; fields are only ever added."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from services.orchestrator.states import JobState


class Progress(BaseModel):
    """How far the job is; totals are null until the tasks are loaded.

    value_samples made the values so far; value_interval_width is the mean width of their intervals, reward units.
    """

    values_done: int
    values_total: int | None
    value_samples: int = 0
    value_interval_width: float | None = None
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
    id: str
    name: str
    labels: dict[str, str]
    state: JobState
    step: int
    created_at: str
    updated_at: str


class Job(JobSummary):
    progress: Progress
    latest_evaluation: dict[str, Any] | None
    failure: Failure | None
    waits: list[str]
    spec: dict[str, Any]
    lineage: Lineage | None = None


class JobPage(BaseModel):
    items: list[JobSummary]
    next_cursor: str | None


class Event(BaseModel):
    seq: int
    at: str
    actor: str
    kind: str
    body: dict[str, Any]


class EventPage(BaseModel):
    items: list[Event]
    next_cursor: str | None


class MetricSeries(BaseModel):
    """Columns of equal length; axis names what `steps` counts."""

    axis: Literal["step", "unix_ms"]
    steps: list[int]
    series: dict[str, list[float | None]]


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
    """parent: the step of the checkpoint before it, null for the first."""

    step: int
    parent: int | None = None
    path: str
    manifest_digest: str
    weight_version: int


class Checkpoints(BaseModel):
    items: list[Checkpoint]


class Evaluations(BaseModel):
    items: list[dict[str, Any]]


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


class TrajectoryDetail(Trajectory):
    """With the tokens and their log-probs, nats."""

    prompt_token_ids: list[int]
    response_token_ids: list[int]
    sampling_logprobs: list[float]
    reference_logprobs: list[float]
    reference_hash: str
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


class Version(BaseModel):
    version: str
