"""How much is on the streams between the services, of one run and of all, and which entries were given up on."""

from __future__ import annotations

from collections.abc import Sequence

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.commit import Commit, Precondition, now_ms
from services.orchestrator.jobs import JobStore
from spo import redis_keys
from spo.errors import PreconditionFailed
from spo.messaging.redis_client import RedisClient
from spo.messaging.streams.entries import StreamDepth, depths, entries_of_run
from spo.messaging.streams.recovery import DeadLetterCount, Trouble, counts_of, troubles_of

# Streams that all runs share, with the group that reads them.
SHARED_STREAMS = {
    "estimates": (redis_keys.estimates(), redis_keys.VALUE_GROUP),
    "pivotal": (redis_keys.pivotal(), redis_keys.VALUE_GROUP),
    "rollouts": (redis_keys.rollouts(), redis_keys.JUDGE_GROUP),
    "verifier_rollouts": (redis_keys.verifier_rollouts(), redis_keys.VERIFIER_GROUP),
    "verdicts": (redis_keys.verdicts(), redis_keys.INGEST_GROUP),
}

DISPATCHER = "dispatcher"

MIN_DEAD_LETTERS = 3


def troubles_in_pipeline(client: RedisClient, run_id: str) -> dict[str, Trouble]:
    """What keeps the run's entries from being handled right now, by stream, and the dispatcher from adding some."""
    names = {redis_keys.prompts(run_id): "prompts"} | {stream: name for name, (stream, _) in SHARED_STREAMS.items()}
    return {names.get(found.place, found.place): found for found in troubles_of(client, run_id, now_ms())}


def entries_in_pipeline(client: RedisClient, run_id: str) -> dict[str, int]:
    """The run's unfinished entries by stream: prompts, and those of SHARED_STREAMS."""
    shared = [stream for stream, _ in SHARED_STREAMS.values()]
    prompts, *others = entries_of_run(client, run_id, redis_keys.prompts(run_id), shared).values()
    return {"prompts": prompts} | dict(zip(SHARED_STREAMS, others, strict=True))


def groups_in_pipeline(client: RedisClient, run_id: str) -> int:
    """Groups of the run that are dispatched and not yet in the replay buffer."""
    entries = entries_in_pipeline(client, run_id)
    return sum(entries[stream] for stream in ("prompts", "rollouts", "verifier_rollouts", "verdicts"))


def platform_depths(client: RedisClient, run_ids: Sequence[str]) -> dict[str, StreamDepth]:
    """The depths of the shared streams, and of `prompts` over these runs together."""
    wanted = [(redis_keys.prompts(run_id), redis_keys.INFERENCE_GROUP) for run_id in run_ids]
    found = depths(client, [*SHARED_STREAMS.values(), *wanted])
    prompts = found[len(SHARED_STREAMS) :]
    total = StreamDepth(lag=sum(depth.lag for depth in prompts), pending=sum(depth.pending for depth in prompts))
    return dict(zip(SHARED_STREAMS, found, strict=False)) | {"prompts": total}


def streams_of(run_id: str) -> dict[str, str]:
    """The streams on which entries of the run travel, by their names in messages."""
    return {"prompts": redis_keys.prompts(run_id)} | {name: stream for name, (stream, _) in SHARED_STREAMS.items()}


def given_up(jobs: JobStore, job_id: str, name: str, total: int, max_share: float) -> int:
    """Entries of the job that were given up on at a stream; whoever gives one up counts it, no payload is read for it.

    Raises PreconditionFailed (code "too_many_dead_letters") when they are more than `max_share` of total.
    """
    return _checked(jobs, job_id, total, max_share, name)[name]


def check_groups(jobs: JobStore, job_id: str, dispatched: int, max_share: float) -> None:
    """Raises PreconditionFailed (code "too_many_dead_letters") when too many of a run's groups are lost."""
    _checked(jobs, job_id, dispatched, max_share, "prompts", "rollouts", "verifier_rollouts", "verdicts")


def _checked(jobs: JobStore, job_id: str, total: int, max_share: float, *names: str) -> dict[str, int]:
    counts = counts_of(jobs.client, job_id)
    streams = streams_of(job_id)
    found = {name: counts.get(streams[name], DeadLetterCount(streams[name], 0, "")) for name in names}
    for name, letters in found.items():
        _announce(jobs, job_id, name, letters)
    for name, letters in found.items():
        if letters.count >= MIN_DEAD_LETTERS and letters.count > max_share * total:
            raise PreconditionFailed(
                f"{letters.count} of {total} entries of the stream {name} were given up on; "
                f"the last one: {letters.last_reason}",
                code="too_many_dead_letters",
            )
    return {name: letters.count for name, letters in found.items()}


def _announce(jobs: JobStore, job_id: str, name: str, letters: DeadLetterCount) -> None:
    """Add an event when there are more than the job's events tell of; those that were redriven are told again."""
    key = own_keys.job_dead_letters_told(job_id)
    told = jobs.client.hget(key, name)
    if letters.count == int(told or 0):
        return
    write = ("HSET", key, name, letters.count)
    if letters.count > int(told or 0):
        body = {"stream": name, "count": letters.count, "reason": letters.last_reason}
        guard = Precondition(key, name, told.decode() if told else "")
        jobs.once(job_id, guard, "dead_letters", body, [write], durable=False)
    else:
        jobs.commit(Commit(job_id, writes=[write]), durable=False)
