"""The platform: replicas and their number, API keys, the audit log, and what is wrong now.

What all documents of the REST API have in common: snake_case, times as RFC 3339 UTC; fields are only ever added.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Generic, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, StrictBool

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
