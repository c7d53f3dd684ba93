"""Trajectories, the prompts they answer, and what their tokens are worth."""

from __future__ import annotations

from pydantic import Field

from spo.client.models.document import Document, Page


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
