"""The platform: replicas and their number, API keys, the audit log, and what is wrong now; and what it serves: names of
policies, captured traffic and its feedback, continual jobs, and sessions of agents.

What all documents of the REST API have in common: snake_case, times as RFC 3339 UTC; fields are only ever added.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Generic, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, StrictBool

from spo.spec.section import HIGHEST_TEMPERATURE
from spo.spec.tasks import TasksSpec

JOB_ID_PATTERN = r"^job_[0-9A-HJKMNP-TV-Z]{26}$"
# What stored experience is named: a job's id or a name of somebody's choice.
RUN_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,199}$"

# A part whose members the API does not fix: a JobSpec, the body of an event.
JsonObject = dict[str, Any]
ReadJson = Mapping[str, Any]
Entry = TypeVar("Entry")


class Document(BaseModel):
    """What the API answers. A client ignores fields that it does not know, which a newer server may send."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class RequestBody(BaseModel):
    """What the API is asked. A server refuses fields that it does not know: a typing error must not be a default."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Listing(Document, Generic[Entry]):
    """A list that comes whole."""

    items: list[Entry]


class Page(Listing[Entry]):
    """Part of a list; next_cursor asks for the next part, null at the end."""

    next_cursor: str | None


LogLevel = Literal["debug", "info", "warning", "error"]
Scope = Literal[
    "jobs:read",
    "jobs:write",
    "trajectories:read",
    "weights:push",
    "datasets:write",
    "models:query",
    "models:capture",
    "agents:run",
    "admin",
]
SCOPES: frozenset[Scope] = frozenset(get_args(Scope))

ReplicaCount = Annotated[int, Field(ge=0, le=100_000)]
KeyName = Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._@-]*$")]


class Replica(Document):
    """A registered replica: what it serves, how loaded it is (0 to 1), what is wrong with it if anything is."""

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


class Replicas(Listing[Replica]):
    """Every live registered replica."""


class PoolView(Document):
    """desired is null where nobody scales; live counts registered replicas that do not drain."""

    desired: int | None
    live: int
    draining: int
    minimum: int
    maximum: int


class ScaleView(Document):
    """The pools that scale, and what scales them."""

    scaler: str
    pools: dict[str, PoolView]


class ScaleRequest(RequestBody):
    """Replicas by pool; a pool that is not named stays as it is."""

    model_config = ConfigDict(populate_by_name=True)

    inference: ReplicaCount | None = None
    sandbox_judge: ReplicaCount | None = Field(default=None, alias="sandbox-judge")
    verifier: ReplicaCount | None = None


class KeyRequest(RequestBody):
    """A key to make: who it is for and what it may."""

    name: KeyName
    tenant: KeyName
    scopes: list[Scope] = Field(min_length=1, max_length=len(SCOPES))
    max_active_jobs: int | None = Field(default=None, ge=1, le=1_000_000, description="Quota; default: none.")
    expires_in_seconds: int | None = Field(default=None, ge=60, le=10 * 365 * 86400)


class Key(Document):
    """A key without its secret."""

    key_id: str
    name: str
    tenant: str
    scopes: list[Scope]
    max_active_jobs: int | None
    created_at: str
    expires_unix: int
    revoked_at: str


class NewKey(Key):
    """With the token, shown this once."""

    token: str


class Keys(Listing[Key]):
    """Every API key."""


class AuditRecord(Document):
    """One request that changed something or was refused."""

    entry_id: str
    at: str
    principal: str
    tenant: str
    method: str
    path: str
    status: int
    request_id: str


class AuditPage(Page[AuditRecord]):
    """Changes and refusals, newest first."""


class AttentionEntry(Document):
    """Something that is wrong now, and what to do about it; page is where one sees more, "" where nowhere."""

    severity: Literal["error", "warning"]
    subject: str
    message: str
    remedy: str
    job_id: str | None
    page: str


class AttentionList(Listing[AttentionEntry]):
    """What is wrong now, errors first."""


class PlatformLoss(Document):
    """Data that the platform found missing, and when; `epoch` is the one that ended with it."""

    at: str
    kind: str
    message: str
    epoch: str
    acknowledged: bool


class LostJob(Document):
    """A job whose records are gone: its state at `saved_at`, and what of it is on disk."""

    id: str
    name: str
    tenant: str
    state: str
    saved_at: str
    checkpoints: list[int]
    weight_versions: list[int]


class PlatformView(Document):
    """The platform's identity; `notice` says what people must know now, and is empty when all is well."""

    epoch: str
    schema_version: str
    notice: str
    losses: list[PlatformLoss]
    lost_jobs: list[LostJob]


class RebuildRequest(RequestBody):
    """Which lost jobs; null: all. Without `resume` those that had not ended come back as failed."""

    job_ids: list[Annotated[str, Field(max_length=200)]] | None = Field(default=None, max_length=10_000)
    resume: StrictBool = Field(default=False, description="Queue them again, to go on from their newest checkpoints.")


class RebuiltJob(Document):
    """A job that has records again; note says what it lacks."""

    id: str
    state: str
    note: str


class RebuiltJobs(Listing[RebuiltJob]):
    """What a rebuild made."""


class Version(Document):
    """The orchestrator's release."""

    version: str


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


SESSION_ID_PATTERN = r"^ses_[0-9A-HJKMNP-TV-Z]{26}$"

OutcomeStatus = Literal["finished", "failed", "cut"]
Token = Annotated[str, Field(min_length=1, max_length=200)]


class SessionRequest(RequestBody):
    """An episode that runs somewhere: of which job's policy, and how much it may use."""

    job: str = Field(pattern=JOB_ID_PATTERN)
    problem: str = Field(default="", max_length=128, description="Id of the problem that is played, for the trace.")
    version: int | None = Field(
        strict=True, default=None, ge=0, le=2**53, description="Weight version; default: the newest loaded."
    )
    temperature: float = Field(strict=True, default=1.0, ge=0, le=HIGHEST_TEMPERATURE, allow_inf_nan=False)
    top_p: float = Field(strict=True, default=1.0, gt=0, le=1)
    max_calls: int = Field(strict=True, default=200, ge=1, le=10_000)
    max_tokens: int = Field(strict=True, default=131_072, ge=1, le=2**31 - 1)
    max_seconds: int = Field(strict=True, default=7200, ge=1, le=7 * 86_400)
    reasoning: Literal["keep", "as_template"] = Field(default="keep", description="As in a job's tasks.harness.")


class SessionGrant(Document):
    """An open session: the agent gets base_url and key, its runner keeps the token."""

    id: str
    job_id: str
    base_url: str = Field(description="For OPENAI_BASE_URL; without its /v1 for ANTHROPIC_BASE_URL.")
    key: str
    token: str
    model: str
    deadline_unix_ms: int


class EpisodeOutcome(RequestBody):
    """How an episode ended. Only what finished, or was cut by its own limits, has a reward."""

    token: Token = Field(description="The session's, which its agent never sees.")
    status: OutcomeStatus
    reward: float | None = Field(strict=True, default=None, ge=0, le=1, allow_inf_nan=False)
    answer: str = Field(default="", max_length=1 << 20)
    metrics: dict[Annotated[str, Field(max_length=64)], float] = Field(default={}, max_length=64)


class LeaseRequest(RequestBody):
    """Which episodes a runner takes, and for how long it waits for one."""

    pool: str = Field(default="default", min_length=1, max_length=100)
    most: int = Field(default=1, ge=1, le=64, strict=True)
    wait_seconds: float = Field(default=10, ge=0, le=15, allow_inf_nan=False, strict=True)


class LeaseToken(RequestBody):
    """Whose lease it is."""

    token: Token


class EpisodeLease(Document):
    """One episode of a job: what is played, by what, and the session that its agent calls."""

    lease_id: str
    fence: int = Field(description="How often the episode was begun anew.")
    lease_until_unix_ms: int = Field(description="Renew it before; then it is another runner's.")
    harness: str
    arguments: JsonObject
    problem_id: str
    statement: str
    seed: int
    reward: Literal["runner", "verifier"] = Field(
        default="verifier", description="Who says what it is worth; a runner without a score gives back what it is to."
    )
    session: SessionGrant


class LeaseList(Document):
    """What was leased; empty where nothing waited in time."""

    items: list[EpisodeLease]


class RenewedLease(Document):
    lease_until_unix_ms: int
    # That the agent has made so far, with those that no replica answered since the last that one did.
    calls: int = 0


class SessionView(Document):
    """A session and what it has used."""

    id: str
    job_id: str
    problem_id: str
    created_unix_ms: int
    deadline_unix_ms: int
    calls: int
    tokens: int
    closed: str = Field(description="Why; empty while it is open.")
    outcome: JsonObject | None


class SessionPage(Page[SessionView]):
    pass


class SessionCall(Document):
    """A call: after which one it goes on, and why it does not where it could have been expected to."""

    number: int
    parent: int | None
    reason: str
    messages: list[JsonObject] = Field(description="What was read since the parent.")
    text: str
    calls: list[JsonObject]
    finish_reason: str
    version_first: int
    version_last: int
    constrained: bool
    at_unix_ms: int
    read: list[int] = Field(description="Tokens since the parent's.")
    sampled: list[int]


class SessionTreeView(Document):
    """All calls of a session in their order."""

    session: SessionView
    calls: list[SessionCall]
