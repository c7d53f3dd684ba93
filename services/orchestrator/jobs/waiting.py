"""What waits for a place: submitted jobs, and paused ones that are to go on."""

from __future__ import annotations

from collections.abc import Sequence

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.jobs.commit import Commit, Precondition, Write
from spo import redis_keys
from spo.messaging.redis_client import RedisClient
from spo.spec.job_state import JobState

_ASKED = "resume_asked"


def waiting(client: RedisClient) -> list[str]:
    """Ids of the jobs that wait for a place, oldest first."""
    with client.pipeline(transaction=True) as pipe:
        for key in (redis_keys.jobs_in_state(JobState.QUEUED), own_keys.resuming()):
            pipe.zrange(key, 0, -1, withscores=True)
        found = [(score, raw.decode()) for members in pipe.execute() for raw, score in members]
    return [job_id for _, job_id in sorted(found)]


def by_priority(client: RedisClient, job_ids: Sequence[str]) -> dict[str, int]:
    """The jobs with their priorities, the highest first; of equal ones in the order given."""
    with client.pipeline(transaction=False) as pipe:
        for job_id in job_ids:
            pipe.hget(redis_keys.job_record(job_id), "priority")
        found = {job_id: int(raw or 1) for job_id, raw in zip(job_ids, pipe.execute(), strict=True)}
    return dict(sorted(found.items(), key=lambda each: -each[1]))


def ask_to_resume(client: RedisClient, job_id: str, actor: str, durable: bool) -> bool:
    """Note, once, that a paused job is to go on; False when it is paused no more."""
    record = redis_keys.job_record(job_id)
    created = client.hget(record, "created_unix_ms")
    outcome = Commit(
        job_id,
        (JobState.PAUSED,),
        guard=Precondition(record, _ASKED),
        writes=[("HSET", record, _ASKED, 1), ("ZADD", own_keys.resuming(), int(created or 0), job_id)],
        kind=_ASKED,
        actor=actor,
    ).run(client, durable)
    return outcome.verdict != "state"


def wants_to_resume(client: RedisClient, job_id: str) -> bool:
    """Whether a paused job waits for a place."""
    return client.hexists(redis_keys.job_record(job_id), _ASKED)


def withdraw_resume(client: RedisClient, job_id: str) -> None:
    """A paused job that waits for a place shall stay paused after all."""
    guard = Precondition(redis_keys.job_record(job_id), _ASKED, "1")
    Commit(job_id, guard=guard, writes=no_longer_waits(job_id), kind="resume_withdrawn").run(client, durable=False)


def no_longer_waits(job_id: str) -> list[Write]:
    """What takes a job that goes on, or shall not, out of the queue."""
    return [("HDEL", redis_keys.job_record(job_id), _ASKED), ("ZREM", own_keys.resuming(), job_id)]
