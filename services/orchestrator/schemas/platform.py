"""What the API says of the platform: replicas and version."""

from __future__ import annotations

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


class Version(BaseModel):
    version: str
