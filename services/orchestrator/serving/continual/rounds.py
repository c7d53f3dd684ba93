"""Continual jobs and their rounds in Redis; the newest rounds of each stay."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.jobs.commit import timestamp
from services.orchestrator.jobs.store import JobStore
from services.orchestrator.serving.continual.definition import ContinualSpec
from spo.errors import NotFound, ResourceExhausted
from spo.spec.stored import read_stored, record_from_json

RoundState = Literal["starting", "training", "evaluating", "served", "kept", "failed"]
ENDED: tuple[RoundState, ...] = ("served", "kept", "failed")
MOST_PER_TENANT = 100
ROUNDS_KEPT = 200
MOST_REASON = 2000


@dataclass(frozen=True)
class Round:
    """One round: which version it started from, the job that trains, and what the gate said.

    parent_change: the number of the change under which that was served. learned_from: rows of each stored run when it
    began. comparison: fields of a GateComparison. served: version, of job_id, was put in service; kept: what was served
    before stayed, reason says why. sources: fields of a SourceResidual for each source of feedback.
    """

    number: int
    parent_job: str
    parent_version: int
    parent_change: int
    overrides: dict[str, object]
    learned_from: dict[str, int]
    state: RoundState = "starting"
    job_id: str = ""
    version: int = 0
    evaluations: Sequence[str] = ()
    comparison: dict[str, float] | None = None
    reason: str = ""
    began_at: str = ""
    ended_at: str = ""
    sources: Sequence[Mapping[str, object]] = ()


@dataclass(frozen=True)
class ContinualJob:
    """A continual job of a tenant. actor: who made it; admin: whether that one may use what is any tenant's;
    max_active_jobs: of the key that made it.
    """

    name: str
    tenant: str
    actor: str
    spec: ContinualSpec
    created_at: str = ""
    admin: bool = False
    max_active_jobs: int | None = None

    @property
    def field(self) -> str:
        """Its field in the hash of all."""
        return f"{self.tenant}/{self.name}"


@dataclass(frozen=True)
class _Stored:
    name: str
    tenant: str
    actor: str
    spec: dict[str, object] = field(default_factory=dict)
    created_at: str = ""
    admin: bool = False
    max_active_jobs: int | None = None


@dataclass(frozen=True)
class ContinualWait:
    """What keeps a continual job from going on, in words, and since when; "" where nothing does."""

    reason: str = ""
    since: str = ""


class ContinualStore:
    """Definitions by tenant and name, and their rounds by number; every write carries the leader's fence."""

    def __init__(self, jobs: JobStore) -> None:
        self.jobs = jobs
        self.client = jobs.client

    def put(self, wanted: ContinualJob) -> ContinualJob:
        """Make or change one; rounds that there were stay. Raises ResourceExhausted."""
        known = self.all(wanted.tenant)
        before = next((job for job in known if job.name == wanted.name), None)
        if before is None and len(known) >= MOST_PER_TENANT:
            message = f"a tenant may have {MOST_PER_TENANT} continual jobs; delete one"
            raise ResourceExhausted(message, code="too_many_continual_jobs")
        made = replace(wanted, created_at=before.created_at if before else timestamp())
        document = asdict(made) | {"spec": made.spec.model_dump(mode="json")}
        self.jobs.write(("HSET", own_keys.continual_jobs(), made.field, json.dumps(document)))
        return made

    def get(self, name: str, tenant: str | None) -> ContinualJob:
        """One by its name, if it is the tenant's (None: anybody's). Raises NotFound."""
        found = [job for job in self.all(tenant) if job.name == name]
        if not found:
            raise NotFound(f"there is no continual job {name}", code="continual_job_not_found")
        return found[0]

    def all(self, tenant: str | None = None) -> list[ContinualJob]:
        """Those of a tenant (None: of all), by name."""
        stored = self.client.hvals(own_keys.continual_jobs())
        found = [_decoded(raw) for raw in stored]
        return sorted((job for job in found if tenant in (None, job.tenant)), key=lambda job: (job.name, job.tenant))

    def delete(self, job: ContinualJob) -> None:
        """Forget it and its rounds; jobs, weights and what is served stay."""
        self.jobs.write(
            ("HDEL", own_keys.continual_jobs(), job.field),
            ("DEL", own_keys.continual_rounds(job.field)),
            ("SREM", own_keys.wanted_rounds(), job.field),
            ("HDEL", own_keys.continual_waits(), job.field),
        )

    def wait_of(self, job: ContinualJob) -> ContinualWait:
        """What it waits for that its schedule does not say."""
        raw = self.client.hget(own_keys.continual_waits(), job.field)
        return record_from_json(ContinualWait, raw) if raw else ContinualWait()

    def note_wait(self, job: ContinualJob, reason: str) -> None:
        """Say what it waits for, "" for nothing; the same again changes nothing, since when it waits neither."""
        before, key = self.wait_of(job), own_keys.continual_waits()
        if not reason and before.reason:
            self.jobs.write(("HDEL", key, job.field))
        elif reason and reason[:MOST_REASON] != before.reason:
            since = before.since or timestamp()
            self.jobs.write(("HSET", key, job.field, json.dumps({"reason": reason[:MOST_REASON], "since": since})))

    def want_round(self, job: ContinualJob) -> None:
        """A round is to begin as soon as it can, whatever the schedule says."""
        self.jobs.write(("SADD", own_keys.wanted_rounds(), job.field))

    def is_round_wanted(self, job: ContinualJob) -> bool:
        """Whether somebody asked for a round that has not begun."""
        return bool(self.client.sismember(own_keys.wanted_rounds(), job.field))

    def rounds(self, job: ContinualJob) -> list[Round]:
        """Its rounds, newest first."""
        stored = self.client.hvals(own_keys.continual_rounds(job.field))
        found = [record_from_json(Round, raw) for raw in stored]
        return sorted(found, key=lambda each: each.number, reverse=True)

    def begin_round(self, job: ContinualJob, begun: Round) -> None:
        """Store a new one; the oldest gives way."""
        key = own_keys.continual_rounds(job.field)
        self.jobs.write(
            ("HSET", key, begun.number, json.dumps(asdict(begun))),
            ("HDEL", key, begun.number - ROUNDS_KEPT),
            ("SREM", own_keys.wanted_rounds(), job.field),
        )

    def change_round(self, job: ContinualJob, changed: Round) -> None:
        """Store its new state, unless the continual job has been deleted meanwhile."""
        if self.client.hexists(own_keys.continual_jobs(), job.field):
            self.jobs.write(("HSET", own_keys.continual_rounds(job.field), changed.number, json.dumps(asdict(changed))))


def _decoded(raw: bytes) -> ContinualJob:
    stored = record_from_json(_Stored, raw)
    spec = read_stored(ContinualSpec, stored.spec, f"the continual job {stored.name}")
    return ContinualJob(**{**asdict(stored), "spec": spec})
