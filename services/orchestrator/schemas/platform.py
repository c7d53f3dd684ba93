"""What the API says of the platform: replicas, pools, log lines and version."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel


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


class PoolView(BaseModel):
    """desired is null where nobody scales; live counts registered replicas that do not drain."""

    desired: int | None
    live: int
    draining: int
    minimum: int
    maximum: int


class ScaleView(BaseModel):
    scaler: str
    pools: dict[str, PoolView]


class LogLine(BaseModel):
    """`fields` is the structured line, redacted when it was written."""

    service: str
    replica_id: str
    level: str
    at_unix_ms: int
    fields: dict[str, object]


class LogPage(BaseModel):
    items: list[LogLine]
    next_cursor: str | None


class AttentionEntry(BaseModel):
    """Something that is wrong now, and what to do about it; page is where one sees more, "" where nowhere."""

    severity: Literal["error", "warning"]
    subject: str
    message: str
    remedy: str
    job_id: str | None
    page: str


class AttentionList(BaseModel):
    """What is wrong now, errors first."""

    items: list[AttentionEntry]


class PlatformLoss(BaseModel):
    """Data that the platform found missing, and when; `epoch` is the one that ended with it."""

    at: str
    kind: str
    message: str
    epoch: str
    acknowledged: bool


class LostJob(BaseModel):
    """A job whose records are gone: its state at `saved_at`, and what of it is on disk."""

    id: str
    name: str
    tenant: str
    state: str
    saved_at: str
    checkpoints: list[int]
    weight_versions: list[int]


class PlatformView(BaseModel):
    """The platform's identity; `notice` says what people must know now, and is empty when all is well."""

    epoch: str
    schema_version: str
    notice: str
    losses: list[PlatformLoss]
    lost_jobs: list[LostJob]


class RebuiltJob(BaseModel):
    """A job that has records again; note says what it lacks."""

    id: str
    state: str
    note: str


class RebuiltJobs(BaseModel):
    items: list[RebuiltJob]


class Version(BaseModel):
    version: str
