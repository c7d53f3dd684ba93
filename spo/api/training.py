"""What training leaves behind: curves, evaluations, weight versions, checkpoints, and completions of any version."""

from __future__ import annotations

import operator
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from spo.api.document import JOB_ID_PATTERN, Document, JsonObject, Listing, RequestBody
from spo.spec.section import Temperature, TopP
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
