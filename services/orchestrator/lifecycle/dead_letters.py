"""Entries that were given up on: how many of a job, and when there are too many to go on."""

from __future__ import annotations

from services.orchestrator.lifecycle.pipeline import SHARED_STREAMS
from spo import redis_keys
from spo.errors import PreconditionFailed
from spo.messaging.redis_client import RedisClient
from spo.v1.trajectory_pb2 import RolloutGroup
from spo.v1.value_pb2 import EstimateRequest

MIN_DEAD_LETTERS = 3
MAX_DEAD_READ = 10_000


def dead_groups(client: RedisClient, run_id: str) -> dict[str, int]:
    """Groups of the run that were given up on, per stream."""
    counts = {"prompts": client.xlen(redis_keys.dead_letters(redis_keys.prompts(run_id)))}
    for name in ("rollouts", "verdicts"):
        payloads = _dead_payloads(client, name)
        counts[name] = sum(RolloutGroup.FromString(raw).request.run_id == run_id for raw in payloads)
    return counts


def dead_requests(client: RedisClient, run_id: str, name: str) -> set[str]:
    """Prompts of the run that value-estimation gave up on, on the stream `estimates` or `pivotal`."""
    # A PivotalRequest has the first two fields of an EstimateRequest, and no others.
    requests = map(EstimateRequest.FromString, _dead_payloads(client, name))
    return {request.prompt.prompt_id for request in requests if request.run_id == run_id}


def refuse_dead_letters(dead: int, total: int, stream: str, *, max_share: float) -> None:
    """Raises PreconditionFailed (code "too_many_dead_letters") when more than this share of a stream is lost."""
    if dead >= MIN_DEAD_LETTERS and dead > max_share * total:
        raise PreconditionFailed(
            f"{dead} of {total} entries of the stream {stream} were given up on; the dead letters name the reasons",
            code="too_many_dead_letters",
        )


def _dead_payloads(client: RedisClient, name: str) -> list[bytes]:
    stream, _ = SHARED_STREAMS[name]
    found = client.xrevrange(redis_keys.dead_letters(stream), count=MAX_DEAD_READ)
    return [fields[b"payload"] for _, fields in found]
