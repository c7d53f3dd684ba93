"""The platform itself: replicas, API keys, the audit log."""

from __future__ import annotations

from typing import Literal

from spo.client.models.document import Document, Listing, Page

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
