"""Lists of jobs, newest first: by state, label, creation time and tenant, from sorted sets, never by scanning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.jobs.commit import Write
from spo import redis_keys
from spo.messaging.control_writes import write_even_when_full
from spo.messaging.redis_client import RedisClient
from spo.spec.job_state import JobState

INDEX_SECONDS = 30


@dataclass(frozen=True)
class JobIdPage:
    """Job ids, newest first, and where the next page begins."""

    job_ids: list[str]
    next_cursor: str | None


@dataclass(frozen=True)
class JobFilter:
    """Which jobs; what is not named does not matter. Labels are `key` or `key:value`, all of which a job has.

    created: unix ms from and to, both included; null is open.
    """

    states: Sequence[JobState] = ()
    labels: Sequence[str] = ()
    created: tuple[int | None, int | None] = (None, None)
    tenant: str | None = None
    # Sorted sets that hold the wanted jobs between them.
    indexes: list[str] = field(init=False)

    def __post_init__(self) -> None:
        indexes = [own_keys.labelled_jobs(label) for label in self.labels]
        if self.tenant is not None:
            indexes.append(own_keys.tenant_jobs(self.tenant))
        if self.states:
            indexes.append(redis_keys.jobs_in_state(self.states[0]))
        object.__setattr__(self, "indexes", sorted(set(indexes)) or [redis_keys.job_index()])


def label_writes(labels: Mapping[str, str], job_id: str, created_unix_ms: int) -> Iterator[Write]:
    """What makes a job be found by its labels."""
    for name in label_names(labels):
        yield ("ZADD", own_keys.labelled_jobs(name), created_unix_ms, job_id)


def label_names(labels: Mapping[str, str]) -> set[str]:
    """The words a job is found by: each label's key, and its key:value."""
    return {*labels, *(f"{key}:{value}" for key, value in labels.items())}


def page_of_jobs(client: RedisClient, wanted: JobFilter, cursor: str | None, limit: int) -> JobIdPage:
    """Jobs newest first; the cursor is a created time, so pages stay stable while jobs are submitted."""
    key = _index(client, wanted.indexes)
    oldest, newest = wanted.created
    before: str | int = f"({cursor}" if cursor else "+inf"
    if newest is not None and (not cursor or newest < int(cursor)):
        before = newest
    after: str | int = "-inf" if oldest is None else oldest
    found = client.zrevrangebyscore(key, before, after, start=0, num=limit + 1, withscores=True)
    jobs = [(raw.decode(), int(score)) for raw, score in found]
    shown = jobs[:limit]
    if len(jobs) > limit:
        # Jobs of one millisecond stay on one page: the cursor cannot point between them.
        last = shown[-1][1]
        same = client.zrangebyscore(key, last, last)
        shown += [(raw.decode(), last) for raw in same if (raw.decode(), last) not in shown]
    return JobIdPage([job for job, _ in shown], str(shown[-1][1]) if len(jobs) > limit else None)


def _index(client: RedisClient, indexes: Sequence[str]) -> str:
    """The sorted set that holds the wanted jobs; several are intersected for a moment."""
    if len(indexes) == 1:
        return indexes[0]
    key = own_keys.listing(redis_keys.digest(*indexes))
    write_even_when_full(
        client,
        ("ZINTERSTORE", key, len(indexes), *indexes, "AGGREGATE", "MIN"),
        ("EXPIRE", key, INDEX_SECONDS),
    )
    return key
