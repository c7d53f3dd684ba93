"""What is served: names of policies, captured traffic and its feedback, and continual jobs."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, StrictBool

from spo.api.document import JOB_ID_PATTERN, RUN_PATTERN, Document, JsonObject, Listing, RequestBody
from spo.spec.tasks import TasksSpec

COMPLETION_ID_PATTERN = r"^(chatcmpl|cmpl)-[0-9A-HJKMNP-TV-Z]{26}$"

Note = Annotated[str, Field(max_length=2000, description="Why; kept in the history.")]
ExpectedNumber = Annotated[
    int | None,
    Field(ge=0, le=2**53, description="Refuse unless this is the number of the name's last change; 0: none."),
]


class Publication(RequestBody):
    """What a name is to mean."""

    job_id: str = Field(pattern=JOB_ID_PATTERN)
    version: int | None = Field(default=None, ge=0, le=2**53, description="0: pi0; default: always the newest.")
    note: Note = ""
    expected_number: ExpectedNumber = None
    min_replicas: int | None = Field(
        default=None,
        ge=0,
        le=1000,
        description="Inference replicas that stay for it whoever asks; 0: none, as at first; default: as before.",
    )


class Rollback(RequestBody):
    """Back to an earlier change, by default to what the name meant before."""

    to_number: int | None = Field(default=None, ge=1, le=2**53)
    note: Note = ""
    expected_number: ExpectedNumber = None


class ServedTarget(Document):
    """A weight version of a job; 0 is pi0, null whichever is the newest."""

    job_id: str
    version: int | None


class ServedModelView(ServedTarget):
    """A name and what it means since its last change; `version` null: the newest of the job."""

    # A default is for answers of older servers; this one writes every field.
    model_config = ConfigDict(json_schema_serialization_defaults_required=True)

    name: str
    tenant: str
    number: int
    at: str
    by: str
    note: str
    before: ServedTarget | None
    restores: int | None
    removed: bool
    min_replicas: int = 0


class ServedModelList(Listing[ServedModelView]):
    """Names, or the changes of one."""


class RedactionRule(RequestBody):
    """What a regular expression matches becomes the replacement, taken literally."""

    # An empty one is refused where a policy is set, not where an answer is read.
    pattern: str = Field(max_length=500, json_schema_extra={"minLength": 1})
    replacement: str = Field(default="[redacted]", max_length=100)


class CapturePolicy(RequestBody):
    """How a tenant's traffic is captured where it is asked for."""

    sampling_rate: float = Field(
        default=1.0, strict=True, ge=0, le=1, description="Share of what is asked for that is kept."
    )
    redactions: list[RedactionRule] = Field(default=[], max_length=32)
    hook: str = Field(default="", max_length=100, description="An installed entry point of spo.redaction.")
    retention_days: float = Field(default=30, strict=True, gt=0, le=3650)
    licence: str = Field(default="", max_length=200)
    consent: str = Field(default="", max_length=200, description="Where a request says nothing of its own.")


class CaptureView(Document):
    """The policy, and how many completions are kept."""

    policy: CapturePolicy
    captured: int


class Feedback(RequestBody):
    """What somebody or something said of a completion later; what is not said again stays."""

    score: float | None = Field(default=None, strict=True, ge=0, le=1)
    thumbs: Literal["up", "down"] | None = None
    test: Literal["passed", "failed"] | None = None
    edited: str | None = Field(
        default=None, min_length=1, max_length=1 << 20, description="The answer as it should be."
    )
    comment: str | None = Field(default=None, max_length=10_000)

    def reward(self, text: str) -> float | None:
        """Of the completion, best 0 and worst -1: by a test, else a score, thumbs, or whether it was edited."""
        if self.test:
            return 0.0 if self.test == "passed" else -1.0
        if self.score is not None:
            return self.score - 1.0
        if self.thumbs:
            return 0.0 if self.thumbs == "up" else -1.0
        if self.edited is not None:
            return 0.0 if self.edited.strip() == text.strip() else -1.0
        return None


class FeedbackRequest(Feedback):
    """What is said of one choice of a completion."""

    id: str = Field(pattern=COMPLETION_ID_PATTERN, description="Of the completion, as its answer said.")
    index: int = Field(default=0, ge=0, lt=64, description="Of the choice.")


class FeedbackReceipt(Document):
    """What the choice is worth now, best 0 and worst -1; null: nothing says so yet."""

    id: str
    index: int
    reward: float | None


class CollectRequest(RequestBody):
    """Which traffic becomes trajectories, and under which name."""

    name: str = Field(pattern=RUN_PATTERN, description="Of the stored experience; jobs name it as their source.")
    job: str | None = Field(default=None, pattern=r"^job_[0-9A-Z]{26}$", description="Prompts are those of its tasks.")
    tasks: TasksSpec | None = None
    judge_unscored: StrictBool = Field(default=False, description="Judge what nobody scored by the tasks' verifier.")
    after_unix_ms: int = Field(default=0, ge=0, lt=2**53, description="Only traffic since then.")


class CollectReport(Document):
    """human: edited answers; unscored: left for later. newest_unix_ms: of the traffic that was looked at."""

    run: str
    looked_at: int
    stored: int
    human: int
    judged: int
    unscored: int
    newest_unix_ms: int


class RoundComparison(Document):
    """Mean pass@1 over `problems` of what was served and of the new version, their difference and its interval."""

    served: float
    candidate: float
    gain: float
    low: float
    high: float
    problems: int


class RoundSource(Document):
    """A source of feedback: mean |Q_T - r| in reward units, how much above the others' median, and whether that is bad.

    excess_error: the standard error of the excess over training steps.
    """

    source: str
    residual: float
    excess: float
    excess_error: float
    suspect: bool


class ContinualRound(Document):
    """One round; learned_from: rows of each stored run when it began; served: its version was put in service."""

    # A default is for answers of older servers; this one writes every field.
    model_config = ConfigDict(json_schema_serialization_defaults_required=True)

    number: int
    state: str
    parent_job: str
    parent_version: int
    job_id: str
    version: int
    learned_from: dict[str, int]
    evaluations: list[str]
    comparison: RoundComparison | None
    reason: str
    began_at: str
    ended_at: str
    sources: list[RoundSource] = Field(default_factory=list)


class ContinualSummary(Document):
    """waits: what keeps it from going on, beside its schedule; waits_since: when that began; both "" for nothing."""

    # A default is for answers of older servers; this one writes every field.
    model_config = ConfigDict(json_schema_serialization_defaults_required=True)

    name: str
    tenant: str
    spec: JsonObject
    created_at: str
    waits: str = ""
    waits_since: str = ""


class ContinualDetail(ContinualSummary):
    """new_trajectories: stored since its newest round began; round_wanted: somebody asked for one that is to begin."""

    new_trajectories: int
    round_wanted: bool
    history: list[ContinualRound]


class ContinualList(Listing[ContinualSummary]):
    """All of the tenant, by name."""
