"""What training makes: curves, evaluations, weight versions, checkpoints, completions of its policies."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from spo.client.models.document import Document, JsonObject, Listing


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
