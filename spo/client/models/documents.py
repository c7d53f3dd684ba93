"""What all documents of the API have in common; bodies and filters of calls; the platform, what it serves, continual
jobs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Generic, Literal, TypedDict, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from spo.spec.section import JobState

# A part whose members the API does not fix: a JobSpec, the body of an event.
JsonObject = dict[str, Any]
Entry = TypeVar("Entry")

LogLevel = Literal["debug", "info", "warning", "error"]
Source = Literal["online", "reference", "human", "other_run", "annotated", "shared", "memory"]

Scope = Literal[
    "jobs:read",
    "jobs:write",
    "trajectories:read",
    "weights:push",
    "datasets:write",
    "models:query",
    "models:capture",
    "admin",
]


class Document(BaseModel):
    """A JSON document of the API. It only grows: fields that this release does not know are kept, not refused."""

    model_config = ConfigDict(extra="allow", frozen=True)


class Listing(Document, Generic[Entry]):
    """A list that comes whole."""

    items: list[Entry]


class Page(Listing[Entry]):
    """Part of a list; next_cursor asks for the next part, None at the end."""

    next_cursor: str | None


class JobFilters(TypedDict, total=False):
    """Which jobs: in this state, with labels ("team" or "team:red"), created within these times (RFC 3339)."""

    status: JobState | None
    label: Sequence[str] | None
    created_from: str | None
    created_to: str | None


class ForkRequest(TypedDict, total=False):
    """Where a fork starts and what differs in its JobSpec; without both numbers: from the newest version."""

    version: int | None
    checkpoint_step: int | None
    as_reference: bool
    overrides: Mapping[str, object]


class LogFilters(TypedDict, total=False):
    """Which log lines: of this service, of this level or above."""

    service: str | None
    level: LogLevel | None


class TrajectoryFilters(TypedDict, total=False):
    """Which trajectories of a job."""

    prompt_id: str | None
    source: Source | None
    verdict: str | None
    policy_version: int | None


class CalibrationDesign(TypedDict, total=False):
    """Which prefixes are continued, how often, and into how many bins they fall."""

    policy_version: int | None
    trajectories: int
    positions: int
    continuations: int
    bins: int


class CompletionRequest(TypedDict, total=False):
    """How a policy is asked; version 0 is the reference, None the newest."""

    version: int | None
    samples: int
    temperature: float
    top_p: float
    max_tokens: int | None
    seed: int | None


class EvaluationRequest(TypedDict, total=False):
    """Which policy is evaluated, on which problems, and how; by default the newest version on the job's own."""

    version: int | None
    checkpoint_step: int | None
    tasks: Mapping[str, object] | None
    samples: int
    temperature: float
    top_p: float
    ks: Sequence[int]


class StoreFilters(TypedDict, total=False):
    """Which part of the experience store."""

    run: str | None
    task_set: str | None


class RowFilters(StoreFilters, total=False):
    """Which stored trajectories; right: only successes, or only failures."""

    prompt_id: str | None
    source: Source | None
    right: bool | None


class ImportOptions(TypedDict, total=False):
    """How rows are stored: whose problems they answer (job, or tasks as JSON), their terms, which are judged here.

    reward = reward_scale * given + reward_shift; reward_best: the best reward there is in them, which becomes 0, in
    place of a shift. log: whose rows these are; fields: JSON, our columns to paths into the rows of another log, or
    what is otherwise than in the named one. keep_good stores the good rows although others are bad.
    """

    job: str | None
    tasks: str | None
    licence: str
    reward_scale: float
    reward_shift: float
    reward_best: float | None
    fields: str
    log: Literal["openai", "langfuse", "phoenix"] | None
    judging: Literal["missing", "all", "never"]
    keep_good: bool


class Export(StoreFilters, total=False):
    """Which stored trajectories are exported; right: only successes, or only failures."""

    right: bool | None


class Rejudge(StoreFilters, total=False):
    """Which stored trajectories are judged again, by whose tests (job or tasks), under which new name."""

    job: str | None
    tasks: Mapping[str, object] | None
    name: str | None
    dry_run: bool


class Compact(StoreFilters, total=False):
    """Which files are merged; dry_run only says what would come of it."""

    dry_run: bool


class Prune(StoreFilters, total=False):
    """What is removed; dry_run only says what would be."""

    older_than_days: float | None
    dry_run: bool


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
    """desired is None where nobody scales; live counts registered replicas that do not drain."""

    desired: int | None
    live: int
    draining: int
    minimum: int
    maximum: int


class ScaleView(Document):
    """The pools that scale, and what scales them."""

    scaler: str
    pools: dict[str, PoolView]


class Key(Document):
    """An API key without its secret; expires_unix is 0 and revoked_at "" where neither applies."""

    key_id: str
    name: str
    tenant: str
    scopes: list[Scope]
    max_active_jobs: int | None
    created_at: str
    expires_unix: int
    revoked_at: str


class NewKey(Key):
    """With the token, which is shown this once."""

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


class ServedTarget(Document):
    """A weight version of a job; 0 is pi0, None whichever is the newest."""

    job_id: str
    version: int | None


class ServedModelView(ServedTarget):
    """A name and what it means since its last change; restores: the change that a roll-back brought back."""

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


class Said(TypedDict, total=False):
    """Feedback on an answer."""

    score: float
    thumbs: Literal["up", "down"]
    test: Literal["passed", "failed"]
    edited: str
    comment: str


class RedactionRule(Document):
    """A regular expression, and what stands in place of what it finds."""

    pattern: str
    replacement: str = "[redacted]"


class CapturePolicy(Document):
    """How traffic is captured where it is asked for; sampling_rate is the share of it that is kept."""

    sampling_rate: float = 1.0
    redactions: list[RedactionRule] = Field(default_factory=list)
    hook: str = ""
    retention_days: float = 30
    licence: str = ""
    consent: str = ""


class CaptureView(Document):
    """The policy, and how many completions are kept."""

    policy: CapturePolicy
    captured: int


class FeedbackReceipt(Document):
    """What the answer is worth now, best 0 and worst -1; None: nothing says so yet."""

    id: str
    index: int
    reward: float | None


class CollectReport(Document):
    """What captured traffic has become; human: edited answers, unscored: left for later."""

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
    """A source of feedback: mean |Q_T - r| in reward units, how much above the others' median, whether that is bad."""

    source: str
    residual: float
    excess: float
    excess_error: float
    suspect: bool


class ContinualRound(Document):
    """One round; learned_from: rows of each stored run when it began. state: starting, training, evaluating, then
    served (its version was put in service), kept (the served one stayed) or failed; reason says why.
    """

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
    sources: tuple[RoundSource, ...] = ()


class ContinualSummary(Document):
    """A continual job as it was made; waits: what keeps it from going on, such as a name that nothing is served as."""

    name: str
    tenant: str
    spec: JsonObject
    created_at: str
    waits: str = ""
    waits_since: str = ""


class ContinualDetail(ContinualSummary):
    """With its rounds, newest first; new_trajectories: stored since the newest round began."""

    new_trajectories: int
    round_wanted: bool
    history: list[ContinualRound]


class ContinualList(Listing[ContinualSummary]):
    """All of the tenant, by name."""
