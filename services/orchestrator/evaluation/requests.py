"""Evaluations that somebody requested: stored until they have ended, and the newest of them afterwards."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.jobs.store import JobStore
from services.orchestrator.leadership import IS_LEADER
from spo.errors import Conflict, NotFound, ResourceExhausted
from spo.spec.stored import record_from_json

EvaluationState = Literal["queued", "running", "succeeded", "failed", "cancelled"]
OPEN: tuple[EvaluationState, ...] = ("queued", "running")

MAX_OPEN_PER_JOB = 100
# Of a tenant, all jobs together: those of deleted jobs outlive the list of their job.
MAX_KEPT = 10_000

# KEYS: open evaluations, evaluations, leader.  ARGV: id, JSON, 1 when it ends, holder and epoch of the leader.  Only an
# open one changes: of a result and a cancellation the first one stands.
_UPDATE = f"""#!lua flags=allow-oom
{IS_LEADER}
if not is_leader(KEYS[3], ARGV[4], ARGV[5]) then return -1 end
if not redis.call('ZSCORE', KEYS[1], ARGV[1]) then return 0 end
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
if ARGV[3] == '1' then redis.call('ZREM', KEYS[1], ARGV[1]) end
return 1
"""


@dataclass(frozen=True)
class RequestedEvaluation:
    """What was requested and what came of it; `tasks` None means the job's own held-out problems.

    It outlives its job, so it says itself which tenant it belongs to. One whose job had ended before the request goes
    on however the job ended; any other ends with a job that is cancelled. `turns` counts those without any answer.
    key: under which it was requested, "" for none; a request that is repeated under it makes no other.
    """

    id: str
    job_id: str
    version: int
    tasks: dict[str, object] | None
    protocol: dict[str, object]
    tenant: str
    state: EvaluationState = "queued"
    created_at: str = ""
    result: dict[str, object] | None = None
    failure: dict[str, str] = field(default_factory=dict)
    job_had_ended: bool = False
    turns: int = 0
    key: str = ""

    @classmethod
    def from_json(cls, stored: bytes | str) -> RequestedEvaluation:
        """The evaluation as stored; fields that this release does not know are left out."""
        return record_from_json(cls, stored)

    def failed(self, code: str, message: str) -> RequestedEvaluation:
        """The evaluation, ended without a result for a reason that people read."""
        return replace(self, state="failed", failure={"code": code, "message": message[:2000]})


class EvaluationRequests:
    """Requested evaluations in Redis; `kept` of a job stay after they have ended."""

    def __init__(self, jobs: JobStore, kept: int) -> None:
        self.jobs = jobs
        self.client = jobs.client
        self.kept = kept

    def add(self, evaluation: RequestedEvaluation) -> None:
        """Store a new one. Raises ResourceExhausted when too many of its job have not ended."""
        of_job = own_keys.requested_evaluations(evaluation.job_id)
        waiting = self._open_among(self._ids(of_job))
        if len(waiting) >= MAX_OPEN_PER_JOB:
            message = f"{len(waiting)} evaluations of {evaluation.job_id} have not ended yet; cancel some, or wait"
            raise ResourceExhausted(message, code="too_many_evaluations")
        self.jobs.write(
            ("HSET", own_keys.on_demand_evaluations(), evaluation.id, json.dumps(asdict(evaluation))),
            ("ZADD", own_keys.open_evaluations(), 0, evaluation.id),
            ("ZADD", of_job, 0, evaluation.id),
            ("ZADD", own_keys.tenant_evaluations(evaluation.tenant), 0, evaluation.id),
        )

    def get(self, evaluation_id: str) -> RequestedEvaluation:
        """A requested evaluation, ended or not. Raises NotFound."""
        stored = self.client.hget(own_keys.on_demand_evaluations(), evaluation_id)
        if stored is None:
            raise NotFound(f"there is no evaluation {evaluation_id}", code="evaluation_not_found")
        return RequestedEvaluation.from_json(stored)

    def with_key(self, job_id: str, version: int, key: str) -> RequestedEvaluation | None:
        """The evaluation of a job's version that was requested under a key, ended or not."""
        ids = self._ids(own_keys.requested_evaluations(job_id))
        stored = self.client.hmget(own_keys.on_demand_evaluations(), ids) if ids else []
        found = (RequestedEvaluation.from_json(raw) for raw in stored if raw is not None)
        return next((each for each in found if (each.version, each.key) == (version, key)), None)

    def all(self) -> list[RequestedEvaluation]:
        """Every requested evaluation, ended or not, newest first."""
        stored = self.client.hvals(own_keys.on_demand_evaluations())
        return sorted(map(RequestedEvaluation.from_json, stored), key=lambda found: found.id, reverse=True)

    def open_ids(self) -> list[str]:
        """Ids of those that have not ended, oldest first: ids sort by the time of the request."""
        return self._ids(own_keys.open_evaluations())

    def update(self, evaluation: RequestedEvaluation) -> bool:
        """Store its new state; False when it has ended meanwhile, and so stays as it is."""
        ends = evaluation.state not in OPEN
        keys = own_keys.open_evaluations(), own_keys.on_demand_evaluations(), own_keys.leader()
        document = json.dumps(asdict(evaluation))
        fence, told = self.jobs.fence, (evaluation.id, document, int(ends))
        reply = self.client.eval(_UPDATE, len(keys), *keys, *told, fence.holder, fence.epoch)
        if reply == -1:
            raise fence.refusal()
        changed = bool(reply)
        if changed and ends:
            self._drop_oldest(evaluation)
        return changed

    def cancel(self, evaluation_id: str, reason: str) -> RequestedEvaluation:
        """End one without a result; doing it again changes nothing. Raises NotFound, Conflict when it has ended."""
        found = self.get(evaluation_id)
        if found.state in OPEN:
            self.update(replace(found, state="cancelled", failure={"code": "cancelled", "message": reason}))
            found = self.get(evaluation_id)
        if found.state != "cancelled":
            raise Conflict(f"evaluation {evaluation_id} has {found.state}", code="evaluation_ended")
        return found

    def is_open(self, evaluation_id: str) -> bool:
        """Whether it has not ended."""
        return self.client.zscore(own_keys.open_evaluations(), evaluation_id) is not None

    def _drop_oldest(self, evaluation: RequestedEvaluation) -> None:
        """Forget the oldest ones that have ended: of its job, and of its tenant."""
        of_job = own_keys.requested_evaluations(evaluation.job_id)
        of_tenant = own_keys.tenant_evaluations(evaluation.tenant)
        surplus = self._ids(of_job)[: -self.kept] + self._ids(of_tenant)[:-MAX_KEPT]
        ended = set(surplus) - self._open_among(surplus)
        if ended:
            lists = [("ZREM", key, *ended) for key in (of_job, of_tenant)]
            self.jobs.write(("HDEL", own_keys.on_demand_evaluations(), *ended), *lists)

    def _open_among(self, ids: list[str]) -> set[str]:
        return set(ids) & set(self.open_ids()) if ids else set()

    def _ids(self, key: str) -> list[str]:
        found = self.client.zrange(key, 0, -1)
        return [raw.decode() for raw in found]
