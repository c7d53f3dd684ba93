"""Jobs whose keys in Redis hold what they cannot, or are missing: somebody must be able to end them all the same.

What such a job is steered by is written anew when it is cancelled or deleted, and at no other time: a person may still
mend it by hand until then. The job's other keys, and every other job, stay as they are.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from functools import cache
from typing import cast

import redis

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.commit import Write
from services.orchestrator.job_records import JobRecord, label_names, write_fields
from services.orchestrator.jobs import JobStore
from spo import redis_keys
from spo.errors import IntegrityError, NotFound, SpoError
from spo.messaging.redis_client import RedisClient, only_this_job
from spo.observability import get_logger
from spo.spec.section import TERMINAL, JobState

# What a job waits for of which a key is missing.
HALF_THERE = "a key of the job is missing in Redis (its state, record or spec): restore it, or cancel the job"
# Held where it is decided by what there is of a job whether all of it goes, or some of it is written anew.
ENDING = threading.Lock()
# What the end of a job goes by, and the kind of value that is there.
_STEERED_BY = (
    (redis_keys.run_state, b"string"),
    (redis_keys.job_record, b"hash"),
    (own_keys.job_events, b"stream"),
    (own_keys.job_lease, b"hash"),
    (redis_keys.prompts, b"stream"),
    (redis_keys.replay_stored, b"hash"),
    (redis_keys.replay_counters, b"hash"),
)

# How the schema of a key, its function's docstring, begins, and the kind of value that Redis calls so.
_KINDS = {"Hash": b"hash", "Stream": b"stream", "String": b"string", "Set": b"set", "Sorted set": b"zset"}

log = get_logger("damaged")


@cache
def _schemas() -> tuple[tuple[Callable[..., str], str, bytes], ...]:
    """Every function of a key: "run_id" or "job_id" where it is one of a job, "" of a shared one, and the kind."""
    found = []
    for module in (redis_keys, own_keys):
        for _, key in inspect.getmembers(module, inspect.isfunction):
            names = list(inspect.signature(key).parameters)
            begins = (key.__doc__ or "").partition(":")[0].partition(",")[0]
            if begins in _KINDS and names in ([], ["run_id"], ["job_id"]):
                found.append((key, names[0] if names else "", _KINDS[begins]))
    return tuple(found)


def keys_of_another_kind(client: RedisClient, job_id: str) -> list[str]:
    """A job's keys that hold another kind of value than they should; of "" those that all jobs share.

    Raises redis.RedisError where Redis is away.
    """
    asked = [
        (key(job_id) if of_job else key(), kind) for key, of_job, kind in _schemas() if bool(of_job) == bool(job_id)
    ]
    with client.pipeline(transaction=False) as pipe:
        for name, _ in asked:
            pipe.execute_command("TYPE", name)
        held = pipe.execute()
    return [name for (name, kind), found in zip(asked, held, strict=True) if found not in (kind, b"none")]


def refused_in_words(client: RedisClient, job_id: str, error: SpoError) -> str:
    """What a job waits for of whose keys Redis says this, and of which of them, where they show it."""
    damaged = keys_of_another_kind(client, job_id)
    which = f"; another kind of value than it should hold is in {', '.join(damaged)}" if damaged else ""
    return f"Redis refuses what the job needs: {error.message}{which}"


def belongs_to(jobs: JobStore, job_id: str, tenant: str) -> bool:
    """Whether a job is the tenant's, also where its record cannot be read. Raises NotFound."""
    with only_this_job():
        owner = jobs.client.hget(redis_keys.job_record(job_id), "tenant")
        if owner is not None:
            return bool(owner.decode() == tenant)
    if jobs.client.zscore(own_keys.tenant_jobs(tenant), job_id) is not None:
        return True
    with only_this_job():
        return jobs.tenant(job_id) == tenant
    return False


def replace_damaged(jobs: JobStore, job_id: str) -> list[str]:
    """Write anew what a job is steered by, where its keys hold what they cannot, so that somebody can end the job.

    Returns the keys that are written anew. Raises NotFound.
    """
    with ENDING:
        damaged = _replace(jobs, job_id)
    if damaged:
        jobs.append(job_id, "keys_replaced", {"keys": damaged})
        log.error("damaged keys of a job are replaced, so that it can end", job=job_id, keys=damaged)
    return damaged


def state_to_delete(jobs: JobStore, job_id: str) -> JobState:
    """The state of a job that somebody deletes; damaged keys of one that has ended are replaced. Raises NotFound."""
    if set(jobs.listed_under(job_id)) & TERMINAL:
        replace_damaged(jobs, job_id)
    return jobs.state(job_id)


def shown_state(jobs: JobStore, job_id: str, stored: bytes | None) -> JobState | None:
    """What a list shows of a job: the stored state, else that of the list that has it; None of one that is gone."""
    known = {state.value.encode(): state for state in JobState}
    return known.get(stored or b"") or next(iter(jobs.listed_under(job_id)), None)


def why_not_shown(jobs: JobStore, job_id: str) -> NotFound:
    """The error of a job without its state, record or spec. Raises what Redis says of one that is none."""
    jobs.state(job_id)
    jobs.spec_document(job_id)
    return jobs.absent(job_id)


def or_nothing(read: Callable[[], Collection[bytes]]) -> Collection[bytes]:
    """What a key holds; nothing where it holds another kind of value."""
    with only_this_job():
        return read()
    return ()


def lists_of(jobs: JobStore, job_id: str) -> list[str]:
    """The keys of all lists that a job is on; those by tenant and label are looked for where its keys do not say."""
    lists = [redis_keys.job_index(), own_keys.resuming(), *map(redis_keys.jobs_in_state, JobState)]
    with suppress(SpoError, redis.ResponseError, ValueError):
        labels = label_names(jobs.spec(job_id).labels)
        tenant = own_keys.tenant_jobs(jobs.record(job_id).tenant)
        if jobs.client.zscore(tenant, job_id) is not None:
            return [*lists, tenant, *map(own_keys.labelled_jobs, labels)]
    return [*lists, *_lists_naming(jobs, job_id)]


def _replace(jobs: JobStore, job_id: str) -> list[str]:
    if jobs.client.zscore(redis_keys.job_index(), job_id) is None:
        raise jobs.absent(job_id)
    with jobs.client.pipeline(transaction=True) as pipe:
        for key, _ in _STEERED_BY:
            pipe.execute_command("TYPE", key(job_id))
        kinds = pipe.execute()
    found = [(key(job_id), kind, held) for (key, kind), held in zip(_STEERED_BY, kinds, strict=True)]
    damaged = {key for key, kind, held in found if held not in (kind, b"none")}
    there = {key for key, _, held in found if held != b"none"} - damaged
    writes: list[Write] = [("DEL", key) for key in sorted(damaged)]
    state, record = redis_keys.run_state(job_id), redis_keys.job_record(job_id)
    if record not in there or not _is_readable(jobs, job_id):
        damaged.add(record)
        writes += [("DEL", record), _record_anew(jobs, job_id)]
    if state not in there:
        damaged.add(state)
        listed = jobs.listed_under(job_id) or [JobState.CANCELLING]
        writes += [("SET", state, listed[-1]), ("ZADD", redis_keys.jobs_in_state(listed[-1]), "NX", 0, job_id)]
    jobs.write(*writes)
    return sorted(damaged)


def _is_readable(jobs: JobStore, job_id: str) -> bool:
    with suppress(IntegrityError):
        return bool(jobs.record(job_id))
    return False


def _record_anew(jobs: JobStore, job_id: str) -> Write:
    """What a record needs to be one, from the job's id and the tenant whose list has it."""
    shown = JobRecord.shown(job_id, None)
    prefix, suffix = own_keys.tenant_jobs("\0").split("\0")
    owners = (key[len(prefix) : -len(suffix)] for key in _lists_naming(jobs, job_id) if key.startswith(prefix))
    return write_fields(
        job_id,
        name=shown.name,
        labels={},
        created_at=shown.created_at,
        created_unix_ms=shown.created_unix_ms,
        tenant=next(owners, ""),
    )


def _lists_naming(jobs: JobStore, job_id: str) -> Iterator[str]:
    """Looks at every key there is."""
    seen, cursor = set[bytes](), -1
    while cursor:
        with jobs.client.pipeline(transaction=False) as pipe:
            asked = ("MATCH", "spo:orchestrator:*:jobs", "COUNT", 1000, "TYPE", "zset")
            pipe.execute_command("SCAN", max(cursor, 0), *asked)
            found, keys = cast("tuple[int, list[bytes]]", pipe.execute()[0])
        cursor = int(found)
        for key in map(bytes.decode, set(keys) - seen):
            if jobs.client.zscore(key, job_id) is not None:
                yield key
        seen.update(keys)
