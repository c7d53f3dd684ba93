"""Trajectories, prompts, and the values of tokens."""

from __future__ import annotations

from pydantic import Field

from spo.api.document import Document, Page


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
    """One response to a prompt; reward and verdict are null until it is judged."""

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
    """A turn of a conversation: an `action` was sampled from the policy, an `observation` written by the environment.

    A `branch` is read like an observation, by what follows and without what stands before it.

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
    segments: list[ResponseSegment] = Field(default=[])
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


class BatchView(Document):
    """What the replay buffer drew for a training step."""

    step: int
    trajectory_ids: list[str]


class PromptSuccess(Document):
    """How pi0 did on a training prompt; null until it is known. Rewards are of its samples, text is its beginning."""

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
    """A prompt with what is known of it: its value, if estimated, and its latest trajectories."""

    prompt_id: str
    text: str
    samples: int | None
    successes: int | None
    qhat_0: float | None
    qhat_0_low: float | None = None
    qhat_0_high: float | None = None
    trajectories: list[Trajectory]


class TokenValues(Document):
    """The policy as value: Q_t after each response token and its advantage A_t, reward units (Eq. 11, 12)."""

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
    """Success of pi0 going on from prefixes, as Q_t predicts it and as it came; bins of about equal count."""

    policy_version: int
    bins: list[CalibrationBin]
    expected_calibration_error: float
    brier_score: float
    brier_score_of_qhat_0: float
    prefixes: int
