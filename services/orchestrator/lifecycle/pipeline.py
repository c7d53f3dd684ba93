"""How much is on the streams between the services, of one run and of all."""

from __future__ import annotations

from collections.abc import Sequence

from services.orchestrator.jobs.leases import now_ms
from spo import redis_keys
from spo.messaging.redis_client import RedisClient
from spo.messaging.streams import StreamDepth, depths, entries_of_run
from spo.messaging.streams.failures import Trouble, troubles_of

# Streams that all runs share, with the group that reads them.
SHARED_STREAMS = {
    "estimates": (redis_keys.estimates(), redis_keys.VALUE_GROUP),
    "pivotal": (redis_keys.pivotal(), redis_keys.VALUE_GROUP),
    "rollouts": (redis_keys.rollouts(), redis_keys.JUDGE_GROUP),
    "verifier_rollouts": (redis_keys.verifier_rollouts(), redis_keys.VERIFIER_GROUP),
    "verdicts": (redis_keys.verdicts(), redis_keys.INGEST_GROUP),
}


DISPATCHER = "dispatcher"


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
